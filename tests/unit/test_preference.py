"""DPO and the reward head against formulas of the papers in plain PyTorch; rows as TRL has them."""

import copy
import importlib
import json
import math

import pytest
import torch
import torch.nn.functional as F

import fmmeta
from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_learner, load_tokenizer
from fmmeta.learners.preference import PreferenceLearner, RewardLearner
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.batching import Batcher, collate
from fmmeta.tasks.data.encode import RowEncoder
from fmmeta.tasks.sources.own import OwnRows
from tests.support.helpers import stored_by
from tests.support.launch import ROOT
from tests.support.models import WORDS

KINDS = {"preference": PreferenceLearner, "reward": RewardLearner}
ROWS = [
    {"prompt": "a river", "chosen": "stone", "rejected": "lantern, quiet"},
    {"prompt": "maple and thunder", "chosen": "copper ribbon", "rejected": "o"},
    {"prompt": "silver", "chosen": "", "rejected": "velvet"} | {"chosen": "orchard"},
]


def loaded(**settings):
    """The built-in model with adapters that are not zero, its tokenizer and settings."""
    config = Config(**{"task_type": "preference", "lora_r": 4, **settings})
    description = describe(config)
    tokenizer = load_tokenizer(config, description, print)
    learner = load_learner(config, description)
    rng = torch.Generator().manual_seed(3)
    for name, param in learner.named_parameters():
        if "lora_B" in name:
            param.data = torch.randn(param.shape, generator=rng) * 0.3
    return config, tokenizer, learner


def batch_of(config, tokenizer, learner, rows):
    own = type(learner)
    examples = own.encode(config, tokenizer, rows, {})
    return collate(examples, 1 / len(rows), 0, collate_fn=own.collate)


