"""fmmeta beside learn2learn, higher and TorchOpt: CPU seconds of a task's meta-gradient, on the same
episodes, the same result.

    python -m benchmarks.peers --peers-python ~/peers/bin/python --json benchmarks/results/peers.json

The peers live in an environment of their own, in which all of this runs (it needs fmmeta's requirements too):
higher and TorchOpt install as they are; of learn2learn, whose build fails on Python 3.11, the files
algorithms/maml.py, algorithms/base_learner.py and utils/__init__.py are enough. One thread, MiniLM, clinc150,
5-way 5-shot with 5 queries per class; measured in turn, task by task.

    same      FOMAML of 5 steps on identical tensors, padded to the longest row of a set
    users     FOMAML as their examples are written: rows tokenised one by one and padded to 64 tokens;
              fmmeta from its own loader
    anil      the same for ANIL of 10 steps, exact; features of the body are computed once per task, as in
              learn2learn's example

fmmeta does what its training loop does: a task's direction is added to a sum (here one of zeros). TorchOpt's
MetaSGD is of second order only, so FOMAML is written with its functional optimizer.

Meta-gradients must agree to 1e-4. The last line has the ratios: fmmeta's CPU seconds by the peer's (same),
and how many times as many episodes per CPU second (users, anil).
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import spread, table, write_json
from benchmarks.floor import SETTINGS
from benchmarks.stepping import Cost, Prepared, alone, find_data, find_model, prepare
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.learners.load import load_learner
from fmmeta.meta.parameters import MetaGradient
from fmmeta.meta.task import TaskRun
from fmmeta.tasks.batching import Episode, MicroBatch

Grads = dict[str, Tensor]
PADDED = 64


def loss_of(model: Any, batch: MicroBatch) -> Tensor:
    return F.cross_entropy(model(**batch.inputs)[1], batch.targets["labels"])


def by_learn2learn(model: nn.Module, episode: Episode, steps: int, lr: float, exact: bool = False) -> Grads:
    """As in its README: clone, adapt, backward through the clone."""
    from learn2learn.algorithms.maml import MAML  # type: ignore[import-not-found]

    learner = MAML(model, lr=lr, first_order=not exact, allow_nograd=True).clone()
    for _ in range(steps):
        learner.adapt(loss_of(learner, episode.support[0]), allow_unused=exact)
    model.zero_grad()
    loss_of(learner, episode.query[0]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_higher(model: nn.Module, episode: Episode, steps: int, lr: float, exact: bool = False) -> Grads:
    """Its inner loop context; of first order: no graph through the steps, gradients at the fast weights."""
    import higher  # type: ignore[import-not-found]

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    with higher.innerloop_ctx(model, optimizer, copy_initial_weights=False, track_higher_grads=exact) as (
        fast,
        inner,
    ):
        for _ in range(steps):
            inner.step(loss_of(fast, episode.support[0]))
        leaves = model if exact else fast
        named = {name: p for name, p in leaves.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(loss_of(fast, episode.query[0]), [*named.values()])
    return dict(zip(named, grads, strict=True))


def by_torchopt(model: nn.Module, episode: Episode, steps: int, lr: float, exact: bool = False) -> Grads:
    """Its functional optimizer on the parameters by name; of first order: gradients at the last ones."""
    import torchopt  # type: ignore[import-not-found]

    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names, params = list(named), tuple(named.values())
    optimizer, leaves = torchopt.sgd(lr=lr), params
    state = optimizer.init(params)

    def loss_at(params: tuple[Tensor, ...], batch: MicroBatch) -> Tensor:
        outputs = torch.func.functional_call(model, dict(zip(names, params, strict=True)), (), batch.inputs)
        return F.cross_entropy(outputs[1], batch.targets["labels"])

    for _ in range(steps):
        found = torch.autograd.grad(loss_at(params, episode.support[0]), params, create_graph=exact)
        updates, state = optimizer.update(found, state, params=params, inplace=not exact)
        params = torchopt.apply_updates(params, updates, inplace=False)
        if not exact:
            leaves = params = tuple(p.detach().requires_grad_() for p in params)
    return dict(zip(names, torch.autograd.grad(loss_at(params, episode.query[0]), leaves), strict=True))


PEERS: dict[str, Callable[..., Grads]] = {
    "learn2learn": by_learn2learn,
    "higher": by_higher,
    "torchopt": by_torchopt,
}


def anil_by_learn2learn(model: Any, episode: Episode, steps: int, lr: float) -> Grads:
    """As in examples/vision/anil_fc100.py: features of support and query at once, the head cloned and
    adapted, second order.
    """
    from learn2learn.algorithms.maml import MAML  # type: ignore[import-not-found]

    head = MAML(model.head, lr=lr).clone()
    sets = (episode.support[0].inputs, episode.query[0].inputs)
    both = {name: torch.cat([inputs[name] for inputs in sets]) for name in sets[0]}
    support, query = model(**both)[0].split(len(episode.support[0].weights))
    for _ in range(steps):
        head.adapt(F.cross_entropy(head(support), episode.support[0].targets["labels"]))
    model.zero_grad()
    F.cross_entropy(head(query), episode.query[0].targets["labels"]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def apart(a: Grads, b: Grads, names: list[str]) -> float:
    """Relative distance over the body."""
    off = sum(float((a[n] - b[n]).double().square().sum()) for n in names)
    return (off / sum(float(b[n].double().square().sum()) for n in names)) ** 0.5


class Ours:
    """fmmeta's rule on its worker; `load` from its own store, as training does."""

    def __init__(self, prepared: Prepared) -> None:
        run = prepared.run
        self.worker, self.theta, self.setup = run.worker, run.theta, run.parts.setup
        self.rule: Any = find(prepared.config.algorithm).rule
        self.load = run.parts.load(prepared.inputs.sources.train)
        self.tasks = [task for step in range(100) for task in run.schedule.meta_batch(step)]
        self.shapes = {f.name: f.shape for f in self.worker.params.fragments}
        self.meta, self.into = run.state.meta_params, MetaGradient(self.theta)

    def episode(self, number: int) -> Episode:
        found = self.load(self.tasks[number]).batches
        assert found is not None
        return found

    def gradient(self, episode: Episode) -> Tensor:
        """Added to `into`, which is zero before."""
        self.rule(TaskRun(self.setup, self.worker, self.meta, episode, self.into))
        return self.into.sum

    def named(self, vector: Tensor) -> Grads:
        return {name: self.worker.gather_param(vector, name, shape) for name, shape in self.shapes.items()}


