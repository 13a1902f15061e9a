"""`fmmeta predict` answers a file or standard input, line by line:

    {"text": ...} or plain text  -->  {"text", "label", "score"}          a class and its probability
    {"image": path} or a path    -->  the same, for a model of images
                                      {"input", "output"}                 a greedy answer (causal_lm)

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import load_file

from fmmeta.adaptation.model import Answer, LoadedModel, load, load_model, stored_examples
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import LOGGER, STDERR, Progress
from fmmeta.common.security import inside, one_line, printable
from fmmeta.common.text import broken_text, counted, to_json
from fmmeta.config.fields import refuse_first
from fmmeta.config.settings import Config
from fmmeta.evaluation.methods import generate
from fmmeta.evaluation.results import check_output, open_output
from fmmeta.evaluation.settings import SHARED_BY_BASE, PredictConfig
from fmmeta.models.files import (
    ADAPTER_FILE,
    BASE_FOLDER,
    HEAD_FILE,
    UNREADABLE,
    base_model_name,
    read_json,
    read_stored,
    remembered,
    weights_state,
)
from fmmeta.models.load import describe, fitted
from fmmeta.models.task_axis import StoredAdapter, adapters_of_rows
from fmmeta.tasks.batching import Example, collate
from fmmeta.tasks.data.images import EncodedImage, encoded_image
from fmmeta.tasks.data.rows import (
    USUAL,
    Row,
    ending,
    input_of_pair,
    input_setting,
    is_text,
    refuse_text_alone,
    stream_file,
    unpacked,
)
from fmmeta.tasks.data.splits import few
from fmmeta.tasks.data.token_store import files_digest


@dataclass(frozen=True)
class Input:
    """A text to answer, or the name of an image, and the folder of its adapter, if there is a directory of
    them. image: of a row of a file; None where `text` is its path.
    """

    text: str
    adapter: str = ""
    image: EncodedImage | None = None

    @property
    def content(self) -> Any:
        """What the model answers."""
        return self.image or self.text


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
    if settings.adapters:
        answer_by_adapters(settings)
        return
    model = load(settings).loaded
    inputs = inputs_of(settings, model)
    with open_output(settings.output, create_folder=True) as file:
        write = writer(file, settings, model)
        for batch in [list(inputs)] if settings.equal_classes else batches(inputs, settings):
            contents = [one.content for one in batch]
            if settings.equal_classes:
                answers = model.answer_evenly(contents)
            else:
                answers = model.answer(contents, settings.max_new_tokens)
            for one, answer in zip(batch, answers, strict=True):
                write(replace(answer, input=one.text).as_dict())


def writer(file: TextIO, settings: PredictConfig, model: LoadedModel) -> Callable[[dict[str, Any]], None]:
    """A function that writes an answer to the output."""
    if not settings.output.lower().endswith(".csv"):
        return lambda row: print(printable(to_json(row, ensure_ascii=False)), file=file, flush=True)
    causal = model.config.task_type == "causal_lm"
    names = ["input", "output"] if causal else ["text", "label", "score"]
    table = csv.DictWriter(file, [*names, *(["adapter", "error"] if settings.adapters else [])])
    table.writeheader()
    return table.writerow


def batches(inputs: Iterator[Input], settings: PredictConfig) -> Iterator[list[Input]]:
    size = 1 if settings.input == "-" else settings.micro_batch_size
    while batch := list(islice(inputs, size)):
        yield batch


def answer_by_adapters(settings: PredictConfig) -> None:
    """Answer rows that name the folders of their adapters. Raises `UsageError` at the end if some cannot."""
    adapters, total, unanswered, unusable = AdapterDirectory(settings), 0, 0, set[str]()
    key = "input" if adapters.model.config.task_type == "causal_lm" else "text"
    with open_output(settings.output, create_folder=True) as file:
        write = writer(file, settings, adapters.model)
        for batch in batches(inputs_of(settings, adapters.model), settings):
            for one, answer in zip(batch, adapters.answer(batch), strict=True):
                total += 1
                if isinstance(answer, str):
                    unanswered += 1
                    unusable.add(one.adapter[:60])
                    shown = {key: one.text, "adapter": one.adapter, "error": answer}
                else:
                    shown = {**replace(answer, input=one.text).as_dict(), "adapter": one.adapter}
                write(shown)
    if unanswered:
        raise UsageError(
            f"adapters={settings.adapters}: {unanswered} of {total} inputs have no answer, since"
            f" {counted(len(unusable), 'adapter')} cannot be used ({few(sorted(unusable))}); replace what is"
            " named, or leave these inputs out"
        )


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter and the names of its classes. base: what it has in common with adapters that share a pass
    with it, by name. pairs, prompt_examples: causal_lm: those before every input, as texts and as tokens.
    state: of its files when they were read (`state_of`).
    """

    weights: StoredAdapter
    labels: tuple[str, ...]
    base: dict[str, Any]
    state: dict[str, list[int]]
    pairs: Sequence[tuple[str, str]] = ()
    prompt_examples: Sequence[Example] = ()


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
        self.model = load_base(settings, base_model, self.base)

    def answer(self, inputs: Sequence[Input]) -> list[Answer | str]:
        """Answer inputs of any adapters in one pass; the reason where an adapter cannot be used.

        Raises `UsageError` for a text without tokens.
        """
        order = sorted(range(len(inputs)), key=lambda index: inputs[index].adapter)
        usable = {name: self.adapter(name) for name in dict.fromkeys(one.adapter for one in inputs)}
        answers: list[Answer | str] = [self.failed.get(one.adapter, "") for one in inputs]
        order = [index for index in order if usable[inputs[index].adapter] is not None]
        if order:
            found = [usable[inputs[index].adapter] for index in order]
            contents = [inputs[index].content for index in order]
            for index, answer in zip(
                order, self._answer(contents, [one for one in found if one]), strict=True
            ):
                answers[index] = answer
        return answers

    def _answer(self, contents: Sequence[Any], adapters: Sequence[LoadedAdapter]) -> Sequence[Answer | str]:
        """Answers to texts or images, those of an adapter one after the other. adapters: of each."""
        model, settings = self.model, self.settings

        def around(rows: Sequence[int]) -> AbstractContextManager[None]:
            runs = [list(group) for _, group in groupby(rows, key=lambda row: id(adapters[row]))]
            weights = [adapters[run[0]].weights for run in runs]
            return adapters_of_rows(model.worker.learner, weights, [len(run) for run in runs])

        texts, examples, prompts = model.encode_inputs(contents)
        if model.config.task_type == "causal_lm":
            tokens, size = settings.max_new_tokens, settings.micro_batch_size
            for index, (example, adapter) in enumerate(zip(examples, adapters, strict=True)):
                if adapter.prompt_examples:
                    (prompts[index],) = model.prompts_of(adapter.prompt_examples, [example], tokens)
            outputs = generate(model.worker, model.reader, prompts, tokens, size, around)
            return list(map(Answer, texts, outputs))
        rows = [replace(example, labels=0) for example in examples]
        with around(range(len(rows))):
            (logits,) = model.worker.logits([collate(rows, 1.0, model.batcher.pad_token_id)])
        answers: list[Answer | str] = []
        for text, row, adapter in zip(texts, logits.cpu(), adapters, strict=True):
            try:
                answers.append(model.choose(text, row[: len(adapter.labels)], adapter.labels))
            except UsageError as error:
                answers.append(f"with this adapter: {error}")
        return answers

    def adapter(self, name: str) -> LoadedAdapter | None:
        """The adapter of a folder; None if it cannot be used, with the reason in `failed` and in the log."""
        if name in self.loaded and self.loaded[name].state != state_of(self.folder / name):
            del self.loaded[name]
        if name not in self.loaded:
            try:
                self.loaded[name] = self._load(name)
                self.failed.pop(name, None)
            except UsageError as error:
                if self.failed.get(name) != str(error):
                    LOGGER.warning("%s", printable(f"adapter {name}: {error}"), extra=STDERR)
                self.failed[name] = str(error)
                return None
        self.loaded.move_to_end(name)
        found = self.loaded[name]
        while len(self.loaded) > self.settings.adapters_in_memory:
            self.loaded.popitem(last=False)
        return found

    def _load(self, name: str) -> LoadedAdapter:
        """Read a folder. Raises `UsageError` for one that cannot share a pass with the others."""
        adapter = read_adapter(self.folder, name)
        differ = [key for key in self.base if adapter.base[key] != self.base[key]]
        if differ:
            texts = [f"{key} {adapter.base[key]} and not {self.base[key]}" for key in differ]
            raise UsageError(
                f"adapters={self.folder}: {name} differs from the other adapters ({'; '.join(texts)}); answer"
                " its inputs with --model_name_or_path"
            )
        device = self.model.worker.device
        weights = adapter.weights.to(device)
        learner = self.model.worker.learner
        if wrong := weights.misfit(learner):
            raise UsageError(
                f"adapters={self.folder}: {name} does not fit its base: {wrong}; adapt the model again"
            )
        examples = self.model.encode_pairs(adapter.pairs)
        return replace(adapter, weights=weights, prompt_examples=examples)


