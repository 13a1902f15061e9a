"""Prompts: input and target texts for plain texts, format strings and chat templates."""

import json
import shutil
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken, PreTrainedTokenizerFast

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.adaptation import predict
from fmmeta.checkpoint.model_card import Content, write_card
from fmmeta.evaluation.settings import PredictConfig
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.load import describe, load_tokenizer, suggest_chat
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.batching import IGNORE, Example
from fmmeta.tasks.data.encode import (
    answer_reader,
    encode_pairs,
    encode_texts,
    end_tokens,
    full_rows,
    make_prompt,
)
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.data.turns import as_text, from_text
from fmmeta.tasks.sources.load import load_sources
from tests.support.helpers import write_rows
from tests.support.messages import check_message, refusal
from tests.support.models import write_pairs

# Three shapes that real templates come in. ChatML with a default system turn, and thinking that can be turned
# off (Qwen3).
CHATML = """{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
# Instructions in brackets, no generation prompt, the date of the day (Llama 2 and Mistral).
BRACKETS = """{{ bos_token + '[SYSTEM]It is ' + strftime_now('%Y-%m-%d') + '.[/SYSTEM]' }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}
{%- else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}{% endfor %}"""
# A text that ends with end-of-text without a generation prompt (Phi-4).
ENDED = """{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

CHATS = {
    "chatml": (
        CHATML,
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "4<|im_end|>",
    ),
    "brackets": (BRACKETS, "<bos>[SYSTEM]It is 2024-07-26.[/SYSTEM][INST] ", " [/INST]", " 4<eos>"),
    "ended": (ENDED, "<|user|>", "<|end|><|assistant|>", "4<|end|><eos>"),
}


def chat_tokenizer(template: str | None):
    """The byte tokenizer with a chat template, and special tokens for turns, as chat models have."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|end|>", "<|assistant|>"]}
    )
    tokenizer.chat_template = template
    return tokenizer


def parts(tokenizer, row: Example) -> tuple[str, str]:
    """The text without loss, and the text with it; labels repeat the tokens and the loss is on one run at the
    end.
    """
    labels = list(row.labels)
    begin = next(i for i, label in enumerate(labels) if label != IGNORE)
    assert labels == [IGNORE] * begin + list(row.input_ids)[begin:]
    return tokenizer.decode(row.input_ids[:begin]), tokenizer.decode(row.input_ids[begin:])


@pytest.mark.parametrize(
    ("template", "prompt", "answer"),
    [
        ("plain", "Input: 2 + 2\nOutput:", " 4"),
        ("Q: {input}\\nA:", "Q: 2 + 2\nA:", " 4"),
        ("Q: {input}\nA: {output}", "Q: 2 + 2\nA:", " 4"),
        ("### {input}\\n\\n", "### 2 + 2\n\n", "4"),
        ("{input} -> {input} ={output}!\\tdone", "2 + 2 -> 2 + 2 =", "4!\tdone"),
        ("{{curly}} {{0}} {input}", "{curly} {0} 2 + 2", " 4"),
    ],
)
def test_text_prompts(template, prompt, answer):
    """The text and the answer are in their places, and braces in them are plain text."""
    tokenizer = byte_tokenizer()
    for text, output in (("2 + 2", "4"), ("{output} {input} {}", "{input}")):
        (row,) = encode_pairs(tokenizer, [text], [output], 96, template)
        wanted = prompt.replace("2 + 2", text), answer.replace("4", output)
        assert parts(tokenizer, row) == (f"<bos>{wanted[0]}", f"{wanted[1]}<eos>")


def test_a_format_string_may_write_the_end():
    """No second end follows; texts around an answer are no part of what is read from the learned tokens."""
    tokenizer = byte_tokenizer()
    for template, learned in (("A: {output}!\tdone", " 4!\tdone<eos>"), ("A: {output} .<eos>", " 4 .<eos>")):
        (row,) = encode_pairs(tokenizer, ["2 + 2"], ["4"], 64, f"Q: {{input}}\n{template}")
        assert parts(tokenizer, row)[1] == learned
        assert (
            answer_reader(tokenizer, f"Q: {{input}}\n{template}", ()).text(row.input_ids[len(row.prompt) :])
            == "4"
        )


def turn(before: str, after: str, ask: str, trim: str = "") -> str:
    """A template whose assistant turns are `before`, the answer, `after`; `ask` is its generation prompt."""
    return (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<u>' + m.content + '\n' }}{% else %}"
        f"{{{{ {before!r} + m.content{trim} + {after!r} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {ask!r} }}}}{{% endif %}}"
    )


# by name: the template, further tokens (those with ~ are not special), and what is learned of the answer " 4"
FORMS: dict[str, tuple[str, list[str], str]] = {
    "llama 3": (turn("<h>a</h>\n\n", "<eot>", "<h>a</h>\n\n", " | trim"), ["<h>", "</h>", "<eot>"], "4<eot>"),
    "gemma": (turn("<t>model\n", "<end>\n", "<t>model\n", " | trim"), ["<t>", "<end>"], "4<end>"),
    "end that is not special": (turn("<a>", "<eot>\n", "<a>"), ["~<eot>"], " 4<eot>"),
    "end of no single token": (turn("<a>", "<|im_off|>\n", "<a>"), [], " 4<|im_off|><eos>"),
    "alpaca": (turn("### Response:\n", "\n\n", "### Response:\n"), [], " 4<eos>"),
    "space": (turn("A: ", "<eos>", "A:", " | trim"), [], " 4<eos>"),
    "nothing": (turn("", "", ""), [], " 4<eos>"),
    "harmony": (
        turn("<s>assistant<c>final<m>", "<return>", "<s>assistant"),
        ["<s>", "<c>", "<m>", "<return>"],
        "<c>final<m> 4<return>",
    ),
    "thinking": (
        turn("<a><think>\n\n</think>\n\n", "<eot>\n", "<a>"),
        ["<a>", "<eot>", "~<think>", "~</think>"],
        "<think>\n\n</think>\n\n 4<eot>",
    ),
    "thinking in the prompt": (turn("<a>", "<eot>", "<a><think>\n"), ["<eot>", "~<think>"], " 4<eot>"),
    "no generation prompt": (turn("<a>\n", "<eot>", ""), ["<a>", "<eot>"], "<a>\n 4<eot>"),
    "end of the user's turn": (turn("<eot><a>", "<eot>", ""), ["<a>", "<eot>"], " 4<eot>"),
    "last turn": (
        turn("<a>\n", "<eot>", "<a>").replace(
            "m.content +", "m.content + (' /quick' if loop.last else '') +", 1
        ),
        ["<a>", "<eot>"],
        "\n 4<eot>",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_is_learned_as_rendered_and_read_without_what_surrounds_it(name):
    template, more, learned = FORMS[name]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(one.lstrip("~"), special=one[0] != "~", normalized=False) for one in more]
    )
    tokenizer.chat_template = template
    (row,) = encode_pairs(tokenizer, ["2 + 2"], [" 4"], 200, "chat")
    (asked,) = encode_pairs(tokenizer, ["2 + 2"], [""], 200, "chat")
    assert parts(tokenizer, row)[1] == learned
    assert row.prompt == asked.prompt
    if name != "end of the user's turn":  # an answer cannot follow its generation prompt
        turns = [{"role": "user", "content": "2 + 2"}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert row.prompt == prompt
    reader = answer_reader(tokenizer, "chat", ())
    ids = list(row.input_ids)[len(row.prompt) :]
    assert ids[-1] in reader.ends
    assert reader.text(ids) == reader.text([*ids, 7, 8]) == "4"
    assert CausalLearner.present(ids, (), {}, reader) == "4"


def test_end_tokens_are_those_of_checkpoint_tokenizer_and_template():
    tokenizer = byte_tokenizer()
    assert end_tokens(tokenizer, "plain", ()) == [2]
    tokenizer.add_tokens(["<eot>", "<a>"])
    tokenizer.chat_template = turn("<a>", "<eot>", "")
    eot, a = tokenizer.convert_tokens_to_ids(["<eot>", "<a>"])
    assert end_tokens(tokenizer, "plain", (9, 2)) == end_tokens(tokenizer, "chat", (9, 2, a)) == [9, 2, eot]
    tokenizer.chat_template = "{{ raise_exception('no') }}"  # which plain prompts do not use
    assert end_tokens(tokenizer, "plain", ()) == [2]
    tokenizer.eos_token = None
    check_message(refusal(make_prompt, "plain", tokenizer), "prompt_template='plain'", "eos_token")


@pytest.mark.parametrize(("stored", "ends"), [(5, [5]), ([5, 6, -1, None], [5, 6]), (None, None)])
def test_a_tokenizer_without_an_end_has_that_of_the_checkpoint(stored, ends, llama, tmp_path):
    model = shutil.copytree(llama, tmp_path / "model")
    config, tokenizer = Config(model_name_or_path=str(model), task_type="causal_lm"), byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stored, "min_length": 9}))
    description, said = describe(config), list[str]()
    found = load_tokenizer(config, description, said.append)
    assert [*description.ends] == (ends or [])
    assert found.eos_token_id == (ends and ends[0])
    check_message(said.pop(), "answers are greedy", "generation_config.json", "min_length")


@pytest.mark.parametrize("name", CHATS)
def test_chat_prompts_equal_the_rendered_template(name):
    template, head, middle, answer = CHATS[name]
    tokenizer = chat_tokenizer(template)
    (row,) = encode_pairs(tokenizer, ["2 + 2"], ["4"], 200, "chat")
    assert parts(tokenizer, row) == (f"{head}2 + 2{middle}", answer)
    turns = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    today = datetime.now().strftime("%Y-%m-%d")  # a template's own clock runs on
    whole = tokenizer.apply_chat_template(turns, tokenize=False).replace(today, "2024-07-26").rstrip()
    assert tokenizer.decode(row.input_ids) == whole
    for begin in ("\n  {{ '' }}", "  {% set a = 1 %}\n\n  {{ '' }}"):
        spaced = chat_tokenizer(begin + template)
        (example,) = encode_pairs(spaced, ["2 + 2"], ["4"], 200, "chat")
        assert spaced.decode(example.input_ids) == f"\n  {whole}"
        shown = spaced.apply_chat_template(turns, tokenize=False)
        assert isinstance(shown, str)
        assert shown.startswith("\n  <")
    if name != "brackets":  # prompts end with the generation prompt
        prompt = tokenizer.apply_chat_template(
            turns[:1], add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        assert list(row.input_ids[: len(prompt)]) == prompt


def test_the_prompt_has_the_tokens_that_it_has_without_an_answer():
    """A vocabulary that joins across the seam would give a prompt that no model gets."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {letter: i for i, letter in enumerate(">ab<:")}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, ":a": 5, "<eos>": 6}, merges=[(":", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}:{% else %}>{% endif %}{% endfor %}"
    )
    (row,) = encode_pairs(fast, ["b"], ["a"], 9, "chat")
    assert (list(row.input_ids), list(row.labels)) == ([2, 4, 1, 0, 6], [IGNORE, IGNORE, 1, 0, 6])


