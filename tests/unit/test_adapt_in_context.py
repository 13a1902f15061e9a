"""Adapted language models that keep their examples in the prompt, against plain PyTorch."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.nn.functional as F

import fmmeta
from fmmeta.adaptation import predict
from fmmeta.evaluation.settings import PredictConfig
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.meta.algorithms.baselines import others_before_each
from fmmeta.tasks.batching import IGNORE, Example
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeRows
from tests.support.helpers import refusal, write_rows
from tests.support.messages import check_message
from tests.support.models import WORDS

PAIRS = [(word, word[0]) for word in WORDS[:3]]
INPUTS = WORDS[3:6]
BOS = byte_tokenizer().bos_token_id
SETTINGS = {"task_type": "causal_lm", "max_length": 32}
LOOP = {"inner_steps": 2, "inner_lr": 0.1, "early_stopping": False, "method": "finetune+in_context"}


def tokens_of(text, answer=None):
    """Tokens and labels of a pair, or of an input."""
    tokenizer = byte_tokenizer()
    before = tokenizer(f"Input: {text}\nOutput:", add_special_tokens=False)["input_ids"]
    after = tokenizer(f" {answer}", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return (before + after, [IGNORE] * len(before) + after) if answer else (before, [])


def oracle(folder, steps=0):
    """The model after `steps` of SGD at 0.1 on the pairs in three orders: the mean loss of the answer tokens
    but those of the first pair.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second, third = (tokens_of(*pair) for pair in PAIRS)
    orders = [(second, third, first), (third, first, second), (first, second, third)]
    for _ in range(steps):
        losses = []
        for order in orders:
            ids = [BOS, *(token for row, _ in order for token in row)]
            labels = [IGNORE] * (1 + len(order[0][0])) + [label for _, row in order[1:] for label in row]
            logits = model(torch.tensor([ids])).logits[0, :-1]
            losses.append(
                F.cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=IGNORE, reduction="sum")
            )
            count = sum(label != IGNORE for label in labels)
        optimizer.zero_grad()
        (torch.stack(losses).sum() / (count * len(orders))).backward()
        optimizer.step()
    return model


def answers_of(model, most=3):
    """Greedy answers to INPUTS, all pairs before each."""
    tokenizer, found = byte_tokenizer(), []
    for text in INPUTS:
        pairs = [token for pair in PAIRS for token in tokens_of(*pair)[0]]
        ids = [BOS, *pairs, *tokens_of(text)[0]]
        out = model.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False, pad_token_id=0)
        found.append(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True).strip())
    return found


@pytest.mark.parametrize(
    ("settings", "steps"), [({"method": "in_context"}, 0), (LOOP, 2)], ids=["in_context", "both"]
)
def test_answers_are_those_of_a_plain_loop_with_the_examples_in_the_prompt(llama, tmp_path, settings, steps):
    adapted = fmmeta.adapt(llama, PAIRS, output_dir=tmp_path / "out", **SETTINGS, **settings)
    model = oracle(llama, steps)
    assert adapted.inner_steps == steps
    for name, param in adapted.loaded.worker.learner.hf.named_parameters():
        assert torch.allclose(param, model.get_parameter(name), atol=1e-5), name
    wanted = answers_of(model)
    assert [one.output for one in adapted.predict(INPUTS, max_new_tokens=3)] == wanted
    loaded = fmmeta.load(tmp_path / "out")
    assert [one.output for one in loaded.predict(INPUTS, max_new_tokens=3)] == wanted
    assert [one.output for one in loaded.predict(INPUTS[:1], max_new_tokens=3)] == wanted[:1]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| prompt | the examples precede every input |" in card
    assert "2 steps of sgd" in card if steps else "inner loop" not in card
    before = "".join(f"Input: {pair[0]}\nOutput: {pair[1]}{byte_tokenizer().eos_token}" for pair in PAIRS)
    assert prompt_in(tmp_path / "out") == f"{before}Input: 5 + 1\nOutput:"


def prompt_in(folder):
    """The prompt in the card of an adapted model."""
    lines = (folder / "README.md").read_text().splitlines()
    (call,) = [line for line in lines if line.startswith("print(pipe(")]
    return json.loads(call[len("print(pipe(") : call.index(", return_full_text")])