def state_of(folder: Path) -> dict[str, list[int]]:
    """See `weights_state`; empty while another process replaces the files."""
    try:
        return weights_state(str(folder))
    except OSError:
        return {}


BASE = "base model"


def base_of(folder: Path) -> str:
    """What identifies the base of an adapter folder: its name, or a digest of the copy in the folder.

    Raises `UsageError`.
    """
    if (folder / BASE_FOLDER).is_dir():
        return files_digest(sorted((folder / BASE_FOLDER).glob("*.safetensors")))
    return base_model_name(str(folder))


def shared_by_base(folder: Path) -> dict[str, Any]:
    """What adapters of a pass have in common, in the files of an adapter folder. Raises `UsageError`."""
    stored = remembered(str(folder))
    return {BASE: base_of(folder), **{key: stored.get(key) for key in SHARED_BY_BASE}}


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


def read_adapter(root: Path, name: str) -> LoadedAdapter:
    """The adapter in the folder `name` of `root`. Raises `UsageError` for anything else."""
    where = f"adapters={root}: {name[:60]!r}"
    folder = root / name
    # os.path.isdir is False for a name that is too long, where Path.is_dir raises
    if name in (".", "..") or "/" in name or "\0" in name or not os.path.isdir(folder):
        raise UsageError(f"{where} is no folder in it; name one of those that fmmeta adapt wrote")
    place, state = str(inside(root, folder)), state_of(folder)
    settings = read_json(place, "adapter_config.json", dict)
    tensors = read_stored(place, ADAPTER_FILE, load_file)
    stored = remembered(place)
    kind = settings and (settings.get("peft_type"), settings.get("bias", "none"))
    refuse_first(
        [
            (
                settings is None or tensors is None or "task_type" not in stored,
                f"{where} holds no adapter of fmmeta (adapter_config.json, {ADAPTER_FILE}, fmmeta.json); give"
                " a whole model to --model_name_or_path",
            ),
            (
                kind != ("LORA", "none") or any(map((settings or {}).get, OTHER_KINDS)),
                f"{where} is an adapter of another kind than plain LoRA; merge it into its base, and give"
                " that to --model_name_or_path",
            ),
        ]
    )
    assert settings is not None
    assert tensors is not None
    labels = tuple(stored.get("labels") or ())
    if stored["task_type"] == "classification" and len(labels) < 2:
        raise UsageError(f"{where} names fewer than two classes; adapt it first (fmmeta adapt)")
    head = read_stored(place, HEAD_FILE, load_file) or {}
    try:
        weights = StoredAdapter.of(tensors, head, settings)
    except (*UNREADABLE, ArithmeticError) as error:
        raise UsageError(f"{where} cannot be read ({one_line(error)}); adapt the model again") from None
    return LoadedAdapter(weights, labels, shared_by_base(folder), state, stored_examples(where, stored))


