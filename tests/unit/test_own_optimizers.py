"""Outer and inner optimizers of the user, chosen by `module:name`."""

import json
import sys

import pytest
import torch
from torch import nn

from fmmeta.config.algorithms import OUTER_OPTIMIZERS, check_outer, find_outer
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import EvaluateConfig, TuneConfig
from fmmeta.meta.outer_step import OuterOptimizer
from fmmeta.meta.parameters import MetaParameters, PendingMean
from fmmeta.parallel.costs import shards
from tests.support.learners import bert, config_of, worker_of
from tests.support.messages import check_message, refusal
from tests.support.models import save_bert
from tests.support.outer_optimizer import Averaged

OWN = "tests.support.outer_optimizer"
BAD = '''
import torch
from fmmeta.config.algorithms import OuterOptimizerSpec

class Normed(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad /= p.grad.norm()
        super().step()

class Counts(torch.optim.Optimizer):
    """Its rate falls by a count outside the state."""
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                p -= group["lr"] / group["count"] * p.grad

unnamed = OuterOptimizerSpec("Adam", ("exp_avg",))
nowhere = OuterOptimizerSpec("Adamm")
number = 3
'''


@pytest.mark.parametrize("name", ["Averaged", "spec"])
def test_a_class_or_a_spec_makes_the_steps_of_torch(name):
    learner = bert("mean")
    given = {"outer_momentum": 0.7} if name == "spec" else {}
    config = config_of(
        learner,
        outer_optimizer=f"{OWN}:{name}",
        outer_lr=0.01,
        weight_decay=0.0,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        head_init="learned",
        **given,
    )
    worker = worker_of(learner, config)
    theta = worker.read()
    param = nn.Parameter(theta.clone())
    plain = Averaged([param], 0.01, **({"beta": 0.7} if given else {}))
    outer = OuterOptimizer(MetaParameters(theta), worker, config)
    random = torch.Generator().manual_seed(1)
    for step in range(3):
        param.grad = torch.randn(theta.shape, generator=random)
        outer.step(PendingMean({"theta": param.grad.clone()}), step)
        plain.step()
    torch.testing.assert_close(theta, param.detach())
    assert set(outer.moments) == set(outer.spec.moments) == {"mean"}


@pytest.mark.parametrize("name", ["Adam", "Adadelta", "ASGD", "Rprop"])
def test_optimizers_of_torch_are_found_with_their_moments(name):
    config = Config(outer_optimizer=f"torch.optim:{name}")
    state = torch.optim.__dict__[name]([value := nn.Parameter(torch.ones(3))])
    value.grad = torch.ones(3)
    state.step()
    vectors = {key for key, one in state.state[value].items() if torch.is_tensor(one) and one.ndim}
    assert set(find_outer(config.outer_optimizer).moments) == vectors


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS)
def test_built_in_optimizers_pass_the_check(name):
    check_outer(Config(outer_optimizer=name))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("bad_outer:Normed", "does not act element by element"),
        ("bad_outer:Counts", "does not act element by element, with moments and numbers as its only state"),
        ("torch.optim:Adafactor", "does not act element by element"),
        ("torch.optim:LBFGS", "cannot take a step on a vector"),
        ("bad_outer:unnamed", "stores exp_avg_sq"),
        ("bad_outer:nowhere", "cannot take a step on a vector"),
        ("bad_outer:number", "is a int and no OuterOptimizerSpec"),
        ("bad_outer:missing", "cannot be imported"),
    ],
)
def test_an_outer_optimizer_that_cannot_work_on_shards_is_refused(name, part, tmp_path, monkeypatch):
    (tmp_path / "bad_outer.py").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        check_message(refusal(Config, outer_optimizer=name), f"outer_optimizer={name}", part)
    finally:
        sys.modules.pop("bad_outer", None)


def test_a_setting_that_the_spec_does_not_read_is_refused():
    check_message(
        refusal(Config, outer_optimizer=f"{OWN}:Averaged", outer_momentum=0.5),
        "outer_momentum=0.5",
        "leave it out",
    )


INNER = "tests.support.inner_optimizer"


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"inner_optimizer": f"{INNER}:normed"}, "does not act element by element"),
        ({"inner_optimizer": f"{INNER}:not_in_place"}, "vectors changed in place as its only state"),
        ({"inner_optimizer": f"{INNER}:nameless"}, "cannot update a vector (KeyError"),
        ({"inner_optimizer": f"{INNER}:with_momentum"}, "has momentum="),
        ({"inner_optimizer": f"{INNER}:unlike"}, "gives another u than its direction"),
        ({"inner_optimizer": f"{INNER}:direction"}, "is a function and no InnerOptimizer"),
        ({"inner_optimizer": "adam"}, "did you mean adamw?"),
        ({"inner_optimizer": f"{INNER}:spec", "algorithm": "maml"}, "has no differentiable="),
        ({"inner_optimizer": f"{INNER}:spec", "algorithm": "imaml"}, "use sgd with more"),
    ],
)
def test_an_inner_optimizer_that_cannot_work_is_refused(settings, part):
    check_message(refusal(Config, **settings), f"inner_optimizer={settings['inner_optimizer']}", part)


def test_the_plan_counts_the_vectors_of_an_inner_optimizer():
    own, sgd = (shards(Config(inner_optimizer=name)).work for name in (f"{INNER}:spec", "sgd"))
    assert own == sgd + 1


def test_a_name_of_code_in_a_model_is_not_imported(tmp_path):
    """The name in fmmeta.json counts after the user has given it as a flag."""
    model = save_bert(tmp_path / "bert")
    (model / "fmmeta.json").write_text(json.dumps({"inner_optimizer": "not_there:spec", "n_way": 2}))
    for kind in (EvaluateConfig, TuneConfig):
        check_message(
            refusal(kind(model_name_or_path=str(model)).run_config),
            "inner_optimizer=not_there:spec",
            "give --inner_optimizer not_there:spec",
        )
    given = EvaluateConfig(model_name_or_path=str(model), inner_optimizer=f"{INNER}:spec")
    assert given.run_config(n_way=2).inner_optimizer == f"{INNER}:spec"
    frozen = EvaluateConfig(model_name_or_path=str(model), method=["prototype"])  # has no inner loop
    assert frozen.run_config(n_way=2).inner_optimizer == "sgd"
