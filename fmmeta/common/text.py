"""Values as text: short for messages, and as strict JSON for files."""

import difflib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

BRIEF = reprlib.Repr()
BRIEF.maxlevel, BRIEF.maxlist, BRIEF.maxtuple, BRIEF.maxdict = 3, 20, 20, 20
BRIEF.maxstring = BRIEF.maxother = 10**6
HALF_PAIR = re.compile(r"[\ud800-\udfff]")


def any_of(choices: Iterable[str]) -> str:
    """`a, b or c`."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def three_digits(value: float) -> str:
    """A number for people, without powers of ten.

    >>> three_digits(4.256), three_digits(999.7), three_digits(1234.5)
    ('4.26', '1,000', '1,234')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A suggestion for a misspelt name or value, to be appended to a message; `otherwise` if none is near.

    >>> nearest("fomalm", ["fomaml", "reptile"], "; remove it"), nearest("x", ["fomaml"], "; remove it")
    ('; did you mean fomaml?', '; remove it')
    """
    names = list(known)
    longer = sorted((one for one in names if len(name) > 2 and one.startswith(name)), key=len)
    close = longer or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else otherwise


def counted(count: int, one: str, more: str = "") -> str:
    """A number with its noun in the singular or plural.

    >>> counted(1, "stratum", "strata"), counted(2, "row")
    ('1 stratum', '2 rows')
    """
    return f"{count} {one if count == 1 else more or one + 's'}"


def units_of(count: int, kind: str) -> str:
    """`count` classes or tasks as text. kind: `class` or `task`."""
    return counted(count, kind, "classes" if kind == "class" else "")


def shortened(value: Any) -> str:
    """A value for a message: its repr on one line, of 60 characters at most.

    Of nested lists, which aliases of YAML can make very long, the first levels are shown.
    """
    try:
        text = " ".join(BRIEF.repr(value).split())
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = f"<{type(value).__name__} with a number of thousands of digits>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def strict(value: Any) -> Any:
    """The value with None for numbers that JSON does not have, in dictionaries and lists too.

    >>> strict({"loss": float("nan"), "interval": (0.5, float("inf"))})
    {'loss': None, 'interval': [0.5, None]}
    """
    if isinstance(value, dict):
        return {name: strict(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any, **how: Any) -> str:
    """Strict JSON for files and other programs. how: options of json.dumps."""
    return json.dumps(strict(value), allow_nan=False, **how)


def as_stored(settings: Any) -> Any:
    """Settings as they are stored and compared: values of JSON, with non-finite numbers as text.

    >>> as_stored({"mix_temperature": float("inf"), "dataset": ("a", "b")})
    {'mix_temperature': 'inf', 'dataset': ['a', 'b']}
    """
    return json.loads(json.dumps(settings), parse_constant=lambda name: str(float(name)))


def render(template: Path, **values: Any) -> str:
    """The text of a Jinja2 template; values are escaped for HTML and XML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return (
        Environment(
            autoescape=True,
            loader=FileSystemLoader(template.parent),
            lstrip_blocks=True,
            trim_blocks=True,
            undefined=StrictUndefined,
        )
        .get_template(template.name)
        .render(values)
    )


@dataclass(frozen=True)
class PromptTemplate:
    """`--prompt_template`: texts, each followed by a field of the prompt (`fields`), the `end` of the prompt,
    spaces (`lead`), the answer, and the text `after` it.
    """

    texts: tuple[str, ...]
    fields: tuple[str, ...]
    end: str
    lead: str
    after: str

    @classmethod
    def of(cls, template: str) -> "PromptTemplate":
        """Parse a format string: names in braces, `{{` and `}}` for braces, `\\n` and `\\t` for escapes.

        Raises `ValueError` for more than a name in braces, and unless {input} is before an only {output}.

        >>> PromptTemplate.of("{{Q}} {question} {input}").fill({"question": "is it?", "input": "A"})
        '{Q} is it? A'
        """
        template = "Input: {input}\nOutput: {output}" if template == "plain" else template
        texts, fields = [""], list[str]()
        for text, name, spec, how in Formatter().parse(template.replace("\\n", "\n").replace("\\t", "\t")):
            texts[-1] += text
            if name is not None:
                if spec or how or not name:
                    raise ValueError(f"{{{name}}} is more than a name")
                fields.append(name)
                texts.append("")
        if "output" not in fields:
            fields.append("output")
            texts = [*texts[:-1], texts[-1] if texts[-1][-1:].isspace() else f"{texts[-1]} ", ""]
        *others, last, after = texts
        if "input" not in fields or fields.index("output") != len(others):
            raise ValueError("{input} is not before an only {output}")
        end = last.rstrip(" ")
        return cls(tuple(others), tuple(fields[:-1]), end, last[len(end) :], after)

    @property
    def columns(self) -> list[str]:
        """The columns that it names, {input} aside."""
        return [name for name in dict.fromkeys(self.fields) if name != "input"]

    def fill(self, values: Mapping[str, str]) -> str:
        """The prompt. values: of each field."""
        filled = (text + values[name] for text, name in zip(self.texts, self.fields, strict=True))
        return "".join(filled) + self.end


def broken_text(text: str) -> str | None:
    """The characters of a text that no tokenizer accepts or no file can store."""
    if "\0" in text:
        return "NUL bytes"
    half = None if text.isascii() else HALF_PAIR.search(text)
    return f"half of a surrogate pair (\\u{ord(half[0]):x})" if half else None


def rouge_l(answer: str, truth: str) -> float:
    """ROUGE-L of an answer, between 0 and 1; of texts without letters and digits, whether they are equal.

    >>> rouge_l("police killed the gunman", "police kill the gunman")  # Lin 2004, section 3
    0.75
    """
    given, reference = (re.findall(r"[^\W_]+", text.lower()) for text in (answer, truth))
    common = longest_common(given, reference)
    if not given and not reference:  # of symbols alone
        return float(answer.strip() == truth.strip())
    return 2 * common / (len(given) + len(reference))


def longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for left in a:
        before = 0
        for j, right in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if left == right else max(row[j], row[j - 1])
    return row[-1]
