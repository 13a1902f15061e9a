"""`fmmeta predict` for documents: each is learned as a stream, and continued by what was learned.

    a .txt or .md file, a row or line with a text, or the rows of one `document` in their order
        -->  {"document", "tokens", "bits_per_byte", "zero_shot_bits_per_byte", "output"}

bits_per_byte scores each chunk before the step on it, from the model's weights on; zero_shot has no steps.
output is greedy, by the weights after the last chunk, and sees the last `context` tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from fmmeta.adaptation.model import refuse_no_model
from fmmeta.adaptation.task_learner import TaskExamples, TaskLearner
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import LOGGER, STDERR, Progress
from fmmeta.evaluation.settings import SHARED_BY_PREDICT, AdaptConfig, PredictConfig
from fmmeta.evaluation.streams import bits_and_bytes
from fmmeta.learners.from_gguf import as_folder
from fmmeta.metrics.language import generate
from fmmeta.parallel.workers.base import all_finite
from fmmeta.tasks.data.columns import Row, column_like, is_missing, refuse
from fmmeta.tasks.data.files import TEXTS
from fmmeta.tasks.data.rows import tabulate
from fmmeta.tasks.sources.stream import read_texts

COLUMNS = ("document", "tokens", "bits_per_byte", "zero_shot_bits_per_byte", "output")


def continued(settings: PredictConfig, rows: Callable[[str], Iterator[Row]]) -> Iterator[dict[str, Any]]:
    """The values of COLUMNS for each document. rows: of `settings.input`, where plain lines are values of a
    column. Raises `UsageError`.
    """
    if settings.equal_classes:
        raise UsageError("equal_classes=True means nothing for documents; leave it out")
    notice = partial(LOGGER.info, "%s", extra=STDERR)
    folder = as_folder(settings.model_name_or_path, notice)
    refuse_no_model(folder)
    given = {name: getattr(settings, name) for name in (*SHARED_BY_PREDICT, "text_column")}
    given = {name: value for name, value in given.items() if value is not None}
    learner = TaskLearner(AdaptConfig(**{**given, "model_name_or_path": folder}), 0, Progress(enabled=False))
    model, config, path = learner.model, learner.config, Path(settings.input)
    if path.suffix in TEXTS:
        found = (Row({"text": one.values["text"]}, one.origin) for one in read_texts(path, [path], refuse))
    else:
        found = rows(settings.text_column or model.columns[0])
    alone = ((row.origin, [row]) for row in found)  # answered before the next line is read
    for name, parts in alone if settings.input == "-" else groupby(found, key=document_of):
        how = {"one_task": True, "unique": False, "tokenizer": model.tokenizer, "setting": "input"}
        document = learner.encode(TaskExamples(name, tabulate(name, [*parts], config, notice, **how)))
        before, passes = learner.follow(document)
        if not all_finite(passes):
            raise UsageError(
                f"inner_lr={config.inner_lr} of {folder}: the loss of {name} is not finite; adapt with a"
                " lower --inner_lr, and give that folder"
            )
        sums = (
            map(sum, zip(*bits_and_bytes(document.examples, one, model.tokenizer), strict=True))
            for one in (passes, before)
        )
        prompt = document.examples[-1].input_ids[-config.context :]
        (output,) = generate(model.worker, model.reader, [prompt], settings.max_new_tokens, 1)
        tokens = sum(one.label_tokens for one in document.examples)
        rates = (round(bits / size, 6) for bits, size in sums)
        yield dict(zip(COLUMNS, (name, tokens, *rates, output), strict=True))


def document_of(row: Row) -> str:
    """The name of a row's document; where the row has none, the file or its place in it."""
    name = row.values.get(str(column_like("document", row.values)))
    return row.origin if is_missing(name) else str(name)
