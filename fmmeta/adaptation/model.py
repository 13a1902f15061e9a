"""A model on a worker, in one process unless a launch has groups: it learns tasks and answers texts."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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
from fmmeta.config.learners import stored_kind
from fmmeta.config.settings import REMEMBERED, Config
from fmmeta.evaluation.methods import with_equal_classes
from fmmeta.evaluation.settings import SHARED_BY_PREDICT, PredictConfig
from fmmeta.learners.base import on_device
from fmmeta.learners.classification import Classifier
from fmmeta.learners.files import HEAD_FILE, SETTINGS_FILE, base_model_name, cached_file, is_path, remembered
from fmmeta.learners.from_gguf import as_folder
from fmmeta.learners.load import Description, describe, fitted, load_tokenizer, max_positions
from fmmeta.meta.algorithms.baselines import prompted
from fmmeta.metrics.language import generate
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.layout import Launch, ParallelPlan
from fmmeta.parallel.process_groups import ProcessGroups, World, pick_device
from fmmeta.parallel.workers.create import create_worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import Batcher, Example, collate
from fmmeta.tasks.collate import Collate
from fmmeta.tasks.data.columns import USUAL, Row, input_of, input_setting, usual
from fmmeta.tasks.data.encode import AnswerReader, answer_reader, encode
from fmmeta.tasks.data.images import EncodedImage, encoded_image
from fmmeta.tasks.data.rows import prefixed

TRAINED_HEADS = ("ForSequenceClassification", "ForImageClassification")
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
    """A text to answer, or the name of an image. content: what the model reads: the text, the image, or what
    a learner stores of a row, whose input `text` is. adapter: the folder of its adapter, if there is a
    directory of them.
    """

    text: Any
    content: Any
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

    @property
    def columns(self) -> Sequence[str]:
        """Usual keys or columns of an input, as in the files of `adapt`; the first one of a row counts."""
        own = self.config.learner.own
        return own.inputs if own else USUAL[input_setting(self.config, self.description.images)]

    def read(self, row: Row, column: str | None = None) -> Input:
        """The input of a row. column: the one to read. Paths of images begin at the folder of the row's file.

        Raises `UsageError`.
        """
        keys = [column] if column else self.columns
        key = usual(keys, row.values)
        if key is None:
            raise UsageError(
                f"{row.origin} has none of the columns {', '.join(keys)}; name one with --text_column"
            )
        if own := self.config.learner.own:
            values = row.values if column is None else {**row.values, self.columns[0]: row.values[key]}
            with prefixed(row.origin):
                return Input(row.values[key], own.rows(self.config, [*values], answered=False)(values))
        if not self.description.images:
            text = input_of(self.config, row, keys)
            return Input(text, text)
        value = row.values[key]
        if isinstance(value, dict) and value.get("bytes") is None:
            value = value.get("path")  # as `datasets` stores an image that is a file
        name, image = encoded_image(value, key, row.origin, None)
        if row.folder and isinstance(value, str):
            image = EncodedImage(str(Path(row.folder, value).absolute()))
        return Input(name, image)

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
        found: list[Any] = []
        if self.config.learner.own is not None:
            facts = {**self.facts, "names": names}
            pairs = self.respond([one.content for one in inputs], max_new_tokens, facts)
            return [Answer(one.text, output) for one, (output, _) in zip(inputs, pairs, strict=True)]
        for start in range(0, len(inputs), size):
            some = inputs[start : start + size]
            found += self.outputs(some, max_new_tokens, [self.prompt_examples] * len(some))
        if equal_classes:
            scores = [self.log_probabilities(one.text, row) for one, row in zip(inputs, found, strict=True)]
            found = [*with_equal_classes(torch.stack(scores)).log()]
        return [self.choose(one.text, output, names) for one, output in zip(inputs, found, strict=True)]

    def respond(
        self, rows: Sequence[Any], max_new_tokens: int, facts: Mapping[str, Any], answered: bool = False
    ) -> list[tuple[Any, Any]]:
        """The answers to rows of a learner that reads them, each with the right one, which rows have if they
        are `answered`. facts: of the task, with names of labels. Raises `UsageError`.
        """
        if not rows:
            return []
        own, learner, size = self.config.learner.own, self.worker.learner, self.config.micro_batch_size
        labels, found = tuple(facts.get("names", ())), dict[int, tuple[Any, Any]]()
        name = self.config.model_name_or_path
        with usage_errors(f"model_name_or_path={name} cannot answer", "correct the rows, or adapt it again"):
            encoded = own.encode(self.config, self.tokenizer, rows, facts)
            lengths = [len(one.input_ids) for one in encoded]
            order = sorted(range(len(rows)), key=lengths.__getitem__, reverse=True)
            for part in (order[begin : begin + size] for begin in range(0, len(order), size)):
                examples = [encoded[place] for place in part]
                batch = collate(examples, 1.0, self.batcher.pad_token_id, len(labels), own.collate)
                batch = on_device(batch, learner, self.worker.device)
                with torch.no_grad():
                    answers = learner.respond(batch, max_new_tokens)
                    right = learner.answers(learner(**batch.inputs), batch) if answered else ()
                    truths = [one for _, one in right] if answered else [None] * len(part)
                for place, *pair in zip(part, answers, truths, strict=True):
                    shown = partial(own.present, names=labels, facts=facts, tokenizer=self.tokenizer)
                    output, truth = (None if one is None else shown(one) for one in pair)
                    found[place] = output, truth
        return [found[place] for place in range(len(rows))]

    def outputs(
        self,
        inputs: Sequence[Input],
        max_new_tokens: int,
        before: Sequence[Sequence[Example]],
        around: Callable[[Sequence[int]], AbstractContextManager[None]] | None = None,
    ) -> Sequence[str | Tensor]:
        """The generated text, or the logits of the classes, of each input.

        before: causal_lm: the pairs before each input. around: see `generate`; then one pass has all inputs.
        Raises `UsageError` for a text without tokens, and for an image that cannot be decoded.
        """
        examples = self.encode_inputs([one.content for one in inputs])
        if self.config.learner.generates:
            rows, size = zip(before, examples, strict=True), self.config.micro_batch_size
            prompts = [self.prompts_of(pairs, [row], max_new_tokens)[0] for pairs, row in rows]
            return generate(self.worker, self.reader, prompts, max_new_tokens, size, around)
        if around is None:
            return [*self.class_logits(examples)]
        rows = [replace(example, labels=0) for example in examples]
        with around(range(len(rows))):
            (logits,) = self.worker.logits([collate(rows, 1.0, self.batcher.pad_token_id)])
        return [*logits.cpu()]

    def encode_inputs(self, contents: Sequence[Any]) -> list[Example]:
        """Texts or images as examples without answers.

        Raises `UsageError` for a text without tokens, and for an image that cannot be decoded.
        """
        examples = encode(self.tokenizer, self.config, contents, [""] * len(contents))
        causal = self.config.learner.generates
        for text, row in zip(contents, examples, strict=True):
            if not (row.prompt if causal else row.input_ids):  # some tokenizers drop white space
                raise UsageError(
                    f"text={shortened(text)} has no tokens for"
                    f" model_name_or_path={self.config.model_name_or_path}; fix or remove it"
                )
        return examples

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Example]:
        """Pairs of input and output as tokens."""
        return encode(self.tokenizer, self.config, *zip(*pairs, strict=True)) if pairs else []

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
    def reader(self) -> AnswerReader:
        """Reads the generated answers of a language model."""
        return answer_reader(self.tokenizer, self.config.prompt_template, self.description.ends)

    @property
    def positions(self) -> int | None:
        """The number of positions of a language model; None: no limit."""
        return max_positions(self.description.hf_config)

    def choose(self, text: str, output: str | Tensor, names: Mapping[int, str] | Sequence[str]) -> Answer:
        """The answer to an input: the likeliest of the first classes by logits [C], or a generated text.

        Raises `UsageError` for probabilities that are not numbers.
        """
        if isinstance(output, str):
            return Answer(text, output)
        score, label = self.log_probabilities(text, output[: len(names)]).exp().max(0)
        return Answer(text, names[int(label)], float(score))

    def log_probabilities(self, text: str, logits: Tensor) -> Tensor:
        """Of the classes of a text, from its logits [C]. Raises `UsageError` if they are not numbers."""
        found = logits.log_softmax(0)
        if found.isnan().any():
            raise UsageError(
                f"model_name_or_path={self.config.model_name_or_path} gives no finite scores for"
                f" {shortened(text)}; adapt it with a lower --inner_lr"
            )
        return found

    def class_logits(self, examples: Sequence[Example]) -> Tensor:
        """Logits [Q, C] of Q examples, in their order; the labels of the examples are not used."""
        batches = self.batcher.split(
            [replace(example, labels=index) for index, example in enumerate(examples)]
        )
        logits = torch.cat([rows.cpu() for rows in self.worker.logits(batches)])
        return logits[torch.cat([batch.targets["labels"] for batch in batches]).argsort()]


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
        """Answer the query set of a learner that reads rows, and score it. facts: of the task, with the query
        set. Raises `UsageError`.
        """
        own = self.loaded.config.learner.own
        found = self.loaded.respond(rows, max_new_tokens, facts, answered=True)
        for row, (output, truth) in zip(rows, found, strict=True):
            key = usual(own.inputs, row) if isinstance(row, Mapping) else None
            self.predictions.append(Answer(row[key] if key else row, output, truth=truth))
        self.metrics = own.metrics(*zip(*found, strict=True)) if found else {}

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
        whole = spec.generates or spec.own is not None
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
    bf16: bool = False,
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
            collate_fn=Collate.of(config) if config.learner.own else None,
            whole_sets=not getattr(config.learner.own, "rows_are_independent", True),
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
    kind = config.learner.own or Classifier
    hf_config.problem_type = kind.problem_type if served else None
    return replace(description, hf_config=hf_config, labels=tuple(labels))


def load(settings: PredictConfig) -> AdaptedModel:
    """Load a model with the classes that it has learned. Raises `UsageError`."""
    aside = partial(LOGGER.info, "%s", extra=STDERR)  # answers are written to standard output
    name = as_folder(settings.model_name_or_path, aside)
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
    config = Config(**{**given, "model_name_or_path": name, "pooling": pooling, "algorithm": "none"})
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
        kinds, own = description.hf_config.architectures or (), getattr(config.learner.own, "auto", "")
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
