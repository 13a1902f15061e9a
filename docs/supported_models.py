"""Writes the tables of docs/reference/what-works.md and README.md from the tables of the code.

python docs/supported_models.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

START = "<!-- table: python docs/supported_models.py -->\n\n"
COLUMNS = (
    "model_type",
    "kind",
    "plain, ZeRO 0-3",
    "pipeline",
    "tensor parallel",
    "packing",
    "LoRA",
    "without padding",
)


TESTED = (  # families with parity cases
    *("bert", "roberta", "gpt2", "gpt_neox", "gemma", "gemma2", "gemma3_text", "glm", "granite", "llama"),
    *("mistral", "olmo", "olmo2", "phi", "phi3", "qwen2", "qwen3", "smollm3"),
)
MIXTURES = ("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")
PLANNED = "with a plan"


def works(split: Callable[..., Any], *args: Any) -> str:
    from fmmeta.common.errors import UsageError

    try:
        split(*args)
    except UsageError:
        return "-"
    return "yes"


def rows() -> list[tuple[str, ...]]:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as LORA
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    from fmmeta.learners.stages import family_of
    from fmmeta.learners.unpadded import MODELS
    from fmmeta.parallel.tensor_parallel import plan_of

    found = []
    for name in sorted({*MODELS, *TESTED, *MIXTURES}, key=lambda name: (name in ENCODERS, name)):
        encoder, hf_config = name in ENCODERS, AutoConfig.for_model(name)
        found.append(
            (
                f"`{name}`",
                "encoder" if encoder else "mixture" if name in MIXTURES else "decoder",
                "yes",
                works(family_of, hf_config),
                works(plan_of, hf_config, 2),
                "-" if encoder or name == "gpt_oss" else "yes",
                "yes" if {name, name.replace("_", "-")} & {*LORA, *MIXTURES} else "with targets",
                "yes" if name in MODELS else "-",
            )
        )
    return [
        *found,
        (
            "another dense decoder",
            *("decoder", "yes", PLANNED, PLANNED, "if it passes the check", "with targets", "-"),
        ),
        (
            "language model of a model with other parts",
            *("decoder", "yes", PLANNED, PLANNED, "if it passes the check", "with targets", "-"),
        ),
        (
            "another mixture with fused experts",
            *("mixture", "yes", PLANNED, "-", "if it passes the check", "yes", "-"),
        ),
        ("another dense encoder", "encoder", "yes", "-", "-", "-", "with targets", "-"),
    ]


def short_rows() -> list[tuple[str, ...]]:
    """Families that are alike in one row, without the columns `kind` and `without padding`, and without
    mixtures of experts that are unlike all others.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    mixtures = {name.strip("`") for name, kind, *_ in rows() if kind == "mixture"}
    for name, _, *cells, _ in rows():
        alike.setdefault(tuple(cells), []).append(name.strip("`"))
    found = {cells: names for cells, names in alike.items() if len(names) > 1 or names[0] not in mixtures}
    return [(", ".join(names), *cells) for cells, names in found.items()]


def table(columns: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(text: str, content: str) -> str:
    """A page with `content` in place of its table, which ends at an empty line."""
    before, rest = text.split(START)
    _, after = rest.split("\n\n", 1)
    return f"{before}{START}{content}\n{after}"


def pages() -> dict[str, str]:
    """The table of each page."""
    short = table(("model family", *COLUMNS[2:-1]), short_rows())
    return {"docs/reference/what-works.md": table(COLUMNS, rows()), "README.md": short}


if __name__ == "__main__":
    for name, content in pages().items():
        Path(name).write_text(page(Path(name).read_text(encoding="utf-8"), content), encoding="utf-8")
