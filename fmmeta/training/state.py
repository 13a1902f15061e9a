"""The state of a run: what its checkpoints hold and a resumed run continues from.

    meta-parameters, the outer optimizer           what training changes
    outer step, tasks seen, steps that failed      what was counted
    whether a callback has ended the run           no outer step follows, unless outer_steps is changed
    the best validated weights, recent losses      what later decisions need
    seconds that were useful, and all              goodput (report/goodput.py)
    tasks that groups run (--max_staleness)        what a resumed run begins again

What is validated and exported may be an interpolation (--init_interpolation alpha): (1 - alpha) theta_0 +
alpha theta. Wortsman et al., "Robust fine-tuning of zero-shot models", 2022 (arXiv 2109.01903), equation 1:
it keeps what pre-training learned about classes that are not in the training data. Such weights are copies:
the live tensors hold what was learned, at any moment.

The state changes only between two outer steps. Settings, seeds and data are not part of it: they belong to
the run.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fmmeta import checkpoint
from fmmeta.checkpoint.write import Saver
from fmmeta.config.settings import Config
from fmmeta.meta.outer_step import Outcome, OuterOptimizer, OuterUpdate
from fmmeta.meta.parameters import MetaParameters, StateDict
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.reliability.checks import Spikes
from fmmeta.report.goodput import Goodput
from fmmeta.training import build


class TrainingState:
    """One for a run. `outer` changes the meta-parameters in place; `load_state_dict` sets other values."""

    def __init__(
        self,
        config: Config,
        inputs: build.RunInputs,
        ranks: ProcessGroups,
        parts: build.Runtime,
        folder: Path,
        log: Callable[[str], None],
        started: float,
    ) -> None:
        """started: when the run began, in seconds since 1970."""
        self.config, self.inputs, self.ranks, self.folder = config, inputs, ranks, folder
        self.meta_params, self.param_map = parts.meta_params, parts.worker.params
        # for the table at the end and for interpolations; in host memory
        keeps_initial = config.test_episodes or config.init_interpolation < 1 or config.tune is not None
        self.initial = self.meta_params.snapshot() if keeps_initial else None
        self.outer = OuterOptimizer(self.meta_params, parts.worker, config)
        self.updates = OuterUpdate(self.outer, ranks.cross, config)
        self.best = Best(self.meta_params) if config.load_best_model_at_end else None
        self.goodput = Goodput(started)
        best = [self.best] if self.best else []
        self.stateful = [self.meta_params, self.outer, self.updates, self.goodput, *best]
        self.spikes = Spikes()
        self.outer_step, self.bad_steps, self.tasks = 0, 0, {"seen": 0, "bad": 0}
        self.queue: dict[str, Any] | None = None  # with --max_staleness: what groups run meanwhile
        self.validated = 0  # the last outer step whose validation is complete
        self.ends_early = False  # set by callbacks
        self.saver = Saver(self.param_map, config, ranks, log)

    def load(self, found: Path) -> None:
        """Load everything from a complete checkpoint, of this layout or another. Local."""
        facts, started = checkpoint.read_state(found), self.goodput.started
        self.load_state_dict(
            StateDict(
                checkpoint.load(found, facts["vectors"], self.param_map, self.meta_params.theta),
                checkpoint.load_tables(found),
                facts,
            )
        )
        if found.parent.resolve() == self.folder.resolve():
            self.saver.last = self.folder / found.name
        else:
            self.goodput.restart(started)

    def state_dict(self) -> StateDict:
        """All of it, uncopied. Local."""
        counts = {"outer_step": self.outer_step, "validated": self.validated, "bad_steps": self.bad_steps}
        facts = {"tasks": self.tasks, "losses": self.spikes.state, "best": {}, "queue": self.queue}
        if self.ends_early:
            facts["ended_early_of"] = self.config.outer_steps
        state = StateDict(facts={**counts, **facts})
        for part in self.stateful:
            part.add_state(state)
        state.facts["vectors"] = list(state.vectors)
        return state

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned; the worker is not written. Local."""
        facts = state.facts
        for part in self.stateful:
            part.load_state(state)
        self.outer_step, self.bad_steps, self.tasks = facts["outer_step"], facts["bad_steps"], facts["tasks"]
        self.validated = facts["validated"]
        self.ends_early = facts.get("ended_early_of") == self.config.outer_steps
        self.spikes, self.queue = Spikes(facts["losses"]), facts["queue"]

    def count(self, outcome: Outcome, tasks: dict[str, int]) -> None:
        """Count an outer step that has ended. tasks: numbers of seen and of bad tasks so far."""
        self.tasks = tasks
        if outcome is Outcome.APPLIED:
            self.bad_steps = 0
        elif outcome is Outcome.SKIPPED_NONFINITE:
            self.bad_steps += 1

    def interpolate_with_initial(self, meta: MetaParameters, alpha: float) -> MetaParameters:
        """Return the weights to validate and export instead of `meta`: `meta`, or its interpolation with the
        initial weights. Local.
        """
        if alpha == 1:
            return meta
        assert self.initial is not None
        return meta.interpolated(self.initial, 1 - alpha)

    @property
    def trained(self) -> MetaParameters:
        """The best validated weights (--load_best_model_at_end), or the last. Local."""
        return (self.best and self.best.meta_params) or self.meta_params

    def is_saved(self) -> bool:
        """Whether there is nothing to save: no step yet, or checkpoint-N exists or is being written."""
        return self.outer_step == 0 or self.checkpoint_path in (self.saver.folder, self.saver.last)

    @property
    def checkpoint_path(self) -> Path:
        """Folder of a checkpoint of this outer step."""
        return self.folder / f"checkpoint-{self.outer_step}"

    def save(self, last: bool) -> None:
        """Begin to write checkpoint-N; with `last` wait until it is complete. Collective: world."""
        state = self.state_dict()
        identity = {"layout": str(self.ranks.layout), "settings": self.inputs.settings(self.config)}
        self.saver.save(self.checkpoint_path, state.vectors, {**state.facts, **identity}, state.tables, last)


