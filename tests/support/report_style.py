"""Colours of the report's style sheet, and the pairs of text and background that must contrast."""

import re
from pathlib import Path

import fmmeta.report

SHEET = Path(fmmeta.report.__file__).with_name("report.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--(\w+):\s*(#\w{6});", block)) for block in re.findall(r":root\s*{(.*?)}", SHEET, re.S)
)
TEXTS = [(ink, on) for ink in ("ink", "quiet", "a", "b", "c", "d", "bad") for on in ("page", "card")]
TEXTS += [("a", "pill"), ("ink", "pill"), *((f"n{level}", f"m{level}") for level in range(6))]
