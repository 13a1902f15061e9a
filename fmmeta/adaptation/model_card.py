"""The model card of an adapted model (README.md): its base model, its examples and its scores."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from fmmeta.adaptation.adapted_model import AdaptedModel
from fmmeta.common.security import printable
from fmmeta.evaluation.settings import AdaptConfig
from fmmeta.models.stored_settings import remembered
from fmmeta.tasks.data.columns import Table


def write_card(adapted: AdaptedModel, folder: Path, settings: AdaptConfig, support: Table) -> None:
    """Write README.md into the adapted model's folder."""
    config, base = adapted.single.config, settings.model_name_or_path
    classes = config.task_type == "classification"
    header, served = served_by(adapted)
    header = {"base_model": base, **header, "tags": ["fmmeta", "few-shot"]}
    source = code(Path(settings.support).name) if settings.support else "given in Python"
    facts = [
        ("base model", code(base)),
        ("meta-training", origin(base)),
        (
            "support",
            f"{source}: {len(support.input)} examples"
            + (f" of {len(adapted.labels)} classes" if classes else ""),
        ),
        (
            "inner loop",
            f"{adapted.inner_steps} steps of {config.inner_optimizer}, inner_lr {config.inner_lr:g}"
            + (f", LoRA of rank {config.lora_r}" if config.lora_r else ""),
        ),
    ]
    if adapted.left_out is not None:
        facts.append(
            (
                "accuracy on examples left out",
                f"{100 * adapted.left_out:.1f} %; the steps were chosen on them",
            )
        )
    if adapted.accuracy is not None:
        facts.append(
            (
                f"accuracy on {code(Path(str(settings.query)).name)}",
                f"{100 * adapted.accuracy:.1f} % of {len(adapted.predictions)}",
            )
        )
    yaml = "".join(
        f"{key}: {printable(json.dumps(value, ensure_ascii=False))}\n" for key, value in header.items()
    )  # JSON is YAML
    table = "".join(f"| {cell(name)} | {cell(value)} |\n" for name, value in facts)
    listed = "".join(f"- {code(label)}\n" for label in adapted.labels)
    text = (
        f"---\n{yaml}---\n\n# {escaped(Path(folder).resolve().name)}\n\nAdapted by fmmeta from a few"
        " examples.\n\n"
    )
    text += f"| | |\n|---|---|\n{table}"
    text += f"\n## Classes\n\n{listed}" if classes else ""
    command = f"fmmeta predict --model_name_or_path {shlex.quote(printable(str(folder)))} --input texts.txt"
    text += f"\n## Use\n\n```bash\n{command}\n```\n\n{served}\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def served_by(adapted: AdaptedModel) -> tuple[dict[str, str], str]:
    """What the hub may be told of who reads the folder, and a sentence for people.

    No pipeline that answers wrongly is named.
    """
    single, names = adapted.single, dict(enumerate(adapted.labels))
    if adapted.labels and single.description.pooling != "model":
        return (
            {"library_name": "fmmeta"},
            (
                "`fmmeta predict` serves it: the classes are in `head.safetensors`, which transformers alone"
                " does not read; `AutoModel` gives the encoder without them, and a `text-classification`"
                " pipeline would give it a random head."
            ),
        )
    if single.config.lora_r and names:
        return (
            {"library_name": "peft"},
            (
                "The folder holds adapters; transformers puts them on the base with\n\n```python\n"
                "AutoModelForSequenceClassification.from_pretrained(\n"
                f"    folder, num_labels={len(names)}, id2label={names}, ignore_mismatched_sizes=True\n)\n```"
            ),
        )
    pipeline = "text-classification" if names else "text-generation"
    library = "peft" if single.config.lora_r else "transformers"
    return {
        "library_name": library,
        "pipeline_tag": pipeline,
    }, f"transformers reads it as it is (`{pipeline}`)."


def origin(base: str) -> str:
    """How the base was meta-trained, as far as its folder and the run beside it tell."""
    memory: dict[str, Any] = remembered(base)
    if memory.get("algorithm", "none") == "none":  # `tune` leaves a memory too
        return "none"
    text = f"{escaped(memory['algorithm'])}, {escaped(memory.get('k_shot'))} shots"
    run = Path(base).parent / "run.json"
    if run.is_file():
        try:
            settings = json.loads(run.read_text(encoding="utf-8"))["settings"]
            text += (
                f", on {' '.join(map(code, settings['dataset']))}, {escaped(settings['outer_steps'])} outer"
                " steps of "
            )
            text += f"{escaped(settings['meta_batch_size'])} tasks"
        except (OSError, ValueError, KeyError, TypeError):
            pass  # another folder's file
    return text


def code(text: str) -> str:
    """A name as a code span, in which neither Markdown nor HTML means anything."""
    text = printable(" ".join(text.split())) or " "
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if "`" in (text[0], text[-1]) else ""
    return f"{fence}{space}{text}{space}{fence}"


def escaped(text: Any) -> str:
    """A value as text without marks."""
    return re.sub(r"[!-,/:-@\[-^`{-~]", r"\\\g<0>", printable(" ".join(str(text).split())))


def cell(text: str) -> str:
    """Markdown in a table: a bar would end the cell."""
    return re.sub(r"(\\*)\|", lambda bar: rf"{bar[1]}\|" if len(bar[1]) % 2 == 0 else bar[0], text)
