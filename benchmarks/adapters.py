"""Several tasks in one pass against one task after the other: the same episodes, the same sum of directions.

    python -m benchmarks.adapters --json benchmarks/results/adapters.json

One rank, one thread; 8 tasks of clinc150, 5-way 1-shot and 5-shot with as many queries, MiniLM. Rows: FOMAML
on LoRA adapters and a head, ANIL, prototypical networks. The floor is what `--tasks_per_pass 1` does,
measured in turn with `--tasks_per_pass 8` on the same batches. The last line is how many times as many
episodes per CPU second the batched path gets through.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.common import spread, table, write_json
from benchmarks.floor import SETTINGS
from benchmarks.stepping import Cost, alone, find_data, find_model, prepare
from fmmeta.config.settings import Config
from fmmeta.meta.multi_task import multi_task_rule
from fmmeta.meta.parameters import MetaGradient

ROWS: dict[str, dict[str, Any]] = {
    "lora": {"algorithm": "fomaml", "lora_r": 8},
    "anil": {"algorithm": "anil", "micro_batch_size": 64},
    "protonet": {"algorithm": "protonet", "inner_steps": 0, "micro_batch_size": 64},
}


def measure(config: Config, tasks: int, repeats: int, world: Any, ranks: Any) -> tuple[dict[str, Any], Any]:
    prepared, ranks = prepare(config, world, ranks)
    run = prepared.run
    together = replace(config, tasks_per_pass=str(tasks))
    several: Any = multi_task_rule(together, run.worker, run.parts.setup.inner)
    load = run.parts.load(prepared.inputs.sources.train)
    costs: dict[str, list[Cost]] = {"alone": [], "together": []}
    apart = 0.0
    for number in range(repeats + 1):
        found = [load(task).batches for task in run.schedule.meta_batch(number)]
        episodes = [episode for episode in found if episode is not None]
        ways: dict[str, Callable[[MetaGradient], list[Any]]] = {
            "alone": lambda into, all_=episodes: [run.rule(run.task_run(one, into)) for one in all_],
            "together": lambda into, all_=episodes: list(several([run.task_run(one, into) for one in all_])),
        }
        sums = []
        for name, way in ways.items():
            sums.append(MetaGradient(run.theta))

            def take(way: Any = way, into: MetaGradient = sums[-1]) -> None:
                way(into)

            costs[name].append(Cost.of(take))
        a, b = (each.sum for each in sums)
        apart = max(apart, float((a - b).norm() / a.norm()))
    result: dict[str, Any] = {"apart": apart, "tasks": tasks}
    for kind in ("cpu", "wall"):
        first, second = ([getattr(c, kind) for c in costs[name][1:]] for name in ("alone", "together"))
        result[kind] = {
            "alone": spread(first),
            "together": spread(second),
            "speedup": spread([x / y for x, y in zip(first, second, strict=True)]),
        }
    return result, ranks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--data")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--inner_steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    given = parser.parse_args()
    world, ranks, results = alone(), None, {}
    for row in given.rows:
        for shots in given.shots:
            settings = {
                **SETTINGS,
                "k_shot": shots,
                "num_query": shots,
                "inner_steps": given.inner_steps,
                **ROWS[row],
            }
            config = Config(
                **settings,
                meta_batch_size=given.tasks,
                model_name_or_path=find_model(given.model_name_or_path),
                dataset=[find_data(given.data)],
                outer_steps=given.repeats + 1,
                group_size="1",
            )
            results[f"{row} {shots}-shot"], ranks = measure(config, given.tasks, given.repeats, world, ranks)
    world.close()
    print(
        table(
            ["", "alone CPU s", "together CPU s", "speed-up", "quartiles", "wall", "sums apart"],
            [
                [
                    name,
                    f"{r['cpu']['alone']['median']:.3f}",
                    f"{r['cpu']['together']['median']:.3f}",
                    f"{r['cpu']['speedup']['median']:.2f}",
                    f"{r['cpu']['speedup']['low']:.2f} to {r['cpu']['speedup']['high']:.2f}",
                    f"{r['wall']['speedup']['median']:.2f}",
                    f"{r['apart']:.1e}",
                ]
                for name, r in results.items()
            ],
        )
    )
    write_json(given.json, {"adapters": results})
    worst = max(r["apart"] for r in results.values())
    if not worst < 1e-4:
        raise SystemExit(f"adapters: the two paths' sums are {worst:.1e} apart")
    print(
        "adapters: "
        + ", ".join(f"{name} {r['cpu']['speedup']['median']:.2f}x" for name, r in results.items())
    )


if __name__ == "__main__":
    main()
