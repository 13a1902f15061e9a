"""The state of a run: what its checkpoints hold and a resumed run continues from.

    theta, learned rates, the outer optimizer      what training changes
    outer step, tasks seen, steps that failed      what was counted
    the best validated weights, recent losses      what later decisions need
    a meta-gradient on its way (--outer_delay)     what has not moved theta yet

What is validated and exported may be an interpolation (--init_interpolation alpha): (1 - alpha) theta_0 +
alpha theta. Wortsman et al., "Robust fine-tuning of zero-shot models", 2022 (arXiv 2109.01903), equation 1:
it keeps what pre-training knew of classes that training does not show. Such weights are copies: the live
tensors hold what was learned, at any moment.

It changes only between two outer steps. Settings, seeds and data are not part of it: they belong to the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from fmmeta import checkpoint
from fmmeta.checkpoint.async_saver import Saver
from fmmeta.config.settings import Config
from fmmeta.meta.delayed_update import DelayedUpdate
from fmmeta.meta.outer_step import Outer, OuterState
from fmmeta.meta.parameters import MetaParameters
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.reliability.outliers import Spikes
from fmmeta.training import build, run_record
from fmmeta.training.best import Best, BestState
from fmmeta.training.step_metrics import Outcome


class TrainingState:
    """One for a run. `outer` changes theta and learned rates in place; `load_state_dict` replaces them."""

    def __init__(
        self,
        config: Config,
        inputs: build.RunInputs,
        ranks: ProcessGroups,
        parts: build.Runtime,
        folder: Path,
        notice: Callable[[str], None],
    ) -> None:
        self.config, self.inputs, self.ranks, self.folder = config, inputs, ranks, folder
        self.worker, self.params = parts.worker, parts.worker.params
        self.theta, rates = parts.theta, parts.setup.inner.rates.meta_parameter
        self.meta_params = MetaParameters(self.theta, rates)
        # for the table at the end and for interpolations; in host memory
        keeps_initial = config.test_episodes or config.init_interpolation < 1
        self.initial = self.meta_params.snapshot() if keeps_initial else None
        self.outer = Outer(self.theta, parts.worker, config, parts.setup.inner)
        self.updates = DelayedUpdate(self.outer, ranks.cross, config)
        self.best = Best(self.meta_params) if config.load_best_model_at_end else None
        self.spikes = Spikes()
        self.outer_step, self.bad_steps, self.tasks = 0, 0, {"seen": 0, "bad": 0}
        self.validated = 0  # the last outer step whose validation is complete
        self.saver = Saver(self.params, config, ranks, notice)

    def load(self, found: Path) -> None:
        """Take everything from a whole checkpoint, of this layout or another. Local."""
        state = checkpoint.read_state(found)
        vectors = checkpoint.load(found, state["vectors"], self.params, self.theta)
        self.load_state_dict(vectors, checkpoint.load_tables(found), state)
        if found.parent.resolve() == self.folder.resolve():
            self.saver.last = self.folder / found.name

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """All of it, uncopied: vectors [S], tables (equal on every rank), and what is JSON.

        Collective: cross.
        """
        outer, (pending, known) = self.outer.state(), self.updates.state()
        best = BestState() if self.best is None else self.best.state()
        vectors = {"theta": self.theta, **outer.vectors, **pending.vectors, **best.vectors}
        facts = {
            "outer_step": self.outer_step,
            "validated": self.validated,
            "numbers": outer.numbers,
            "bad_steps": self.bad_steps,
            "tasks": self.tasks,
            "losses": self.spikes.state,
            "best": best.numbers,
            "pending": known,
            "vectors": list(vectors),
        }
        return vectors, {**outer.tables, **pending.tables, **best.tables}, facts

    def load_state_dict(
        self, vectors: dict[str, Tensor], tables: dict[str, Tensor], facts: dict[str, Any]
    ) -> None:
        """Restore what `state_dict` returned; the worker is not written. Local."""
        self.theta.copy_(vectors.pop("theta"))
        if self.best is not None:
            self.best.load_state(vectors, tables, facts["best"])
        self.updates.load_state(vectors, tables, facts.get("pending"))
        self.outer.load_state(OuterState(vectors, tables, facts["numbers"]))
        self.outer_step, self.bad_steps, self.tasks = facts["outer_step"], facts["bad_steps"], facts["tasks"]
        self.validated = facts.get("validated", self.outer_step)  # absent in checkpoints of 0.1.0
        self.spikes = Spikes(facts.get("losses"))

    def count(self, outcome: Outcome, tasks: dict[str, int]) -> None:
        """Count an outer step that has ended. tasks: seen and bad so far."""
        self.tasks = tasks
        if outcome is Outcome.APPLIED:
            self.bad_steps = 0
        elif outcome is Outcome.SKIPPED_NONFINITE:
            self.bad_steps += 1

    @property
    def validation_due(self) -> bool:
        """Whether the validation after this outer step has not been done, or was stopped before its end."""
        every = self.config.eval_steps
        return bool(every) and self.outer_step > self.validated and self.outer_step % every == 0

    def interpolate_with_initial(self, meta: MetaParameters) -> MetaParameters:
        """What is validated and exported in place of `meta`: itself, or the interpolation with the initial
        weights. Local.
        """
        if self.config.init_interpolation == 1:
            return meta
        assert self.initial is not None
        return meta.interpolated(self.initial, 1 - self.config.init_interpolation)

    def final(self) -> MetaParameters:
        """What the run exports: the best validated or the last weights, interpolated where asked. Local."""
        best = None if self.best is None else self.best.kept
        return self.interpolate_with_initial(best or self.meta_params)

    def preallocate(self) -> None:
        """Allocate the buffers of the first save, beside training."""
        self.saver.warm({"theta": self.theta, **self.outer.state().vectors, **self.updates.shape()})

    def is_saved(self) -> bool:
        """Whether there is nothing to save: no step yet, or checkpoint-N is there or being written."""
        return self.outer_step == 0 or self.checkpoint_path in (self.saver.folder, self.saver.last)

    @property
    def checkpoint_path(self) -> Path:
        """Where a checkpoint of this moment belongs."""
        return self.folder / f"checkpoint-{self.outer_step}"

    def save(self, last: bool) -> None:
        """Begin to write checkpoint-N; with `last` wait until it is whole. Collective: world."""
        vectors, tables, facts = self.state_dict()
        settings = run_record.settings_of(self.config, self.inputs.sources.fingerprint, self.inputs.resolved)
        self.saver.save(
            self.checkpoint_path,
            vectors,
            {**facts, "layout": str(self.ranks.layout), "settings": settings},
            tables,
            last,
        )