def test_the_steps_are_chosen_with_prompts_and_adapters_share_a_pass(llama, tmp_path):
    """Several tasks with LoRA adapters: folders and answers are those of single commands."""
    tasks = {"first": PAIRS, "last": [(word, word[-1]) for word in WORDS[2:6]]}
    settings = {**SETTINGS, "inner_lr": 0.01, "inner_steps": 2, "lora_r": 2, "method": "finetune+in_context"}
    together = fmmeta.adapt_many(llama, tasks, output_dir=tmp_path / "many", **settings)
    assert not together.failed
    bare = fmmeta.adapt(
        llama, PAIRS, output_dir=tmp_path / "many" / "bare", **{**settings, "method": "finetune"}
    )
    rows = [{"text": text, "adapter": "bare"} for text in INPUTS]
    wanted = [one.output for one in bare.predict(INPUTS, max_new_tokens=3)]
    for name, pairs in tasks.items():
        single = fmmeta.adapt(llama, pairs, **settings)
        assert single.left_out is not None
        assert single.inner_steps == together[name].inner_steps
        wanted += [one.output for one in single.predict(INPUTS, max_new_tokens=3)]
        assert [one.output for one in together[name].predict(INPUTS, max_new_tokens=3)] == wanted[-3:]
        rows += [{"text": text, "adapter": name} for text in INPUTS]
    assert any(wanted)
    answers = tmp_path / "answers.jsonl"
    inputs = write_rows(tmp_path / "rows.jsonl", rows)
    flags = {"adapters": str(tmp_path / "many"), "input": str(inputs), "output": str(answers)}
    predict.run(PredictConfig(**flags, max_new_tokens=3))
    assert [json.loads(line)["output"] for line in answers.read_text().splitlines()] == wanted


def test_examples_without_room_are_left_out_of_the_prompt(llama, terminal, capsys):
    """The model has 128 positions: four of the pairs fit before an input, with room for their answers."""
    pairs = [*PAIRS, *((word, word[0]) for word in WORDS[6:9])]
    adapted = fmmeta.adapt(llama, pairs, method="in_context", quiet=False, **SETTINGS)
    model, whole = adapted.loaded, adapted.loaded.prompt_examples
    examples = model.encode([{"input": INPUTS[0]}], {})
    (ids,), (short,) = (model.prompts_of(whole, examples, most) for most in (64, 1))
    kept = [token for pair in pairs[2:] for token in tokens_of(*pair)[0]]
    assert [*ids] == [*short] == [BOS, *kept, *tokens_of(INPUTS[0])[0]]
    assert len(ids) + 3 <= 128 < len(ids) + len(tokens_of(*pairs[1])[0])
    check_message(capsys.readouterr().out.strip().splitlines()[-1], "4 of 6 examples", "left out")
    assert adapted.predict(INPUTS, max_new_tokens=500)  # as many as there are positions
    few = fmmeta.adapt(llama, PAIRS, method="in_context", quiet=False, **SETTINGS)
    assert "left out" not in capsys.readouterr().out
    assert few.inner_steps == 0


def test_a_folder_keeps_its_method_and_its_inner_loop(llama, tmp_path):
    """An adapted folder is adapted again as before, or by an inner loop; merged/ answers as adapters do."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    rows = [("a", "b"), ("c", "d")]
    fmmeta.adapt(llama, PAIRS, output_dir=first, method="in_context", **SETTINGS)
    again = fmmeta.adapt(first, rows, output_dir=second)
    assert [len(again.loaded.prompt_examples), again.inner_steps] == [2, 0]
    loop = fmmeta.adapt(second, PAIRS, method="finetune", early_stopping=False)
    assert [len(loop.loaded.prompt_examples), loop.inner_steps] == [0, 5]
    settings = {**SETTINGS, **LOOP, "inner_lr": 0.01, "lora_r": 2, "lora_merge": True}
    adapted = fmmeta.adapt(llama, PAIRS, output_dir=third, **settings)
    wanted = [one.output for one in adapted.predict(INPUTS, max_new_tokens=3)]
    assert any(wanted)
    for folder in (third, third / "merged"):
        assert [one.output for one in fmmeta.load(folder).predict(INPUTS, max_new_tokens=3)] == wanted
    stored = json.loads((third / "merged" / "fmmeta.json").read_text())
    assert stored["method"] == "finetune+in_context"


def test_a_method_without_an_inner_loop_needs_no_code_that_the_model_names(llama, tmp_path):
    """fmmeta.json of a model whose inner optimizer is the user's own."""
    model = shutil.copytree(llama, tmp_path / "model")
    (model / "fmmeta.json").write_text(json.dumps({"inner_optimizer": "not_there:spec", "inner_lr": 7.0}))
    check_message(refusal(fmmeta.adapt, model, PAIRS, **SETTINGS), "inner_optimizer=not_there:spec")
    adapted = fmmeta.adapt(model, PAIRS, method="in_context", **SETTINGS)
    assert [one.output for one in adapted.predict(INPUTS, max_new_tokens=3)] == answers_of(oracle(model))


