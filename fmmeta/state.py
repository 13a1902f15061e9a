"""Where a run is: what its checkpoints hold, and what a resumed run goes on from.

    theta, learned rates, the outer optimizer      what training changes
    outer step, tasks seen, steps that failed      what was counted
    the best validated weights, recent losses      what later decisions need
    a meta-gradient on its way (--outer_delay)     what has not moved theta yet

What comes out at the end, and is validated before, may be a mixture (--start_share s): s theta_0 + (1 - s) theta. Wortsman et
al., "Robust fine-tuning of zero-shot models", 2022 (arXiv 2109.01903), equation 1, with s = 1 - alpha: what pre-training knew of
classes that training does not show is not unlearned.

It changes only between two outer steps. Settings, seeds and data are no part of it: they are the run's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fmmeta import build, checkpoint, record
from fmmeta.best import Best, BestState
from fmmeta.checkpoint.saver import Saver
from fmmeta.config import Config
from fmmeta.guard import Spikes
from fmmeta.meta.outer import Outer, OuterState
from fmmeta.meta.updates import Updates
from fmmeta.parallel.communicator import Ranks


class State:
    """One for a run. theta and rates are changed in place by `outer`, by nobody else while training lasts."""

    def __init__(self, config: Config, plan: build.Plan, ranks: Ranks, parts: build.Parts, folder: Path,
                 notice: Callable[[str], None]) -> None:  # fmt: skip
        self.config, self.plan, self.ranks, self.folder = config, plan, ranks, folder
        self.worker, self.params = parts.worker, parts.worker.params
        self.theta, rates = parts.theta, parts.setup.inner.rates.meta_parameter
        self.live: dict[str, Tensor] = {"theta": self.theta} | ({} if rates is None else {"rates": rates})
        # for the table at the end and for mixtures; in host memory
        asked = config.test_episodes or config.start_share
        self.initial = {name: value.to("cpu", copy=True) for name, value in self.live.items()} if asked else None
        self.outer = Outer(self.theta, parts.worker, config, parts.setup.inner)
        self.updates = Updates(self.outer, ranks.cross, config)
        self.best = Best(self.live) if config.load_best_model_at_end else None
        self.spikes = Spikes()
        self.outer_step, self.bad_steps, self.tasks = 0, 0, {"seen": 0, "bad": 0}
        self.saver = Saver(self.params, config, ranks, notice)

    def load(self, found: Path) -> None:
        """Take everything from a whole checkpoint, of this layout or another. Local."""
        state = checkpoint.read_state(found)
        checkpoint.same_size(found, self.params)
        vectors = checkpoint.load(found, state["vectors"], self.params, self.theta)
        self.take(vectors, checkpoint.load_tables(found), state)
        if found.parent.resolve() == self.folder.resolve():
            self.saver.last = self.folder / found.name

    def give(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """All of it, uncopied: vectors [S], tables (equal on every rank), and what is JSON. Collective: cross."""
        outer, (pending, known) = self.outer.state(), self.updates.state()
        best = BestState() if self.best is None else self.best.state()
        vectors = {"theta": self.theta, **outer.vectors, **pending.vectors, **best.vectors}
        facts = {"outer_step": self.outer_step, "numbers": outer.numbers, "bad_steps": self.bad_steps, "tasks": self.tasks,
                 "losses": self.spikes.state, "best": best.numbers, "pending": known, "vectors": list(vectors)}  # fmt: skip
        return vectors, {**outer.tables, **pending.tables, **best.tables}, facts

    def take(self, vectors: dict[str, Tensor], tables: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go on from what `give` gave, which is taken apart; the worker still has to be written. Local."""
        self.theta.copy_(vectors.pop("theta"))
        if self.best is not None:
            self.best.load_state(vectors, tables, facts["best"])
        self.updates.load_state(vectors, tables, facts.get("pending"))
        self.outer.load_state(OuterState(vectors, tables, facts["numbers"]))
        self.outer_step, self.bad_steps, self.tasks = facts["outer_step"], facts["bad_steps"], facts["tasks"]
        self.spikes = Spikes(facts.get("losses"))

    def begin_anew(self) -> None:
        """Put the weights of the start in place of what was learned; `initial` must be there."""
        assert self.initial is not None
        for name, value in self.live.items():
            value.copy_(self.initial[name])

    def mix(self) -> None:
        """Put the mixture in place of theta; learned rates stay. Local."""
        assert self.initial is not None
        for piece in self.outer.home.pieces(slice(0, len(self.theta))):
            self.theta[piece].lerp_(self.initial["theta"][piece].to(self.theta.device), self.config.start_share)

    @contextmanager
    def mixed(self) -> Iterator[None]:
        """Theta is the mixture for as long; the worker holds theta afterwards. Collective: group, where there is a share."""
        if not self.config.start_share:
            yield
            return
        kept = self.theta.to("cpu", copy=True)
        self.mix()
        try:
            yield
        finally:
            self.theta.copy_(kept)
        self.worker.write(self.theta)

    def warm(self) -> None:
        """Make room for the first save, beside training."""
        self.saver.warm({"theta": self.theta, **self.outer.state().vectors, **self.updates.shape()})

    def is_saved(self) -> bool:
        """Whether there is nothing to save: no step yet, or checkpoint-N is there or being written."""
        return self.outer_step == 0 or self.place in (self.saver.folder, self.saver.last)

    @property
    def place(self) -> Path:
        """Where a checkpoint of this moment belongs."""
        return self.folder / f"checkpoint-{self.outer_step}"

    def save(self, last: bool) -> None:
        """Begin to write checkpoint-N; with `last` wait until it is whole. Collective: world."""
        vectors, tables, facts = self.give()
        settings = record.settings_of(self.config, self.plan.sources.fingerprint, self.plan.resolved)
        self.saver.save(self.place, vectors, {**facts, "layout": str(self.ranks.layout), "settings": settings}, tables, last)