OTHER_KINDS = ("use_dora", "lora_bias", "use_qalora", "layer_replication", "target_parameters")


def load_base(settings: PredictConfig, name: str, base: dict[str, Any]) -> LoadedModel:
    """The base of adapters, without a trained head. base: see `LoadedAdapter`. Raises `UsageError`."""
    given = {
        name: getattr(settings, name)
        for name in ("attn_implementation", "trust_remote_code", "micro_batch_size")
    }
    values = {**{key: base[key] for key in SHARED_BY_BASE}, **given}
    if base["task_type"] == "causal_lm":
        del values["pooling"]
    config = Config(
        model_name_or_path=name,
        algorithm="none",
        n_way=2,
        **{name: one for name, one in values.items() if one is not None},
    )
    return load_model(fitted(config, describe(config).hf_config), Progress(enabled=False))


def keys_of(settings: PredictConfig, model: LoadedModel) -> Sequence[str]:
    """Keys or columns of the inputs of a model: the first one of a row counts, as in the files of `adapt`."""
    if settings.text_column:
        return [settings.text_column]
    return USUAL[input_setting(model.config.task_type, model.description.images)]


def inputs_of(settings: PredictConfig, model: LoadedModel) -> Iterator[Input]:
    """The inputs of `--input`: rows of a file that `adapt` reads, lines of any other and of standard input.

    Raises `UsageError`.
    """
    path = Path(settings.input)
    if settings.input == "-":
        yield from read_inputs(sys.stdin, settings, model)
    elif ending(path):
        for row in stream_file(path):
            yield input_in(row, settings, model)
    else:
        try:
            binary = unpacked(path) if path.suffix == ".gz" else path.open("rb")
        except OSError as error:
            raise UsageError(f"input={path} cannot be opened: {error.strerror}; give another file") from None
        with io.TextIOWrapper(binary, encoding="utf-8") as file:
            yield from read_inputs(file, settings, model)


