"""What learners of tags, numbers, answers and preferences read of a row, and what they refuse. A loss of the
user is checked before a run; a model's folder never names code that is imported.
"""

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fmmeta import MetaTrainer, inspection
from fmmeta.config.learners import BUILT_IN, CAUSAL_LM, CLASSIFICATION, LearnerSpec
from fmmeta.config.settings import Config
from fmmeta.learners.base import loss_of
from fmmeta.learners.files import remembered
from fmmeta.learners.load import describe, load_tokenizer
from tests.support.helpers import refusal, stored_by
from tests.support.launch import ROOT, python
from tests.support.messages import check_message
from tests.support.models import save, save_llama, tiny

TAGS = {"task_type": "token_classification"}
NUMBERS = {"task_type": "regression"}
SEQ2SEQ = {"task_type": "seq2seq"}
PAIRS = {"task_type": "preference", "lora_r": 4}
NO_REFERENCE = {"task_type": "preference"}
REWARD = {"task_type": "reward"}
ASKED = {"role": "user", "content": "2 + 2"}


def said(text):
    return {"role": "assistant", "content": text}


def stored(settings, row, answered=True):
    config = Config(**settings)
    return stored_by(config.learner.kind, config, row, answered)


PAIR = {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}


@pytest.mark.parametrize(
    ("settings", "row", "wanted"),
    [
        (TAGS, {"Words": ["a", "b"], "NER_tags": ["O", "B-x"]}, {"tokens": ["a", "b"], "tags": ["O", "B-x"]}),
        (TAGS, {"tokens": "a b", "labels": [0, 3]}, {"tokens": ["a", "b"], "tags": ["0", "3"]}),
        (NUMBERS, {"Text": "a", "Score": 2}, {"text": "a", "target": [2.0]}),
        (NUMBERS, {"sentence": "a", "value": "2.5"}, {"text": "a", "target": [2.5]}),
        (NUMBERS, {"text": "a", "label": [1, 2]}, {"text": "a", "target": [1.0, 2.0]}),
        (NUMBERS, {"text": "a", "target": np.array([1.5])}, {"text": "a", "target": [1.5]}),
        (NUMBERS, {"sentence1": "a", "sentence2": "b", "score": 1}, {"text": "a [SEP] b", "target": [1.0]}),
        (SEQ2SEQ, {"input": "aa", "output": ["d"]}, {"input": "aa", "output": "d"}),
        (PAIRS, {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}, PAIR),
        (PAIRS, {"prompt": [ASKED], "chosen": [said("4")], "rejected": [said("5")]}, PAIR),
        (PAIRS, {"prompt": [ASKED], "chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]}, PAIR),
        (PAIRS, {"chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]}, PAIR),
        (PAIRS, {"question": "2 + 2", "chosen": "4", "rejected": "5"}, PAIR),
    ],
)
def test_rows_are_read_under_usual_names(settings, row, wanted):
    assert stored(settings, row) == wanted


def test_rows_to_answer_need_no_tags():
    assert stored(TAGS, {"tokens": "a b"}, answered=False) == {"tokens": ["a", "b"]}


NO_LIST = "has tokens=.*, which is no list of texts; fix the row"
NO_NUMBER = "has target=.*, which is no number"
ALONE = "an encoder reads the input alone"
GIVE_LORA = "give --lora_r 8, whose base is the reference, or both columns"


@pytest.mark.parametrize(
    ("settings", "row", "message"),
    [
        (TAGS, {"tokens": ["a", "b"], "tags": ["O"]}, "has 2 tokens and 1 tags; give one for each"),
        (TAGS, {"tokens": [], "tags": []}, NO_LIST),
        (TAGS, {"tokens": ["a"], "tags": [None]}, NO_LIST.replace("tokens", "tags")),
        (TAGS, {"tokens": ["a", " "], "tags": ["O", "O"]}, NO_LIST),
        (
            TAGS,
            {"text": "a", "tags": ["O"]},
            "none of the columns tokens, words; it has .*name one with --text_column",
        ),
        (NUMBERS, {"text": "a", "target": "x"}, f"{NO_NUMBER}; fix the row"),
        (NUMBERS, {"text": "a", "target": True}, NO_NUMBER),
        (NUMBERS, {"text": "a", "target": float("nan")}, NO_NUMBER),
        (NUMBERS, {"text": "a", "target": []}, NO_NUMBER),
        (NUMBERS, {"text": "", "target": 1}, "text"),
        (NUMBERS, {"text": "a"}, "none of the columns target, score, label, value"),
        (SEQ2SEQ, {"input": "a", "output": ["b", " "]}, "output=|empty"),
        (SEQ2SEQ, {"input": "a", "output": " "}, "output=|empty"),
        (SEQ2SEQ, {"input": "a", "output": None}, "output=|empty"),
        (SEQ2SEQ, {"input": "a", "answers_": "b"}, "has none of the columns output"),
        ({**SEQ2SEQ, "input_column": "x"}, {"input": "a", "output": "b"}, "input_column=x is no column"),
        ({**SEQ2SEQ, "prompt_template": "chat"}, {"input": "a", "output": "b"}, ALONE),
        ({**SEQ2SEQ, "prompt_template": "{input} {output}."}, {"input": "a", "output": "b"}, ALONE),
        (PAIRS, {**PAIR, "rejected": "4"}, "the same answer .4. in chosen and rejected"),
        (PAIRS, {**PAIR, "rejected": " "}, "which is empty"),
        (PAIRS, {"chosen": [ASKED, said("4")], "rejected": [said("5")]}, "compare answers to one prompt"),
        (PAIRS, {"prompt": "3", "chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]}, "one prompt"),
        (
            PAIRS,
            {"chosen": [ASKED, said("4"), ASKED, said("1")], "rejected": "5"},
            "prompt_template chat",
        ),
        (PAIRS, {"prompt": "x", "chosen": [ASKED], "rejected": "5"}, "no turn of an assistant"),
        (PAIRS, {"chosen": "4", "text": "5"}, "has no column rejected; it has chosen, text"),
        (NO_REFERENCE, PAIR, GIVE_LORA),
        (NO_REFERENCE, {**PAIR, "chosen_logp": 1.0}, GIVE_LORA),
        (NO_REFERENCE, {**PAIR, "chosen_logp": None, "rejected_logp": 1.0}, "are no numbers"),
    ],
)
def test_other_rows_are_refused_in_one_line(settings, row, message):
    found = refusal(stored, settings, row)
    assert re.search(message, found), found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"task_type": kind, "pipeline_stages": 2}, f"pipeline_stages=2 with task_type={kind}")
            for kind in ("token_classification", "seq2seq", "preference", "reward")
        ),
        (
            {"task_type": "examples.own_loss:answers", "label_column": "x"},
            "label_column=x means nothing for task_type=examples",
        ),
        ({**TAGS, "head_init": "prototype"}, "head_init=prototype is made of means of classes"),
        ({**TAGS, "algorithm": "anil"}, "task_type=token_classification does not go with algorithm=anil"),
        ({**TAGS, "pooling": "mean"}, "pooling=mean means nothing for task_type=token_classification"),
        ({**TAGS, "input_column": "x"}, "input_column=x means nothing for task_type=token_classification"),
    ],
)
def test_settings_that_do_not_go_with_a_kind_are_refused(settings, message):
    assert message in refusal(Config, **settings)


@pytest.mark.parametrize("kind", ["causal_lm", "seq2seq", "preference", "stream"])
@pytest.mark.parametrize(("name", "value"), [("n_way", 3), ("head_init", "learned")])
def test_settings_of_heads_are_refused_by_training_where_a_model_has_none(name, value, kind):
    """`Config` accepts them, as other commands set them."""
    settings = {"task_type": kind, name: value}
    refused = [refusal(MetaTrainer(Config(lora_r=4, **settings)).train)]
    if kind != "stream":  # documents have no rows to show
        refused.append(refusal(inspection.run, inspection.InspectConfig(**settings)))
    for text in refused:
        check_message(text, f"{name}={value} means nothing for task_type={kind}", "leave it out")


def test_models_that_are_no_encoder_with_a_decoder_are_refused(tmp_path):
    config = Config(**SEQ2SEQ, model_name_or_path=str(save_llama(tmp_path / "llama")))
    assert "which is no encoder with a decoder; give one, such as T5 or BART" in refusal(describe, config)
    config = config.but(
        model_name_or_path=str(save(tiny("t5", decoder_start_token_id=None), tmp_path / "t5"))
    )
    assert "no decoder_start_token_id" in refusal(load_tokenizer, config, describe(config), print)


@pytest.mark.parametrize("settings", [PAIRS, REWARD])
def test_the_sample_data_are_preferences(settings):
    lines = (ROOT / "examples/data/preferences.jsonl").read_text().splitlines()
    assert len({json.loads(line)["task"] for line in lines}) == 24
    assert all(stored(settings, json.loads(line))["prompt"] == "eat" for line in lines)


def mean(logits, targets):
    return F.cross_entropy(logits, targets)


def of_batch(logits, targets):
    return F.cross_entropy(logits - logits.mean(0), targets, reduction="none")


def raising(logits, targets):
    return logits[:, 7]


def endless(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none") / (logits - logits).sum(1)


of_every_logit = replace(CLASSIFICATION, loss=partial(F.cross_entropy, reduction="none", label_smoothing=0.1))
mean_of_rows = replace(CLASSIFICATION, loss=mean)
depends = replace(CLASSIFICATION, loss=of_batch)
broken = replace(CLASSIFICATION, loss=raising)
nowhere_finite = replace(CAUSAL_LM, loss=endless)
renamed = LearnerSpec("focal", of_classes=True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (f"{__name__}:mean_of_rows", "has the shape \\[\\]; return one number for each row"),
        (f"{__name__}:depends", "depends on the other rows"),
        (f"{__name__}:broken", "cannot compute a loss"),
        (f"{__name__}:of_every_logit", "not finite where a logit is -inf"),
        (f"{__name__}:nowhere_finite", "not finite|depends on the other rows"),
        (f"{__name__}:renamed", "keeps the name of its kind of task"),
        (f"{__name__}:mean", "is a function and no LearnerSpec"),
        ("clasification", "is unknown; did you mean classification"),
    ],
)
def test_a_loss_that_is_none_of_rows_is_refused(name, why):
    message = refusal(Config, task_type=name)
    assert message.startswith(f"task_type={name}")
    assert re.search(why, message)


def test_no_code_is_imported_from_a_models_folder(tmp_path):
    (tmp_path / "fmmeta.json").write_text(json.dumps({"task_type": f"{__name__}:depends"}))
    assert "task_type is none of classification, causal_lm, " in refusal(remembered, str(tmp_path))


def test_tokens_without_a_label_have_no_loss():
    loss = loss_of(replace(CAUSAL_LM, loss=lambda logits, targets: logits[:, 0] + targets))
    assert loss(torch.ones(3, 2), torch.tensor([4, -100, 0])).tolist() == [5.0, 0.0, 1.0]


def test_settings_follow_the_kind_of_an_own_loss():
    own = Config(task_type="examples.own_loss:answers")
    assert (own.learner.generates, own.inner_lr) == (True, Config(task_type="causal_lm").inner_lr)


def test_only_the_registry_names_a_kind_of_task():
    """Of code; messages name kinds as advice."""
    named = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in sorted((ROOT / "fmmeta").rglob("*"))
        if file.suffix in (".py", ".j2") and file.name != "learners.py"
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if any(f'"{name}"' in line or f"'{name}'" in line for name in BUILT_IN)
    ]
    assert named == []


