"""Answers of language models: prompts that hold the support set, losses and generated answers behind shared
prefixes, adapted models that keep their examples in the prompt, against plain PyTorch and transformers.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.adaptation import predict
from fmmeta.adaptation.model import Answer, LoadedModel, load_model
from fmmeta.common.progress import Progress
from fmmeta.common.text import rouge_l
from fmmeta.config.learners import CAUSAL_LM
from fmmeta.evaluation.command import episodes_of
from fmmeta.evaluation.settings import EvaluateConfig, PredictConfig
from fmmeta.learners import shared_prefix
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.load import fitted, max_positions
from fmmeta.learners.shared_prefix import AnswerRow, Answers
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.meta.algorithms.baselines import others_before_each, prompted
from fmmeta.metrics.language import LanguageMetrics, generate
from fmmeta.tasks.batching import IGNORE, Example, MicroBatch, collate
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeRows
from fmmeta.training import final
from tests.support.episodes import objective, without_model
from tests.support.helpers import CASES, needs_cases, refusal, write_rows
from tests.support.launch import python, train_flags
from tests.support.messages import check_message
from tests.support.models import WORDS, save_family, tiny, with_settings, write_pairs
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
    after = held_out["after adaptation, meta-trained"]["accuracy"][0]
    assert result.after == result.after_from_start == after
    assert held_out["gain"]["loss"] == [0, 0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    trained, _ = run_of(tmp_path / "other", algorithm="fomaml")
    assert trained.after_from_start == result.after  # the same episodes and inner loop


def answering(*tokens: int, answers: int = 1) -> Example:
    """A row whose last tokens are the answer."""
    return Example([*tokens], [IGNORE] * (len(tokens) - answers) + [*tokens[-answers:]])


@pytest.mark.parametrize(
    ("how", "ids"),
    [
        ({}, [1, 10, 11, 20, 21, 22, 30, 31]),
        ({"bos_token_id": None}, [1, 10, 11, 1, 20, 21, 22, 1, 30, 31]),
        ({"positions": 7}, [1, 20, 21, 22, 30, 31]),
        ({"positions": 6}, [1, 20, 21, 22, 30, 31]),  # it fits to the last place
        ({"positions": 5}, [1, 30, 31]),
    ],
)
def test_in_context_prompts_hold_the_support_set(how, ids):
    support, query = [answering(1, 10, 11), answering(1, 20, 21, 22, answers=2)], answering(1, 30, 31)
    (found,) = prompted(support, [query], **{"bos_token_id": 1, "positions": None, **how})
    assert found.input_ids == ids
    assert found.labels == [IGNORE] * (len(ids) - 1) + [31]
    chat = answering(1, 10, 1, 11)  # a token that begins each turn stays
    (found,) = prompted([chat], [answering(1, 30, 1, 31)], bos_token_id=1, positions=None)
    assert found.input_ids == [1, 10, 1, 11, 1, 30, 1, 31]


def test_prompts_whose_support_examples_are_learned():
    """Each order once, no label on the first answer, and none on the first one that is left."""
    rows = [answering(1, 10 * i, 10 * i + 1) for i in (1, 2, 3)], [answering(1, 70, 71)] * 4
    whole, cut = (prompted(*rows, bos_token_id=1, positions=most, learn_support=True) for most in (None, 7))
    assert [row.input_ids for row in (*whole, cut[0])] == [
        [1, 10, 11, 20, 21, 30, 31, 70, 71],
        [1, 20, 21, 30, 31, 10, 11, 70, 71],
        [1, 30, 31, 10, 11, 20, 21, 70, 71],
        [1, 10, 11, 20, 21, 30, 31, 70, 71],
        [1, 20, 21, 30, 31, 70, 71],
    ]
    assert whole[1].labels == [IGNORE, IGNORE, IGNORE, IGNORE, 31, IGNORE, 11, IGNORE, 71]
    assert cut[0].labels == [IGNORE, IGNORE, IGNORE, IGNORE, 31, IGNORE, 71]


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
    tokenizer, prefix = byte_tokenizer(), [token for pair in PAIRS for token in tokens_of(*pair)[0]]
    prompts = [[BOS, *prefix, *tokens_of(text)[0]] for text in INPUTS]
    answers = [plain_greedy(model, prompt, most, tokenizer.eos_token_id) for prompt in prompts]
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]


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
    check_message(
        refusal(fmmeta.adapt_many, model, {"a": PAIRS, "b": PAIRS}, **settings),
        "method finetune -> finetune+in_context",
        "another output_dir",
    )
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


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """From a family to the folder of a small model, made once."""
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda family: save_family(folder / family, family))


def model_of(folder: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def plain_losses(model: Any, rows: list[AnswerRow]) -> tuple[list[float], list[bool]]:
    """Summed losses, and whether all label tokens are the likeliest, row by row."""
    losses, right = [], []
    for row in rows:
        logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0][row.positions].detach()
        targets = torch.tensor(row.targets)
        losses.append(float(F.cross_entropy(logits, targets, reduction="sum")))
        right.append(bool((logits.argmax(-1) == targets).all()))
    return losses, right


@torch.no_grad()
def plain_greedy(model: Any, prompt: list[int], tokens: int, end: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + tokens and (len(ids) == len(prompt) or ids[-1] != end):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def some_rows() -> list[AnswerRow]:
    """Four prompts behind 30 common tokens, each with three answers of different lengths."""
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 259, (count,), generator=draw).tolist()

    prefix, rows = tokens(30), []
    for query in range(4):
        prompt = prefix + tokens(8 + query)
        for length in (1, 4, 2):
            answer = tokens(length)
            rows.append(AnswerRow.of(prompt + answer, [IGNORE] * len(prompt) + answer))
    return rows[::2] + rows[1::2]


@contextmanager
def counted(model: Any):
    """Counts the tokens that enter the model in each pass, and the positions whose logits it computes."""
    seen = SimpleNamespace(tokens=[], logits=0)

    def of_logits(_: Any, args: Any, __: Any) -> None:
        seen.logits += args[0].shape[:-1].numel()

    hooks = [
        model.get_input_embeddings().register_forward_pre_hook(
            lambda _, args: seen.tokens.append(args[0].numel())
        ),
        model.get_output_embeddings().register_forward_hook(of_logits),
    ]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.fixture
def least_saved(monkeypatch):
    """Sets the number of tokens from which on a prefix is shared; at first every prefix is."""

    def choose(tokens: int) -> None:
        monkeypatch.setattr(shared_prefix, "LEAST_SAVED", {"cpu": tokens})

    choose(0)
    return choose


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "mistral", "qwen2"])
@pytest.mark.parametrize("least", [0, 60, 10**6])
def test_losses_behind_shared_prefixes_are_those_of_complete_rows(families, family, least, least_saved):
    model, rows = model_of(families(family)), some_rows()
    least_saved(least)
    found = Answers(CausalLearner(model))
    assert found.can_share == (family not in ("mistral", "qwen2"))  # these see a window of 8 tokens
    with counted(model) as seen:
        losses, right = found.losses(rows, 5)
    expected, exact = plain_losses(model, rows)
    assert losses.tolist() == pytest.approx(expected, abs=1e-5, rel=1e-6)
    assert right.tolist() == exact
    assert seen.logits == sum(len(row.targets) for row in rows)
    share = sum(seen.tokens) / sum(len(row.ids) for row in rows)
    if found.can_share and least < 10**6:
        assert share < (0.25 if least == 0 else 0.5)
    else:
        assert share >= 1


def test_a_limit_of_tokens_holds_for_the_padded_rows_of_each_pass(families, least_saved):
    model, rows = model_of(families("llama")), some_rows()
    least_saved(10**6)
    with counted(model) as seen:
        losses, _ = Answers(CausalLearner(model)).losses(rows, 32, 100)
    assert max(seen.tokens) <= 100
    assert len(seen.tokens) == 6  # two rows of 39 to 45 tokens each
    assert losses.tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-5)


def test_rows_without_a_common_token_and_equal_rows_are_scored(families, least_saved):
    model = model_of(families("gpt2"))
    rows = [AnswerRow.of([5, 6, 7], [IGNORE, 6, 7]), AnswerRow.of([9, 6, 7, 8], [IGNORE] * 3 + [8])]
    rows += [rows[0], AnswerRow.of([5, 6, 7, 7], [IGNORE] * 3 + [7])]
    losses, _ = Answers(CausalLearner(model)).losses(rows, 32)
    assert losses.tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-5)


def test_a_loss_that_is_nan_is_no_right_answer(families, least_saved):
    model = model_of(families("llama"))
    model.get_output_embeddings().weight.data.fill_(torch.nan)
    losses, right = Answers(CausalLearner(model)).losses(some_rows(), 32)
    assert losses.isnan().all()
    assert not right.any()


def test_a_model_that_ignores_the_positions_behind_a_cache_computes_complete_rows(
    families, monkeypatch, least_saved
):
    """Its cache is of the usual kind, and its results with it are wrong."""
    model = model_of(families("gpt2"))
    forward = model.transformer.forward

    def from_zero(input_ids, **named):
        return forward(input_ids, **{**named, "position_ids": torch.arange(input_ids.shape[1])[None]})

    monkeypatch.setattr(model.transformer, "forward", from_zero)
    found, rows = Answers(CausalLearner(model)), some_rows()
    assert not found.can_share
    assert found.losses(rows, 5)[0].tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-5)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_prompts_end_below_the_length_at_which_the_rotary_table_changes(kind, least_saved):
    """Beyond it a shared prefix and the other rows of a pass would change the results of a row."""
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
        sizes = {"rope_scaling": {"type": kind, **factors}, "original_max_position_embeddings": 32}
        model = tiny("phi3", num_key_value_heads=4, initializer_range=0.5, **sizes).eval()
    else:
        sizes = {"rope_scaling": {"type": kind, "factor": 4.0}, "max_position_embeddings": 32}
        model = tiny("llama", num_key_value_heads=4, initializer_range=0.5, **sizes).eval()
    pairs = [Example(row.ids[-8:], [IGNORE] * 4 + row.ids[-4:]) for row in some_rows()[:3]]
    query = [
        Example(row.ids[:length], [IGNORE] * (length - 2) + row.ids[length - 2 : length])
        for row, length in zip(some_rows(), (3, 9, 20, 30), strict=False)
    ]
    prompts = prompted(pairs, query, None, max_positions(model.config))
    rows = [AnswerRow.of(row.input_ids, row.token_labels) for row in prompts]
    assert max(len(row.ids) for row in rows) > 24
    losses, _ = Answers(CausalLearner(model)).losses(rows, 5)
    assert losses.tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-4)
    check_message(
        refusal(fitted, Config(max_length=64), model.config),
        "max_length=64",
        "32 positions",
        "use 32 or less",
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])  # all of 128 positions
def test_generated_answers_are_the_greedy_ones_of_single_prompts(families, family, least_saved):
    """Behind a shared prefix, and of prompts of unequal length up to the last position."""
    least_saved(1)
    settings = Config(model_name_or_path=str(families(family)), task_type="causal_lm", algorithm="none")
    single, model = load_model(settings, Progress(False)), model_of(families(family))
    answer, hf = partial(generate, single.worker, single.reader), single.worker.model.hf
    shared, text = [row.ids for row in some_rows()[:5]], single.tokenizer("river " * 30)["input_ids"]
    long = [text[:length] for length in (125, 7, 127, 120, 1)]
    with counted(hf) as seen:
        found = answer(shared, 6, 3)
    assert (sum(seen.tokens) < sum(map(len, shared))) == (family != "mistral")
    found += answer(long, 6, 4)
    for prompt, text in zip([*shared, *long], found, strict=True):
        ids = plain_greedy(model, prompt, min(6, 128 - len(prompt)), single.tokenizer.eos_token_id)
        assert text == single.tokenizer.decode(ids, skip_special_tokens=True).strip()
    hf.generation_config.repetition_penalty = 5.0
    assert answer(long, 6, 4) == found[5:]
    assert hf.generation_config.repetition_penalty == 5.0
    check_message(
        refusal(answer, [[5] * 128], 6, 4),
        "max_new_tokens=6",
        "128 tokens",
        "128 positions",
        "lower --max_length",
    )
    assert answer([], 6, 4) == []


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "finetune"), *((family, "in_context") for family in ("llama", "gpt2", "mistral"))],
)
def test_scores_and_metrics_are_those_of_plain_text(families, family, method, tmp_path, least_saved):
    """After a gradient step on the support set, and behind it in the prompt."""
    least_saved(1)
    folder, data = str(families(family)), write_pairs(tmp_path / "pairs.jsonl")
    shots, loop = (2, {"inner_lr": 0.1, "inner_steps": 1}) if method == "finetune" else (1, {})
    flags: dict[str, Any] = {
        "task_type": "causal_lm",
        "method": [method],
        "num_query": 3,
        "episodes": 2,
        "metrics": ["exact_match", "rank", "options", "rouge_l"],
        "max_new_tokens": 3,
        "max_length": 60,  # no row is cut, and two fit into the model's 128 positions
    }
    results = fmmeta.evaluate(folder, data, k_shot=shots, **flags, **loop)
    settings = EvaluateConfig(model_name_or_path=folder, dataset=[str(data)], k_shot=[shots], **flags)
    tokenizer = byte_tokenizer()
    tokens = partial(tokenizer, add_special_tokens=False)
    draws = episodes_of(settings, shots, tokenizer).draws()
    for score, draw in zip(results["cells"][0]["scores"], draws, strict=True):
        model, text = model_of(folder), draw.store.text
        prefix = [tokenizer.bos_token_id]

        def prompt_of(row, text=text, prefix=prefix):
            return [*prefix, *tokens(f"Input: {text('input', row)}\nOutput:").input_ids]

        def answer_ids(answer):
            return [*tokens(f" {answer}").input_ids, tokenizer.eos_token_id]

        def nats(row, answer, model=model, prompt_of=prompt_of):
            prompt, ids = prompt_of(row), answer_ids(answer)
            logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            return F.cross_entropy(logits, torch.tensor(ids), reduction="sum")

        def mean_loss(rows, text=text, nats=nats):
            answers = [text("target", row) for row, _ in rows]
            total = sum(nats(row, answer) for (row, _), answer in zip(rows, answers, strict=True))
            return total / sum(len(answer_ids(answer)) for answer in answers)

        if method == "finetune":
            params = [*model.parameters()]
            for param, grad in zip(params, torch.autograd.grad(mean_loss(draw.support), params), strict=True):
                param.data -= 0.1 * grad
        else:
            for row, _ in draw.support:
                prefix[:] = [*prompt_of(row), *answer_ids(text("target", row))]
        wanted = dict.fromkeys(flags["metrics"], 0.0)
        for row, _ in draw.query:
            right = text("target", row)
            generated = plain_greedy(model, prompt_of(row), 3, tokenizer.eos_token_id)
            answer = tokenizer.decode(generated, skip_special_tokens=True).strip()
            known = {text("target", one) for one, _ in (*draw.support, *draw.query)}
            losses = {one: nats(row, one).item() for one in known}
            wanted["exact_match"] += (answer == right.strip()) / 3
            wanted["rouge_l"] += rouge_l(answer, right) / 3
            wanted["rank"] += (1 + sum(loss < losses[right] for loss in losses.values())) / 3
            wanted["options"] += (losses[right] == min(losses.values())) / 3
        assert score["loss"] == pytest.approx(mean_loss(draw.query).item(), rel=1e-4)
        assert score["metrics"] == pytest.approx(wanted)
    options = [score["metrics"]["options"] for score in results["cells"][0]["scores"]]
    assert results["options"]["mean"] == pytest.approx(sum(options) / 2)


def test_every_right_answer_of_a_row_counts(tmp_path, llama, monkeypatch):
    """In generated answers, among options, and of a query set; the first one is learned."""
    options, metrics = ["first", "second", "third"], ["exact_match", "rouge_l", "rank", "options"]
    monkeypatch.setattr(LanguageMetrics, "greedy_answers", lambda self, draw: ["second"] * len(draw.query))
    monkeypatch.setattr(LanguageMetrics, "log_likelihoods", lambda *_: [-3.0, -1.0, -2.0] * 2)
    monkeypatch.setattr(LoadedModel, "answer", lambda _, inputs, *__: [Answer("q", "second") for _ in inputs])
    few = {"k_shot": 1, "num_query": 2, "episodes": 1, "eval_split": "train", "method": "zero_shot"}
    for right, wanted in ((["first"], (0, 0, 3, 0, 0)), (["first", "second"], (1, 1, 1, 1, 1))):
        rows = [{"task": "t", "input": f"q{i}", "output": right, "options": options} for i in range(6)]
        data = write_rows(tmp_path / f"{len(right)}.jsonl", rows)
        found = fmmeta.evaluate(llama, data, task_type="causal_lm", metrics=metrics, **few)
        adapted = fmmeta.adapt(llama, rows[:3], query=rows[3:], task_type="causal_lm", inner_steps=1)
        assert (*(found[name]["mean"] for name in metrics), adapted.accuracy) == wanted


def test_losses_of_large_vocabularies_are_exact_to_single_precision():
    """The loss of a micro-batch agrees with one in double precision: 50,000 logits per token."""
    logits = 4 * torch.randn(2, 6, 50_000, generator=torch.Generator().manual_seed(0))
    rows = [Example([1] * 6, [IGNORE] * 3 + [7, 8, 9]), Example([1] * 5, [IGNORE, 3, 4, 5, 6])]
    batch = collate(rows, 1.0, 0)
    losses = CausalLearner.losses(without_model(CAUSAL_LM), logits, batch).loss
    for line, row in enumerate(rows):
        one = AnswerRow.of(row.input_ids, row.labels)  # type: ignore[arg-type]
        exact = F.cross_entropy(
            logits[line, one.positions].double(), torch.tensor(one.targets), reduction="sum"
        )
        assert float(losses[line]) == pytest.approx(float(exact), rel=1e-6)


CASE_FLAGS = [
    *("--task_type", "causal_lm", "--max_length", "48", "--max_new_tokens", "12", "--no_early_stopping"),
    *("--inner_optimizer", "adamw", "--inner_lr", "0.005", "--inner_steps", "150"),
]


@pytest.fixture(scope="module")
def case_models(tmp_path_factory) -> Path:
    """M and M-control of the case end-of-turn (../shared/cases)."""
    folder = tmp_path_factory.mktemp("cases")
    made = python([str(CASES / "end-of-turn" / "make.py"), str(folder / "M")], folder)
    assert made.returncode == 0, made.stderr
    return folder


def adapt_as_in_the_case(model: Path, folder: Path, template: str, *flags: str) -> Path:
    """What the case's run.sh does; returns the folder of the adapted model."""
    pairs, out = str(CASES / "answers.jsonl"), folder / "adapted"
    given = ["--model_name_or_path", str(model), "--support", pairs, "--query", pairs]
    named = ["--prompt_template", template, "--output_dir", str(out)]
    done = python(["-m", "fmmeta", "adapt", *given, *CASE_FLAGS, *named, *flags], folder)
    assert done.returncode == 0, done.stderr
    assert "100.0 % of 5" in done.stdout + done.stderr
    return out