@pytest.mark.parametrize("max_length", [25, 27, 30, 45])
def test_long_chats_lose_the_start_of_the_input_and_keep_the_template(max_length):
    tokenizer = chat_tokenizer(ENDED)
    text = "a question much too long to fit"
    (row,) = encode_pairs(tokenizer, [text], ["yes"], max_length, "chat")
    prompt, answer = parts(tokenizer, row)
    assert len(row.input_ids) == min(max_length, 8 + 2 + len(text) + 5)
    assert answer == "yes<|end|><eos>"
    kept = prompt.removeprefix("<|user|>").removesuffix("<|end|><|assistant|>")
    assert text.endswith(kept)
    assert len(prompt) - len(kept) == len("<|user|><|end|><|assistant|>")


@pytest.mark.parametrize("name", CHATS)
def test_earlier_turns_are_part_of_the_prompt(name):
    tokenizer = chat_tokenizer(CHATS[name][0])
    text = as_text(TURNS)
    (row,) = encode_pairs(tokenizer, [text], ["4"], 300, "chat")
    asked = tokenizer.apply_chat_template(
        from_text(text), add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    today = datetime.now().strftime("%Y-%m-%d")
    assert parts(tokenizer, row) == (asked.replace(today, "2024-07-26"), CHATS[name][3])


TURNS = [
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 2"},
]


def test_long_conversations_lose_their_earliest_turns():
    tokenizer = chat_tokenizer(ENDED)
    (whole,) = encode_pairs(tokenizer, [as_text(TURNS)], ["4"], 300, "chat")
    (row,) = encode_pairs(tokenizer, [as_text(TURNS)], ["4"], len(whole.input_ids) - 1, "chat")
    assert row == encode_pairs(tokenizer, ["2 + 2"], ["4"], 300, "chat")[0]
    (cut,) = encode_pairs(tokenizer, [as_text(TURNS)], ["4"], len(row.input_ids) - 1, "chat")
    assert parts(tokenizer, cut)[0] == parts(tokenizer, row)[0].replace("2 + 2", " + 2")


def test_a_pair_of_texts_has_the_separator_of_the_tokenizer():
    tokenizer = byte_tokenizer()
    plain = encode_texts(tokenizer, ["a\nb"], 32)
    assert encode_texts(tokenizer, ["a [SEP] b"], 32) == plain
    tokenizer.add_special_tokens({"sep_token": "</s>"})
    assert encode_texts(tokenizer, ["a [SEP] b"], 32) == encode_texts(tokenizer, ["a </s> b"], 32) != plain


def test_long_answers_lose_their_end():
    tokenizer = chat_tokenizer(ENDED)
    (row,) = encode_pairs(tokenizer, ["why"], ["because of many things"], 14, "chat")
    assert parts(tokenizer, row) == ("<|user|><|end|><|assistant|>", "beca")


@given(st.text(max_size=40), st.text(max_size=20), st.integers(12, 60))
def test_no_chat_exceeds_max_length(text, output, max_length):
    row = encode_pairs(chat_tokenizer(ENDED), [text], [output], max_length, "chat")[0]
    assert len(row.input_ids) == len(row.labels) <= max_length
    assert row.label_tokens >= 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            None,
            ["needs a chat template", "use plain or a format string"],
        ),
        (
            "{{ raise_exception('only pictures') }}",
            ["the tokenizer's chat template", "use plain or a format"],
        ),
        (
            "{{ messages[0].content }}",
            ["the tokenizer's chat template does", "use plain or a format"],
        ),
        ("{% if %}", ["the tokenizer's chat template"]),
    ],
)
def test_tokenizers_without_a_usable_chat_template_are_refused(template, expected):
    message = refusal(encode_pairs, chat_tokenizer(template), ["a"], ["b"], 64, "chat")
    check_message(message, "prompt_template=chat", *expected)


