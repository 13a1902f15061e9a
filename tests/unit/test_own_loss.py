"""A loss of the user is checked before a run; a model's folder never names code that is imported."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fmmeta.common.errors import UsageError
from fmmeta.config.learners import BUILT_IN, CAUSAL_LM, CLASSIFICATION, LearnerSpec
from fmmeta.config.settings import Config
from fmmeta.learners.base import loss_of
from fmmeta.learners.files import remembered
from tests.support.launch import ROOT


def mean(logits, targets):
    return F.cross_entropy(logits, targets)


def of_batch(logits, targets):
    return F.cross_entropy(logits - logits.mean(0), targets, reduction="none")


def raising(logits, targets):
    return logits[:, 7]


def endless(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none") / (logits - logits).sum(1)


def smoothed(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)


of_every_logit = replace(CLASSIFICATION, loss=smoothed)
mean_of_rows = replace(CLASSIFICATION, loss=mean)
depends = replace(CLASSIFICATION, loss=of_batch)
broken = replace(CLASSIFICATION, loss=raising)
nowhere_finite = replace(CAUSAL_LM, loss=endless)
renamed = LearnerSpec("focal", of_classes=True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mean_of_rows", "has the shape []; return one number for each row"),
        ("depends", "depends on the other rows"),
        ("broken", "cannot compute a loss"),
        ("of_every_logit", "not finite where a logit is -inf"),
        ("nowhere_finite", "not finite|depends on the other rows"),
        ("renamed", "keeps the name of its kind of task"),
        ("mean", "is a function and no LearnerSpec"),
    ],
)
def test_a_loss_that_is_none_of_rows_is_refused(name, why):
    with pytest.raises(UsageError, match=f"task_type={__name__}:{name}") as refused:
        Config(task_type=f"{__name__}:{name}")
    assert "\n" not in str(refused.value)
    assert any(one in str(refused.value) for one in why.split("|"))


def test_unknown_names_are_refused_with_the_nearest_one():
    with pytest.raises(UsageError, match="task_type=clasification is unknown; did you mean classification"):
        Config(task_type="clasification")


def test_no_code_is_imported_from_a_models_folder(tmp_path):
    (tmp_path / "fmmeta.json").write_text(json.dumps({"task_type": f"{__name__}:depends"}))
    with pytest.raises(UsageError, match="task_type is none of classification, causal_lm, "):
        remembered(str(tmp_path))


def test_tokens_without_a_label_have_no_loss():
    loss = loss_of(replace(CAUSAL_LM, loss=lambda logits, targets: logits[:, 0] + targets))
    assert loss(torch.ones(3, 2), torch.tensor([4, -100, 0])).tolist() == [5.0, 0.0, 1.0]


def test_settings_of_classes_and_of_answers_follow_the_kind_of_an_own_loss():
    own = Config(task_type="examples.own_loss:answers")
    assert own.learner.generates
    assert own.inner_lr == Config(task_type="causal_lm").inner_lr
    with pytest.raises(UsageError, match="label_column=x means nothing for task_type=examples"):
        Config(task_type="examples.own_loss:answers", label_column="x")


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
