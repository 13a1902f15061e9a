"""A model on a worker, in one process unless a launch has groups: it learns tasks and answers texts."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.progress import LOGGER, STDERR, Progress
from fmmeta.common.security import printable
from fmmeta.common.text import broken_text, counted, shortened, to_json
from fmmeta.config.fields import check_bounds, of_type, refuse_first, rules
from fmmeta.config.learners import CLASSIFICATION, find, stored_kind
from fmmeta.config.settings import REMEMBERED, Config
from fmmeta.evaluation.methods import with_equal_classes
from fmmeta.evaluation.settings import SHARED_BY_PREDICT, PredictConfig
from fmmeta.learners.base import on_device
from fmmeta.learners.files import HEAD_FILE, SETTINGS_FILE, base_model_name, cached_file, is_path, remembered
from fmmeta.learners.from_gguf import as_folder
from fmmeta.learners.load import Description, describe, fitted, load_tokenizer, max_positions
from fmmeta.meta.algorithms.baselines import prompted
from fmmeta.metrics.language import generate
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.layout import Launch, ParallelPlan
from fmmeta.parallel.process_groups import (
    ProcessGroups,
    World,
    chosen_bf16,
    pick_device,
    set_matmul_precision,
)
from fmmeta.parallel.workers.create import create_worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import Batcher, Example, collate
from fmmeta.tasks.collate import Collate
from fmmeta.tasks.data.columns import USUAL, Row, input_setting, usual
from fmmeta.tasks.data.encode import RowEncoder
from fmmeta.tasks.data.images import EncodedImage
from fmmeta.tasks.data.rows import prefixed

TRAINED_HEADS = ("ForSequenceClassification", "ForImageClassification")
ASIDE = partial(LOGGER.info, "%s", extra=STDERR)  # answers are written to standard output
CONTINUED = "documents have no answers; score and continue them with fmmeta predict --model_name_or_path"
PASSES = 16  # forward passes whose rows are encoded together, and sorted by length


@dataclass(frozen=True)
class Answer:
    """An input and the model's answer: a class and its probability, or a text or what `Learner.present`
    returns (score None).

    truth: the correct answer, where it is known.
    """

    input: Any
    output: Any
    score: float | None = None
    truth: Any = None

    def as_dict(self) -> dict[str, Any]:
        """The keys of a line of output: text, label and score of a class, or input and output; and truth."""
        truth = {} if self.truth is None else {"truth": self.truth}
        if self.score is None:
            return {"input": self.input, "output": self.output, **truth}
        return {"text": self.input, "label": self.output, "score": round(self.score, 6), **truth}

    def line(self) -> str:
        """A line of JSON, with control characters of terminals escaped."""
        return printable(to_json(self.as_dict(), ensure_ascii=False))


@dataclass(frozen=True)
class Input:
    """A text to answer, the name of an image, or what else a row shows of its input. row: what the learner
    stores of it. adapter: the folder of its adapter, if there is a directory of them.
    """

    text: Any
    row: Any
    adapter: str = ""


@dataclass
class LoadedModel:
    """A model on a worker, with its tokenizer and batcher.

    frozen: untrained tensors by name. prompt_examples: causal_lm: the pairs before every input. facts: of the
    support set (`Learner.facts`), without names of labels.
    """

    config: Config
    description: Description
    tokenizer: Any
    ranks: ProcessGroups
    worker: FullModelWorker
    head_names: tuple[str, ...]
    frozen: dict[str, Tensor]
    batcher: Batcher
    prompt_examples: Sequence[Example] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    configs: dict[str | None, Config] = field(default_factory=dict, init=False)  # of inputs, by their column

    @property
    def kind(self) -> Any:
        """The class of the learner."""
        return self.config.learner.kind

    @property
    def columns(self) -> Sequence[str]:
        """Usual keys or columns of an input, as in the files of `adapt`; the first one of a row counts."""
        return USUAL["image_column"] if self.description.images else self.kind.inputs

    def read(self, row: Row, column: str | None = None) -> Input:
        """The input of a row. column: the one to read. Paths of images begin at the folder of the row's file.

        Raises `UsageError`.
        """
        keys, values = [column] if column else self.columns, dict(row.values)
        key = usual(keys, values)
        if key is None:
            raise UsageError(
                f"{row.origin} has none of the columns {', '.join(keys)}; name one with --text_column"
            )
        if column not in self.configs:  # without the columns of the examples that it was adapted to
            setting = input_setting(self.config, self.description.images)
            chosen = {setting: key} if column and setting else {}
            unset = dict.fromkeys(("text_column", "image_column", "input_column"))
            self.configs[column] = self.config.but(**{**unset, **chosen})
        config = self.configs[column]
        if column and not input_setting(config, False):
            values[self.columns[0]] = values[key]
        value = values[key]
        if self.description.images and isinstance(value, dict) and value.get("bytes") is None:
            value = values[key] = value.get("path")  # as `datasets` stores an image that is a file
        with prefixed(f"{row.origin}:"):
            reader = self.kind.rows(config, self.tokenizer, [*values], answered=False)
        with prefixed(row.origin):
            found = reader.read(replace(row, values=values, folder=None))
        if self.description.images and row.folder and isinstance(value, str):
            found["image"] = EncodedImage(str(Path(row.folder, value).absolute()))
        return Input(found[self.kind.pair[0]] if self.kind.pair else value, found)

    def answer(
        self, inputs: Sequence[Input], max_new_tokens: int, equal_classes: bool = False
    ) -> list[Answer]:
        """Answer inputs, in their order. A limited number of them is tokenised at a time.

        equal_classes: every class has equally many of them. Raises `UsageError` for a text without tokens, an
        image that cannot be decoded, and for probabilities that are not finite; with equal_classes for a
        language model, and for fewer inputs than classes.
        """
        names, size = self.description.labels, PASSES * self.config.micro_batch_size
        refuse_first(
            [
                (
                    equal_classes and not self.config.learner.of_classes,
                    "equal_classes=True means nothing for a language model, or another without classes; leave"
                    " it out",
                ),
                (
                    equal_classes and len(inputs) < len(names),
                    f"equal_classes=True with {len(inputs)} inputs, but there are {len(names)} classes; give"
                    " all inputs at once, or leave it out",
                ),
            ]
        )
        found, facts = list[Any](), {**self.facts, "names": names}
        for start in range(0, len(inputs), size):
            examples = self.encode([one.row for one in inputs[start : start + size]], facts)
            before = [self.prompt_examples] * len(examples)
            found += [answer for answer, _ in self.respond(examples, max_new_tokens, len(names), before)]
        if equal_classes:
            scores = [self.log_probabilities(one.text, row) for one, row in zip(inputs, found, strict=True)]
            found = [*with_equal_classes(torch.stack(scores)).log()]
        return [self.choose(one.text, output, facts) for one, output in zip(inputs, found, strict=True)]

    def encode(self, rows: Sequence[Any], facts: Mapping[str, Any]) -> list[Example]:
        """Rows as examples. facts: of their task, with names of labels.

        Raises `UsageError` for a text without tokens, and for an image that cannot be decoded.
        """
        name, generates = self.config.model_name_or_path, self.config.learner.generates
        with usage_errors(f"model_name_or_path={name} cannot answer", "correct the rows, or adapt it again"):
            examples = RowEncoder(self.config, self.tokenizer).examples(rows, facts)
        for row, example in zip(rows, examples, strict=True) if self.kind.pair else ():
            if not (example.prompt if generates else example.input_ids):  # tokenizers may drop white space
                raise UsageError(
                    f"text={shortened(row[self.kind.pair[0]])} has no tokens for model_name_or_path={name};"
                    " fix or remove it"
                )
        return examples

    def respond(
        self,
        examples: Sequence[Example],
        max_new_tokens: int,
        classes: int,
        before: Sequence[Sequence[Example]] = (),
        around: Callable[[Sequence[int]], AbstractContextManager[None]] | None = None,
        answered: bool = False,
    ) -> list[tuple[Any, Any]]:
        """The answer to each example: the logits of its classes, a generated text, or one of
        `Learner.respond`; and the right one, if the rows are `answered`.

        classes: of the task, or the most of several. before: of a language model, the pairs before each
        input. around: see `generate`; then one pass has all examples.
        """
        learner, size = self.worker.learner, self.config.micro_batch_size
        if self.config.learner.generates:
            rows = zip(before, examples, strict=True)
            prompts = [self.prompts_of(pairs, [row], max_new_tokens)[0] for pairs, row in rows]
            texts = generate(self.worker, self.reader, prompts, max_new_tokens, size, around)
            return [(text, None) for text in texts]
        found, passes = dict[int, tuple[Any, Any]](), 1 if around else -(-len(examples) // size)
        order = sorted(range(len(examples)), key=lambda place: -len(examples[place].input_ids))
        for part in np.array_split(range(len(examples)) if around else order, passes):
            places = part.tolist()
            batch = collate(
                [examples[place] for place in places],
                1.0,
                self.batcher.pad_token_id,
                classes,
                self.batcher.collate_fn,
            )
            batch = on_device(batch, learner, self.worker.device)
            right = [None] * len(places)
            with torch.no_grad(), around(places) if around else nullcontext():
                if self.config.learner.of_classes:
                    answers = [*self.worker.logits([batch])[0].cpu()]
                else:
                    answers = learner.respond(batch, max_new_tokens)
                if answered:
                    right = [one for _, one in learner.answers(learner(**batch.inputs), batch)]
            found |= dict(zip(places, zip(answers, right, strict=True), strict=True))
        return [found[place] for place in range(len(examples))]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Example]:
        """Pairs of input and output as tokens."""
        rows = [dict(zip(self.kind.pair, pair, strict=True)) for pair in pairs]
        return RowEncoder(self.config, self.tokenizer).examples(rows, {}) if rows else []

    def prompts_of(
        self, support: Sequence[Example], examples: Sequence[Example], max_new_tokens: int
    ) -> list[Sequence[int]]:
        """The tokens of inputs with as many of the last pairs before them, if any, as leave room for an
        answer.
        """
        if support:
            room = self.room(support, max_new_tokens)
            examples = prompted(support, examples, self.tokenizer.bos_token_id, room)
        return [row.prompt for row in examples]

    def room(self, support: Sequence[Example], max_new_tokens: int) -> int | None:
        """Positions for a prompt; None: no limit. An answer may be as long as the longest of the pairs."""
        if self.positions is None:
            return None
        return self.positions - min(max_new_tokens, max(pair.label_tokens for pair in support))

    def dropped_examples(self, support: Sequence[Example], max_new_tokens: int) -> str:
        """A message if not all pairs fit before an input as long as the longest of theirs; else ""."""
        room, longest = self.room(support, max_new_tokens), max(len(pair.prompt) for pair in support)
        lengths = accumulate((len(pair.input_ids) for pair in reversed(support)), initial=longest)
        fit = sum(room is None or length <= room for length in lengths) - 1
        if fit == len(support):
            return ""
        return (
            f"{max(fit, 0)} of {counted(len(support), 'example')} fit into the {self.positions} positions of"
            f" the model before an input of {longest} tokens; the first ones are left out there"
        )

    @property
    def reader(self) -> Any:
        """Reads the answers (`Learner.reader`)."""
        return self.kind.reader(self.config, self.tokenizer, self.description.ends)

    @property
    def positions(self) -> int | None:
        """The number of positions of a language model; None: no limit."""
        return max_positions(self.description.hf_config)

    def choose(self, text: Any, output: Any, facts: Mapping[str, Any]) -> Answer:
        """The answer to an input, of what `respond` returns. facts: of the task, with names of labels.

        Raises `UsageError` for probabilities that are not numbers.
        """
        names = facts["names"]
        if isinstance(output, Tensor):
            score, label = self.log_probabilities(text, output[: len(names)]).exp().max(0)
            return Answer(text, names[int(label)], float(score))
        return Answer(text, output if isinstance(output, str) else self.present(output, facts))

    def present(self, answer: Any, facts: Mapping[str, Any]) -> Any:
        """An answer of the learner as people read it."""
        return self.kind.present(answer, names=facts["names"], facts=facts, tokenizer=self.reader)

    def log_probabilities(self, text: str, logits: Tensor) -> Tensor:
        """Of the classes of a text, from its logits [C]. Raises `UsageError` if they are not numbers."""
        found = logits.log_softmax(0)
        if found.isnan().any():
            raise UsageError(
                f"model_name_or_path={self.config.model_name_or_path} gives no finite scores for"
                f" {shortened(text)}; adapt it with a lower --inner_lr"
            )
        return found


@dataclass(repr=False)
class AdaptedModel:
    """A model that has learned one task.

    labels: names of the classes, sorted; empty for causal_lm. inner_steps: steps that were taken; None for a
    model that fmmeta has not adapted. left_out: accuracy on the examples that were left out to choose them,
    None if none were. predictions: answers to the query set. output_dir: the model's folder, if any. metrics:
    of the learner, on the query set. loaded: the model.
    """

    labels: tuple[str, ...]
    inner_steps: int | None
    left_out: float | None
    loaded: LoadedModel
    predictions: list[Answer] = field(default_factory=list)
    output_dir: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        config = self.loaded.config
        left_out, accuracy = (
            None if share is None else f"{share:.4f}" for share in (self.left_out, self.accuracy)
        )
        return (
            f"{type(self).__name__}(base={config.model_name_or_path!r}, task_type={config.task_type!r},"
            f" labels={self.labels!r}, inner_steps={self.inner_steps}, left_out={left_out},"
            f" accuracy={accuracy}, output_dir={self.output_dir!r})"
        )

    @property
    def accuracy(self) -> float | None:
        """Share of correct answers to the query set, between 0 and 1; None without a query set, and of
        answers that are no texts.

        A generated answer is correct if it equals the right one apart from spaces around it.
        """
        if not self.predictions or not all(isinstance(one.output, str) for one in self.predictions):
            return None
        right = [
            one.output == (str(one.truth).strip() if one.score is None else one.truth)
            for one in self.predictions
        ]
        return sum(right) / len(right)

    def answer_queries(self, rows: Sequence[Any], max_new_tokens: int, facts: Mapping[str, Any]) -> None:
        """Answer the query set, and score it. rows: as the learner has stored them. facts: of the task, with
        the query set. Raises `UsageError`.
        """
        loaded, kind = self.loaded, self.loaded.kind
        if not rows:
            return
        if kind.pair:
            source, target = kind.pair
            inputs = [Input(row[source], row) for row in rows]
            for row, answer in zip(rows, loaded.answer(inputs, max_new_tokens), strict=True):
                others = (one for one in row.get("answers", ()) if one.strip() == answer.output)
                self.predictions.append(replace(answer, truth=next(others, row[target])))
            return
        examples = loaded.encode(rows, facts)
        found = loaded.respond(examples, max_new_tokens, len(facts.get("names", ())), answered=True)
        texts = [[loaded.present(one, {"names": (), **facts}) for one in pair] for pair in found]
        for row, (output, truth) in zip(rows, texts, strict=True):
            key = usual(kind.inputs, row) if isinstance(row, Mapping) else None
            right = truth if isinstance(truth, list) and isinstance(output, str) else [truth]
            truth = output if output in right else right[0]
            self.predictions.append(Answer(row[key] if key else row, output, truth=truth))
        self.metrics = kind.metrics(*zip(*texts, strict=True))

    def predict(
        self, texts: Sequence[Any], max_new_tokens: int = 64, equal_classes: bool = False
    ) -> list[Answer]:
        """Answer new inputs.

        texts: non-empty strings; for a language model and a learner that reads rows also rows as
        dictionaries, which a prompt_template with names of columns needs; for a model of images, paths,
        encoded bytes, arrays uint8 [H, W, 3] or images of Pillow; max_new_tokens: longest answer of a
        language model. equal_classes: every class has equally many of the inputs. Returns an `Answer` for
        each, in their order: `output` is a class with its probability as `score`, a generated text, or what
        `Learner.present` returns. Raises `UsageError` for an input that is not a text, and for equal_classes
        with a model without classes or with fewer inputs than classes.

        >>> import fmmeta
        >>> pairs = [("red", "colour"), ("blue", "colour"), ("one", "number"), ("two", "number")]
        >>> adapted = fmmeta.adapt("tiny", pairs, inner_steps=10, early_stopping=False)
        >>> adapted.labels, [answer.output in adapted.labels for answer in adapted.predict(["green", "six"])]
        (('colour', 'number'), [True, True])
        """
        loaded, spec = self.loaded, self.loaded.config.learner
        refuse_first([(spec.ordered, f"task_type={spec.name}: {CONTINUED}")])
        whole = not spec.of_classes
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise UsageError(f"texts={shortened(texts)} is no list; give a list of texts")
        images = loaded.description.images
        if images and isinstance(texts, np.ndarray) and (texts.ndim < 3 or texts.shape[2:] in ((1,), (3,))):
            raise UsageError(f"texts of the shape {list(texts.shape)} are one image; give a list of images")
        max_new_tokens = of_type(PredictConfig, "max_new_tokens", max_new_tokens)
        check_bounds("max_new_tokens", max_new_tokens, rules(PredictConfig)["max_new_tokens"])
        key = loaded.columns[0]
        rows = (dict(one) if whole and isinstance(one, Mapping) else {key: one} for one in texts)
        inputs = [loaded.read(Row(values, f"texts[{index}]")) for index, values in enumerate(rows)]
        return loaded.answer(inputs, max_new_tokens, equal_classes)


def load_model(
    config: Config,
    progress: Progress,
    labels: Sequence[str] = (),
    ranks: ProcessGroups | None = None,
) -> LoadedModel:
    """Load the model of `config`. labels: names of its classes. ranks: default is this process alone.

    Raises `UsageError`. Collective: world.
    """
    description = describe(config)
    if labels:
        description = with_labels(config, description, labels)
    tokenizer = load_tokenizer(config, description, progress.notice)
    ranks = ranks or World(Launch(), pick_device(Launch())).split(1, default_group=False)
    set_matmul_precision(config)
    bf16 = chosen_bf16(config, 0, ranks.world, ranks.device)
    deepspeed = deepspeed_config.read(config.deepspeed, bf16, progress.notice)
    plan = ParallelPlan.of(config, deepspeed, ranks.layout.group_size, ranks.device.type)
    worker, head_names, frozen = create_worker(config, description, plan, ranks)
    assert isinstance(worker, FullModelWorker)
    return LoadedModel(
        config,
        description,
        tokenizer,
        ranks,
        worker,
        head_names,
        frozen,
        Batcher(
            description.pad_token_id,
            config.micro_batch_size,
            ranks.layout.group_rank,
            ranks.layout.group_size,
            collate_fn=Collate.of(config),
            whole_sets=bool(description.dependent(config)),
        ),
    )


def with_labels(config: Config, description: Description, labels: Sequence[str]) -> Description:
    """The description of the same model with a head for these classes; the configuration is a copy.

    It names the classes only where transformers serves them, so that no other program answers at random.
    """
    hf_config = copy.deepcopy(description.hf_config)
    # transformers does not read the head of a pooled encoder, and would put a random one on it: none of its
    # classifiers is made for no class
    served = labels if description.pooling == "model" else ()
    hf_config.id2label = dict(enumerate(served))
    hf_config.label2id = {label: number for number, label in enumerate(served)}
    hf_config.problem_type = config.learner.kind.problem_type if served else None
    return replace(description, hf_config=hf_config, labels=tuple(labels))


def load(settings: PredictConfig) -> AdaptedModel:
    """Load a model with the classes that it has learned. Raises `UsageError`."""
    name = as_folder(settings.model_name_or_path, ASIDE)
    refuse_no_model(name)
    stored, labels = remembered(name), tuple[str, ...]()
    config, description = config_of(settings, name, stored, settings.pooling)
    if config.learner.has_head:
        refuse_untrained_head(config, description, stored)
        names = description.hf_config.id2label
        labels = tuple(stored.get("labels") or (names[number] for number in sorted(names)))
        if len(labels) < 2 and config.learner.of_classes:
            raise UsageError(
                f"model_name_or_path={name} names fewer than two classes; adapt it first (fmmeta adapt)"
            )
        config = replace(config, n_way=len(labels), head_init="learned")
    pairs, facts = stored_examples(f"model_name_or_path={name}", stored), stored.get("adapted") or {}
    loaded = load_model(config, Progress(enabled=False), labels)
    loaded.prompt_examples, loaded.facts = loaded.encode_pairs(pairs), dict(facts.get("facts") or {})
    return AdaptedModel(labels, facts.get("inner_steps"), facts.get("left_out"), loaded, output_dir=name)


def config_of(
    settings: PredictConfig, name: str, stored: dict[str, Any], pooling: str
) -> tuple[Config, Description]:
    """The `Config` of a model that answers: set flags, then `stored`, the content of an fmmeta.json.

    Raises `UsageError`.
    """
    values = {
        key: stored.get(key)
        if getattr(settings, key) is None and key in REMEMBERED
        else getattr(settings, key)
        for key in SHARED_BY_PREDICT
    }
    given = {key: one for key, one in values.items() if one is not None}
    if find(given.get("task_type") or CLASSIFICATION.name).ordered:
        raise UsageError(
            f"model_name_or_path={name} is for documents (task_type={given['task_type']}): {CONTINUED}"
        )
    fixed = {"model_name_or_path": name, "pooling": pooling, "algorithm": "none", "bf16": False}
    config = Config(**{**given, **fixed})
    description = describe(config)
    return fitted(config, description.hf_config), description


def stored_examples(where: str, stored: dict[str, Any]) -> list[tuple[str, str]]:
    """The pairs that an adapted language model has before every input. stored: content of its fmmeta.json.

    where: the setting that names the model, with its value. Raises `UsageError`.
    """
    facts = stored.get("adapted")
    if not (stored_kind(stored).generates and isinstance(facts, dict)):
        return []
    pairs = facts.get("prompt_examples") or []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        texts = pair if isinstance(pair, list) and len(pair) == 2 else [None]
        if not all(isinstance(text, str) and not broken_text(text) for text in texts):
            raise UsageError(
                f"{where}: prompt_examples in {SETTINGS_FILE} holds {shortened(pair)}, no pair of texts;"
                " adapt the model again"
            )
    return [(before, after) for before, after in pairs]


def refuse_no_model(name: str) -> None:
    """Raise `UsageError` for a path without a model, naming what it lacks. A hub id is accepted."""
    path = Path(name)
    if not path.is_dir() and (path.exists() or is_path(name)):
        raise UsageError(f"model_name_or_path={name} is no folder; give the one that fmmeta adapt wrote")
    if path.is_dir() and not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
        inside = path / "model"
        advice = f"run fmmeta adapt on {inside}, and give" if inside.is_dir() else "give"
        raise UsageError(
            f"model_name_or_path={name} holds neither config.json nor adapter_config.json; {advice} the"
            " folder that fmmeta adapt writes"
        )


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
        kinds, own = description.hf_config.architectures or (), config.learner.auto
        ends = [own.removeprefix("AutoModel")] if own else TRAINED_HEADS
        trained = base_model_name(name) != name or any(kind.endswith(end) for kind in kinds for end in ends)
    adapted = bool(stored.get("labels"))
    refuse_first(
        [
            (
                adapted and pooling != expected,
                f"pooling={pooling} does not fit the head of model_name_or_path={name}, which was trained"
                f" with {expected}; use --pooling {expected}",
            ),
            (
                adapted and config.feature_norm != stored.get("feature_norm", 0.0),
                f"feature_norm={config.feature_norm} does not fit the head of model_name_or_path={name},"
                f" which was trained with {stored.get('feature_norm', 0.0)}; leave it out",
            ),
            (
                adapted and not trained,
                f"model_name_or_path={name} holds no {HEAD_FILE}, where its classes are; fetch it again",
            ),
            (
                not trained
                or ("algorithm" in stored and not adapted),  # of a meta-trained run, or of no task
                f"model_name_or_path={name} has no trained head, and would answer at random; run fmmeta adapt"
                " first, and give the folder that it writes",
            ),
        ]
    )
