"""Sinusoid regression (Finn et al. 2017, section 5.1): fmmeta with the module of examples/own_module.py,
beside the same algorithm written by hand and with higher, on the same tasks in turn.

    python -m benchmarks.sinusoid --json benchmarks/results/sinusoid.json

Each of the three trains an MLP from the same weights: MAML, exact or of first order, 25 tasks an outer step,
Adam. fmmeta takes the tasks one by one, and all in one pass (--tasks_per_pass). It runs its training loop,
loading included; the others get the tensors that it has just used. The last lines are the mean squared error
on test tasks after 0 to 10 inner steps, with 95 % intervals over tasks, and fmmeta's CPU seconds of a task by
those of each of the others. higher is measured where it is installed.
"""

import argparse
import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import spread, table, write_json
from benchmarks.stepping import QUIET, Cost, alone, prepare
from examples import own_module
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import Example, MicroBatch

LR, TASKS, OUTER_LR, CURVE = 0.01, 25, 1e-3, 10
SHOWN = (0, 1, CURVE)  # inner steps of the table
SETTINGS: dict[str, Any] = {
    "task_type": "examples.own_module:Sine",
    "dataset": ["examples.own_module:tasks"],
    "inner_lr": LR,
    "meta_batch_size": TASKS,
    "outer_lr": OUTER_LR,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "warmup_steps": 0,
    "lr_scheduler_type": "constant",
    "test_episodes": 0,
    "group_size": "1",
    **QUIET,
}


def loss(net: Any, params: Any, batch: MicroBatch) -> Tensor:
    outputs = torch.func.functional_call(net, params, (batch.inputs["x"],))
    return (outputs - batch.targets["y"]).square().mean()


class ByHand:
    """The published algorithm in a few lines; `exact` keeps the graph of the inner steps."""

    def __init__(self, exact: bool, steps: int) -> None:
        torch.manual_seed(Config.seed)
        self.net, self.exact, self.steps = own_module.Sine().net, exact, steps
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=OUTER_LR)

    def adapted(self, batch: MicroBatch, steps: int, exact: bool = False) -> list[dict[str, Tensor]]:
        """The parameters after 0, 1, ... inner steps."""
        found: list[dict[str, Tensor]] = [{**dict(self.net.named_parameters())}]
        for _ in range(steps):
            grads = torch.autograd.grad(
                loss(self.net, found[-1], batch), [*found[-1].values()], create_graph=exact
            )
            following = [one - LR * grad for one, grad in zip(found[-1].values(), grads, strict=True)]
            if not exact:
                following = [one.detach().requires_grad_() for one in following]
            found.append(dict(zip(found[-1], following, strict=True)))
        return found

    def gradient(self, support: MicroBatch, query: MicroBatch) -> Any:
        path = self.adapted(support, self.steps, self.exact)
        leaves = path[0 if self.exact else -1]
        return torch.autograd.grad(loss(self.net, path[-1], query), [*leaves.values()])

    def step(self, episodes: list[Any]) -> None:
        total = [torch.zeros_like(param) for param in self.net.parameters()]
        for episode in episodes:
            (support,), (query,) = episode.support, episode.query
            torch._foreach_add_(total, self.gradient(support, query))
        for param, grad in zip(self.net.parameters(), total, strict=True):
            param.grad = grad / len(episodes)
        self.optimizer.step()


class ByHigher(ByHand):
    """The same gradient by higher's inner loop context."""

    def gradient(self, support: MicroBatch, query: MicroBatch) -> Any:
        import higher  # type: ignore[import-not-found]

        inner = torch.optim.SGD(self.net.parameters(), lr=LR)
        with higher.innerloop_ctx(
            self.net, inner, copy_initial_weights=False, track_higher_grads=self.exact
        ) as (fast, optimizer):
            for _ in range(self.steps):
                optimizer.step((fast(support.inputs["x"]) - support.targets["y"]).square().mean())
            outputs = fast(query.inputs["x"])
            leaves = self.net if self.exact else fast
            return torch.autograd.grad((outputs - query.targets["y"]).square().mean(), [*leaves.parameters()])


