"""Simulates outer steps of many groups: the efficiency with unequal tasks, stragglers and failures.

A step ends when its slowest group ends. The time of a step is

    max over groups g of  slow_g x sum of the times of g's tasks  +  fixed  (+ the cost of failures)

and efficiency is useful time / all time; useful is the time of the tasks spread evenly over groups that never
wait. Tasks are assigned by expected size, as in a run (assign_to_groups in tasks/schedule/meta_batches.py);
their actual times differ. Claimed tasks (--task_schedule dynamic) run in the order of their expected sizes,
largest first, each on the group that is free first. docs/scaling.md derives it. Arrays: S steps, G groups, N
tasks per step. All randomness comes from `seed`, and nothing communicates.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

TOKENS = 10_000  # tokens of a task of expected size 1
CHUNK = 2**22  # (step, group) pairs that are assigned at a time
DRAWN = 100_000  # steps over which failures, which are rare, are drawn; the simulated steps are repeated


@dataclass(frozen=True)
class SimulatedCluster:
    """The groups and their tasks. The unit of time is a mean task's.

    spread: standard deviation of the logarithm of the tasks' expected sizes, by which they are assigned;
    noise: the same of actual / expected. slow_share, slow_by: how often a group is slower in a step, and how
    many times. claimed: groups claim tasks. fixed: time of a step beside its tasks. failure_rate: of one
    group, per unit of time. elastic: a failure costs the step in which it happens and `away` with fewer
    groups; else all groups restart after `away`, from the last of the checkpoints that are `interval` apart.
    """

    groups: int
    tasks: int
    spread: float = 0.0
    noise: float = 0.0
    slow_share: float = 0.0
    slow_by: float = 1.0
    claimed: bool = False
    fixed: float = 0.0
    failure_rate: float = 0.0
    elastic: bool = False
    away: float = 0.0
    interval: float = 0.0


@dataclass(frozen=True)
class SimulationResult:
    """efficiency: useful / total; waiting, failing, fixed: shares of the rest; step: mean, no failures."""

    efficiency: float
    waiting: float
    failing: float
    fixed: float
    step: float


def simulate(world: SimulatedCluster, steps: int = 200, seed: int = 0) -> SimulationResult:
    """Simulate `steps` outer steps."""
    groups, sizes = world.groups, (world.tasks, world.spread, world.noise, steps, seed)
    rng = np.random.default_rng((seed, 1))
    slow = draw_slow(world, steps, rng)
    if world.claimed:
        times, taken = draw_claimed(groups, world.slow_share, world.slow_by, *sizes)
    else:
        times, taken = draw_times(groups, *sizes)
        times = times * slow
    return outcome(world, times, taken, rng)


def draw_slow(world: SimulatedCluster, steps: int, rng: np.random.Generator) -> np.ndarray:
    """How many times slower each group is in each step [S, G]."""
    return np.where(rng.random((steps, world.groups)) < world.slow_share, world.slow_by, 1.0)


@lru_cache(maxsize=16)
def draw_times(
    groups: int, tasks: int, spread: float, noise: float, steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Times of groups [S, G] and of tasks [S, N]; cached for layouts with the same number of groups."""
    sizes, taken = draw_tasks(tasks, spread, noise, steps, seed)
    return group_times(sizes, taken, groups), taken


def draw_tasks(
    tasks: int, spread: float, noise: float, steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Expected and actual times of tasks [S, N]."""
    rng = np.random.default_rng((seed, 0))
    sizes = lognormal(rng, spread, (steps, tasks))
    return sizes, sizes * lognormal(rng, noise, sizes.shape)


@lru_cache(maxsize=16)
def draw_claimed(
    groups: int,
    slow_share: float,
    slow_by: float,
    tasks: int,
    spread: float,
    noise: float,
    steps: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """As `draw_times`, of groups that claim tasks and are slow in some steps."""
    sizes, taken = draw_tasks(tasks, spread, noise, steps, seed)
    world = SimulatedCluster(groups, tasks, slow_share=slow_share, slow_by=slow_by)
    slow = draw_slow(world, steps, np.random.default_rng((seed, 1)))
    return claimed_times(sizes, taken, slow), taken


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


def outcome(
    world: SimulatedCluster, times: np.ndarray, taken: np.ndarray, rng: np.random.Generator
) -> SimulationResult:
    """The result for times of groups [S, G], stragglers included, and tasks [S, N]; draws failures."""
    useful = taken.sum(1) / world.groups
    length = times.max(1) + world.fixed
    lost = 0.0
    if world.failure_rate:
        repeats = max(50, DRAWN // len(length))
        losses = elastic_losses if world.elastic else static_losses
        lost = losses(world, np.tile(length, repeats), rng) / repeats
    total = float(length.sum() + lost)
    return SimulationResult(
        float(useful.sum()) / total,
        float((length - world.fixed - useful).sum()) / total,
        lost / total,
        world.fixed * len(length) / total,
        float(length.mean()),
    )


def static_losses(world: SimulatedCluster, length: np.ndarray, rng: np.random.Generator) -> float:
    """Time lost if a failure stops all groups: `away`, and the work since the last checkpoint."""
    failures = rng.poisson(world.failure_rate * world.groups * length).sum()
    return float(failures * world.away + world.interval * rng.random(failures).sum())


def elastic_losses(world: SimulatedCluster, length: np.ndarray, rng: np.random.Generator) -> float:
    """Time lost if the other groups repeat the step and continue with fewer groups until all rejoin."""
    failed = rng.binomial(world.groups, -np.expm1(-world.failure_rate * length)).clip(max=world.groups - 1)
    steps_away = 1 + int(np.ceil(world.away / length.mean()))
    missing = np.convolve(failed, np.ones(steps_away))[: len(failed)].clip(max=world.groups - 1)
    slower = (length - world.fixed) * missing / (world.groups - missing)
    return float(length[failed > 0].sum() + slower.sum())


def lognormal(rng: np.random.Generator, sigma: float, shape: tuple[int, ...]) -> np.ndarray:
    """Positive numbers with mean 1 whose logarithms have the standard deviation `sigma`."""
    return np.exp(rng.normal(-(sigma**2) / 2, sigma, shape)) if sigma else np.ones(shape)
