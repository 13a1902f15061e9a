"""Settings that take a JSON file or its text.

Of --peft_config and --label_names a run stores the text, so that it resumes, and a model is adapted, where
the file does not exist.
"""

import json
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.text import broken_text, shortened

PEFT_EXAMPLE = '{"r": 8}'
NAMES = "names"  # of --label_names, instead of a file


def read_object(setting: str, source: str, example: str) -> tuple[str, dict[str, Any]]:
    """How messages name a file or text, and the JSON object in it. Raises `UsageError`."""
    is_text = source.lstrip().startswith("{")
    given = f"{setting}={shortened(source) if is_text else source}"
    with usage_errors(f"{given} cannot be read as JSON", "fix it, or give a JSON file"):
        if not is_text and Path(source).exists() and not Path(source).is_file():
            raise OSError(None, "it is no file")  # a device would be read for ever
        found = json.loads(source if is_text else Path(source).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise UsageError(f"{given} holds no object of JSON; write {example}, say")
    return given, found


def text_of(setting: str, source: str | None, example: str) -> str | None:
    """The JSON object of a file as text. Raises `UsageError`."""
    return source and json.dumps(read_object(setting, source, example)[1], sort_keys=True)


def label_texts_of(source: str | None) -> str | None:
    """`--label_names` as a run stores it: the file's text, or its value if it names no file.

    Raises `UsageError`.
    """
    if source in (None, NAMES):
        return source
    given, texts = read_object("label_names", source, '{"card_arrival": "when will my card arrive"}')
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"{given}: the value of class {shortened(name)} is not a text; write one")
        if found := broken_text(text):
            raise UsageError(f"{given}: the text of class {shortened(name)} has {found}; remove them")
    return json.dumps(texts, sort_keys=True)