def test_a_template_longer_than_max_length_is_refused():
    check_message(
        refusal(encode_pairs, chat_tokenizer(ENDED), ["a"], ["b"], 10, "chat"),
        "max_length=10",
        "10 tokens",
        "raise it",
    )


@pytest.mark.parametrize(
    "template",
    [
        "text",
        "{output} {input}",
        "{input} {output} {output}",
        "{output}",
        "{input} {output} {input}",
        "{input} {output} {context}",
        "{{input}}",
        "{{ input }} {{ output }}",
        "{input!r}",
        "{input:>9}",
        "{} {input}",
        '{"q": "{input}"}',
        "{input} }",
    ],
)
def test_format_strings_are_checked(template):
    check_message(
        refusal(Config, task_type="causal_lm", prompt_template=template),
        f"prompt_template={template}",
        "write one such as 'Q: {input}\\nA",
    )


ROWS = [
    {"task": f"t{i % 2}", "instruction": f"add {i}", "input": f"{i} {{x}}" if i < 4 else "", "output": f"{i}"}
    for i in range(8)
]


def stored(tmp_path, rows=ROWS, **settings) -> tuple[TokenStore, list[str]]:
    """The store of a training run on a file of pairs, and what it says."""
    config = Config(
        task_type="causal_lm",
        dataset=[str(write_rows(tmp_path / "rows.jsonl", rows))],
        k_shot=1,
        num_query=1,
        **settings,
    )
    notes: list[str] = []
    return load_sources(config, byte_tokenizer(), notes.append).train.store, notes


