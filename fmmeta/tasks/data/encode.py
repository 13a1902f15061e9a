"""Text to tokens: classification texts, and causal_lm pairs whose labels cover the answer only.

The prompt of a pair, `--prompt_template`:

    plain     Input: {input}\\nOutput: {output}
    chat      the tokenizer's chat template, {input} as the user's turn and {output} as the assistant's
    other     a format string with {input}, names of other columns, and {output} unless it is at the end

Of a format string with other columns the inputs are whole prompts, which columns.py fills.

The prompt of an example has exactly the tokens that a model gets after training: for chat they end with the
template's generation prompt. What the template writes from there to the end of the turn is learned with the
answer, and is no part of the text of a generated answer (`AnswerReader`). An answer ends with the first end
token that the prompt writes behind it, or with the tokenizer's end of text.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.text import PromptTemplate, counted, shortened
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import IGNORE, Example
from fmmeta.tasks.data.images import EncodedImage, ImageReader
from fmmeta.tasks.data.turns import BEGIN, PAIR, as_text, from_text

INPUT, MARK = "<<the input>>", "<<the answer>>"  # stand for texts while a chat template is analysed
# Some templates print the date. An example must not depend on the day of the run, so a macro of the same name
# replaces the clock. The environment of transformers drops the line break behind it (trim_blocks), so the
# template begins where it began.
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
STOPPED_CLOCK = "{%- macro strftime_now(format) -%}{{ format" + REPLACED + " }}{%- endmacro %}\n"


@dataclass(frozen=True)
class Prompt:
    """Texts around an input and its answer.

    before: an input to the text that precedes what is learned. lead, after: texts around an output that are
    learned with it. specials: whether the tokenizer adds its own tokens (BOS, EOS) around the prompt. strips:
    whether spaces around an output are left out. end: the token that ends an answer. added: it, where `after`
    does not write it. Both are unknown without a tokenizer.
    """

    before: Callable[[str], str]
    lead: str
    after: str
    specials: bool
    strips: bool = False
    end: int | None = None
    added: tuple[int, ...] = ()

    def answer(self, output: str) -> str:
        return f"{self.lead}{output.strip() if self.strips else output}{self.after}"


def make_prompt(template: str, tokenizer: Any) -> Prompt:
    """The prompt of `--prompt_template`. Raises `UsageError` if the tokenizer has no usable chat template, or
    neither it nor the prompt has a token that ends an answer.

    Braces in inputs are plain text. tokenizer: None for the texts of a format string alone.
    """
    prompt = chat_prompt(tokenizer) if template == "chat" else text_prompt(template)
    if tokenizer is None:
        return prompt
    end = written_end(tokenizer, prompt.after)
    if end is not None:
        return replace(prompt, end=end)
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"prompt_template={shortened(template)}: no token ends an answer, since the tokenizer has no"
            " eos_token and the checkpoint names no eos_token_id; set eos_token in tokenizer_config.json"
        )
    return replace(prompt, end=tokenizer.eos_token_id, added=(tokenizer.eos_token_id,))


def text_prompt(template: str) -> Prompt:
    """The prompt of a format string, or of `plain`."""
    parsed = PromptTemplate.of(template)
    before = str if parsed.columns else lambda text: parsed.fill({"input": text})
    return Prompt(before, parsed.lead, parsed.after, specials=True)


def example_input(template: str, text: str) -> str:
    """An input as `encode` takes it, with a text in every column of the template."""
    parsed = PromptTemplate.of("plain" if template == "chat" else template)
    return parsed.fill(dict.fromkeys(parsed.fields, text)) if parsed.columns else text


def written_end(tokenizer: Any, after: str) -> int | None:
    """The first special token in the text after an answer, else the first added one that is no white space;
    None without either.
    """
    added = {one: token for one, token in tokenizer.added_tokens_decoder.items() if token.content in after}
    ids = [one for one in plain_tokens(tokenizer, after) if one in added]
    found = [one for one in ids if added[one].special or one == tokenizer.eos_token_id]
    return next(iter(found or [one for one in ids if added[one].content.strip()]), None)


def chat_prompt(tokenizer: Any) -> Prompt:
    """The prompt of the tokenizer's chat template, with thinking turned off if the template supports it.

    It is what `apply_chat_template` gives with a generation prompt, or the text before the answer where an
    answer cannot follow that.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "prompt_template=chat needs a chat template, and the tokenizer has none; use plain or a format"
            " string such as 'Q: {input}\\nA:'"
        )

    def render(text: str, *answer: str, ask: bool = False) -> str:
        with usage_errors(
            "prompt_template=chat: the tokenizer's chat template fails", "use plain or a format string"
        ):
            return tokenizer.apply_chat_template(
                [*from_text(text), *({"role": "assistant", "content": one} for one in answer)],
                tokenize=False,
                add_generation_prompt=ask,
                enable_thinking=False,
                chat_template=STOPPED_CLOCK + tokenizer.get_chat_template(),
            )

    whole, asked, alone = render(INPUT, MARK), render(INPUT, ask=True), render(INPUT)
    if whole.count(MARK) != 1:
        raise UsageError(
            "prompt_template=chat: the tokenizer's chat template does not show an assistant's answer; use"
            " plain or a format string"
        )
    head, after = whole.split(MARK)
    before, follows = partial(render, ask=True), head.startswith(asked)
    lead = head[len(asked) :] if follows else ""
    if not follows and asked != alone and asked.startswith(alone):  # a turn depends on what follows it
        behind = head.rpartition(asked[len(alone) :])
        lead = behind[2] if behind[1] else ""
    ends = {tokenizer.eos_token_id, written_end(tokenizer, after)}
    if (not follows and asked == alone) or ends & {*plain_tokens(tokenizer, lead)}:
        before, lead = (lambda text: render(text, MARK).split(MARK)[0]), ""
    strips = f" {MARK} " not in render(INPUT, f" {MARK} ")
    return Prompt(before, lead, after.rstrip(), False, strips)


