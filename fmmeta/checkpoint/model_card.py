"""Model cards: README.md of an exported folder, with metadata of the Hugging Face Hub and measured results.

    settings, scores --> metadata (huggingface_hub.ModelCardData) and text (card.md.j2) --> README.md

The metadata names the base model, its license and its language only where they are known from a hub id or
from the card of the base. Paths of this machine are not written. Texts from data and from other models' files
are escaped for Markdown and HTML.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from fmmeta.common.security import printable
from fmmeta.common.text import counted, render
from fmmeta.config.settings import Config
from fmmeta.learners.files import BUILTIN, UNREADABLE, base_model_name, cached_file, is_path, split_source
from fmmeta.tasks.data.encode import example_input, make_prompt

FILE = "README.md"
INPUT = "5 + 1"  # of a language model, in the examples of a card
PLACEHOLDER = "USER/MODEL"  # in the commands of a card; `fmmeta push` writes the id of the repository instead
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual")
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
LOCAL_DATA = ("letters", "words", "digits", "ciphers", "tables")  # built-in data sets


@dataclass(frozen=True)
class Scores:
    """A table of measured scores. text: what was measured; header, rows: cells, escaped for Markdown."""

    text: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Content:
    """The content of a card. summary, facts: Markdown, escaped where it comes from data; empty facts are left
    out.

    base: model_name_or_path of the training. config, pooling: of the model. adapter: the folder holds
    adapters and not a whole model. adapted: the model has learned a task. images: it reads images. classes:
    names of its classes. prompt: a language model's input with the examples that precede it, if any do.
    dataset: names of the training data. results: measured scores of this model, none if nothing was measured.
    """

    base: str
    config: Config
    pooling: str
    adapter: bool
    summary: str
    facts: Mapping[str, str]
    adapted: bool = False
    images: bool = False
    classes: Sequence[str] = ()
    prompt: str = ""
    dataset: Sequence[str] = ()
    results: Sequence[EvalResult] = ()
    scores: Scores | None = None
    tags: Sequence[str] = field(default=("fmmeta", "few-shot", "meta-learning"))

    @property
    def kind(self) -> str:
        """What the folder is to programs that read it without fmmeta; a key of `KINDS`."""
        if self.config.learner.generates:
            return "generator"
        if self.config.learner.ordered or (not self.config.learner.plain and self.pooling == "model"):
            return "learner"
        if self.images and (self.pooling == "model" or not self.adapted) and not self.adapter:
            return "image classifier" if self.adapted else "image encoder"
        if self.adapted:
            return "head" if self.pooling != "model" else "adapters" if self.adapter else "classifier"
        return "encoder" if self.pooling == "model" or self.adapter else "sentence encoder"


KINDS: dict[str, tuple[str, str | None]] = {
    "learner": ("transformers", None),
    "generator": ("transformers", "text-generation"),
    "head": ("fmmeta", None),
    "adapters": ("peft", None),
    "classifier": ("transformers", "text-classification"),
    "encoder": ("transformers", "feature-extraction"),
    "image classifier": ("transformers", "image-classification"),
    "image encoder": ("transformers", "image-feature-extraction"),
    "sentence encoder": ("sentence-transformers", "sentence-similarity"),
}
"""For the hub, which library reads a folder, and the pipeline; none that would use a random head."""


def write_card(folder: Path, content: Content) -> None:
    """Write README.md into an exported folder."""
    title = title_of(folder)
    text = render(
        Path(__file__).with_name("card.md.j2"),
        title=escaped(title),
        model=PLACEHOLDER,
        content=content,
        facts={cell(name): cell(value) for name, value in content.facts.items()},
        classes=list(map(code, content.classes)),
        names=printable(repr(dict(enumerate(content.classes)))),
        prompt=python_text(content.prompt) if content.prompt else prompt_of(content.config.prompt_template),
        own=None if content.config.learner.plain else content.config.learner.kind,
        auto=content.config.learner.auto,
    )
    header = metadata(content, printable(title)).to_yaml()
    ModelCard(f"---\n{header}\n---\n\n{text}").save(folder / FILE)


def metadata(content: Content, title: str) -> ModelCardData:
    """The metadata block of a card."""
    library, pipeline = KINDS[content.kind]
    if content.kind == "learner":
        own = content.config.learner.kind
        pipeline = getattr(own, "pipeline", None) if content.adapted else None
        library = library if getattr(own, "auto", "") else "fmmeta"
    base = base_without_revision(content.base) if content.adapter else origin(content.base)
    known = is_hub_id(base)
    hub_data = [name for name in content.dataset if name not in LOCAL_DATA and is_hub_id(name)]
    return ModelCardData(
        **stored_license(content.base),
        library_name="peft" if content.adapter and library == "transformers" else library,
        pipeline_tag=pipeline,
        tags=list(content.tags),
        base_model=base if known else None,
        base_model_relation="adapter" if known and content.adapter else None,
        datasets=hub_data or None,
        model_name=title if content.results else None,
        eval_results=list(content.results) or None,
    )


def title_of(folder: Path) -> str:
    """The name of an exported folder, with its parent's where it has a fixed name."""
    path = folder.resolve()
    if path.name == "model":
        return path.parent.name
    return f"{path.parent.name} (merged)" if path.name == "merged" else path.name