@pytest.mark.parametrize("template", ["plain", "Q: {input}\\nA:"])
def test_an_instruction_precedes_its_input_which_may_be_empty(tmp_path, template):
    rows = [{name.title(): value for name, value in row.items()} for row in ROWS]
    store, notes = stored(tmp_path, rows, prompt_template=template)
    assert [store.text("input", row) for row in (0, 5)] == ["add 0\n0 {x}", "add 5"]
    prompt, _ = parts(byte_tokenizer(), *store.examples([5], {}))
    assert prompt == ("<bos>Input: add 5\nOutput:" if template == "plain" else "<bos>Q: add 5\nA:")
    assert not any("not read" in note for note in notes)


def test_a_template_is_filled_from_columns_which_may_be_empty(tmp_path):
    rows = [{**row, "context": row["instruction"].upper()} for row in ROWS]
    store, notes = stored(tmp_path, rows, prompt_template="{context}; {input}{{}}\\n{context} ={output}.")
    shown = [parts(byte_tokenizer(), one) for one in store.examples([1, 5], {})]
    assert shown[0] == ("<bos>ADD 1; 1 {x}{}\nADD 1 =", "1.<eos>")
    assert shown[1][0] == "<bos>ADD 5; {}\nADD 5 ="
    (unread,) = [note for note in notes if "not read" in note]
    check_message(
        unread, "texts in instruction of", "rows.jsonl are not read", "--prompt_template 'Q: {instruction}"
    )


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (
            "{Instruction} {input}",
            ("names {Instruction}", "is no column", "it has input, instruction, output, task"),
        ),
        ("{instruction} {0} {input}", ("names {0}", "is no column")),
        ("{input.upper} {input}", ("names {input.upper}", "is no column")),
        ("{input} {target}", ("names {target}, the column of the answer", "write {output}")),
    ],
)
def test_names_in_a_template_that_are_no_columns_are_refused(tmp_path, template, parts):
    rows = [{**row, "target": row["output"]} for row in ROWS]
    settings = {"prompt_template": template, "output_column": "target" if "target" in template else None}
    check_message(refusal(stored, tmp_path, rows if settings["output_column"] else ROWS, **settings), *parts)