@dataclass(frozen=True)
class AnswerReader:
    """Reads the text of an answer from the tokens that a model generates.

    The first of the tokens `ends` and what follows it, and the texts that the prompt has around an answer,
    are no part of it.
    """

    tokenizer: Any
    prompt: Prompt
    ends: Sequence[int]

    def text(self, ids: Sequence[int]) -> str:
        """The text of an answer, without spaces around it."""
        lead = self._decode(plain_tokens(self.tokenizer, self.prompt.lead))
        tail = self._decode(self._until_end(plain_tokens(self.tokenizer, self.prompt.after)), True)
        answer, skipped, rest = self._until_end(ids), 0, ""
        for count in range(1, min(len(answer), len(lead)) + 1):  # the lead may have special tokens
            begin = self._decode(answer[:count])
            if begin.startswith(lead):
                skipped, rest = count, begin[len(lead) :]
                break
        text = rest + self.tokenizer.decode(answer[skipped:], skip_special_tokens=True)
        return text.strip().removesuffix(tail).strip()

    def _until_end(self, ids: Sequence[int]) -> list[int]:
        return list(takewhile(lambda one: one not in self.ends, ids))

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens).strip()


def answer_reader(tokenizer: Any, template: str, stored: Sequence[int]) -> AnswerReader:
    """stored: the end tokens of the checkpoint."""
    return AnswerReader(tokenizer, make_prompt(template, tokenizer), end_tokens(tokenizer, template, stored))


def end_tokens(tokenizer: Any, template: str, stored: Sequence[int]) -> list[int]:
    """The tokens that end an answer of a model: those of its checkpoint (`stored`) and of its tokenizer, that
    of the prompt, and that of its chat template, whatever the prompt is; none that the prompt writes before
    an answer. Raises `UsageError`.
    """
    prompt = make_prompt(template, tokenizer)
    ends = [*stored, tokenizer.eos_token_id, prompt.end]
    if getattr(tokenizer, "chat_template", None):
        with suppress(UsageError):  # a template that the prompt does not use
            ends.append(make_prompt("chat", tokenizer).end)
    lead = {None, *plain_tokens(tokenizer, prompt.lead)}
    return [one for one in dict.fromkeys(ends) if one not in lead]


# of a tokenizer's call: masks and types of all tokens would be a tenth of its time
IDS_ALONE = {"verbose": False, "return_attention_mask": False, "return_token_type_ids": False}
LONGEST_TOKEN = 64  # characters: texts are cut to max_length of these before they are tokenised


@dataclass(frozen=True)
class RowEncoder:
    """Makes examples of what a learner has stored of rows. Picklable."""

    config: Config
    tokenizer: Any

    def facts(self, support: Sequence[Any], query: Sequence[Any]) -> dict[str, Any]:
        """See `Learner.facts`. Raises `UsageError`, also for more labels than the head has outputs."""
        spec, most = self.config.learner, self.config.most_classes
        found = spec.kind.facts(support, query)
        names = found.get("names", ())
        if spec.has_head and len(names) > most:
            raise UsageError(
                f"the support set has {len(names)} labels ({', '.join(names)[:100]}), and n_way={most} is"
                " the number of outputs; raise --n_way"
            )
        return found

    def examples(self, rows: Sequence[Any], facts: Mapping[str, Any]) -> list[Example]:
        """See `Learner.encode`. Raises `UsageError`."""
        return self.config.learner.kind.encode(self.config, self.tokenizer, rows, facts)

    def cut_message(self, examples: Sequence[Example]) -> str:
        """A message, the same for all, if one of these has `max_length` tokens, and so has probably lost a
        part; else "".
        """
        most = self.config.max_length
        message = f"some rows fill max_length={most}; longer texts lose a part: raise --max_length"
        return message * any(len(one.input_ids) >= most for one in examples)


