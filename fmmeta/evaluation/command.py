"""`fmmeta evaluate`: models x methods x shots over the same episodes, divided among the ranks of a launch.

    settings --> episodes of each k_shot (by seed, never by model)
             --> one score per episode, method and shot --> results

The scores do not depend on the number of groups: an episode is scored by one group, and frozen features are
computed in batches that the rows alone determine. Ranks join groups as in training, so that a model is
evaluated wherever it could be trained.
"""

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.evaluation.methods import EvaluatedModel
from fmmeta.evaluation.output import check_output, write_json
from fmmeta.evaluation.results import (
    EvaluationResults,
    differences,
    read_cells,
    results_of,
    show,
)
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.models.load import describe, empty_learner
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.reliability.signals import Signals


def run(settings: EvaluateConfig, signals: Signals | None = None) -> None:
    """`fmmeta evaluate`. Collective: world."""
    evaluate(settings, Progress(enabled=Launch.from_env(os.environ).global_rank == 0), signals)


def evaluate(
    settings: EvaluateConfig, progress: Progress, signals: Signals | None = None
) -> EvaluationResults:
    """Evaluate, show the results, and write them to `settings.output`. Raises `UsageError`.

    signals: from the moment at which the results are complete, a signal no longer ends the process.
    Collective: world.
    """
    launch = Launch.from_env(os.environ)
    with closing(World(launch, pick_device(launch))) as world:
        others = None
        with world.comm.raise_on_all("reading settings"):
            if launch.global_rank == 0 and settings.output:
                check_output(Path(settings.output))
            if settings.compare is not None and settings.compare_model is None:
                others = read_cells(settings.compare)
            elif settings.compare_model is not None and launch.global_rank == 0:
                check_compare_model(settings, settings.compare_model)
        models = list(filter(None, [settings.model_name_or_path, settings.compare_model]))
        model = EvaluatedModel(settings, world, progress, models, others)
        cells, ranks = model.cells(), model.ranks
        results = results_of(settings, cells, model.config.task_type)
        del model  # frees the weights before another model is loaded
        if settings.compare is not None:
            if others is None:
                other = with_model(settings, settings.compare)
                others = EvaluatedModel(other, world, progress, models, cells, ranks).cells()
            results["compare"] = {"with": settings.compare, "cells": differences(cells, others)}
        if signals:
            signals.run()
        show(results, progress)
        with world.comm.raise_on_all("writing the results"):
            if launch.global_rank == 0 and settings.output:
                write_json(Path(settings.output), results)
        return results


def with_model(settings: EvaluateConfig, model: str) -> EvaluateConfig:
    """The same evaluation of another model, compared with nothing."""
    return replace(settings, model_name_or_path=model, compare=None)


def check_compare_model(settings: EvaluateConfig, model: str) -> None:
    """Raise `UsageError` for a model to compare with that does not exist, or that is for other tasks."""
    first = settings.run_config()
    try:
        second = with_model(settings, model).run_config()
        description = describe(second)
        if second.task_type == first.task_type:
            empty_learner(second, description)
            return
    except UsageError as error:
        raise UsageError(str(error).replace("model_name_or_path=", "compare=")) from None
    raise UsageError(
        f"compare={model} is a model for task_type={second.task_type}, and"
        f" model_name_or_path={settings.model_name_or_path} one for task_type={first.task_type}; give"
        " another model, or --task_type"
    )
