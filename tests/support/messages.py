"""The message of a refusal, and what a test asks of it: the setting with its value, and what to do."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from fmmeta.cli import main
from fmmeta.common.errors import UsageError


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of the UsageError that a call raises; it must be one line."""
    with pytest.raises(UsageError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_message(text: str, part: str, *more: str) -> None:
    """Check that a message is one line, contains its parts, and gives one remedy.

    part, more: the setting with its value, and the remedy; other words may change.
    """
    missing = [one for one in (part, *more) if one not in text]
    assert not missing, f"{missing} not in {text!r}"
    assert "\n" not in text.strip(), text
    assert "did you mean" not in text or ("remove it" not in text and "leave it out" not in text), text


def check_text(text: str, *parts: str) -> None:
    """Check that a text of any number of lines contains its parts."""
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in {text!r}"


def exit_code(words: Iterable[str]) -> Any:
    """The code that `fmmeta WORDS` exits with, in this process."""
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return ended.value.code
