"""The model card of an adapted model (README.md): its base model, its examples and its scores."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from fmmeta.adaptation.adapted_model import AdaptedModel
from fmmeta.common.security import printable
from fmmeta.common.text import render
from fmmeta.evaluation.settings import AdaptConfig
from fmmeta.models.files import remembered
from fmmeta.tasks.data.rows import Table


def write_card(adapted: AdaptedModel, folder: Path, settings: AdaptConfig, support: Table) -> None:
    """Write README.md into the adapted model's folder."""
    config, base, labels = adapted.loaded.config, settings.model_name_or_path, adapted.labels
    library, pipeline, usage = how_to_use(adapted)
    header = {
        "base_model": base,
        "library_name": library,
        "pipeline_tag": pipeline,
        "tags": ["fmmeta", "few-shot"],
    }
    source = code(Path(settings.support).name) if settings.support else "given in Python"
    classes = f" of {len(labels)} classes" if labels else ""
    adapters = f", LoRA of rank {config.lora_r}" if config.lora_r else ""
    steps = f"{adapted.inner_steps} steps of {config.inner_optimizer}"
    facts = {
        "base model": code(base),
        "meta-training": meta_training(base),
        "support": f"{source}: {len(support.input)} examples{classes}",
        "inner loop": f"{steps}, inner_lr {config.inner_lr:g}{adapters}",
    }
    if adapted.left_out is not None:
        share = f"{100 * adapted.left_out:.1f} %"
        facts["accuracy on examples left out"] = f"{share}; the steps were chosen on them"
    if adapted.accuracy is not None:
        share = f"{100 * adapted.accuracy:.1f} %"
        facts[f"accuracy on {code(Path(str(settings.query)).name)}"] = (
            f"{share} of {len(adapted.predictions)}"
        )
    text = render(
        Path(__file__).with_name("card.md.j2"),
        header={
            key: printable(json.dumps(value, ensure_ascii=False)) for key, value in header.items() if value
        },
        title=escaped(folder.resolve().name),
        facts={cell(name): cell(value) for name, value in facts.items()},
        classes=list(map(code, labels)),
        folder=shlex.quote(printable(str(folder))),
        usage=usage,
    )
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")


def how_to_use(adapted: AdaptedModel) -> tuple[str, str | None, str]:
    """The library and the pipeline that read the folder, and a text about them.

    No pipeline is named that would use a random head.
    """
    model, names = adapted.loaded, dict(enumerate(adapted.labels))
    pipeline = "text-classification" if names else "text-generation"
    if names and model.description.pooling != "model":
        return (
            "fmmeta",
            None,
            "`fmmeta predict` serves it: the classes are in `head.safetensors`, which transformers alone"
            " does not read; `AutoModel` gives the encoder without them, and a `text-classification`"
            " pipeline would give it a random head.",
        )
    if names and model.config.lora_r:
        return (
            "peft",
            None,
            "The folder holds adapters; transformers puts them on the base with\n\n```python\n"
            "AutoModelForSequenceClassification.from_pretrained(\n"
            f"    folder, num_labels={len(names)}, id2label={names}, ignore_mismatched_sizes=True\n)\n```",
        )
    library = "peft" if model.config.lora_r else "transformers"
    return library, pipeline, f"transformers reads it as it is (`{pipeline}`)."


def meta_training(base: str) -> str:
    """How the base was meta-trained, from its folder and the run.json beside it."""
    stored: dict[str, Any] = remembered(base)
    if stored.get("algorithm", "none") == "none":  # `tune` writes fmmeta.json too
        return "none"
    text = f"{escaped(stored['algorithm'])}, {escaped(stored.get('k_shot'))} shots"
    try:
        run = json.loads((Path(base).parent / "run.json").read_text(encoding="utf-8"))["settings"]
        return (
            f"{text}, on {' '.join(map(code, run['dataset']))}, {escaped(run['outer_steps'])} outer steps of"
            f" {escaped(run['meta_batch_size'])} tasks"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return text  # no such file, or a file of another program


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