def test_an_adapted_model_answers_rows_with_the_columns_of_its_template(llama, tmp_path, capsys):
    """The template is stored with the model; a text alone, or a row without a column, is refused."""
    template, folder = "{instruction}|{input}\\n", tmp_path / "adapted"
    settings = {
        "task_type": "causal_lm",
        "prompt_template": template,
        "inner_steps": 1,
        "early_stopping": False,
    }
    support = write_rows(tmp_path / "support.jsonl", ROWS[:4])
    adapted = fmmeta.adapt(str(llama), str(support), query=ROWS[4:], output_dir=folder, **settings)
    assert [one.input for one in adapted.predictions] == [f"add {i}|\n" for i in range(4, 8)]
    loaded, row = fmmeta.load(folder), {"instruction": "add 5", "input": ""}
    (answer,) = loaded.predict([row], max_new_tokens=1)
    assert answer.input == "add 5|\n"
    for one in ("add 5", {"input": "5"}):
        check_message(refusal(loaded.predict, [one]), "texts[0]: ", "{instruction}", "no column of the data")
    file = write_rows(tmp_path / "new.csv", [row])
    predict.run(PredictConfig(str(folder), input=str(file), max_new_tokens=1))
    assert json.loads(capsys.readouterr().out)["input"] == "add 5|\n"
    (tmp_path / "new.txt").write_text("add 5\n")
    check_message(
        refusal(predict.run, PredictConfig(str(folder), input=str(tmp_path / "new.txt"))),
        "{instruction}",
        "no column of",
        "new.txt:1: ",
        "it has input",
    )
    assert "5 + 1|5 + 1" in (folder / "README.md").read_text()


