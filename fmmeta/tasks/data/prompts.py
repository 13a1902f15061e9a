"""Prompts of a language model: the texts before and after an answer.

    plain     Input: {input}\\nOutput: {output}
    chat      the tokenizer's chat template, {input} as the user's turn and {output} as the assistant's
    other     a format string with {input}, and {output} unless it is at the end

The prompt of an example is exactly the text that a model gets after training: for chat it ends with the
template's generation prompt. The template's text after the answer (the end of the turn) is learned with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fmmeta.common.errors import UsageError

PLAIN = "Input: {input}\nOutput: {output}"
MARK = "<<the answer>>"  # stands for an answer while a chat template is analysed
# Some templates print the date. An example must not depend on the day of the run, so a macro of the same name
# replaces the clock.
TODAY = {
    "%Y": "2024",
    "%m": "07",
    "%d": "26",
    "%b": "Jul",
    "%B": "July",
    "%A": "Friday",
    "%a": "Fri",
    "%y": "24",
}
REPLACED = "".join(f"|replace({code!r},{text!r})" for code, text in TODAY.items())
STOPPED_CLOCK = "{%- macro strftime_now(format) -%}{{ format" + REPLACED + " }}{%- endmacro -%}"


@dataclass(frozen=True)
class Prompt:
    """Texts around an input and its answer.

    `specials`: whether the tokenizer adds its own tokens (BOS, EOS) around them.
    """

    before: Callable[[str], str]  # input -> the text up to the answer
    # text between them, learned with the answer: usually a space, which is one token with the next word
    lead: str
    after: str
    specials: bool

    def answer(self, output: str) -> str:
        return f"{self.lead}{output}{self.after}"


def make_prompt(template: str, tokenizer: Any) -> Prompt:
    """The prompt of `--prompt_template`. Raises `UsageError` if the tokenizer has no usable chat template."""
    if template == "chat":
        return chat_prompt(tokenizer)
    return text_prompt(PLAIN if template == "plain" else template)


def text_prompt(template: str) -> Prompt:
    """The prompt of a format string with the escapes `\\n` and `\\t`. Braces in inputs are plain text."""
    template = template.replace("\\n", "\n").replace("\\t", "\t")
    if "{output}" not in template:
        template += "{output}" if template[-1:].isspace() else " {output}"
    before, after = template.split("{output}", 1)
    stem = before.rstrip(" ")
    return Prompt(lambda text: stem.replace("{input}", text), before[len(stem) :], after, specials=True)


def chat_prompt(tokenizer: Any) -> Prompt:
    """The prompt of the tokenizer's chat template, with thinking turned off if the template supports it.

    It ends with the generation prompt; for a template without one, with the text before the answer.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "prompt_template=chat needs a chat template, and the tokenizer has none; use plain or a format"
            " string such as 'Q: {input}\\nA:'"
        )

    def render(*turns: str, ask: bool = False) -> str:
        messages = [
            {"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=False)
        ]
        try:
            return tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=ask,
                enable_thinking=False,
                chat_template=STOPPED_CLOCK + tokenizer.get_chat_template(),
            )
        except Exception as error:  # a template is a program
            raise UsageError(
                f"prompt_template=chat: the tokenizer's chat template fails ({' '.join(str(error).split())});"
                " use plain or a format string"
            ) from None

    whole = render("", MARK)
    if whole.count(MARK) != 1:
        raise UsageError(
            "prompt_template=chat: the tokenizer's chat template does not show an assistant's answer; use"
            " plain or a format string"
        )
    has_generation_prompt = render("", ask=True) != render("")
    before = (
        partial(render, ask=True) if has_generation_prompt else lambda text: render(text, MARK).split(MARK)[0]
    )
    return Prompt(before, "", whole.split(MARK)[1].rstrip(), specials=False)