def is_hub_id(name: str) -> bool:
    """Whether a model or data set can be a hub id: no built-in model, no path and no file of this machine."""
    with suppress(HFValidationError, OSError):
        validate_repo_id(name)
        return name != BUILTIN and not is_path(name) and not Path(name).exists()
    return False


def public_name(name: str) -> str:
    """A hub id or a built-in name as it is; of a path the last part, or the name of its run."""
    return name if is_hub_id(name) or name == BUILTIN else title_of(Path(name)) or "local files"


def base_without_revision(name: str) -> str:
    """The base model of an adapter folder; any other name unchanged."""
    return split_source(base_model_name(name))["pretrained_model_name_or_path"]


def origin(name: str) -> str:
    """The hub id of the model that `name` was trained from, by the cards of local folders; else `name`."""
    base = base_without_revision(name)
    if not is_hub_id(base):
        stored = base_card(name).get("base_model")
        if isinstance(stored, str) and is_hub_id(stored):
            return stored
    return base


def stored_license(name: str) -> dict[str, Any]:
    """License and language of a model, where its card names valid ones."""
    card, keys = base_card(name), ("license", "license_name", "license_link")
    found: dict[str, Any] = {key: printable(card[key]) for key in keys if isinstance(card.get(key), str)}
    if not LICENSE.fullmatch(found.get("license", "")):
        found = {}
    languages = card.get("language")
    languages = [languages] if isinstance(languages, str) else languages
    if isinstance(languages, list) and all(
        isinstance(one, str) and LANGUAGE.fullmatch(one) for one in languages
    ):
        found["language"] = languages or None
    return found


def base_card(name: str) -> dict[str, Any]:
    """The metadata of a model's card; empty without a readable card."""
    for each in dict.fromkeys((name, base_model_name(name))):  # adapters of other programs may have no card
        path = cached_file(each, FILE)
        with suppress(*UNREADABLE, yaml.YAMLError):
            if path is not None:
                return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    return {}


def prompt_of(template: str) -> str:
    """An input in the prompt of `--prompt_template`, as Python code."""
    prompt: Any = [{"role": "user", "content": INPUT}]
    if template != "chat":
        prompt = make_prompt(template, None).before(example_input(template, INPUT))
    return python_text(prompt)


def python_text(value: Any) -> str:
    """A text, or a list of messages, as Python code."""
    return printable(json.dumps(value, ensure_ascii=False))


def trained_weights(config: Config, merged: str = "") -> str:
    """What was trained, for a card; "" for all weights. merged: what became of adapters."""
    sets = {"changed by the inner loop": config.inner_parameters, "meta-trained": config.outer_parameters}
    adapters = [f"LoRA adapters of rank {config.lora_r}{merged}"] if config.lora_r else []
    return "; ".join(
        [*adapters, *(f"{what}: {code(' '.join(given))}" for what, given in sets.items() if given)]
    )


def inner_loop(config: Config, steps: int | None) -> str:
    """What the card says of an inner loop; empty without steps."""
    text = f"{counted(steps or 0, 'step')} of {config.inner_optimizer}, inner_lr {config.inner_lr:g}"
    clipped = f", gradients clipped at {config.inner_max_grad_norm:g}" if config.inner_max_grad_norm else ""
    return text + clipped if steps else ""


def code(text: str) -> str:
    """A name as a code span, which holds neither Markdown nor HTML."""
    text = printable(" ".join(text.split())) or " "
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if "`" in (text[0], text[-1]) else ""
    return f"{fence}{space}{text}{space}{fence}"


def escaped(text: Any) -> str:
    """A value as text, its Markdown and HTML characters escaped."""
    return re.sub(r"[!-,/:-@\[-^`{-~]", r"\\\g<0>", printable(" ".join(str(text).split())))


def cell(text: str) -> str:
    """Markdown as a cell of a table: a bar would end the cell."""
    return re.sub(r"(\\*)\|", lambda bar: rf"{bar[1]}\|" if len(bar[1]) % 2 == 0 else bar[0], text)
