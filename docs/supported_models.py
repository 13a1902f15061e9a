"""Writes the table of docs/supported_models.md from the tables of the code.

python docs/supported_models.py
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path("docs/supported_models.md")
START, END = "<!-- table: python docs/supported_models.py -->\n", "<!-- end of the table -->\n"
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


def rows() -> list[tuple[str, ...]]:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as LORA
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    from fmmeta.models.learner import MODELS
    from fmmeta.models.pipeline_split import FAMILIES
    from fmmeta.parallel.deepspeed_config import PLANS

    found = []
    for name in sorted({*MODELS, *FAMILIES, *PLANS}, key=lambda name: (name in ENCODERS, name)):
        encoder = name in ENCODERS
        found.append(
            (
                f"`{name}`",
                "encoder" if encoder else "decoder",
                "yes",
                "yes" if name in FAMILIES else "-",
                "yes" if name in PLANS else "-",
                "-" if encoder else "yes",
                "yes" if name.replace("_", "-") in LORA or name in LORA else "with targets",
                "yes" if name in MODELS else "-",
            )
        )
    return [
        *found,
        ("another dense decoder", "decoder", "yes", "-", "-", "if it passes the check", "with targets", "-"),
        ("another dense encoder", "encoder", "yes", "-", "-", "-", "with targets", "-"),
    ]


def table() -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(text: str) -> str:
    """The page with the table of the code in place of its own."""
    before, rest = text.split(START)
    return before + START + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
