"""Encoder-decoders against transformers' own loss and greedy search; DPO and the reward head against formulas
of the papers in plain PyTorch; and their runs.
"""

import copy
import importlib
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import fmmeta
from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_learner, load_tokenizer
from fmmeta.learners.preference import PreferenceLearner, RewardLearner
from fmmeta.learners.seq2seq import Seq2SeqLearner
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.batching import IGNORE, Batcher, collate
from fmmeta.tasks.data.encode import RowEncoder
from fmmeta.tasks.sources.own import OwnRows
from tests.support.helpers import refusal, stored_by, write_rows
from tests.support.launch import ROOT
from tests.support.models import WORDS, save, tiny, write_pairs

PREFERENCE = Config(task_type="preference", lora_r=4)
SEQ2SEQ = Config(task_type="seq2seq", max_length=8)
TOKENIZER = byte_tokenizer()
ANSWERS = [
    {"input": "a river", "output": "stone"},
    {"input": "maple and thunder", "output": "copper ribbon"},
    {"input": "silver", "output": "o"},
]
ROWS = [
    {"prompt": "a river", "chosen": "stone", "rejected": "lantern, quiet"},
    {"prompt": "maple and thunder", "chosen": "copper ribbon", "rejected": "o"},
    {"prompt": "silver", "chosen": "orchard", "rejected": "velvet"},
]


@pytest.fixture(params=["t5", "bart"])
def model(request):
    return tiny(request.param).eval()


def answers_batch(rows=ANSWERS):
    """A micro-batch of rows with answers, and its examples in their order."""
    examples = Seq2SeqLearner.encode(Config(task_type="seq2seq"), TOKENIZER, rows, {})
    (batch,) = Batcher(0, collate_fn=Seq2SeqLearner.collate).split(examples)
    return batch, sorted(examples, key=lambda one: -len(one.input_ids))


def test_losses_are_those_of_transformers_row_by_row(model):
    learner, (batch, examples) = Seq2SeqLearner(model), answers_batch()
    outputs = learner(**batch.inputs)
    rows, answers = learner.losses(outputs, batch), [*learner.answers(outputs, batch)]
    for i, example in enumerate(examples):
        labels = torch.tensor([example.labels])
        found = model(input_ids=torch.tensor([list(example.input_ids)]), labels=labels)
        torch.testing.assert_close(rows.loss[i], found.loss * labels.numel(), rtol=1e-4, atol=1e-4)
        guess = found.logits[0].argmax(-1)
        assert bool(rows.correct[i]) == bool((guess == labels[0]).all())
        assert answers[i] == (guess.tolist()[:-1], example.labels[:-1])
    wanted = float(rows.loss.detach().sum()) / sum(len(one.labels) for one in examples)
    assert float(rows.weighted(batch.weights).sums()[0]) == pytest.approx(wanted, rel=1e-5)


def test_a_row_is_right_when_each_of_its_tokens_is():
    learner, (batch, _) = Seq2SeqLearner(tiny("t5").eval()), answers_batch()
    labels = batch.targets["labels"]
    logits = F.one_hot(labels.clamp(min=0), 259).float() * 30
    wrong, broken = logits.clone(), logits.clone()
    wrong[1, int((labels[1] != IGNORE).sum()) - 1] = 0.0  # its end token
    broken[2, 0] = torch.nan
    right = [learner.losses(one, batch).correct.tolist() for one in (logits, wrong, broken)]
    assert right == [[1, 1, 1], [1, 0, 1], [1, 1, 0]]


def test_answers_are_greedy(model):
    model.generation_config.repetition_penalty = 5.0  # of a checkpoint, and left out
    batch, examples = answers_batch()
    for example, found in zip(examples, Seq2SeqLearner(model).respond(batch, 6), strict=True):
        ids, wanted = torch.tensor([list(example.input_ids)]), [model.config.decoder_start_token_id]
        for _ in range(6):
            logits = model(input_ids=ids, decoder_input_ids=torch.tensor([wanted])).logits
            wanted.append(int(logits[0, -1].argmax()))
        assert found == (wanted[1 : wanted.index(2, 1)] if 2 in wanted[1:] else wanted[1:])
    assert model.generation_config.repetition_penalty == 5.0