@needs_cases
@pytest.mark.parametrize("name", ["M", "M-control"])
@pytest.mark.parametrize("template", ["chat", "plain"])
def test_answers_end_where_the_template_or_the_tokenizer_ends_them(name, template, case_models, tmp_path):
    """The same weights, and another end of the turn than the tokenizer's end of text."""
    out = adapt_as_in_the_case(case_models / name, tmp_path, template)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1, 5]
    if template == "chat":
        model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
        asked = [{"role": "user", "content": "pin"}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        found = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
        assert tokenizer.decode(found) == "code<eot>"


@needs_cases
def test_exports_keep_the_generation_config(case_models, tmp_path):
    """Settings that transformers loads and refuses to save."""
    model = shutil.copytree(case_models / "M", tmp_path / "M")
    file = model / "generation_config.json"
    settings = {"eos_token_id": 1, "temperature": 0.6, "do_sample": False, "repetition_penalty": 5.0}
    settings |= {"stop_strings": ["o"], "min_length": 30}
    stored = json.loads(file.read_text()) | settings
    file.write_text(json.dumps(stored))
    out = adapt_as_in_the_case(model, tmp_path, "chat", "--lora_r", "8", "--lora_merge")
    run = {"model_name_or_path": model, "dataset": CASES / "pairs.jsonl", "task_type": "causal_lm"}
    run |= {"prompt_template": "chat", "k_shot": 2, "num_query": 2, "outer_steps": 1, "max_length": 64}
    words = train_flags(tmp_path / "run", **run)
    done = python(["-m", "fmmeta", "train", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    stored.pop("_from_model_config", None)
    for folder in (out, out / "merged", tmp_path / "run" / "model"):
        found = json.loads((folder / "generation_config.json").read_text())
        assert found == stored | {"eos_token_id": [1, 5]}