PREFIX = "best "  # of the names of vectors and tables in a checkpoint


class Best:
    """A copy of the meta-parameters with the highest validation accuracy so far, or without one with the
    lowest loss, and their score.

    It is kept in host memory and in every checkpoint. Local; every rank decides alike.

    live: the meta-parameters of the run.
    """

    def __init__(self, live: MetaParameters) -> None:
        self.live = live
        self.meta_params: MetaParameters | None = None
        self.step, self.loss = 0, math.inf
        self.accuracy: float | None = -math.inf

    def update(self, meta_params: MetaParameters, step: int, accuracy: float, loss: float) -> None:
        """Copy the meta-parameters if they score higher than the best before (of equals, if their loss is
        lower). accuracy: NaN where there is none.
        """
        loss = loss if math.isfinite(loss) else math.inf  # the worst, and equal to itself
        share = None if math.isnan(accuracy) else accuracy
        if (share or 0.0, -loss) > (self.accuracy or 0.0, -self.loss):
            self.step, self.accuracy, self.loss = step, share, loss
            self.meta_params = meta_params.snapshot()

    @property
    def text(self) -> str:
        """Which weights are exported."""
        if self.meta_params is None:
            return "load_best_model_at_end: no validation was done; the last weights are exported"
        score = f"loss {self.loss:.4f}" if self.accuracy is None else f"accuracy {100 * self.accuracy:.1f} %"
        return f"best of the validated weights: outer step {self.step}, {score}"

    def add_state(self, state: StateDict) -> None:
        """Add the copy and its score to what a checkpoint holds."""
        if self.meta_params is not None:
            state.add(PREFIX, self.meta_params.named())
            state.facts["best"] = {"step": self.step, "accuracy": self.accuracy, "loss": self.loss}

    def load_state(self, state: StateDict) -> None:
        """Restore what `add_state` gave, if there was a copy.

        One with learned rates of another shape than the run's (--accept_changed_settings) is forgotten: its
        score is that of another inner loop.
        """
        saved, copy = state.facts["best"], state.tensors(PREFIX)
        shapes = [None if rates is None else rates.shape for rates in (copy.get("rates"), self.live.rates)]
        if shapes[0] != shapes[1]:
            return
        self.meta_params = MetaParameters.from_named(copy).snapshot() if copy else None
        if saved:
            self.step, self.accuracy = saved["step"], saved["accuracy"]
            self.loss = math.inf if saved["loss"] is None else saved["loss"]  # JSON has no infinity