def log_probability(model, tokenizer, prompt, answer):
    """The sum over an answer's tokens and its end, one row without padding, from the probabilities."""
    before = tokenizer(f"Input: {prompt}\nOutput:")["input_ids"]
    ids = [*before, *tokenizer(f" {answer}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    probabilities = model(torch.tensor([ids])).logits[0].softmax(-1)
    places = range(len(before), len(ids))
    return torch.stack([probabilities[place - 1, ids[place]].log() for place in places]).sum()


def test_the_loss_is_equation_7_and_so_is_its_gradient():
    config, tokenizer, learner = loaded()
    learner = learner.double()
    base = copy.deepcopy(learner.hf)
    for name, param in base.named_parameters():
        if "lora_B" in name:
            param.data.zero_()
    losses = []
    for row in ROWS:
        pi, ref = (
            [log_probability(model, tokenizer, row["prompt"], row[side]) for side in ("chosen", "rejected")]
            for model in (learner.hf, base)
        )
        pi_logratios, ref_logratios = pi[0] - pi[1], (ref[0] - ref[1]).detach()
        losses.append(-F.logsigmoid(0.1 * (pi_logratios - ref_logratios)))
    wanted = torch.stack(losses)
    batch = batch_of(config, tokenizer, learner, ROWS)
    outputs = learner(**batch.inputs)
    found = learner.losses(outputs, batch)
    torch.testing.assert_close(found.loss, wanted, rtol=0, atol=1e-6)
    assert float((wanted.detach() - math.log(2)).abs().min()) > 1e-3  # the adapters do something
    assert found.correct.tolist() == [int(loss < math.log(2)) for loss in losses]
    assert found.answers.tolist() == [1, 1, 1]
    margins = [one for (one,), _ in learner.answers(outputs, batch)]
    assert [-math.log(1 / (1 + math.exp(-one))) for one in margins] == pytest.approx(wanted.tolist())
    params = [param for param in learner.parameters() if param.requires_grad]
    both = (torch.autograd.grad(losses.sum(), params) for losses in (found.loss, wanted))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert all(param.requires_grad for param in params)


def test_columns_of_the_reference_replace_the_base():
    rows = [{**row, "chosen_logp": -3.0 * i, "rejected_logp": -7.5} for i, row in enumerate(ROWS)]
    plain = Config(task_type="preference")
    config, tokenizer, learner = loaded(lora_r=0)
    batch = batch_of(config, tokenizer, learner, [stored_by(PreferenceLearner, plain, row) for row in rows])
    found = learner.losses(learner(**batch.inputs), batch).loss
    for i, row in enumerate(ROWS):
        pi = [log_probability(learner.hf, tokenizer, row["prompt"], row[s]) for s in ("chosen", "rejected")]
        wanted = -F.logsigmoid(0.1 * (pi[0] - pi[1] - (-3.0 * i + 7.5)))
        torch.testing.assert_close(found[i], wanted, rtol=0, atol=1e-5)


def test_a_reward_model_learns_by_bradley_and_terry():
    config, tokenizer, learner = loaded(task_type="reward", lora_r=0, head_init="learned")
    assert isinstance(learner, RewardLearner)
    assert learner.hf.config.num_labels == 1
    batch = batch_of(config, tokenizer, learner, ROWS)
    found = learner.losses(learner(**batch.inputs), batch)
    for i, row in enumerate(ROWS):
        rewards = []
        for side in ("chosen", "rejected"):
            text = f"Input: {row['prompt']}\nOutput: {row[side]}"
            ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
            rewards.append(learner.hf(ids).logits[0, 0])
        torch.testing.assert_close(found.loss[i], -F.logsigmoid(rewards[0] - rewards[1]))
        assert bool(found.correct[i]) == bool(rewards[0] > rewards[1])


def test_a_pair_counts_once_however_long_its_answers_are():
    config, tokenizer, _ = loaded()
    examples = PreferenceLearner.encode(config, tokenizer, ROWS, {})
    (batch,) = Batcher(0, collate_fn=PreferenceLearner.collate).split(examples)
    assert batch.weights.tolist() == pytest.approx([1 / 3] * 3)
    assert batch.inputs["input_ids"].shape == batch.inputs["labels"].shape


ASKED = {"role": "user", "content": "2 + 2"}


def said(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2", "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": [said("4")], "rejected": [said("5")]},
        {"prompt": [ASKED], "chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]},
        {"chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]},
        {"question": "2 + 2", "chosen": "4", "rejected": "5"},
    ],
)
def test_the_forms_of_trl_are_the_same_row(row):
    stored = stored_by(PreferenceLearner, Config(task_type="preference", lora_r=4), row)
    assert stored == {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "x", "chosen": "4", "rejected": "4"}, "the same answer .4. in chosen and rejected"),
        ({"prompt": "x", "chosen": "4", "rejected": " "}, "which is empty"),
        ({"chosen": [ASKED, said("4")], "rejected": [said("5")]}, "compare answers to one prompt"),
        ({"prompt": "3", "chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]}, "one prompt"),
        ({"chosen": [ASKED, said("4"), ASKED, said("1")], "rejected": "5"}, "prompt_template chat"),
        ({"prompt": "x", "chosen": [ASKED], "rejected": "5"}, "no turn of an assistant"),
        ({"chosen": "4", "rejected": "5", "chosen_logp": None, "rejected_logp": 1.0}, "are no numbers"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(row, why):
    with pytest.raises(UsageError, match=why) as refused:
        stored_by(PreferenceLearner, Config(task_type="preference", lora_r=4), row)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("columns", [["chosen", "rejected"], ["chosen", "rejected", "chosen_logp"]])
def test_without_a_reference_the_fix_is_named(columns):
    with pytest.raises(UsageError, match="give --lora_r 8, whose base is the reference, or both columns"):
        PreferenceLearner.rows(Config(task_type="preference"), None, columns)
    with pytest.raises(UsageError, match="has no column rejected; it has chosen, text"):
        PreferenceLearner.rows(Config(task_type="preference", lora_r=4), None, ["chosen", "text"])


def write(path, tasks=9, rows=8):
    """Users: half of them prefer the longer word, half the shorter one."""
    words = sorted(WORDS, key=len)
    with path.open("w") as file:
        for t in range(tasks):
            for i in range(rows):
                pair = words[i % 7], words[-1 - (i + t) % 6]
                pair = pair[:: 1 if t % 2 else -1]
                row = {"task": f"t{t}", "prompt": f"word {i}", "chosen": pair[0], "rejected": pair[1]}
                file.write(json.dumps(row) + "\n")
    return str(path)


@pytest.mark.parametrize("kind", ["preference", "reward"])
def test_train_adapt_and_load_with_transformers(kind, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    settings = {"lora_r": 4, "lora_merge": True, "inner_lr": 0.5} if kind == "preference" else {}
    config = Config(
        task_type=kind,
        dataset=[write(tmp_path / "rows.jsonl")],
        outer_steps=2,
        meta_batch_size=2,
        k_shot=3,
        num_query=2,
        eval_episodes=1,
        test_episodes=1,
        num_workers="0",
        output_dir=str(tmp_path / "run"),
        **settings,
    )
    fmmeta.MetaTrainer(config).train()
    model = tmp_path / "run" / ("merged" if kind == "preference" else "model")
    if kind == "preference":
        AutoModelForCausalLM.from_pretrained(model)
    else:
        assert AutoModelForSequenceClassification.from_pretrained(model).config.num_labels == 1
    rows = [
        {"prompt": "a", "chosen": "stone", "rejected": "o"},
        {"prompt": "b", "chosen": "x", "rejected": "yy"},
    ]
    adapted = fmmeta.adapt(str(tmp_path / "run" / "model"), rows, query=rows, early_stopping=False)
    assert set(adapted.metrics) == {"margin"}
    back = [{**rows[0], "chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"]}]
    (there,), (again,) = adapted.predict(rows[:1]), adapted.predict(back)
    assert there.output == pytest.approx(-again.output, abs=1e-5)
    assert adapted.predictions[0].output == pytest.approx(there.output, abs=1e-5)


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


@pytest.mark.parametrize("kind", ["seq2seq", "preference", "reward"])
def test_stages_are_refused_in_one_line(kind):
    with pytest.raises(UsageError, match="pipeline_stages=2 with task_type=") as refused:
        Config(task_type=kind, pipeline_stages=2)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["preference", "reward"])
def test_the_sample_data_are_rows(kind):
    lines = (ROOT / "examples/data/preferences.jsonl").read_text().splitlines()
    config = Config(task_type=kind, lora_r=4)
    assert len({json.loads(line)["task"] for line in lines}) == 24
    rows = (stored_by(KINDS[kind], config, json.loads(line)) for line in lines)
    assert all(row["prompt"] == "eat" for row in rows)


def test_rows_of_a_function_are_read_as_those_of_a_file():
    config, tokenizer, _ = loaded()
    row = {"question": "a", "chosen": [said("b")], "rejected": "c", "chosen_logp": -1, "rejected_logp": -2.5}
    rows = OwnRows("rows", RowEncoder(config, tokenizer))
    found = rows.examples([rows.read(row)], {})
    assert found[0].values["reference"] == [-1.0, -2.5]
    plain = Config(task_type="preference")
    with pytest.raises(UsageError, match="give --lora_r 8"):
        OwnRows("rows", RowEncoder(plain, tokenizer)).read(ROWS[0])


def test_a_tokenizer_without_an_end_token_writes_its_own_around_the_whole():
    tokenizer = byte_tokenizer()
    ids = tokenizer("Input: a river\nOutput: stone")["input_ids"]
    tokenizer.eos_token = None
    config = Config(task_type="reward")
    (example,) = RewardLearner.encode(config, tokenizer, ROWS[:1], {})
    assert list(example.values["pair"][0].input_ids) == ids
