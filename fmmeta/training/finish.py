"""The end of a run: export the model, evaluate it on held-out tasks, show the table, close run.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmmeta.checkpoint.hf_export import export
from fmmeta.training.final_table import against_start, show
from fmmeta.training.loop import Run


@dataclass
class Result:
    """What `MetaTrainer.train` returns on every rank. Accuracies are means over the held-out episodes."""

    output_dir: Path
    outer_steps: int
    before: float | None = None
    after: float | None = None
    after_from_start: float | None = None


def finish(run: Run) -> Result:
    """Export, evaluate, show, close run.json; then `on_train_end`. Collective: world."""
    result = Result(run.folder, run.state.outer_step)
    if run.controller.writes:
        _finish(run, result)
    else:
        run.progress.notice("another group writes the model")
    run.callbacks.on_train_end(run)
    return result


def _finish(run: Run, result: Result) -> None:
    """Fill the accuracies of `result`. Collective: world."""
    config, state, test = run.config, run.state, run.inputs.sources.test
    if config.save_steps and run.trains:
        run.save(last=True)
    if state.best is not None:
        run.progress.notice(state.best.text)
    final = state.final() if run.trains else state.meta_params
    if run.trains and config.init_interpolation < 1:
        alpha = config.init_interpolation
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
    facts = dict[str, Any]()
    if test is None:
        run.progress.notice("no held-out tasks: nothing to compare")
    elif config.test_episodes:
        initial = state.initial if run.trains else None
        gains, facts = against_start(
            run.held_out, run.inputs.sources, final, initial, run.parts.setup, run.raise_if_stopped
        )
        show(gains, config, run.progress.table)
        result.before, result.after, result.after_from_start = gains.accuracies
        run.callbacks.on_log(run, {"step": state.outer_step, "held_out_accuracy": gains.accuracies._asdict()})
    profile = run.profiler.show(run.progress.table)
    with run.ranks.world.raise_on_all("closing the run"):
        if run.ranks.first:
            run.write_run(finished=True, held_out=facts, **profile)
            run.held_out.clear()
    run.progress.notice(f"model {run.folder / 'model'}")
