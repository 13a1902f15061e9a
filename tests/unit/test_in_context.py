"""Prompts that hold the support set, and runs of the rules that compute with them or train nothing."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.adaptation import predict
from fmmeta.evaluation.settings import PredictConfig
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.meta.algorithms.baselines import others_before_each, prompted
from fmmeta.tasks.batching import IGNORE, Example, MicroBatch
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeRows
from fmmeta.training import final
from tests.support.episodes import objective
from tests.support.helpers import refusal, write_rows
from tests.support.messages import check_message
from tests.support.models import WORDS, with_settings, write_pairs
from tests.support.short_runs import metrics_of


def run_of(folder, **settings):
    """The result of a short run, and its table on held-out tasks."""
    fixed = {"eval_episodes": 3, "meta_batch_size": 2, "outer_steps": 2, "inner_steps": 2}
    result = MetaTrainer(Config(**{**fixed, "output_dir": str(folder / "run"), **settings})).train()
    return result, json.loads((folder / "run" / "run.json").read_text())["held_out"]


@pytest.fixture
def pairs(llama, tmp_path):
    """Settings of a small language model and its data."""
    return {
        "task_type": "causal_lm",
        "k_shot": 2,
        "num_query": 3,
        "model_name_or_path": str(llama),
        "dataset": [str(write_pairs(tmp_path / "pairs.jsonl"))],
    }


@pytest.mark.timeout(120)
def test_none_trains_nothing_and_evaluates(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(final, "choose_loop", lambda *of: final.BaselineLoop(1.0, 2))
    result, held_out = run_of(tmp_path, algorithm="none")
    assert "algorithm=none trains nothing" in capsys.readouterr().out
    assert (
        result.after == result.after_from_start == held_out["after adaptation, meta-trained"]["accuracy"][0]
    )
    assert held_out["gain"]["loss"] == [0, 0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    trained, _ = run_of(tmp_path / "other", algorithm="fomaml")
    assert trained.after_from_start == result.after  # the same episodes and inner loop


def answering(*tokens: int, answers: int = 1) -> Example:
    """A row whose last tokens are the answer."""
    return Example([*tokens], [IGNORE] * (len(tokens) - answers) + [*tokens[-answers:]])


def test_in_context_prompts_hold_the_support_set():
    support, query = [answering(1, 10, 11), answering(1, 20, 21, 22, answers=2)], answering(1, 30, 31)

    def prompt(rows, asked, **how):
        (found,) = prompted(rows, [asked], **{"bos_token_id": 1, "positions": None, **how})
        return found

    full = prompt(support, query)
    assert full.input_ids == [1, 10, 11, 20, 21, 22, 30, 31]
    assert full.labels == [IGNORE] * 7 + [31]
    assert prompt(support, query, bos_token_id=None).input_ids == [1, 10, 11, 1, 20, 21, 22, 1, 30, 31]
    chat = prompt([answering(1, 10, 1, 11)], answering(1, 30, 1, 31))  # a token that begins each turn stays
    assert chat.input_ids == [1, 10, 1, 11, 1, 30, 1, 31]
    short = prompt(support, query, positions=7)
    assert short.input_ids == [1, 20, 21, 22, 30, 31]
    assert prompt(support, query, positions=6) == short  # it fits to the last place
    assert prompt(support, query, positions=5) == query


def test_prompts_whose_support_examples_are_learned():
    """Each order once, no label on the first answer, and none on the first one that is left."""
    support, query = [answering(1, 10 * i, 10 * i + 1) for i in (1, 2, 3)], [answering(1, 70, 71)] * 4
    found = prompted(support, query, bos_token_id=1, positions=None, learn_support=True)
    assert [row.input_ids for row in found] == [
        [1, 10, 11, 20, 21, 30, 31, 70, 71],
        [1, 20, 21, 30, 31, 10, 11, 70, 71],
        [1, 30, 31, 10, 11, 20, 21, 70, 71],
        [1, 10, 11, 20, 21, 30, 31, 70, 71],
    ]
    assert found[1].labels == [IGNORE, IGNORE, IGNORE, IGNORE, 31, IGNORE, 11, IGNORE, 71]
    (short, *_) = prompted(support, query, bos_token_id=1, positions=7, learn_support=True)
    assert short.input_ids == [1, 20, 21, 30, 31, 70, 71]
    assert short.labels == [IGNORE, IGNORE, IGNORE, IGNORE, 31, IGNORE, 71]


def test_accuracy_counts_each_answer_of_a_prompt():
    """Two answers, of which one has a wrong token; a row without an answer counts as none."""
    labels = torch.tensor([[IGNORE, 3, 4, IGNORE, 5, 6], [IGNORE] * 6, [2, 3, 4, 5, 6, 7]])
    likeliest = torch.tensor([[3, 4, 0, 5, 7, 0], [0] * 6, [3, 4, 5, 6, 7, 0]])  # of the next token
    logits = F.one_hot(likeliest, 8).float()
    _, right, answers = objective(
        logits, MicroBatch({"input_ids": labels}, {"labels": labels}, torch.full((3,), 0.25))
    )
    assert (right.item(), answers.item()) == (2, 3)


@pytest.mark.timeout(120)
def test_a_meta_icl_run_lowers_the_loss_in_context_and_evaluate_uses_prompts(tmp_path, pairs):
    """The model stores its method and no inner loop; support sets have no loss. A run that learns support
    examples too is evaluated on queries alone.
    """
    own = {"algorithm": "meta_icl", "inner_steps": None, "outer_steps": 4, "outer_lr": 0.01, **pairs}
    _, held_out = run_of(tmp_path, **own, logging_steps=1)
    start, trained = (f"after adaptation, {name}" for name in ("weights at the start", "meta-trained"))
    assert held_out[trained]["loss"][0] < 0.95 * held_out[start]["loss"][0]
    model, (data,) = tmp_path / "run/model", pairs["dataset"]
    stored = json.loads((model / "fmmeta.json").read_text())
    assert stored["method"] == "in_context"
    assert "inner_steps" not in stored
    assert stored["inner_rates"] is None
    assert "| learning | support set in the prompt |" in (model / "README.md").read_text()
    lines = metrics_of(tmp_path / "run")
    assert all(line["support_loss"] is None and line["query_loss"] > 0 for line in lines)
    for asked, methods in (({}, ["in_context"]), ({"method": ["finetune"]}, ["finetune"])):
        found = fmmeta.evaluate(str(model), data, k_shot=2, num_query=3, episodes=3, **asked)
        assert [cell["method"] for cell in found["cells"]] == methods
    _, every_answer = run_of(tmp_path / "every answer", **own, loss_on_support=True)
    assert every_answer[start] == held_out[start]
    assert every_answer[trained] != held_out[trained]


@pytest.mark.timeout(120)
def test_protonet_evaluates_by_its_prototypes(tmp_path):
    _, held_out = run_of(tmp_path, algorithm="protonet", inner_steps=None)
    assert held_out["before adaptation, meta-trained"] == held_out["after adaptation, meta-trained"]
    assert held_out["after adaptation, meta-trained"]["accuracy"][0] > 0.2


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


def outputs(model, texts=INPUTS):
    return [one.output for one in model.predict(texts, max_new_tokens=3)]


def oracle(folder, steps=0):
    """The model after `steps` of SGD at 0.1 on the pairs in three orders: the mean loss of the answer tokens
    but those of the first pair.
    """
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second, third = (tokens_of(*pair) for pair in PAIRS)
    orders = [(second, third, first), (third, first, second), (first, second, third)]
    for _ in range(steps):
        losses = []
        for order in orders:
            ids = [BOS, *(token for row, _ in order for token in row)]
            skipped = [IGNORE] * len(order[0][0])
            labels = torch.tensor(skipped + [label for _, row in order[1:] for label in row])
            logits = model(torch.tensor([ids])).logits[0, :-1]
            losses.append(F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none").sum())
            count = int((labels != IGNORE).sum())
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
    wanted, loaded = answers_of(model), fmmeta.load(tmp_path / "out")
    assert outputs(adapted) == outputs(loaded) == wanted
    assert outputs(loaded, INPUTS[:1]) == wanted[:1]
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
    many = tmp_path / "many"
    together = fmmeta.adapt_many(llama, tasks, output_dir=many, **settings)
    assert not together.failed
    bare = fmmeta.adapt(llama, PAIRS, output_dir=many / "bare", **{**settings, "method": "finetune"})
    wanted = outputs(bare)
    for name, pairs in tasks.items():
        single = fmmeta.adapt(llama, pairs, **settings)
        assert single.left_out is not None
        assert single.inner_steps == together[name].inner_steps
        assert outputs(together[name]) == outputs(single)
        wanted += outputs(single)
    assert any(wanted)
    rows = [{"text": text, "adapter": name} for name in ("bare", *tasks) for text in INPUTS]
    answers, inputs = tmp_path / "answers.jsonl", write_rows(tmp_path / "rows.jsonl", rows)
    flags = {"adapters": str(many), "input": str(inputs), "output": str(answers)}
    predict.run(PredictConfig(**flags, max_new_tokens=3))
    assert [json.loads(line)["output"] for line in answers.read_text().splitlines()] == wanted


def test_examples_without_room_are_left_out_of_the_prompt(llama, terminal, capsys):
    """The model has 128 positions: four of the pairs fit before an input, with room for their answers."""
    pairs = [*PAIRS, *((word, word[0]) for word in WORDS[6:9])]
    few = fmmeta.adapt(llama, PAIRS, method="in_context", quiet=False, **SETTINGS)
    assert few.inner_steps == 0
    assert "left out" not in capsys.readouterr().out
    adapted = fmmeta.adapt(llama, pairs, method="in_context", quiet=False, **SETTINGS)
    model = adapted.loaded
    examples = model.encode([{"input": INPUTS[0]}], {})
    (ids,), (short,) = (model.prompts_of(model.prompt_examples, examples, most) for most in (64, 1))
    kept = [token for pair in pairs[2:] for token in tokens_of(*pair)[0]]
    assert [*ids] == [*short] == [BOS, *kept, *tokens_of(INPUTS[0])[0]]
    assert len(ids) + 3 <= 128 < len(ids) + len(tokens_of(*pairs[1])[0])
    check_message(capsys.readouterr().out.strip().splitlines()[-1], "4 of 6 examples", "left out")
    assert adapted.predict(INPUTS, max_new_tokens=500)  # as many as there are positions


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
    wanted = outputs(fmmeta.adapt(llama, PAIRS, output_dir=third, **settings))
    assert any(wanted)
    for folder in (third, third / "merged"):
        assert outputs(fmmeta.load(folder)) == wanted
    stored = json.loads((third / "merged" / "fmmeta.json").read_text())
    assert stored["method"] == "finetune+in_context"


def test_a_method_without_an_inner_loop_needs_no_code_that_the_model_names(llama, tmp_path):
    """fmmeta.json of a model whose inner optimizer is the user's own."""
    model = with_settings(llama, tmp_path / "model", inner_optimizer="not_there:spec", inner_lr=7.0)
    check_message(refusal(fmmeta.adapt, model, PAIRS, **SETTINGS), "inner_optimizer=not_there:spec")
    assert fmmeta.adapt(model, PAIRS, method="in_context", **SETTINGS).inner_steps == 0


