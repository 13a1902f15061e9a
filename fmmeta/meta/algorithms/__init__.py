"""Meta-gradient rules and baselines, each with its spec (fmmeta/config/algorithms.py has the
registry).

A rule adds the meta-gradient of one task to that of the outer step (fmmeta/meta/rule.py). A spec's
`rule(setup, outer_step)` returns the rule of an outer step, since it may change during a run
(`--first_order_steps`).
"""
