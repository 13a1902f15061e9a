"""Meta-gradient rules and baselines, each with its spec (fmmeta/config/algorithms.py has the
registry).

A rule is a function of a `TaskRun` (fmmeta/meta/task.py): it adds the meta-gradient of this task to that of
the outer step, and returns its numbers. Where it changes during a run (`--first_order_steps`), it reads
`task.outer_step`.
"""