def test_tasks_that_were_adapted_by_another_method_are_not_complete(llama, tmp_path):
    model = shutil.copytree(llama, tmp_path / "model")
    fmmeta.adapt_many(model, {"a": PAIRS}, output_dir=tmp_path / "out", **SETTINGS, inner_steps=1)
    (model / "fmmeta.json").write_text(json.dumps({"method": "finetune+in_context"}))
    settings = {"output_dir": tmp_path / "out", **SETTINGS, "inner_steps": 1}
    message = refusal(fmmeta.adapt_many, model, {"a": PAIRS, "b": PAIRS}, **settings)
    check_message(message, "method finetune -> finetune+in_context", "another output_dir")
    (model / "fmmeta.json").write_text(json.dumps({"method": "zero_shot"}))  # of evaluate alone
    same = fmmeta.adapt_many(model, {"a": PAIRS}, **settings)
    assert [*same] == ["a"]


def test_the_card_of_a_chat_model_has_the_prompt_in_use(llama, tmp_path):
    """A template that begins with `bos`, which a prompt of several pairs has once."""
    model = shutil.copytree(llama, tmp_path / "model")
    template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    (model / "chat_template.jinja").write_text(template)
    adapted = fmmeta.adapt(
        model,
        PAIRS[:2],
        output_dir=tmp_path / "out",
        method="in_context",
        **{**SETTINGS, "prompt_template": "chat"},
    )
    assert prompt_in(tmp_path / "out") == "<u>river<a>r<eos><u>stone<a>s<eos><u>5 + 1<a>"
    loaded = adapted.loaded
    examples = loaded.encode([{"input": "5 + 1"}], {})
    (ids,) = loaded.prompts_of(loaded.prompt_examples, examples, 1)
    assert byte_tokenizer().decode(ids[1:]) == prompt_in(tmp_path / "out")
    assert ids[0] == BOS


def test_a_single_support_row_is_learned_without_a_prompt():
    row, query = Example([1, 10, 11], [IGNORE, IGNORE, 11]), Example([1, 30, 31], [IGNORE, IGNORE, 31])
    episode = others_before_each(EpisodeRows(Task(0, "t", "s", 1, (0,)), [row], [query]), bos_token_id=1)
    assert episode.support == [row]
    assert episode.query == [Example([1, 10, 11, 30, 31], [IGNORE] * 4 + [31])]


def test_damaged_examples_of_a_folder_are_refused(llama, tmp_path):
    fmmeta.adapt(llama, PAIRS, output_dir=tmp_path, method="in_context", **SETTINGS)
    file = tmp_path / "fmmeta.json"
    stored = json.loads(file.read_text())
    for wrong in ("text", [["one"]], [["a", 3]], {"a": 1}, [["a\ud800", "b"]]):
        stored["adapted"]["prompt_examples"] = wrong
        file.write_text(json.dumps(stored))
        check_message(refusal(fmmeta.load, tmp_path), "prompt_examples", "no pair", "adapt the model")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"inner_steps": 3}, ("inner_steps=3", "method=in_context has none", "leave it out")),
        ({"lora_r": 4}, ("lora_r=4", "trained by an inner loop", "method=in_context has none", "leave it")),
        (
            {"early_stopping": False},
            ("early_stopping=False", "is of the inner loop", "method=in_context has none", "leave it out"),
        ),
        ({"method": "prototype"}, ("method=prototype is unknown", "use finetune")),
        (
            {"task_type": "classification"},
            ("method=in_context", "task_type=classification", "use finetune"),
        ),
    ],
)
def test_settings_without_effect_on_prompts_are_refused(settings, parts, llama):
    given = {**SETTINGS, "method": "in_context", **settings}
    check_message(refusal(fmmeta.adapt, llama, PAIRS, **given), *parts)


def test_a_bound_on_answers_of_a_classifier_is_refused():
    message = refusal(fmmeta.adapt, "tiny", [("a", "b"), ("c", "d")], max_new_tokens=7)
    check_message(message, "max_new_tokens=7", "a classifier gives classes", "leave it out")