@pytest.mark.slow
def test_the_example_trains_and_evaluate_wants_the_loss_by_name(tmp_path):
    example, model, out = ROOT / "examples" / "own_loss.py", tmp_path / "run" / "model", tmp_path / "r.json"
    assert len(example.read_text().splitlines()) <= 40

    def fmmeta(*words):
        return python(["-m", "fmmeta", *words], tmp_path, example.parent)

    short = ["--outer_steps=2", "--eval_episodes=2", "--num_workers=0", f"--output_dir={model.parent}"]
    ran = fmmeta("train", "--task_type=own_loss:classes", *short)
    assert ran.returncode == 0, ran.stderr
    stored = json.loads((model / "fmmeta.json").read_text())
    assert (stored["task_type"], stored["own_task_type"]) == ("classification", "own_loss:classes")
    assert "loss (units of loss)" in (model / "README.md").read_text()
    few = ["evaluate", f"--model_name_or_path={model}", "--episodes=2", "--num_query=1", f"--output={out}"]
    refused = fmmeta(*few)
    assert refused.returncode == 2
    assert "give --task_type own_loss:classes to use yours, or classification" in refused.stderr
    losses = []
    for kind in ("own_loss:classes", "classification"):
        ran = fmmeta(*few, f"--task_type={kind}")
        assert ran.returncode == 0, ran.stderr
        losses.append(json.loads(out.read_text())["loss"])
    assert losses[0] < 0.9 * losses[1]  # (1 - p)^2 is well below 1 for five classes