def test_tasks_that_were_adapted_by_another_method_are_not_complete(llama, tmp_path):
    model = with_settings(llama, tmp_path / "model")
    settings = {"output_dir": tmp_path / "out", **SETTINGS, "inner_steps": 1}
    fmmeta.adapt_many(model, {"a": PAIRS}, **settings)
    (model / "fmmeta.json").write_text(json.dumps({"method": "finetune+in_context"}))
    message = refusal(fmmeta.adapt_many, model, {"a": PAIRS, "b": PAIRS}, **settings)
    check_message(message, "method finetune -> finetune+in_context", "another output_dir")
    (model / "fmmeta.json").write_text(json.dumps({"method": "zero_shot"}))  # of evaluate alone
    assert [*fmmeta.adapt_many(model, {"a": PAIRS}, **settings)] == ["a"]


def test_the_card_of_a_chat_model_has_the_prompt_in_use(llama, tmp_path):
    """A template that begins with `bos`, which a prompt of several pairs has once."""
    model, out = shutil.copytree(llama, tmp_path / "model"), tmp_path / "out"
    (model / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    settings = {**SETTINGS, "method": "in_context", "prompt_template": "chat"}
    loaded = fmmeta.adapt(model, PAIRS[:2], output_dir=out, **settings).loaded
    assert prompt_in(out) == "<u>river<a>r<eos><u>stone<a>s<eos><u>5 + 1<a>"
    examples = loaded.encode([{"input": "5 + 1"}], {})
    (ids,) = loaded.prompts_of(loaded.prompt_examples, examples, 1)
    assert byte_tokenizer().decode(ids[1:]) == prompt_in(out)
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
