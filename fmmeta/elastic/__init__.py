"""Groups that come and go: who is there (lighthouse), what they owe each other (attendance), who starts them
(supervisor).
"""