def read_image(reader: ImageReader, image: EncodedImage) -> Tensor:
    """The pixels of an image, fp32 [3, H, W]. Raises `UsageError`, also for a file that cannot be read."""
    with usage_errors(f"{image.where} cannot be read", "fix or remove it"):
        return reader.read(image)


def full_rows(config: Config, lengths: Sequence[int]) -> str:
    """A message if rows have `max_length` tokens, and so have probably lost a part; else ""."""
    full = sum(length >= config.max_length for length in lengths)
    if not full or config.learner.ordered:  # a document is cut into rows later
        return ""
    causal = config.learner.generates
    lost = "inputs lose tokens, then answers their end" if causal else "texts lose their end"
    return (
        f"{full} of {counted(len(lengths), 'row')} {'fills' if full == 1 else 'fill'} max_length="
        f"{config.max_length}; longer {lost}: raise --max_length"
    )


def answer_without_room(config: Config, tokenizer: Any, outputs: Sequence[str]) -> str:
    """A message for the first answer that does not fit into `max_length` even without its input; else "".

    Such an answer would lose its end.
    """
    if not config.learner.generates:
        return ""
    prompt, most = make_prompt(config.prompt_template, tokenizer), config.max_length
    frame = 1 if prompt.specials else len(plain_tokens(tokenizer, prompt.before("")))
    for output in outputs:
        answer = plain_tokens(tokenizer, prompt.answer(output[: LONGEST_TOKEN * most]))
        size = len(answer) + len(prompt.added)
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
    token = tokenizer.special_tokens_map.get("sep_token")
    separator = f" {token} " if token else "\n"
    return tokenizer(
        [text[kept].replace(PAIR, separator) for text in texts],
        truncation=True,
        max_length=max_length,
        **IDS_ALONE,
    )["input_ids"]


def encode_pairs(
    tokenizer: Any, inputs: Sequence[str], outputs: Sequence[str], max_length: int, template: str = "plain"
) -> list[Example]:
    """One example per pair: prompt, answer, end of text. `template`: see the head of the module.

    Pairs that are too long lose the start of the prompt, or of the input for chats, whose template stays
    whole: the earliest turns, then text. If that is not enough, the answer loses its end. At least one token
    precedes the answer.
    """
    reach = LONGEST_TOKEN * max_length
    inputs = [text if text.startswith(BEGIN) else text[-reach:] for text in inputs]
    outputs = [text[:reach] for text in outputs]
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
    prompts = tokenizer([prompt.before(text) for text in inputs], **IDS_ALONE)["input_ids"]
    answers = tokenizer([prompt.answer(text) for text in outputs], add_special_tokens=False, **IDS_ALONE)[
        "input_ids"
    ]
    examples = []
    for before, answer in zip(prompts, answers, strict=True):
        if before[-1:] == [tokenizer.eos_token_id]:  # some tokenizers end every text
            before = before[:-1]
        answer = [*answer, *prompt.added][: max_length - 1]
        before = before[max(0, len(before) + len(answer) - max_length) :]
        examples.append(labelled(before + answer, len(before)))
    return examples


def encode_chat(tokenizer: Any, prompt: Prompt, text: str, output: str, max_length: int) -> Example:
    """One turn of a chat. The answer is tokenised with its prompt where that leaves the prompt's tokens as
    they are, since some tokenizers begin every text with a space.
    """
    while True:
        before, answer = prompt.before(text), prompt.answer(output)
        ids = plain_tokens(tokenizer, before)
        whole = plain_tokens(tokenizer, before + answer)
        learned = whole[len(ids) :] if whole[: len(ids)] == ids else plain_tokens(tokenizer, answer)
        learned += prompt.added
        over = len(ids) + len(learned) - max_length
        if over <= 0 or not text:
            break
        if len(turns := from_text(text)) > 1:
            later = (number for number, turn in enumerate(turns) if number and turn["role"] == "user")
            text = as_text(turns[next(later, len(turns) - 1) :])
            continue
        text = turns[0]["content"]
        shorter = tokenizer.decode(plain_tokens(tokenizer, text)[over:])
        text = shorter if len(shorter) < len(text) else text[1:]
    return labelled((ids + learned)[:max_length], len(ids))


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, **IDS_ALONE)["input_ids"]


def labelled(ids: list[int], prompt: int) -> Example:
    """Labels on everything but the first `prompt` tokens."""
    return Example(ids, [IGNORE] * prompt + ids[prompt:])
