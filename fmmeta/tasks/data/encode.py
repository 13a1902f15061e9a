"""Text to tokens: classification texts, and causal_lm pairs whose labels cover the answer only.

The prompt of a pair, `--prompt_template`:

    plain     Input: {input}\\nOutput: {output}
    chat      the tokenizer's chat template, {input} as the user's turn and {output} as the assistant's
    other     a format string with {input}, names of other columns, and {output} unless it is at the end

Of a format string with other columns the inputs are whole prompts, which rows.py fills.

The prompt of an example is exactly the text that a model gets after training: for chat it ends with the
template's generation prompt. The template's text after the answer (the end of the turn) is learned with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.common.text import PromptTemplate, counted, shortened
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import IGNORE, Example
from fmmeta.tasks.data.images import EncodedImage, ImageReader

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
    """The prompt of `--prompt_template`. Raises `UsageError` if the tokenizer has no usable chat template.

    Braces in inputs are plain text.
    """
    if template == "chat":
        return chat_prompt(tokenizer)
    parsed = PromptTemplate.of(template)
    before = str if parsed.columns else lambda text: parsed.fill({"input": text})
    return Prompt(before, parsed.lead, parsed.after, specials=True)


def example_input(template: str, text: str) -> str:
    """An input as `encode` takes it, with a text in every column of the template."""
    parsed = PromptTemplate.of("plain" if template == "chat" else template)
    return parsed.fill(dict.fromkeys(parsed.fields, text)) if parsed.columns else text


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


LONGEST_TOKEN = 64  # characters: texts are cut to max_length of these before they are tokenised


def encode(tokenizer: Any, config: Config, inputs: Sequence[Any], targets: Sequence[str]) -> list[Example]:
    """Examples of (input, output) pairs for causal_lm; else of texts, or of images (`EncodedImage`) for an
    `ImageReader`, whose label -1 the caller replaces.
    """
    if isinstance(tokenizer, ImageReader):
        return [Example([0], -1, values={"pixel_values": read_image(tokenizer, image)}) for image in inputs]
    if config.task_type == "causal_lm":
        return encode_pairs(tokenizer, inputs, targets, config.max_length, config.prompt_template)
    return [Example(ids, -1) for ids in encode_texts(tokenizer, inputs, config.max_length)]


def read_image(reader: ImageReader, image: EncodedImage) -> Tensor:
    """The pixels of an image, fp32 [3, H, W]. Raises `UsageError`, also for a file that cannot be read."""
    try:
        return reader.read(image)
    except OSError as error:
        raise UsageError(f"{image.where} cannot be read ({error.strerror}); fix or remove it") from None


def full_rows(config: Config, lengths: Sequence[int]) -> str:
    """A message if rows have `max_length` tokens, and so have probably lost a part; else ""."""
    full = sum(length >= config.max_length for length in lengths)
    if not full:
        return ""
    lost = "longer texts lose their end"
    if config.task_type == "causal_lm":
        lost = "longer inputs lose tokens, then answers their end"
    return (
        f"{full} of {counted(len(lengths), 'row')} {'fills' if full == 1 else 'fill'} max_length="
        f"{config.max_length}; {lost}: raise --max_length"
    )


def answer_without_room(config: Config, tokenizer: Any, outputs: Sequence[str]) -> str:
    """A message for the first answer that does not fit into `max_length` even without its input; else "".

    Such an answer would lose its end.
    """
    if config.task_type != "causal_lm":
        return ""
    prompt, most = make_prompt(config.prompt_template, tokenizer), config.max_length
    frame = 1 if prompt.specials else len(plain_tokens(tokenizer, prompt.before("")))
    end = int(prompt.specials and tokenizer.eos_token_id is not None)
    for output in outputs:
        size = len(plain_tokens(tokenizer, prompt.answer(output[: LONGEST_TOKEN * most]))) + end
        if size > most - frame:
            return (
                f"the answer {shortened(output)} has {counted(size, 'token')} with its end, and max_length="
                f"{most} has room for {max(0, most - frame)}; shorten it, or raise --max_length"
            )
    return ""


def encode_texts(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Tokens of each text, with the tokenizer's special tokens, at most `max_length`, from the side that the
    tokenizer keeps.
    """
    reach = LONGEST_TOKEN * max_length
    kept = slice(-reach, None) if tokenizer.truncation_side == "left" else slice(reach)
    return tokenizer(
        [text[kept] for text in texts],
        truncation=True,
        max_length=max_length,
        verbose=False,
    )["input_ids"]


def encode_pairs(
    tokenizer: Any, inputs: Sequence[str], outputs: Sequence[str], max_length: int, template: str = "plain"
) -> list[Example]:
    """One example per pair: prompt, answer, end of text. `template`: see the head of the module.

    Pairs that are too long lose the start of the prompt, or of the input for chats, whose template stays
    whole; if that is not enough, the answer loses its end. At least one token precedes the answer.
    """
    reach = LONGEST_TOKEN * max_length
    inputs, outputs = [text[-reach:] for text in inputs], [text[:reach] for text in outputs]
    prompt = make_prompt(template, tokenizer)
    if not prompt.specials:
        frame = len(plain_tokens(tokenizer, prompt.before("")))
        if frame >= max_length:
            raise UsageError(
                f"max_length={max_length} leaves no room: the chat template takes {frame} tokens by itself;"
                " raise it"
            )
        return [
            encode_chat(tokenizer, prompt, *pair, max_length) for pair in zip(inputs, outputs, strict=True)
        ]
    prompts = tokenizer([prompt.before(text) for text in inputs], verbose=False)["input_ids"]
    answers = tokenizer([prompt.answer(text) for text in outputs], add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    examples = []
    for before, answer in zip(prompts, answers, strict=True):
        if end and before[-1:] == end:  # some tokenizers end every text
            before = before[:-1]
        answer = (answer + end)[: max_length - 1]
        before = before[max(0, len(before) + len(answer) - max_length) :]
        examples.append(labelled(before + answer, len(before)))
    return examples


def encode_chat(tokenizer: Any, prompt: Prompt, text: str, output: str, max_length: int) -> Example:
    """One turn of a chat, tokenised as a whole; the labels begin at its first token that differs from the
    prompt's tokens.
    """
    while True:
        before = plain_tokens(tokenizer, prompt.before(text))
        ids = plain_tokens(tokenizer, prompt.before(text) + prompt.answer(output))
        over = len(ids) - max_length
        if over <= 0 or not text:
            break
        shorter = tokenizer.decode(plain_tokens(tokenizer, text)[over:])
        text = shorter if len(shorter) < len(text) else text[1:]
    common = takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False))
    return labelled(ids[:max_length], len(list(common)))


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def labelled(ids: list[int], prompt: int) -> Example:
    """Labels on everything but the first `prompt` tokens."""
    return Example(ids, [IGNORE] * prompt + ids[prompt:])