def test_classification_has_no_prompt():
    check_message(
        refusal(Config, prompt_template="chat"),
        "prompt_template=chat",
        "task_type=classification",
        "leave it out",
    )


def test_a_run_with_a_chat_template_stores_it(llama, tmp_path):
    model, data = shutil.copytree(llama, tmp_path / "llama"), write_pairs(tmp_path / "pairs.jsonl")
    tokenizer, seen = byte_tokenizer(), set()
    tokenizer.chat_template = ENDED
    tokenizer.save_pretrained(model)
    for template in ("plain", "chat"):
        config = Config(
            model_name_or_path=str(model),
            dataset=[str(data)],
            task_type="causal_lm",
            prompt_template=template,
            outer_steps=1,
            eval_episodes=0,
            save_steps=0,
            output_dir=str(tmp_path / template),
        )
        result = MetaTrainer(config).train()
        stored = json.loads((result.output_dir / "model" / "fmmeta.json").read_text())
        assert stored["prompt_template"] == template
        seen.add(result.log_history[0]["tokens"])
    assert len(seen) == 2


def test_a_chat_template_is_suggested_where_prompts_are_plain_by_default(llama, tmp_path):
    said = list[str]()
    folder = shutil.copytree(llama, tmp_path / "model")
    tokenizer = SimpleNamespace(chat_template=ENDED)
    settings: dict[str, Any] = {"task_type": "causal_lm", "model_name_or_path": str(folder)}
    suggest_chat(Config(**settings), tokenizer, said.append)
    check_message(said.pop(), "prompt_template=plain", "--prompt_template chat")
    (folder / "fmmeta.json").write_text('{"prompt_template": "plain"}')
    suggest_chat(Config(**settings), tokenizer, said.append)
    assert said == []


def test_rows_that_fill_max_length_are_counted():
    pairs = Config(task_type="causal_lm", max_length=32)
    check_message(full_rows(pairs, [32, 31, 32]), "2 of 3 rows", "max_length=32", "raise --max_length")
    check_message(full_rows(Config(max_length=32), [32]), "1 of 1 row", "max_length=32", "lose their end")
    assert full_rows(pairs, [31]) == full_rows(Config(max_length=32), [31]) == ""


@pytest.mark.parametrize(
    ("template", "expected"), [("plain", '"Input: 5 + 1\\nOutput:"'), ("chat", '"content": "5 + 1"')]
)
def test_a_model_card_shows_the_prompt(template, expected, tmp_path):
    config = Config(task_type="causal_lm", prompt_template=template)
    write_card(tmp_path, Content("tiny", config, "model", adapter=False, summary="", facts={}))
    assert expected in (tmp_path / "README.md").read_text()
