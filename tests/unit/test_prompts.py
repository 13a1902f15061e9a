"""Prompts: input and target texts for plain texts, format strings and chat templates; texts are never longer
than the positions of the model.
"""

import json
import shutil
from datetime import datetime
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.adaptation import predict
from fmmeta.checkpoint.model_card import Content, write_card
from fmmeta.evaluation.settings import PredictConfig
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.load import describe, fitted, load_tokenizer, max_positions, suggest_chat
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
from fmmeta.tasks.data.turns import as_text
from fmmeta.tasks.sources.load import load_sources
from tests.support.helpers import write_rows
from tests.support.messages import check_message, refusal
from tests.support.models import WORDS, save, tiny, write_pairs

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
    turns = ["<|im_start|>", "<|im_end|>", "<|end|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": turns})
    tokenizer.chat_template = template
    return tokenizer


def encoded(tokenizer, text: str, answer: str = "4", length: int = 300, template: str = "chat") -> Example:
    return encode_pairs(tokenizer, [text], [answer], length, template)[0]


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
        ("Q: {input}\nA: {output} .<eos>", "Q: 2 + 2\nA:", " 4 ."),
    ],
)
def test_text_prompts(template, prompt, answer):
    """The text and the answer are in their places, and braces in them are plain text. A format string may
    write the end; texts around an answer are no part of what is read from the learned tokens.
    """
    tokenizer = byte_tokenizer()
    for text, output in (("2 + 2", "4"), ("{output} {input} {}", "{input}")):
        row = encoded(tokenizer, text, output, 96, template)
        wanted = prompt.replace("2 + 2", text), answer.replace("4", output)
        assert parts(tokenizer, row) == (f"<bos>{wanted[0]}", f"{wanted[1]}<eos>")
        assert answer_reader(tokenizer, template, ()).text(row.input_ids[len(row.prompt) :]) == output


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
    special = [AddedToken(one.lstrip("~"), special=one[0] != "~", normalized=False) for one in more]
    tokenizer.add_tokens(special)
    tokenizer.chat_template = template
    row = encoded(tokenizer, "2 + 2", " 4")
    assert parts(tokenizer, row)[1] == learned
    assert row.prompt == encoded(tokenizer, "2 + 2", "").prompt
    if name != "end of the user's turn":  # an answer cannot follow its generation prompt
        turns = [{"role": "user", "content": "2 + 2"}]
        asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert row.prompt == asked
    reader, ids = answer_reader(tokenizer, "chat", ()), list(row.input_ids)[len(row.prompt) :]
    assert ids[-1] in reader.ends
    assert reader.text(ids) == reader.text([*ids, 7, 8]) == "4"
    assert CausalLearner.present(ids, (), {}, reader) == "4"


def test_end_tokens_are_those_of_checkpoint_tokenizer_and_template():
    tokenizer = byte_tokenizer()
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


TURNS = [
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 2"},
]


def rendered(tokenizer, turns, **settings) -> str:
    """A conversation by transformers; a template's own clock runs on."""
    text = tokenizer.apply_chat_template(turns, tokenize=False, enable_thinking=False, **settings)
    return text.replace(datetime.now().strftime("%Y-%m-%d"), "2024-07-26")


@pytest.mark.parametrize("name", CHATS)
def test_chat_prompts_equal_the_rendered_template(name):
    """Earlier turns are part of the prompt."""
    template, head, middle, answer = CHATS[name]
    tokenizer = chat_tokenizer(template)
    row = encoded(tokenizer, "2 + 2")
    assert parts(tokenizer, row) == (f"{head}2 + 2{middle}", answer)
    whole = rendered(tokenizer, [TURNS[2], {"role": "assistant", "content": "4"}]).rstrip()
    assert tokenizer.decode(row.input_ids) == whole
    for begin in ("\n  {{ '' }}", "  {% set a = 1 %}\n\n  {{ '' }}"):
        spaced = chat_tokenizer(begin + template)
        assert spaced.decode(encoded(spaced, "2 + 2").input_ids) == f"\n  {whole}"
        assert rendered(spaced, TURNS[2:]).startswith("\n  <")
    prompts = [parts(tokenizer, encoded(tokenizer, as_text(turns))) for turns in (TURNS[2:], TURNS)]
    wanted = [rendered(tokenizer, turns, add_generation_prompt=True) for turns in (TURNS[2:], TURNS)]
    assert prompts == [(prompt, answer) for prompt in wanted]