def read_inputs(lines: Iterable[str], settings: PredictConfig, model: LoadedModel) -> Iterator[Input]:
    """The inputs of plain lines, or of JSON objects. Raises `UsageError` naming the line."""
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
                yield input_in(Row(values, origin), settings, model)
            elif wrong := broken_text(text):
                raise UsageError(f"{origin} has {wrong}; fix it")
            elif text.strip() and settings.adapters:
                raise UsageError(
                    f"{origin} names no adapter; write JSON objects with {settings.adapter_column} and a text"
                )
            elif text.strip():
                refuse_text_alone(model.config, origin)
                yield Input(text)
    except UnicodeDecodeError as error:
        name = "input" if settings.input == "-" else f"input={settings.input}"
        raise UsageError(
            f"{name} is not UTF-8 at line {number + 1} or soon after it ({error.reason}); convert it"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"input={settings.input} cannot be read: {error}; fix it, or give another file"
        ) from None


def input_in(row: Row, settings: PredictConfig, model: LoadedModel) -> Input:
    """The text or image of a row, and its adapter if the settings have a directory of them.

    Relative paths of images begin at the folder of the row's file. Raises `UsageError`.
    """
    values, origin, keys, images = row.values, row.origin, keys_of(settings, model), model.description.images
    key = next((key for key in keys if key in values), keys[0])
    value = values.get(key)
    if model.config.task_type == "causal_lm" and key in values:
        value = input_of_pair(model.config, row, keys)
    if isinstance(value, dict) and value.get("bytes") is None and "path" in value:
        value = value["path"]  # as `datasets` stores an image that is a file
    text, image = str(value), None
    if images and isinstance(value, (bytes, dict)):
        text, image = encoded_image(value, key, origin, None)
    elif images and row.folder and is_text(value):
        _, image = encoded_image(row.folder / text, key, origin, None)
    refuse_first(
        [
            (
                image is None and not is_text(value),
                f"{origin} has no {'image' if images else 'text'} under {', '.join(keys)}; name the key with"
                " --text_column",
            ),
            (not text, f"{origin} has no text in {key}, which is empty; fix it"),
        ]
    )
    if wrong := broken_text(text):
        raise UsageError(f"{origin} has {wrong} in {key}; fix it")
    adapter = values.get(settings.adapter_column) if settings.adapters else ""
    adapter = str(adapter) if is_text(adapter) else ""
    if settings.adapters and not adapter:
        raise UsageError(
            f"{origin} names no adapter under {settings.adapter_column}; name the key with --adapter_column"
        )
    return Input(text, adapter, image)
