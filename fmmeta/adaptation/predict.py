"""`fmmeta predict` answers a file or standard input, line by line:

    {"text": ...} or plain text  -->  {"text", "label", "score"}          a class and its probability
    {"image": path} or a path    -->  the same, for a model of images
                                      {"input", "output"}                 a greedy answer (causal_lm), or
                                                                          that of a learner that reads rows

With a model of streams a document is a .txt or .md file, a row or line with a text, or the rows of one
`document` in their order:

    {"text": ...}  -->  {"document", "tokens", "bits_per_byte", "zero_shot_bits_per_byte", "output"}

bits_per_byte: of each chunk before the step on it, from the model's weights on; zero_shot: without steps.
output: a greedy continuation by the weights after the last chunk, which sees the last `context` tokens.

With one model, or with the adapters of a directory: each row names its folder, rows of many adapters share a
pass of their base, and an adapter is loaded when a row names it.

    {"text": ..., "adapter": ...}  -->  the same with "adapter", or with "error" in place of the answer

A .csv file gets them as rows of a table.
"""

import csv
import io
import json
import os
import sys
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import load_file

from fmmeta.adaptation.model import (
    ASIDE,
    Answer,
    Input,
    LoadedModel,
    config_of,
    load,
    load_model,
    refuse_no_model,
    stored_examples,
)
from fmmeta.adaptation.task_learner import TaskExamples, TaskLearner
from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.progress import LOGGER, STDERR, Progress
from fmmeta.common.security import inside, printable
from fmmeta.common.text import counted, to_json
from fmmeta.config.fields import refuse_first
from fmmeta.config.learners import find, stored_kind
from fmmeta.evaluation.results import check_output, open_output
from fmmeta.evaluation.settings import SHARED_BY_BASE, SHARED_BY_PREDICT, AdaptConfig, PredictConfig
from fmmeta.evaluation.streams import bits_and_bytes
from fmmeta.learners.files import (
    ADAPTER_FILE,
    BASE_FOLDER,
    HEAD_FILE,
    base_model_name,
    read_json,
    read_stored,
    remembered,
    weights_state,
)
from fmmeta.learners.from_gguf import as_folder
from fmmeta.learners.task_axis import StoredAdapter, adapters_of_rows
from fmmeta.metrics.language import generate
from fmmeta.parallel.workers.base import all_finite
from fmmeta.tasks.batching import Example
from fmmeta.tasks.data.columns import Row, is_text, refuse
from fmmeta.tasks.data.files import ending, is_document, stream_file, unpacked
from fmmeta.tasks.data.rows import tabulate
from fmmeta.tasks.data.splits import few
from fmmeta.tasks.data.token_store import files_digest
from fmmeta.tasks.sources.stream import document_of, read_texts

OF_DOCUMENT = ("document", "tokens", "bits_per_byte", "zero_shot_bits_per_byte", "output")


def run(settings: PredictConfig) -> None:
    """`fmmeta predict`. Standard input is answered line by line, a file in batches.

    Standard streams are UTF-8 in every locale, as files are. Raises `UsageError`; for adapters that cannot be
    used after all other rows have their answers.
    """
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding != "utf-8":
            stream.reconfigure(encoding="utf-8")
    if settings.output != "-":
        check_output(Path(settings.output))
    name = settings.task_type or stored_kind(remembered(settings.model_name_or_path)).name
    if find(name).ordered and not settings.adapters:
        with open_output(settings.output) as file:
            write = writer(file, settings, OF_DOCUMENT)
            for one in documents(settings):
                write(one)
        return
    adapters = AdapterDirectory(settings) if settings.adapters else None
    model = adapters.model if adapters else load(settings).loaded
    names = ["text", "label", "score"] if model.config.learner.of_classes else ["input", "output"]
    total, unanswered = 0, list[str]()
    with open_output(settings.output) as file:
        write = writer(file, settings, names)
        for batch in batches(inputs_of(settings, model), settings):
            total += len(batch)
            answers = (
                adapters.answer(batch)
                if adapters
                else model.answer(batch, settings.max_new_tokens, settings.equal_classes)
            )
            for one, answer in zip(batch, answers, strict=True):
                adapter = {"adapter": one.adapter} if adapters else {}
                if isinstance(answer, str):
                    unanswered.append(one.adapter[:60])
                    write({names[0]: one.text, **adapter, "error": answer})
                else:
                    write({**answer.as_dict(), **adapter})
    if unanswered:
        raise UsageError(
            f"adapters={settings.adapters}: {len(unanswered)} of {total} inputs have no answer, since"
            f" {counted(len(set(unanswered)), 'adapter')} cannot be used ({few(sorted(set(unanswered)))});"
            " replace what is named, or leave these inputs out"
        )


