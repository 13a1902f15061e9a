"""Groups that come and go: lighthouse (which are alive), controller (what they do in an outer step), supervisor
(starts them).
"""