def test_labels_are_the_answer_and_its_end_also_where_it_is_cut():
    rows = [{"input": "x" * 40, "output": "y" * 40}, {"input": "a", "output": "b"}]
    cut, short = Seq2SeqLearner.encode(SEQ2SEQ, TOKENIZER, rows, {})
    assert len(cut.input_ids) == len(cut.labels) == 8
    assert cut.labels[-1] == TOKENIZER.eos_token_id
    assert short.labels == [*TOKENIZER("b")["input_ids"], TOKENIZER.eos_token_id]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, "abc"),
        ("summarize: {input}", "summarize: abc"),
        ("{style} summary: {input}", "short summary: abc"),
    ],
)
def test_the_input_is_read_alone_or_in_a_format_string(template, text):
    settings: dict[str, Any] = {"prompt_template": template} if template else {}
    config = Config(task_type="seq2seq", input_column="document", **settings)
    stored = stored_by(Seq2SeqLearner, config, {"document": "abc", "style": "short", "output": "a"})
    (example,) = Seq2SeqLearner.encode(config, TOKENIZER, [stored], {})
    assert TOKENIZER.decode(example.input_ids, skip_special_tokens=True) == text


def test_of_several_right_answers_the_first_is_learned_and_the_best_counts():
    rows = [{"input": "a", "output": ["b c", "d", "x" * 9]}, {"input": "aa", "output": "d"}]
    stored = [stored_by(Seq2SeqLearner, SEQ2SEQ, row) for row in rows]
    examples = Seq2SeqLearner.encode(SEQ2SEQ, TOKENIZER, stored, {})
    alone = Seq2SeqLearner.encode(SEQ2SEQ, TOKENIZER, [{"input": "a", "output": "b c"}, rows[1]], {})
    assert [one.labels for one in examples] == [one.labels for one in alone]
    (batch,) = Batcher(0, collate_fn=Seq2SeqLearner.collate).split(examples)
    outputs = F.one_hot(batch.targets["labels"].clamp(min=0), 259).float()
    pairs = Seq2SeqLearner(tiny("t5")).answers(outputs, batch)
    predicted, references = (
        [Seq2SeqLearner.present(one, (), {}, TOKENIZER) for one in part] for part in zip(*pairs, strict=True)
    )
    assert sorted(references, key=str) == [["b c", "d", "x" * 6], "d"]
    assert sorted(predicted) == ["b c", "d"]
    assert Seq2SeqLearner.metrics(["d", "d"], references) == {"exact_match": 1.0, "rouge_l": 1.0}
    assert Seq2SeqLearner.metrics(["c", "c"], references) == {
        "exact_match": 0.0,
        "rouge_l": pytest.approx(1 / 3),
    }


def randomize_adapters(model, scale=0.3) -> None:
    """Adapters that are not zero, or with a scale of 0 the base."""
    rng = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data = torch.randn(param.shape, generator=rng).to(param) * scale


def loaded(rows=ROWS, **settings):
    """The built-in model with adapters that are not zero, its tokenizer, and a micro-batch of rows."""
    config = Config(**{"task_type": "preference", "lora_r": 4, **settings})
    description = describe(config)
    tokenizer, learner = load_tokenizer(config, description, print), load_learner(config, description)
    randomize_adapters(learner)
    stored = [stored_by(type(learner), config, row) for row in rows]
    examples = learner.encode(config, tokenizer, stored, {})
    return learner, tokenizer, collate(examples, 1 / len(rows), 0, collate_fn=learner.collate)


def log_ratio(model, tokenizer, row):
    """The log-probability of the chosen answer minus that of the other one: sums over an answer's tokens and
    its end, one row without padding, from the probabilities.
    """
    found = []
    before = tokenizer(f"Input: {row['prompt']}\nOutput:")["input_ids"]
    for side in ("chosen", "rejected"):
        answer = tokenizer(f" {row[side]}", add_special_tokens=False)["input_ids"]
        ids = [*before, *answer, tokenizer.eos_token_id]
        probabilities = model(torch.tensor([ids])).logits[0].softmax(-1)
        places = range(len(before), len(ids))
        found.append(torch.stack([probabilities[at - 1, ids[at]].log() for at in places]).sum())
    return found[0] - found[1]