def documents(settings: PredictConfig) -> Iterator[dict[str, Any]]:
    """The values of OF_DOCUMENT for each document of `--input`. Raises `UsageError`."""
    refuse_first([(settings.equal_classes, "equal_classes=True means nothing for documents; leave it out")])
    folder = as_folder(settings.model_name_or_path, ASIDE)
    refuse_no_model(folder)
    names, stop = (*SHARED_BY_PREDICT, "text_column"), settings.max_new_tokens
    given = {name: value for name in names if (value := getattr(settings, name)) is not None}
    learner = TaskLearner(AdaptConfig(**{**given, "model_name_or_path": folder}), 0, Progress(enabled=False))
    model, config, path = learner.model, learner.config, Path(settings.input)
    rows = rows_of(settings, settings.text_column or model.columns[0])
    if is_document(path):
        rows = (Row({"text": one.values["text"]}, one.origin) for one in read_texts(path, [path], refuse))
    how = {"one_task": True, "unique": False, "tokenizer": model.tokenizer, "setting": "input"}
    groups: Iterable[tuple[str, list[Row]]] = ((row.origin, [row]) for row in rows)
    if settings.input != "-":  # whose lines are answered before the next one is read
        found = defaultdict[str, list[Row]](list)
        for row in rows:
            found[document_of(config, row) or row.origin].append(row)
        groups = found.items()
    for name, parts in groups:
        document = learner.encode(TaskExamples(name, tabulate(name, parts, config, ASIDE, **how)))
        examples, (before, passes) = document.examples, learner.follow(document)
        if not all_finite(passes):
            raise UsageError(
                f"inner_lr={config.inner_lr} of {folder}: the loss of {name} is not finite; adapt with a"
                " lower --inner_lr, and give that folder"
            )
        found = [
            zip(*bits_and_bytes(examples, one, model.tokenizer), strict=True) for one in (passes, before)
        ]
        rates = [round(sum(bits) / sum(sizes), 6) for bits, sizes in found]
        output = generate(model.worker, model.reader, [examples[-1].input_ids[-config.context :]], stop, 1)
        tokens = sum(one.label_tokens for one in examples)
        yield dict(zip(OF_DOCUMENT, (name, tokens, *rates, *output), strict=True))


def writer(file: TextIO, settings: PredictConfig, names: Sequence[str]) -> Callable[[dict[str, Any]], None]:
    """A function that writes an answer to the output. names: of the columns of a table."""
    if not settings.output.lower().endswith(".csv"):
        return lambda row: print(printable(to_json(row, ensure_ascii=False)), file=file, flush=True)
    table = csv.DictWriter(file, [*names, *(["adapter", "error"] if settings.adapters else [])])
    table.writeheader()
    return lambda row: table.writerow({name: as_cell(value) for name, value in row.items()})


