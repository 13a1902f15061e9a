"""How much of their time do 8 to 1,024 groups work, when tasks differ and some groups are slow?

    python -m benchmarks.scaling --json benchmarks/results/scaling.json --plot docs/scaling.svg

Simulated, not run. A step ends when its slowest group ends:

    step = max over groups g of  slow_g x sum of the times of g's tasks  +  FIXED

Assigned tasks (--task_schedule static) are dealt by expected size, as in a run (assign_to_groups in
tasks/schedule/meta_batches.py); their actual times differ. Claimed tasks (dynamic) run in the order of their
expected sizes, largest first, each on the group that is free first. Useful is the time of the tasks spread
evenly over groups that never wait. Arrays: S steps, G groups, N tasks per step. The last line is the useful
time of 1,024 groups in per cent, assigned and claimed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.common import plot, table, write_json

TOKENS = 10_000  # tokens of a task of expected size 1
CHUNK = 2**22  # (step, group) pairs that are assigned at a time
FIXED = 0.05  # of a mean task's time, which is the unit


@dataclass(frozen=True)
class Case:
    """spread: standard deviation of the logarithm of the tasks' expected sizes, by which they are assigned;
    noise: the same of actual / expected. slow_share, slow_by: how often a group is slower in a step, and how
    many times.
    """

    per_group: int = 4  # tasks
    spread: float = 0.0
    noise: float = 0.0
    slow_share: float = 0.0
    slow_by: float = 1.5
    claimed: bool = False


GROUPS = (8, 16, 32, 64, 128, 256, 512, 1024)
UNKNOWN = Case(spread=0.5, noise=0.2)
SLOW = replace(UNKNOWN, slow_share=0.001)
CASES = {
    "equal tasks": Case(),
    "sizes differ, known": Case(spread=0.5),
    "and 20 % unknown": UNKNOWN,
    "and slow groups": SLOW,
    "the same, claimed": replace(SLOW, claimed=True),
    "16 tasks a group": replace(SLOW, per_group=16),
    "the same, claimed ": replace(SLOW, per_group=16, claimed=True),
}


def useful_time(case: Case, groups: int, steps: int, seed: int = 0) -> float:
    """Useful time of `groups` groups, as a share of all time."""
    rng = np.random.default_rng(seed)
    slow = np.where(rng.random((steps, groups)) < case.slow_share, case.slow_by, 1.0)
    sizes = lognormal(rng, case.spread, (steps, case.per_group * groups))
    taken = sizes * lognormal(rng, case.noise, sizes.shape)
    times = claimed_times(sizes, taken, slow) if case.claimed else group_times(sizes, taken, groups) * slow
    return float(taken.sum() / groups / (times.max(1) + FIXED).sum())


def claimed_times(sizes: np.ndarray, taken: np.ndarray, slow: np.ndarray) -> np.ndarray:
    """Time at which each group [S, G] ends its last task if groups claim tasks of expected `sizes` [S, N].

    taken [S, N]: time of a task; slow [S, G]: factor of a group's times.
    """
    rows, ends = np.arange(len(sizes)), np.zeros(slow.shape)
    for task in np.argsort(-sizes, axis=1, kind="stable").T:  # largest first
        free = ends.argmin(1)
        ends[rows, free] += taken[rows, task] * slow[rows, free]
    return ends


def group_times(sizes: np.ndarray, taken: np.ndarray, groups: int) -> np.ndarray:
    """Time of each group [S, G] when tasks of expected `sizes` [S, N] take `taken` [S, N]."""
    owner = assign_steps(np.maximum(1, np.rint(TOKENS * sizes)).astype(np.int64), groups)
    times = np.zeros((len(sizes), groups))
    np.add.at(times, (np.arange(len(sizes))[:, None], owner), taken)
    return times


def assign_steps(tokens: np.ndarray, groups: int) -> np.ndarray:
    """The group of every task [S, N]: `assign_to_groups` for each row of `tokens` [S, N], all at once."""
    if len(tokens) * groups > CHUNK and len(tokens) > 1:
        return np.concatenate([assign_steps(part, groups) for part in np.array_split(tokens, 2)])
    steps, rows = len(tokens), np.arange(len(tokens))
    order = np.argsort(-tokens, axis=1, kind="stable")
    load, count = np.zeros((steps, groups), np.int64), np.zeros((steps, groups), np.int64)
    slack = 0.05 * tokens.sum(1) / groups
    owner, far = np.zeros_like(tokens), np.iinfo(np.int64).max
    for task in order.T:  # largest first
        fewest = np.where(load <= (load.min(1) + slack)[:, None], count, far)
        best = np.where(fewest == fewest.min(1)[:, None], load, far).argmin(1)
        owner[rows, task] = best
        load[rows, best] += tokens[rows, task]
        count[rows, best] += 1
    return owner


def lognormal(rng: np.random.Generator, sigma: float, shape: tuple[int, ...]) -> np.ndarray:
    """Positive numbers with mean 1 whose logarithms have the standard deviation `sigma`."""
    return np.exp(rng.normal(-(sigma**2) / 2, sigma, shape)) if sigma else np.ones(shape)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    found = {
        name: [useful_time(case, groups, given.steps) for groups in GROUPS] for name, case in CASES.items()
    }
    print(
        table(
            ["", *map(str, GROUPS)],
            [[name, *(f"{100 * one:.1f}" for one in row)] for name, row in found.items()],
        )
    )
    write_json(given.json, {"groups": GROUPS, "steps": given.steps, "useful": found})

    def draw(axes) -> None:
        for (name, row), look in zip(found.items(), ("-", "--", "-.", ":", "-", "--", "-"), strict=True):
            axes.plot(GROUPS, [100 * one for one in row], look, marker=".", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(GROUPS, [f"{groups:,}" for groups in GROUPS])
        axes.set(xlabel="groups", ylabel="useful time, %", ylim=(0, 102))
        axes.legend(loc="lower left")
        axes.grid(alpha=0.3)

    plot(given.plot, draw)
    ends = ("and slow groups", "the same, claimed")
    print(" ".join(f"{100 * found[name][-1]:.1f}" for name in ends))


if __name__ == "__main__":
    main()