def test_the_loss_is_equation_7_and_so_is_its_gradient():
    learner, tokenizer, batch = loaded()
    learner = learner.double()
    base = copy.deepcopy(learner.hf)
    randomize_adapters(base, 0.0)
    ratios = [
        log_ratio(learner.hf, tokenizer, row) - log_ratio(base, tokenizer, row).detach() for row in ROWS
    ]
    wanted = -F.logsigmoid(0.1 * torch.stack(ratios))
    outputs = learner(**batch.inputs)
    found = learner.losses(outputs, batch)
    torch.testing.assert_close(found.loss, wanted, rtol=0, atol=1e-6)
    assert float((wanted.detach() - math.log(2)).abs().min()) > 1e-3  # the adapters do something
    assert found.correct.tolist() == [int(loss < math.log(2)) for loss in wanted]
    assert found.answers.tolist() == [1, 1, 1]
    margins = [one for (one,), _ in learner.answers(outputs, batch)]
    assert [-math.log(1 / (1 + math.exp(-one))) for one in margins] == pytest.approx(wanted.tolist())
    params = [param for param in learner.parameters() if param.requires_grad]
    both = (torch.autograd.grad(losses.sum(), params) for losses in (found.loss, wanted))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_columns_of_the_reference_replace_the_base():
    rows = [{**row, "chosen_logp": -3.0 * i, "rejected_logp": -7.5} for i, row in enumerate(ROWS)]
    learner, tokenizer, batch = loaded(rows, lora_r=0)
    ratios = [log_ratio(learner.hf, tokenizer, row) + 3.0 * i - 7.5 for i, row in enumerate(ROWS)]
    found = learner.losses(learner(**batch.inputs), batch).loss
    torch.testing.assert_close(found, -F.logsigmoid(0.1 * torch.stack(ratios)), rtol=0, atol=1e-5)


def test_a_reward_model_learns_by_bradley_and_terry():
    learner, tokenizer, batch = loaded(task_type="reward", lora_r=0, head_init="learned")
    assert isinstance(learner, RewardLearner)
    assert learner.hf.config.num_labels == 1
    found = learner.losses(learner(**batch.inputs), batch)
    for i, row in enumerate(ROWS):
        texts = [f"Input: {row['prompt']}\nOutput: {row[side]}" for side in ("chosen", "rejected")]
        ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        good, bad = (learner.hf(torch.tensor([one])).logits[0, 0] for one in ids)
        torch.testing.assert_close(found.loss[i], -F.logsigmoid(good - bad))
        assert bool(found.correct[i]) == bool(good > bad)


def test_a_pair_counts_once_however_long_its_answers_are():
    examples = PreferenceLearner.encode(PREFERENCE, TOKENIZER, ROWS, {})
    (batch,) = Batcher(0, collate_fn=PreferenceLearner.collate).split(examples)
    assert batch.weights.tolist() == pytest.approx([1 / 3] * 3)
    assert batch.inputs["input_ids"].shape == batch.inputs["labels"].shape


def write_users(path):
    """Users: half of them prefer the longer word, half the shorter one."""
    words, rows = sorted(WORDS, key=len), []
    for user in range(9):
        for i in range(8):
            pair = words[i % 7], words[-1 - (i + user) % 6]
            good, bad = pair if user % 2 else pair[::-1]
            rows.append({"task": f"t{user}", "prompt": f"word {i}", "chosen": good, "rejected": bad})
    return write_rows(path, rows)


RUN = {
    **{"outer_steps": 2, "meta_batch_size": 2, "k_shot": 3, "num_query": 2, "eval_episodes": 1},
    **{"test_episodes": 1, "num_workers": "0"},
}


