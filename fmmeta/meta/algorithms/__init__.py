"""Meta-gradient rules and baselines: one file each, with its specs (fmmeta/config/algorithms.py has the
registry).

A rule turns one task into a direction for theta: `direction(worker, theta, episode)`
(fmmeta/meta/task_gradient.py). A spec's `rule(setup, outer_step)` says which rule holds at an outer step,
since some begin as another.
"""
