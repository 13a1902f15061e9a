"""`fmmeta adapt`: adapts a model to one task from a few labelled examples and writes a Hugging Face folder.

    support file --> number of inner steps, by cross-validation --> inner loop on all examples
                 --> model folder, model card, predictions

The inner loop has the settings of meta-training (stored in fmmeta.json) unless flags override them. Runs in
one process. A directory of support files is adapted to task by task (many.py).
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from fmmeta.adaptation import many
from fmmeta.adaptation.folder import new_folder, write_folder
from fmmeta.adaptation.model import AdaptedModel
from fmmeta.adaptation.task_learner import TaskLearner, read_task, support_set
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.text import counted
from fmmeta.config.fields import refuse_first
from fmmeta.evaluation.settings import AdaptConfig
from fmmeta.models.files import trained_with
from fmmeta.models.from_gguf import as_folder
from fmmeta.models.load import describe
from fmmeta.parallel.layout import Launch
from fmmeta.tasks.data.rows import Examples
from fmmeta.tasks.data.splits import known_rows


def run(settings: AdaptConfig) -> None:
    """`fmmeta adapt`."""
    refuse_first(
        (not getattr(settings, name), f"{name} is missing; give --{name}")
        for name in ("support", "output_dir")
    )
    if Path(settings.support).is_dir():
        many.run(settings)
        return
    if (ranks := Launch.from_env(os.environ).world_size) > 1:
        raise UsageError(
            f"support={settings.support} is one task, which one process adapts to, and {ranks} were started;"
            " start one, or give a directory of support files"
        )
    progress = Progress(enabled=True)
    adapted = adapt(settings, progress)
    if adapted.accuracy is not None:
        progress.notice(
            f"accuracy on {settings.query}: {100 * adapted.accuracy:.1f} % of {len(adapted.predictions)};"
            f" answers in {Path(str(settings.output_dir), 'predictions.jsonl')}"
        )
    progress.notice(f"model {settings.output_dir}")


def adapt(
    settings: AdaptConfig,
    progress: Progress,
    support: Examples | None = None,
    query: Examples | None = None,
) -> AdaptedModel:
    """Adapt to the task of the examples `support`, or of the file `settings.support`; the query set likewise.

    A folder is written if `settings.output_dir` is set. Raises `UsageError`.
    """
    shards = settings.deepspeed or settings.group_size not in ("auto", "1")
    refuse_first(
        [
            (
                not support and Path(settings.support).is_dir(),
                f"support={settings.support} is a directory; give a file, or use adapt_many",
            ),
            (
                shards,
                f"deepspeed={settings.deepspeed} and group_size={settings.group_size} go with a directory of"
                " support files, and one task is adapted to in one process; leave them out",
            ),
        ]
    )
    settings = replace(settings, model_name_or_path=as_folder(settings.model_name_or_path, progress.notice))
    config = settings.run_config(n_way=2)
    read = partial(read_task, config=config, notice=progress.notice, images=describe(config).images)
    table, queries = read("support", support or settings.support), read("query", query or settings.query)
    task = support_set("", table, settings, config, progress.notice)
    labels = task.labels
    if unknown := sorted(set(queries.target) - set(labels)) if labels else []:
        name = "query" if query else f"query={settings.query}"
        raise UsageError(f"{name} has the class {unknown[0]!r}, of which the support set has none; add some")
    name, trained = settings.query or "query", trained_with([settings.model_source])
    for text in known_rows(trained, name, "class", queries.contents):
        progress.notice(Warn(text))
    if shared := len(set(queries.content) & set(table.content)):
        progress.notice(
            Warn(
                f"{name}: {counted(shared, 'row')} of {len(set(queries.content))} are in the support set too,"
                " by their contents; the accuracy on them is not that on new rows: leave them out"
            )
        )
    with new_folder(settings.output_dir) as folder:
        learner = TaskLearner(settings, len(labels), progress, labels)
        encoded = learner.encode(task)
        learned = next(learner.learn([encoded]))
        if learned.failure:
            raise UsageError(learned.failure)
        if learned.left_out is not None:
            progress.notice(
                f"{counted(learned.steps, 'inner step')}: {100 * learned.left_out:.1f} % right of examples"
                f" that were left out, of up to {learner.inner.steps} steps"
            )
        if learned.weights is not None:
            learner.hold(learned.weights)
        if learner.prompts:
            learner.model.prompt_examples = encoded.examples
        adapted = AdaptedModel(labels, learned.steps, learned.left_out, learner.model)
        answers = adapted.loaded.answer(queries.encodable, settings.max_new_tokens)
        adapted.predictions = [
            replace(answer, input=name, truth=truth)
            for answer, name, truth in zip(answers, queries.input, queries.target, strict=True)
        ]
        if folder is not None:
            write_folder(adapted, folder, learner, learned)
            adapted.output_dir = settings.output_dir
    return adapted