@pytest.mark.parametrize("family", ["tiny", "bart"])
def test_encoder_decoders_train_adapt_and_load_with_transformers(family, tmp_path):
    name = family if family == "tiny" else str(save(tiny(family), tmp_path / family))
    data = str(write_pairs(tmp_path / "pairs.jsonl"))
    given = {"task_type": "seq2seq", "model_name_or_path": name, "dataset": [data], **RUN}
    path = fmmeta.MetaTrainer(Config(**given, output_dir=str(tmp_path / "run"))).train().output_dir / "model"
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path)
    assert model.generation_config.decoder_start_token_id == model.config.decoder_start_token_id
    assert model.generation_config.eos_token_id == 2
    assert json.loads((path / "fmmeta.json").read_text())["task_type"] == "seq2seq"
    rows = [{"input": one, "output": ["yes", "y"]} for one in ("a", "bb", "ccc")]
    settings = {"inner_steps": 40, "early_stopping": False, "inner_optimizer": "adamw", "inner_lr": 0.01}
    adapted = fmmeta.adapt(str(path), rows, query=rows, **settings, max_new_tokens=5)
    assert set(adapted.metrics) == {"exact_match", "rouge_l"}
    (answer,) = adapted.predict([{"input": "dd"}], max_new_tokens=5)
    assert isinstance(answer.output, str)
    outputs = [one.output for one in adapted.predictions]
    truths = [one if one in ("yes", "y") else "yes" for one in outputs]
    assert [one.truth for one in adapted.predictions] == truths
    right = [one == truth for one, truth in zip(outputs, truths, strict=True)]
    assert adapted.metrics["exact_match"] == adapted.accuracy == sum(right) / 3


@pytest.mark.parametrize(
    ("kind", "settings", "auto", "folder"),
    [
        ("preference", {"lora_r": 4, "lora_merge": True, "inner_lr": 0.5}, "AutoModelForCausalLM", "merged"),
        ("reward", {}, "AutoModelForSequenceClassification", "model"),
    ],
)
def test_preferences_train_adapt_and_load_with_transformers(kind, settings, auto, folder, tmp_path):
    data, run = str(write_users(tmp_path / "rows.jsonl")), tmp_path / "run"
    fmmeta.MetaTrainer(Config(task_type=kind, dataset=[data], **RUN, **settings, output_dir=str(run))).train()
    model = getattr(transformers, auto).from_pretrained(run / folder)
    assert kind == "preference" or model.config.num_labels == 1
    rows = [
        {"prompt": "a", "chosen": "stone", "rejected": "o"},
        {"prompt": "b", "chosen": "x", "rejected": "yy"},
    ]
    adapted = fmmeta.adapt(str(run / "model"), rows, query=rows, early_stopping=False)
    assert set(adapted.metrics) == {"margin"}
    back = {**rows[0], "chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"]}
    (there, again) = adapted.predict([rows[0], back])
    assert there.output == pytest.approx(-again.output, abs=1e-5)
    assert adapted.predictions[0].output == pytest.approx(there.output, abs=1e-5)


@pytest.mark.slow
def test_the_example_trains_and_scores_users(tmp_path, monkeypatch):
    example = ROOT / "examples" / "dpo.py"
    assert len(example.read_text().splitlines()) <= 60
    monkeypatch.syspath_prepend(example.parent)
    monkeypatch.chdir(tmp_path)
    dpo = importlib.import_module("dpo")
    support, query = dpo.draw(3)
    assert dpo.draw(3) == (support, query)
    assert not [row for row in support if row in query]
    monkeypatch.setitem(dpo.RUN, "outer_steps", 1)
    before, adapted = dpo.accuracies("fomaml", ["zero_shot", "finetune"], episodes=2)
    assert before.shape == adapted.shape == (2,)
    assert json.loads((tmp_path / "runs/fomaml/model/fmmeta.json").read_text())["task_type"] == "preference"


def test_rows_of_a_function_are_read_as_those_of_a_file():
    said = [{"role": "assistant", "content": "b"}]
    row = {"question": "a", "chosen": said, "rejected": "c", "chosen_logp": -1, "rejected_logp": -2.5}
    rows = OwnRows("rows", RowEncoder(PREFERENCE, TOKENIZER))
    assert rows.examples([rows.read(row)], {})[0].values["reference"] == [-1.0, -2.5]
    without = OwnRows("rows", RowEncoder(Config(task_type="preference"), TOKENIZER))
    assert "give --lora_r 8" in refusal(without.read, ROWS[0])


def test_a_tokenizer_without_an_end_token_writes_its_own_around_the_whole():
    tokenizer = byte_tokenizer()
    ids = tokenizer("Input: a river\nOutput: stone")["input_ids"]
    tokenizer.eos_token = None
    (example,) = RewardLearner.encode(Config(task_type="reward"), tokenizer, ROWS[:1], {})
    assert list(example.values["pair"][0].input_ids) == ids