def curve(hand: ByHand, tasks: int) -> list[tuple[float, float]]:
    """Mean squared error of test tasks after 0 to CURVE inner steps, and half its 95 % interval."""
    rows = []
    for number in own_module.tasks.numbers("test")[:tasks]:
        support, query = (
            MicroBatch(
                *own_module.Sine.collate([Example([0], 0, values={"row": one}) for one in part], 0),
                torch.ones(len(part)),
            )
            for part in own_module.draw(number)
        )
        rows.append([loss(hand.net, params, query).item() for params in hand.adapted(support, CURVE)])
    found = torch.tensor(rows, dtype=torch.float64)
    half = 1.96 * found.std(0) / math.sqrt(tasks)
    return [*zip(found.mean(0).tolist(), half.tolist(), strict=True)]


def measure(config: Config, world: Any, ranks: Any, exact: bool, tasks: int) -> tuple[dict[str, Any], Any]:
    prepared, ranks = prepare(config, world, ranks)
    others: dict[str, ByHand] = {"by hand": ByHand(exact, config.inner_steps)}
    if find_spec("higher"):
        others["higher"] = ByHigher(exact, config.inner_steps)
    costs: dict[str, list[Cost]] = {name: [] for name in others}

    def between(used: list[Any]) -> None:
        for name, other in others.items():
            costs[name].append(Cost.of(lambda other=other: other.step(used)))

    ours = prepared.stepped(between)
    mine = ByHand(exact, config.inner_steps)
    worker, theta = prepared.run.worker, prepared.run.theta
    for name, param in mine.net.named_parameters():
        param.data = worker.gather_param(theta, f"net.{name}", tuple(param.shape))
    result: dict[str, Any] = {"fmmeta": {"mse": curve(mine, tasks)}}
    for name, other in others.items():
        ratios = [a.cpu / b.cpu for a, b in zip(ours, costs[name][1:], strict=True)]
        result[name] = {"mse": curve(other, tasks), "ratio": spread(ratios)}
    result["fmmeta"]["ms of a task"] = 1000 * spread([one.cpu for one in ours])["median"] / TASKS
    return result, ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--outer_steps", type=int, default=1000)
    parser.add_argument("--inner_steps", type=int, default=1)
    parser.add_argument("--test_tasks", type=int, default=600)
    parser.add_argument("--json")
    given = parser.parse_args()
    world, ranks, results, lines = alone(), None, dict[str, Any](), list[list[str]]()
    for shots in (5, 10):
        own_module.K = shots
        for algorithm in ("fomaml", "maml"):
            flags: dict[str, Any] = {**SETTINGS, "algorithm": algorithm, "outer_steps": given.outer_steps}
            flags["inner_steps"] = given.inner_steps
            for at_once in ("1", str(TASKS)):
                config = Config(**flags, tasks_per_pass=at_once)
                found, ranks = measure(config, world, ranks, algorithm == "maml", given.test_tasks)
                row = f"{algorithm}, {shots} shots, {at_once} in a pass"
                results[row] = found
                for name, one in found.items():
                    ratio = f"{one['ratio']['median']:.2f}" if "ratio" in one else ""
                    errors = [f"{mean:.3f} ± {half:.3f}" for mean, half in map(one["mse"].__getitem__, SHOWN)]
                    lines.append([row, name, *errors, ratio])
                facts = {"outer_steps": given.outer_steps, "inner_steps": given.inner_steps}
                write_json(given.json, {**facts, "results": results})
    world.close()
    print(table(["", "", "MSE before", "1 step", f"{CURVE} steps", "fmmeta's CPU seconds by its own"], lines))


if __name__ == "__main__":
    main()
