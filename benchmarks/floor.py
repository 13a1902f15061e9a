"""The price of the framework: an outer step against the same arithmetic in a hand-written PyTorch loop, on
the same tensors.

    python -m benchmarks.floor --json benchmarks/results/floor.json

One rank, one thread; FOMAML on 4 tasks x 5 steps x 25 rows of clinc150 with MiniLM, then AdamW. fmmeta runs
its own training loop, loading and logging included; after each of its outer steps the floor does that step's
work on the batches that it has just used, from the same weights, so that both have the machine to themselves
in turn. Both must end at the same theta. The last line is the median over outer steps of fmmeta's CPU seconds
by the floor's, per ZeRO stage. `--engine deepspeed` keeps DeepSpeed where a group of one would do without it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import plot, spread, table, write_json
from benchmarks.stepping import QUIET, Cost, Prepared, alone, find_data, find_model, prepare
from fmmeta.config.settings import Config
from fmmeta.learners.load import load_learner
from fmmeta.tasks.batching import Episode, MicroBatch

SETTINGS = {
    "algorithm": "fomaml",
    "n_way": 5,
    "k_shot": 5,
    "num_query": 5,
    "inner_lr": 0.05,
    "outer_lr": 2e-5,
    "pooling": "mean",
    "lr_scheduler_type": "constant",
    "adam_epsilon": 1e-4,
    "max_length": 64,
    **QUIET,
}


class Floor:
    """FOMAML as one would write it for one model and one device: autograd, foreach updates, fused AdamW.

    Zero head per task. In bf16 the model computes with a copy of the fp32 weights that are trained.
    """

    def __init__(self, model: Any, config: Config) -> None:
        self.model, self.config = model, config
        self.used = [p for p in model.parameters() if p.requires_grad]
        head = set(model.head.parameters())
        for p in head:
            nn.init.zeros_(p)
        self.params: list[Any] = self.used
        if config.bf16:
            self.params = [nn.Parameter(p.detach().float().clone()) for p in self.used]
            for p in model.parameters():
                p.data = p.data.to(torch.bfloat16)
        self.body = [p for p, used in zip(self.params, self.used, strict=True) if used not in head]
        decayed = [p for p in self.body if p.ndim > 1]
        plain = [p for p in self.body if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.outer_lr, eps=config.adam_epsilon, weight_decay=0.0, fused=True
        )

    def refresh(self) -> None:
        if self.used is not self.params:
            torch._foreach_copy_([p.data for p in self.used], [p.data for p in self.params])

    def gradient(self, batch: MicroBatch) -> list[Tensor]:
        loss = F.cross_entropy(self.model(**batch.inputs)[1].float(), batch.targets["labels"])
        return [grad.float() for grad in torch.autograd.grad(loss, self.used)]

    def step(self, episodes: list[Episode]) -> None:
        """One outer step on tasks whose sets are one batch each."""
        theta = [p.detach().clone() for p in self.params]
        total: list[Tensor] = []
        for episode in episodes:
            (support,), (query,) = episode.support, episode.query
            for _ in range(self.config.inner_steps):
                grads = self.gradient(support)
                with torch.no_grad():
                    torch._foreach_sub_(self.params, grads, alpha=self.config.inner_lr)
                self.refresh()
            grads = self.gradient(query)
            with torch.no_grad():
                torch._foreach_copy_(self.params, theta)
            if total:
                torch._foreach_add_(total, grads)
            else:
                total = grads
        torch._foreach_div_(total, len(episodes))
        by_param = dict(zip(self.params, total, strict=True))
        for p in self.body:
            p.grad = by_param[p]
        torch.nn.utils.clip_grad_norm_(self.body, self.config.max_grad_norm)
        self.optimizer.step()
        self.refresh()
        for p in self.body:
            p.grad = None


def floor_of(prepared: Prepared) -> Floor:
    return Floor(load_learner(prepared.config, prepared.inputs.description), prepared.config)


def distance(prepared: Prepared, floor: Floor) -> float:
    """|theta - floor| / |floor - theta_0| over what is meta-trained."""
    names = {id(p): name for name, p in floor.model.named_parameters()}
    began = dict(load_learner(prepared.config, prepared.inputs.description).named_parameters())
    worker, theta = prepared.run.worker, prepared.run.theta
    off = far = 0.0
    for p in floor.body:
        name = names[id(p)]
        off += float((worker.gather_param(theta, name, tuple(p.shape)) - p.detach()).double().square().sum())
        far += float((p.detach() - began[name].detach()).double().square().sum())
    return (off / far) ** 0.5


def measure(config: Config, world: Any, ranks: Any) -> tuple[dict[str, Any], Any]:
    """Costs of fmmeta's outer steps and of the floor's, interleaved."""
    prepared, ranks = prepare(config, world, ranks)
    floor, floors = floor_of(prepared), list[Cost]()
    ours = prepared.stepped(lambda used: floors.append(Cost.of(lambda: floor.step(used))))
    floors = floors[1:]
    result: dict[str, Any] = {"distance": distance(prepared, floor), "tasks": config.meta_batch_size}
    for kind in ("cpu", "wall"):
        mine, theirs = [getattr(c, kind) for c in ours], [getattr(c, kind) for c in floors]
        result[kind] = {
            "fmmeta": spread(mine),
            "floor": spread(theirs),
            "ratio": spread([a / b for a, b in zip(mine, theirs, strict=True)]),
        }
    return result, ranks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path")
    parser.add_argument(
        "--data", help="folder that holds clinc150 (default: ../shared/data beside the checkout)"
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--engine", choices=["auto", "deepspeed"], default="auto")
    parser.add_argument("--repeats", type=int, default=7, help="outer steps that are measured, per stage")
    parser.add_argument("--inner_steps", type=int, default=5)
    parser.add_argument("--meta_batch_size", type=int, default=4)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    given = parser.parse_args()
    world, ranks, results = alone(), None, {}
    shared = {
        **SETTINGS,
        "model_name_or_path": find_model(given.model_name_or_path),
        "dataset": [find_data(given.data)],
        "inner_steps": given.inner_steps,
        "meta_batch_size": given.meta_batch_size,
        "engine": given.engine,
        "outer_steps": given.repeats + 1,
        "group_size": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        for stage in given.stages:
            file = Path(folder) / f"zero{stage}.json"
            file.write_text(f'{{"zero_optimization": {{"stage": {stage}}}}}')
            name = f"zero{stage}"
            results[name], ranks = measure(Config(**shared, deepspeed=str(file)), world, ranks)
            print(
                f"{name}: {results[name]['cpu']['ratio']['median']:.3f} of the floor's CPU seconds",
                flush=True,
            )
            write_json(given.json, {"engine": given.engine, "settings": shared, "stages": results})
    world.close()
    print(
        table(
            ["", "fmmeta CPU s", "floor CPU s", "CPU ratio", "quartiles", "wall ratio", "theta apart"],
            [
                [
                    name,
                    f"{r['cpu']['fmmeta']['median']:.3f}",
                    f"{r['cpu']['floor']['median']:.3f}",
                    f"{r['cpu']['ratio']['median']:.3f}",
                    f"{r['cpu']['ratio']['low']:.3f} to {r['cpu']['ratio']['high']:.3f}",
                    f"{r['wall']['ratio']['median']:.3f}",
                    f"{r['distance']:.1e}",
                ]
                for name, r in results.items()
            ],
        )
    )

    def draw(axes: Any) -> None:
        axes.bar(list(results), [r["cpu"]["ratio"]["median"] for r in results.values()])
        axes.axhline(1, color="black", linewidth=1)
        axes.set(ylabel="CPU seconds by those of the floor", title="One outer step in a group of one")

    plot(given.plot, draw)
    apart = max(r["distance"] for r in results.values())
    if not apart < 1e-3:
        raise SystemExit(
            f"floor: fmmeta and the floor did not do the same: theta is {apart:.1e} of its way apart"
        )
    print("floor: " + " ".join(f"{name} {r['cpu']['ratio']['median']:.2f}" for name, r in results.items()))


if __name__ == "__main__":
    main()