def as_cell(value: Any) -> Any:
    """A value as a cell of a table: lists and dictionaries as JSON."""
    return to_json(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def batches(inputs: Iterator[Input], settings: PredictConfig) -> Iterator[list[Input]]:
    """The inputs that are answered together: all of them for equal_classes."""
    size = 1 if settings.input == "-" else settings.micro_batch_size
    while batch := list(islice(inputs, None if settings.equal_classes else size)):
        yield batch


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter. facts: of its task, with `names` of labels. state: of its files when they were read
    (`state_of`). prompt_examples: of a language model, the pairs before every input.
    """

    weights: StoredAdapter
    facts: Mapping[str, Any]
    state: dict[str, list[int]]
    prompt_examples: Sequence[Example]


class AdapterDirectory:
    """The adapters in the folders of a directory, on one base: that of most folders.

    The last `adapters_in_memory` adapters stay in memory until their files change. failed: why adapters could
    not be used, by name; the next row that names one tries again. base: what all usable adapters have in
    common. Raises `UsageError` if no folder has adapters.
    """

    def __init__(self, settings: PredictConfig) -> None:
        self.settings, self.folder = settings, Path(str(settings.adapters)).absolute()
        self.loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self.failed: dict[str, str] = {}
        base_model, self.base = most_common_base(self.folder)
        pooling = self.base["pooling"] if stored_kind(self.base).pools else None
        config, _ = config_of(settings, base_model, self.base, pooling or "auto")
        self.model = load_model(config, Progress(enabled=False))

    def answer(self, inputs: Sequence[Input]) -> list[Answer | str]:
        """Answer inputs of any adapters in one pass; the reason where an adapter cannot be used.

        Raises `UsageError` for a text without tokens.
        """
        usable = {name: self.adapter(name) for name in dict.fromkeys(one.adapter for one in inputs)}
        answers: list[Answer | str] = [self.failed.get(one.adapter, "") for one in inputs]
        by_name = sorted(enumerate(inputs), key=lambda pair: pair[1].adapter)
        rows = [(index, one, adapter) for index, one in by_name if (adapter := usable[one.adapter])]

        def around(places: Sequence[int]) -> AbstractContextManager[None]:
            adapters = groupby((rows[place][2] for place in places), key=id)
            runs = [list(group) for _, group in adapters]
            weights = [run[0].weights for run in runs]
            return adapters_of_rows(self.model.worker.learner, weights, [len(run) for run in runs])

        examples, before = list[Example](), [adapter.prompt_examples for _, _, adapter in rows]
        for _, of_one in groupby(rows, key=lambda row: id(row[2])):
            run = [*of_one]
            examples += self.model.encode([one.row for _, one, _ in run], run[0][2].facts)
        most = max((len(adapter.facts["names"]) for _, _, adapter in rows), default=0)
        limit = self.settings.max_new_tokens
        found = self.model.respond(examples, limit, most, before, around) if rows else []
        for (index, one, adapter), (output, _) in zip(rows, found, strict=True):
            try:
                answers[index] = self.model.choose(one.text, output, adapter.facts)
            except UsageError as error:
                answers[index] = f"with this adapter: {error}"
        return answers

    def adapter(self, name: str) -> LoadedAdapter | None:
        """The adapter of a folder; None if it cannot be used, with the reason in `failed` and in the log."""
        if name not in self.loaded or self.loaded[name].state != state_of(self.folder / name):
            self.loaded.pop(name, None)
            try:
                self.loaded[name] = self._load(name)
                self.failed.pop(name, None)
            except UsageError as error:
                if self.failed.get(name) != str(error):
                    LOGGER.warning("%s", printable(f"adapter {name}: {error}"), extra=STDERR)
                self.failed[name] = str(error)
                return None
        self.loaded.move_to_end(name)
        if len(self.loaded) > self.settings.adapters_in_memory:
            self.loaded.popitem(last=False)
        return self.loaded[name]

    def _load(self, name: str) -> LoadedAdapter:
        """Read a folder. Raises `UsageError` for one that has no adapter, or none that can share a pass with
        the others.
        """
        folder, where = self.folder / name, f"adapters={self.folder}: {name[:60]!r}"
        # os.path.isdir is False for a name that is too long, where Path.is_dir raises
        if name in (".", "..") or "/" in name or "\0" in name or not os.path.isdir(folder):
            raise UsageError(f"{where} is no folder in it; name one of those that fmmeta adapt wrote")
        place, state = str(inside(self.folder, folder)), state_of(folder)
        settings = read_json(place, "adapter_config.json", dict) or {}
        tensors, head = (read_stored(place, file, load_file) or {} for file in (ADAPTER_FILE, HEAD_FILE))
        stored, kind = remembered(place), (settings.get("peft_type"), settings.get("bias", "none"))
        labels = tuple(stored.get("labels") or ())
        refuse_first(
            [
                (
                    not settings or not tensors or "task_type" not in stored,
                    f"{where} holds no adapter of fmmeta (adapter_config.json, {ADAPTER_FILE}, fmmeta.json);"
                    " give a whole model to --model_name_or_path",
                ),
                (
                    kind != ("LORA", "none") or any(map(settings.get, OTHER_KINDS)),
                    f"{where} is an adapter of another kind than plain LoRA; merge it into its base, and give"
                    " that to --model_name_or_path",
                ),
                (
                    stored_kind(stored).of_classes and len(labels) < 2,
                    f"{where} names fewer than two classes; adapt it first (fmmeta adapt)",
                ),
            ]
        )
        with usage_errors(f"{where} cannot be read", "adapt the model again"):
            weights = StoredAdapter.of(tensors, head, settings, self.model.worker.learner.hf)
        base, pairs = shared_by_base(folder), stored_examples(where, stored)
        if differ := [
            f"{key} {base[key]} and not {value}" for key, value in self.base.items() if base[key] != value
        ]:
            raise UsageError(
                f"adapters={self.folder}: {name} differs from the other adapters ({'; '.join(differ)});"
                " answer its inputs with --model_name_or_path"
            )
        weights = weights.to(self.model.worker.device)
        if wrong := weights.misfit(self.model.worker.learner):
            raise UsageError(
                f"adapters={self.folder}: {name} does not fit its base: {wrong}; adapt the model again"
            )
        facts = {**((stored.get("adapted") or {}).get("facts") or {}), "names": labels}
        return LoadedAdapter(weights, facts, state, self.model.encode_pairs(pairs))


def state_of(folder: Path) -> dict[str, list[int]]:
    """See `weights_state`; empty while another process replaces the files."""
    try:
        return weights_state(str(folder))
    except OSError:
        return {}


BASE = "base model"


def shared_by_base(folder: Path) -> dict[str, Any]:
    """What adapters of a pass have in common, in the files of an adapter folder: the name of the base, or a
    digest of the copy in the folder, and settings. Raises `UsageError`.
    """
    stored, base = remembered(str(folder)), base_model_name(str(folder))
    if (folder / BASE_FOLDER).is_dir():
        base = files_digest(sorted((folder / BASE_FOLDER).glob("*.safetensors")))
    return {BASE: base, **{key: stored.get(key) for key in SHARED_BY_BASE}}


def most_common_base(root: Path) -> tuple[str, dict[str, Any]]:
    """The base model of most adapter folders of a directory, and what these folders have in common.

    Raises `UsageError` if there are none.
    """
    found: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for folder in sorted(root.iterdir()):
        with suppress(UsageError):
            if (inside(root, folder) / "adapter_config.json").is_file():
                base = shared_by_base(folder)
                if base["task_type"] is not None:
                    found[str(base)].append((base_model_name(str(folder)), base))
    if not found:
        raise UsageError(
            f"adapters={root} has no folder with adapters of fmmeta; give the output_dir of fmmeta adapt"
            " --support DIRECTORY --lora_r N"
        )
    return max(found.values(), key=len)[0]


OTHER_KINDS = ("use_dora", "lora_bias", "use_qalora", "layer_replication", "target_parameters")


def inputs_of(settings: PredictConfig, model: LoadedModel) -> Iterator[Input]:
    """The inputs of `--input`: rows of a file that `adapt` reads, lines of any other and of standard input.

    Raises `UsageError`.
    """
    column = settings.text_column
    for row in rows_of(settings, column or model.columns[0]):
        found = model.read(row, column)
        if settings.adapters:
            name = row.values.get(settings.adapter_column)
            if not is_text(name):
                raise UsageError(
                    f"{row.origin} names no adapter under {settings.adapter_column}; write JSON objects with"
                    " it and an input, or name the key with --adapter_column"
                )
            found = replace(found, adapter=str(name))
        yield found


def rows_of(settings: PredictConfig, column: str) -> Iterator[Row]:
    """The rows of `--input`; those of plain lines are values of `column`. Raises `UsageError`."""
    path = Path(settings.input)
    return stream_file(path) if ending(path) else lines_of(settings, column)


def lines_of(settings: PredictConfig, column: str) -> Iterator[Row]:
    """Rows of plain lines, as values of `column`, and of JSON objects. Raises `UsageError`."""
    path, number, name = Path(settings.input), 0, f"input={settings.input}"
    try:
        with ExitStack() as stack:
            if settings.input == "-":
                name, lines = "input", sys.stdin
            else:
                binary = unpacked(path) if path.suffix == ".gz" else path.open("rb")
                lines = stack.enter_context(io.TextIOWrapper(binary, encoding="utf-8"))
            for number, line in enumerate(lines, 1):
                origin = f"input line {number}" if settings.input == "-" else f"{path}:{number}"
                text = line.rstrip("\n").removeprefix("\ufeff" if number == 1 else "")  # byte order mark
                if text.lstrip().startswith("{"):
                    with usage_errors(f"{origin} is no JSON object", "fix it"):
                        yield Row(json.loads(text), origin)
                elif text.strip():
                    yield Row({column: text}, origin)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 at line {number + 1} or soon after it ({error.reason}); convert it"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{name} cannot be read: {error}; fix it, or give another file") from None