def test_the_prompt_has_the_tokens_that_it_has_without_an_answer():
    """A vocabulary that joins across the seam would give a prompt that no model gets."""
    vocabulary = {token: i for i, token in enumerate([*">ab<:", ":a", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(":", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}:{% else %}>{% endif %}{% endfor %}"
    )
    row = encoded(fast, "b", "a", 9)
    assert (list(row.input_ids), list(row.labels)) == ([2, 4, 1, 0, 6], [IGNORE, IGNORE, 1, 0, 6])


@pytest.mark.parametrize("max_length", [25, 27, 30, 45])
def test_long_chats_lose_the_start_of_the_input_and_keep_the_template(max_length):
    tokenizer, text = chat_tokenizer(ENDED), "a question much too long to fit"
    row = encoded(tokenizer, text, "yes", max_length)
    prompt, answer = parts(tokenizer, row)
    assert len(row.input_ids) == min(max_length, 8 + 2 + len(text) + 5)
    assert answer == "yes<|end|><eos>"
    kept = prompt.removeprefix("<|user|>").removesuffix("<|end|><|assistant|>")
    assert text.endswith(kept)
    assert len(prompt) - len(kept) == len("<|user|><|end|><|assistant|>")


def test_long_conversations_lose_their_earliest_turns_and_long_answers_their_end():
    tokenizer, whole = chat_tokenizer(ENDED), as_text(TURNS)
    row = encoded(tokenizer, whole, length=len(encoded(tokenizer, whole).input_ids) - 1)
    assert row == encoded(tokenizer, "2 + 2")
    cut = encoded(tokenizer, whole, length=len(row.input_ids) - 1)
    assert parts(tokenizer, cut)[0] == parts(tokenizer, row)[0].replace("2 + 2", " + 2")
    row = encoded(tokenizer, "why", "because of many things", 14)
    assert parts(tokenizer, row) == ("<|user|><|end|><|assistant|>", "beca")


@given(st.text(max_size=40), st.text(max_size=20), st.integers(12, 60))
def test_no_chat_exceeds_max_length(text, output, max_length):
    row = encoded(chat_tokenizer(ENDED), text, output, max_length)
    assert len(row.input_ids) == len(row.labels) <= max_length
    assert row.label_tokens >= 1


UNUSABLE = ["prompt_template=chat", "the tokenizer's chat template"]


@pytest.mark.parametrize(
    ("template", "length", "expected"),
    [
        (None, 64, ["prompt_template=chat", "needs a chat template", "use plain or a format string"]),
        ("{{ raise_exception('only pictures') }}", 64, [*UNUSABLE, "use plain or a format"]),
        ("{{ messages[0].content }}", 64, [*UNUSABLE, "use plain or a format"]),
        ("{% if %}", 64, UNUSABLE),
        (ENDED, 10, ["max_length=10", "10 tokens", "raise it"]),
    ],
)
def test_chat_templates_that_cannot_be_used_are_refused(template, length, expected):
    check_message(refusal(encoded, chat_tokenizer(template), "a", "b", length), *expected)


def test_a_pair_of_texts_has_the_separator_of_the_tokenizer():
    tokenizer = byte_tokenizer()
    plain = encode_texts(tokenizer, ["a\nb"], 32)
    assert encode_texts(tokenizer, ["a [SEP] b"], 32) == plain
    tokenizer.add_special_tokens({"sep_token": "</s>"})
    assert encode_texts(tokenizer, ["a [SEP] b"], 32) == encode_texts(tokenizer, ["a </s> b"], 32) != plain


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
    """Of language models; classification has no prompt."""
    named = f"prompt_template={template}"
    message = refusal(Config, task_type="causal_lm", prompt_template=template)
    check_message(message, named, "write one such as 'Q: {input}\\nA")
    message = refusal(Config, prompt_template=template)
    check_message(message, named, "task_type=classification", "leave it out")


SHORT = {"outer_steps": 1, "meta_batch_size": 1, "inner_steps": 1, "eval_episodes": 0, "save_steps": 0}


def stored_settings(model):
    return json.loads((model / "fmmeta.json").read_text())


ROWS = [
    {"task": f"t{i % 2}", "instruction": f"add {i}", "input": f"{i} {{x}}" if i < 4 else "", "output": f"{i}"}
    for i in range(8)
]


def stored(tmp_path, rows=ROWS, **settings) -> tuple[TokenStore, list[str]]:
    """The store of a training run on a file of pairs, and what it says."""
    data, notes = [str(write_rows(tmp_path / "rows.jsonl", rows))], list[str]()
    config = Config(task_type="causal_lm", dataset=data, k_shot=1, num_query=1, **settings)
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
    ("template", "column", "parts"),
    [
        (
            "{Instruction} {input}",
            "output",
            ["names {Instruction}", "is no column", "it has input, instruction, output, target, task"],
        ),
        ("{instruction} {0} {input}", "output", ["names {0}", "is no column"]),
        ("{input.upper} {input}", "output", ["names {input.upper}", "is no column"]),
        ("{input} {target}", "target", ["names {target}, the column of the answer", "write {output}"]),
    ],
)
def test_names_in_a_template_that_are_no_columns_are_refused(tmp_path, template, column, parts):
    rows = [{**row, "target": row["output"]} for row in ROWS]
    message = refusal(stored, tmp_path, rows, prompt_template=template, output_column=column)
    check_message(message, *parts)


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
    (tmp_path / "new.txt").write_text("add 5\n")
    files = [str(write_rows(tmp_path / "new.csv", [row])), str(tmp_path / "new.txt")]
    of_table, of_text = (PredictConfig(str(folder), input=file, max_new_tokens=1) for file in files)
    predict.run(of_table)
    assert json.loads(capsys.readouterr().out)["input"] == "add 5|\n"
    check_message(
        refusal(predict.run, of_text), "{instruction}", "no column of", "new.txt:1: ", "it has input"
    )
    assert "5 + 1|5 + 1" in (folder / "README.md").read_text()


def test_a_run_with_a_chat_template_stores_it(llama, tmp_path):
    model, data = shutil.copytree(llama, tmp_path / "llama"), write_pairs(tmp_path / "pairs.jsonl")
    tokenizer, seen = byte_tokenizer(), set()
    tokenizer.chat_template = ENDED
    tokenizer.save_pretrained(model)
    given = {"task_type": "causal_lm", "model_name_or_path": str(model), "dataset": [str(data)], **SHORT}
    for template in ("plain", "chat"):
        config = Config(**given, prompt_template=template, output_dir=str(tmp_path / template))
        result = MetaTrainer(config).train()
        assert stored_settings(result.output_dir / "model")["prompt_template"] == template
        seen.add(result.log_history[0]["tokens"])
    assert len(seen) == 2


def test_a_chat_template_is_suggested_where_prompts_are_plain_by_default(tmp_path):
    said, tokenizer = list[str](), SimpleNamespace(chat_template=ENDED)
    config = Config(task_type="causal_lm", model_name_or_path=str(tmp_path))
    suggest_chat(config, tokenizer, said.append)
    check_message(said.pop(), "prompt_template=plain", "--prompt_template chat")
    (tmp_path / "fmmeta.json").write_text('{"prompt_template": "plain"}')
    suggest_chat(config, tokenizer, said.append)
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


LONG = " ".join(WORDS * 4)
PAIRS = [(f"{word} {place} {LONG}", f"class {word}") for word in WORDS[:6] for place in range(6)]


@pytest.mark.parametrize(
    ("family", "kind", "most"),
    [("bert", "classification", 64), ("roberta", "classification", 63), ("gpt2", "causal_lm", 64)],
)
def test_every_command_stays_within_the_positions(tmp_path, capsys, family, kind, most):
    """A length given by a flag is refused, the default is lowered and stored with the model. BERT; RoBERTa,
    which keeps a position for padding; GPT-2, with other names.
    """
    names = ("input", "output", "task") if kind == "causal_lm" else ("text", "label", "group")
    pairs = [dict(zip(names, (*pair, pair[1]), strict=True)) for pair in PAIRS]
    rows, out = write_rows(tmp_path / "rows.jsonl", pairs), tmp_path / "out"
    folder = save(tiny(family, num_hidden_layers=1, max_position_embeddings=64), tmp_path / family)
    byte_tokenizer(512).save_pretrained(folder)
    small = {"n_way": 5 if kind == "causal_lm" else 2, "k_shot": 1, "num_query": 1, "task_type": kind}
    run = Config(
        **small, **SHORT, model_name_or_path=str(folder), dataset=[str(rows)], output_dir=str(out / "run")
    )
    given, adapt = (folder, PAIRS[:12]), {"task_type": kind, "inner_steps": 1, "early_stopping": False}
    adapted = fmmeta.adapt(*given, output_dir=out / "task", **adapt)
    assert len(adapted.predict([LONG], max_new_tokens=1)) == 1
    assert predict.load(PredictConfig(str(out / "task"))).predict([LONG])
    assert fmmeta.evaluate(folder, rows, eval_split="train", **small, episodes=1, inner_steps=1)
    if family == "bert":
        MetaTrainer(run).train()
        assert f"max_length {most}: {folder} " in capsys.readouterr().out
        assert stored_settings(out / "run" / "model")["max_length"] == most
    assert stored_settings(out / "task")["max_length"] == most
    for call in (
        lambda **of: fmmeta.adapt(*given, task_type=kind, **of),
        lambda **of: fmmeta.evaluate(folder, rows, task_type=kind, **of),
        lambda **of: predict.load(PredictConfig(str(out / "task"), **of)),
        lambda **of: MetaTrainer(run.but(**of)).train(),
    ):
        check_message(refusal(call, max_length=100), "max_length=100", f"; use {most} or less")


def test_a_length_that_fits_and_a_model_without_a_limit_are_unchanged(bert):
    config = Config(model_name_or_path=str(bert), max_length=20)
    assert fitted(config, describe(config).hf_config) is config
    for unlimited in (None, -1):
        assert max_positions(SimpleNamespace(max_position_embeddings=unlimited, model_type="xlnet")) is None
