"""The end of a run: export the model, score held-out tasks from theta and from the initial weights, show the
table, close run.json.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fmmeta.checkpoint.hf_export import export
from fmmeta.parallel.collectives import Communicator
from fmmeta.report.data import AFTER, BEFORE, FROM_START, read, read_lines
from fmmeta.training.comparison import against_start, show, verdict_of
from fmmeta.training.run import Run
from fmmeta.training.run_card import write_cards


@dataclass(repr=False)
class Result:
    """What `MetaTrainer.train` returns on every rank.

    before, after, after_from_start: mean accuracies on the held-out episodes, between 0 and 1: before and
    after adaptation of the meta-trained model, and after adaptation of the initial weights. log_history: the
    lines of metrics.jsonl. verdict: what meta-training has gained, over what it was measured, and what to do.
    held_out: what run.json stores of the held-out tasks; without them the verdict alone. Pairs are a mean and
    half its 95 % interval, None where one is not finite:

        NAME         {"accuracy": pair, "loss": pair} of the three rows, and of `gain`, which is paired
        per_stratum, per_stratum_at_start
                     mean accuracies after adaptation, meta-trained and from the initial weights
        episodes     number of episodes, over `units` classes or tasks (`kind`)
        metrics      {NAME: {"after_from_start": pair, "after": pair}} of the numbers of --metrics
    """

    output_dir: Path
    outer_steps: int
    before: float | None = None
    after: float | None = None
    after_from_start: float | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = ""
    held_out: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        accuracies = "".join(
            f", {name}={value:.4f}"
            for name in ("before", "after_from_start", "after")
            if (value := getattr(self, name)) is not None
        )
        episodes = self.held_out.get("episodes", 0)
        return (
            f"Result(output_dir={str(self.output_dir)!r}, outer_steps={self.outer_steps}{accuracies},"
            f" log_history=[{len(self.log_history)} lines], held_out={{{episodes} episodes}})"
        )


def read_result(folder: Path, comm: Communicator) -> Result:
    """The result of a finished run from its files, which rank 0 reads. Collective: comm (world)."""
    found: dict[str, Any] = {}
    with comm.raise_on_all("reading the result"):
        if comm.rank == 0:
            facts = read(folder)
            found = {
                "steps": facts.run.get("outer_steps", facts.settings["outer_steps"]),
                "lines": read_lines(folder),
                "held_out": facts.held_out,
            }
    found = json.loads(comm.broadcast_bytes(json.dumps(found).encode()))
    table = found["held_out"]
    rows = [table.get(name) or {"accuracy": [None]} for name in (BEFORE, AFTER, FROM_START)]
    before, after, from_start = (row["accuracy"][0] for row in rows)
    verdict = table.get("verdict", {}).get("text", "")
    return Result(folder, found["steps"], before, after, from_start, found["lines"], verdict, table)


def finish(run: Run, choose_interpolation: Callable[[Run], float]) -> Result:
    """Export, evaluate, show, close run.json; then `on_train_end`.

    choose_interpolation: gives the `init_interpolation` of the exported weights. Collective: world.
    """
    result = Result(run.folder, run.state.outer_step)
    if run.view.writes:
        _finish(run, choose_interpolation)
        result = read_result(run.folder, run.ranks.world)
    else:
        run.progress.notice("another group writes the model")
    run.callbacks.on_train_end(run.view)
    return result


def _finish(run: Run, choose_interpolation: Callable[[Run], float]) -> None:
    """Collective: world."""
    config, state, test = run.config, run.state, run.inputs.sources.test
    if config.save_steps and run.trains:
        run.save(last=True)
    if state.best is not None:
        run.progress.notice(state.best.text)
    final, alpha = state.meta_params, config.init_interpolation
    if run.trains:
        alpha = choose_interpolation(run)
        config = replace(config, init_interpolation=alpha)
        final = state.interpolate_with_initial(state.trained, alpha)
    if run.trains and alpha < 1:
        run.progress.notice(
            f"init_interpolation={alpha:g}: the exported weights are {1 - alpha:g} * initial + {alpha:g} *"
            " trained"
        )
    run.stage.begin("exporting the model")
    export(
        run.folder / "model",
        final.theta,
        run.worker,
        run.parts.frozen,
        config,
        run.inputs.description,
        run.inputs.tokenizer,
        run.ranks,
        run.parts.setup.inner.rates.variant(final.rates),
        trained=[*run.inputs.trained, *(run.inputs.sources.used if run.trains else ())],
    )
    gains, facts = None, dict[str, Any]()
    if test is not None and config.test_episodes:
        gains, facts = against_start(
            run.held_out,
            run.inputs.sources,
            final,
            state.initial if run.trains else None,
            run.parts.setup,
            run.raise_if_stopped,
        )
        show(gains, config, run.progress.table)
        if gains.has_answers:
            line = {"step": state.outer_step, "held_out_accuracy": gains.accuracies}
            run.callbacks.on_log(run.view, line)
    verdict = verdict_of(gains, config, run.inputs.sources)
    run.progress.notice(f"verdict: {verdict['text']}")
    profile = run.profiler.show(run.progress.table)
    with run.ranks.world.raise_on_all("closing the run"):
        if run.ranks.first:
            write_cards(run.folder, config, state.outer_step, run.inputs.description, gains, verdict["text"])
            run.write_run(
                finished=True,
                outer_steps=state.outer_step,
                init_interpolation=alpha,
                held_out={**facts, "verdict": verdict},
                **profile,
            )
            run.held_out.scoring.clear()
    run.progress.notice(f"model {run.folder / 'model'}")
