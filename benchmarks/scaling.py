"""How much of their time do 8 to 1,024 groups work, when tasks differ, some groups are slow, and some fail?

    python -m benchmarks.scaling --json benchmarks/results/scaling.json --plot docs/scaling.svg

Simulated (fmmeta/planning/simulate.py), not run: tasks are assigned as in a run. A task takes 20 s on
a group of 8 GPUs, each of which fails once in 2 years; a restart takes 10 minutes, checkpoints are 30 minutes
apart. The last line is the efficiency of 1,024 groups: tasks of differing sizes alone, and with slow groups
and failures, static and elastic.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.common import plot, table, write_json
from fmmeta.planning.simulate import SimulatedCluster, simulate

TASK_S, PER_GROUP, RATE = 20.0, 4, 8 * 0.5 / (365.25 * 86400)
GROUPS = (8, 16, 32, 64, 128, 256, 512, 1024)
EVEN = SimulatedCluster(1, PER_GROUP, fixed=0.05, away=600 / TASK_S, interval=1800 / TASK_S)
KNOWN = replace(EVEN, spread=0.5)
UNKNOWN = replace(KNOWN, noise=0.2)
SLOW = replace(UNKNOWN, slow_share=0.001, slow_by=1.5)
CASES = {
    "equal tasks": EVEN,
    "sizes differ, known": KNOWN,
    "and 20 % unknown": UNKNOWN,
    "and slow groups": SLOW,
    "and failures, static": replace(SLOW, failure_rate=RATE * TASK_S),
    "and failures, elastic": replace(SLOW, failure_rate=RATE * TASK_S, elastic=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    found = {
        name: [
            simulate(replace(case, groups=groups, tasks=PER_GROUP * groups), given.steps).efficiency
            for groups in GROUPS
        ]
        for name, case in CASES.items()
    }
    print(
        table(
            ["", *map(str, GROUPS)],
            [[name, *(f"{100 * one:.1f}" for one in row)] for name, row in found.items()],
        )
    )
    write_json(given.json, {"groups": GROUPS, "tasks_per_group": PER_GROUP, "efficiency": found})

    def draw(axes) -> None:
        for (name, row), look in zip(found.items(), ("-", "--", "-.", ":", "-", "--"), strict=True):
            axes.plot(GROUPS, [100 * one for one in row], look, marker=".", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(GROUPS, [f"{groups:,}" for groups in GROUPS])
        axes.set(xlabel="groups", ylabel="useful time, %", ylim=(0, 102))
        axes.legend(loc="lower left")
        axes.grid(alpha=0.3)

    plot(given.plot, draw)
    ends = ("sizes differ, known", "and failures, static", "and failures, elastic")
    print(" ".join(f"{100 * found[name][-1]:.1f}" for name in ends))


if __name__ == "__main__":
    main()
