"""`fmmeta predict`: answers of an adapted model to a file or to standard input, line by line.

{"text": ...} or plain text  -->  {"text", "label", "score"}          a class and its probability
                                  {"input", "output"}                 a greedy answer (causal_lm)
"""

import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from fmmeta.adaptation.adapted_model import LoadedModel, load_single_process
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.config.settings import REMEMBERED, Config
from fmmeta.evaluation.output import open_output
from fmmeta.evaluation.settings import SHARED_BY_PREDICT, PredictConfig, refuse_first
from fmmeta.models.files import HEAD_FILE, base_model_name, cached_file, remembered
from fmmeta.models.load import Description, describe, fitted
from fmmeta.tasks.data.rows import MOST_GIB, broken_text, ending, read_file, unpacked

KEYS = ("text", "sentence", "utterance", "input", "prompt", "question")


def run(settings: PredictConfig) -> None:
    """`fmmeta predict`. Standard input is answered line by line, a file in batches."""
    model, texts = load(settings), texts_of(settings)
    size = 1 if settings.input == "-" else settings.micro_batch_size
    with open_output(settings.output) as file:
        while batch := list(islice(texts, size)):
            for one in model.answer(batch, settings.max_new_tokens):
                print(one.line(), file=file, flush=True)


def load(settings: PredictConfig) -> LoadedModel:
    """Load a model with the classes that it has learned. Raises `UsageError`."""
    stored = remembered(settings.model_name_or_path)
    values = {name: getattr(settings, name) for name in SHARED_BY_PREDICT}
    values |= {
        name: stored.get(name) for name in SHARED_BY_PREDICT if values[name] is None and name in REMEMBERED
    }
    given = {name: value for name, value in values.items() if value is not None}
    config = Config(**given, algorithm="none")
    description = describe(config)
    labels: tuple[str, ...] = ()
    if config.task_type == "classification":
        refuse_untrained_head(config, description, stored)
        names = description.hf_config.id2label
        labels = tuple(stored.get("labels") or (names[number] for number in sorted(names)))
        if len(labels) < 2:
            raise UsageError(
                f"model_name_or_path={settings.model_name_or_path} names fewer than two classes; adapt it"
                " first (fmmeta adapt)"
            )
        config = replace(config, n_way=len(labels), head_init="learned")
    return load_single_process(fitted(config, description.hf_config), Progress(enabled=False), labels)


def refuse_untrained_head(config: Config, description: Description, stored: dict[str, Any]) -> None:
    """Raise `UsageError` for a classifier that would answer at random: no trained head, or other features.

    stored: content of the model's fmmeta.json.
    """
    name, pooling = config.model_name_or_path, description.pooling
    expected = stored.get("pooling", pooling)
    if config.builtin_model:
        trained = False
    elif pooling != "model":
        trained = cached_file(name, HEAD_FILE) is not None
    else:  # adapters of another origin contain their head
        kinds = description.hf_config.architectures or ()
        trained = base_model_name(name) != name or any(
            kind.endswith("ForSequenceClassification") for kind in kinds
        )
    adapted = bool(stored.get("labels"))
    if adapted and pooling != expected:
        raise UsageError(
            f"pooling={pooling} does not fit the head of model_name_or_path={name}, which was trained with"
            f" {expected}; use --pooling {expected}"
        )
    if adapted and not trained:
        raise UsageError(
            f"model_name_or_path={name} holds no {HEAD_FILE}, where its classes are; fetch it again"
        )
    if not trained or ("algorithm" in stored and not adapted):  # of a meta-trained run, or of no task
        raise UsageError(
            f"model_name_or_path={name} has no trained head, and would answer at random; run fmmeta adapt"
            " first, and give the folder that it writes"
        )


def texts_of(settings: PredictConfig) -> Iterator[str]:
    """The texts of `--input`: rows of a .csv or .parquet file, lines of any other and of standard input.

    Raises `UsageError`.
    """
    path = Path(settings.input)
    if settings.input == "-":
        yield from read_texts(sys.stdin, settings)
    elif ending(path) in (".csv", ".parquet"):
        for row in read_file(path):
            yield text_in(row.values, row.origin, settings)
    else:
        with open_lines(path) as file:
            yield from read_texts(file, settings)


def open_lines(path: Path) -> TextIO:
    """A text file for reading, unpacked if its name ends with .gz. Raises `UsageError`."""
    try:
        binary = unpacked(path, MOST_GIB) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise UsageError(f"input={path} cannot be opened: {error.strerror}; give another file") from None
    return io.TextIOWrapper(binary, encoding="utf-8")


def read_texts(lines: Iterable[str], settings: PredictConfig) -> Iterator[str]:
    """The texts of plain lines, or of JSON objects. Raises `UsageError` naming the line."""
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            origin = f"input line {number}" if settings.input == "-" else f"{settings.input}:{number}"
            text = line.rstrip("\n").removeprefix("\ufeff" if number == 1 else "")  # byte order mark
            if text.lstrip().startswith("{"):
                try:
                    values = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise UsageError(f"{origin} is no JSON object ({error}); fix it") from None
                yield text_in(values, origin, settings)
            elif wrong := broken_text(text):
                raise UsageError(f"{origin} has {wrong}; fix it")
            elif text.strip():
                yield text
    except UnicodeDecodeError as error:
        raise UsageError(
            f"input is not UTF-8 at line {number + 1} or soon after it ({error.reason}); convert it"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"input={settings.input} cannot be read: {error}; fix it, or give another file"
        ) from None


def text_in(values: dict[str, Any], origin: str, settings: PredictConfig) -> str:
    """The text of a row. Raises `UsageError`."""
    keys = [settings.text_column] if settings.text_column else KEYS
    key = next((key for key in keys if isinstance(values.get(key), str)), "")
    problems = [
        (not key, f"{origin} has no text under {', '.join(keys)}; name the key with --text_column"),
        (not values.get(key), f"{origin} has no text in {key}, which is empty; fix it"),
    ]
    refuse_first(problems)
    if wrong := broken_text(values[key]):
        raise UsageError(f"{origin} has {wrong} in {key}; fix it")
    return values[key]