def as_users_read(texts: tuple[list[str], list[str]], episode: Episode, tokenizer: Any) -> Episode:
    """Rows tokenised one by one, padded to 64 tokens, stacked."""
    sets = []
    for lines, batch in zip(texts, (episode.support[0], episode.query[0]), strict=True):
        rows = [
            tokenizer(text, padding="max_length", truncation=True, max_length=PADDED, return_tensors="pt")
            for text in lines
        ]
        inputs = {name: torch.cat([row[name] for row in rows]) for name in batch.inputs}
        sets.append([MicroBatch(inputs, batch.targets, batch.weights)])
    return Episode(*sets)


def texts_of(episode: Episode, tokenizer: Any) -> tuple[list[str], list[str]]:
    return tuple(
        tokenizer.batch_decode(b.inputs["input_ids"], skip_special_tokens=True)
        for b in (episode.support[0], episode.query[0])
    )  # type: ignore[return-value]


def compare(
    ours: Ours,
    model: nn.Module,
    peers: dict[str, Callable[..., Grads]],
    repeats: int,
    config: Config,
    tokenizer: Any,
    users: bool,
) -> dict[str, Any]:
    """CPU and wall seconds of one task by each, and how far each peer's meta-gradient is from ours."""
    names = [name for name in ours.shapes if not name.startswith("head.")]
    costs: dict[str, list[Cost]] = {name: [] for name in ("fmmeta", *peers)}
    distances = dict.fromkeys(peers, 0.0)
    for number in range(repeats + 1):
        kept: dict[str, Any] = {}
        given = ours.episode(number)
        texts = texts_of(given, tokenizer)

        def own(number: int = number, kept: dict[str, Any] = kept, given: Episode = given) -> None:
            kept["fmmeta"] = ours.gradient(ours.episode(number) if users else given)

        ours.into.clear()
        costs["fmmeta"].append(Cost.of(own))
        mine = ours.named(kept["fmmeta"])
        for peer, work in peers.items():
            own_model = copy.deepcopy(model)

            def theirs(
                peer: str = peer,
                work: Any = work,
                own_model: Any = own_model,
                kept: dict[str, Any] = kept,
                given: Episode = given,
                texts: Any = texts,
            ) -> None:
                episode = as_users_read(texts, given, tokenizer) if users else given
                kept[peer] = work(own_model, episode, config.inner_steps, config.inner_lr)

            costs[peer].append(Cost.of(theirs))
            distances[peer] = max(distances[peer], apart(kept[peer], mine, names))
        print(".", end="", flush=True)
    print()
    result: dict[str, Any] = {"apart": distances}
    for kind in ("cpu", "wall"):
        seconds = {name: [getattr(c, kind) for c in each[1:]] for name, each in costs.items()}
        result[kind] = {name: spread(each) for name, each in seconds.items()}
        result[f"{kind}_ratio"] = {
            peer: spread([a / b for a, b in zip(seconds["fmmeta"], seconds[peer], strict=True)])
            for peer in peers
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers-python", required=True, help="interpreter of an environment with learn2learn and higher"
    )
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--data")
    parser.add_argument(
        "--questions", nargs="+", choices=["same", "users", "anil"], default=["same", "users", "anil"]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    given = parser.parse_args()
    there = os.path.abspath(given.peers_python)
    if os.path.abspath(sys.executable) != there:
        os.execv(there, [there, "-m", "benchmarks.peers", *sys.argv[1:]])
    world, ranks, results = alone(), None, {}
    base = {
        **SETTINGS,
        "model_name_or_path": find_model(given.model_name_or_path),
        "dataset": [find_data(given.data)],
        "outer_steps": 1,
        "group_size": "1",
        "micro_batch_size": 64,
    }
    for question in given.questions:
        anil = question == "anil"
        config = Config(
            **{**base, "algorithm": "anil" if anil else "fomaml", "inner_steps": 10 if anil else 5}
        )
        prepared, ranks = prepare(config, world, ranks)
        model = load_learner(config, prepared.inputs.description)
        model.unpadded.works = False  # the peers get the model as transformers has it
        for p in model.head.parameters():  # type: ignore[union-attr]
            nn.init.zeros_(p)
        peers: dict[str, Callable[..., Grads]] = {"learn2learn": anil_by_learn2learn} if anil else PEERS
        results[question] = compare(
            Ours(prepared), model, peers, given.repeats, config, prepared.inputs.tokenizer, question != "same"
        )
        write_json(given.json, {"settings": base, "questions": results})
    world.close()
    rows, last = [], []
    for question, r in results.items():
        for peer, ratio in r["cpu_ratio"].items():
            rows.append(
                [
                    question,
                    peer,
                    f"{r['cpu']['fmmeta']['median']:.3f}",
                    f"{r['cpu'][peer]['median']:.3f}",
                    f"{ratio['median']:.3f}",
                    f"{ratio['low']:.3f} to {ratio['high']:.3f}",
                    f"{r['wall_ratio'][peer]['median']:.3f}",
                    f"{r['apart'][peer]:.1e}",
                ]
            )
            value = f"{ratio['median']:.2f}" if question == "same" else f"{1 / ratio['median']:.1f}x"
            last.append(f"{question} {peer} {value}")
    print(
        table(
            ["", "peer", "fmmeta CPU s", "peer CPU s", "ratio", "quartiles", "wall ratio", "gradients apart"],
            rows,
        )
    )

    worst = max(value for r in results.values() for value in r["apart"].values())
    if not worst < 1e-4:
        raise SystemExit(f"peers: meta-gradients are {worst:.1e} apart")
    print("peers: " + ", ".join(last))


if __name__ == "__main__":
    main()
