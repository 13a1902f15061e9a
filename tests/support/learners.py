"""A small BERT and a small Llama with gradients above rounding, episodes, and comparisons with the oracle."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.learners.base import Learner
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.classification import NativeClassifier, PooledClassifier
from fmmeta.learners.parameter_sets import choose_parameters
from fmmeta.meta.algorithms.baselines import support_before_query
from fmmeta.meta.algorithms.setup import setup
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.meta.reference import reference_gradient
from fmmeta.meta.task import Setup, TaskRun
from fmmeta.parallel.param_map import param_groups
from fmmeta.parallel.workers.full_model import PlainWorker
from fmmeta.tasks.augment import weigh_classes
from fmmeta.tasks.batching import IGNORE, Batcher, Episode, Example
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeRows
from tests.support.models import tiny

CPU = torch.device("cpu")
CLASSES = 3
SMALL = {"seed": 4, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 8}
"""Sizes of a BERT of about a thousand parameters: its Hessian fits."""


def bert(pooling: str = "mean", classes: int = CLASSES, seed: int = 1, **sizes: int) -> Learner:
    """A BERT of one layer with a nonzero head."""
    small = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
    model = tiny(
        "bert",
        seed,
        "" if pooling == "model" else "AutoModel",
        **{**small, **sizes},
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=classes,
        initializer_range=0.3,
    )
    return (
        NativeClassifier(model, classes) if pooling == "model" else PooledClassifier(model, classes, pooling)
    )


def llama(tied: bool = True) -> Learner:
    """A Llama of two layers."""
    small = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32}
    return CausalLearner(
        tiny(
            "llama",
            2,
            **small,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=40,
            initializer_range=0.2,
            tie_word_embeddings=tied,
        )
    )


def episode_of(learner: Learner, support: int = 9, query: int = 6, seed: int = 5) -> EpisodeRows:
    """Rows of 2 to 6 tokens with alternating classes; for a Llama the last one or two are the answer."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(support + query):
        ids = torch.randint(1, 40, (3 + i % 5,), generator=rng).tolist()
        prompt = len(ids) - 1 - i % 2
        labels = i % CLASSES if learner.head_names else [IGNORE] * prompt + ids[prompt:]
        rows.append(Example(ids, labels))
    return EpisodeRows(
        Task(0, "t", "s", 1, (0,)), rows[:support], rows[support:], tuple(f"c{i}" for i in range(CLASSES))
    )


def batches_of(
    episode: EpisodeRows,
    micro_batch_size: int = 4,
    prompts: bool = False,
    learn_support: bool = False,
    class_weights: Sequence[float] = (),
) -> Episode:
    """A prompt has at most the 32 positions of `llama`."""
    if class_weights:
        weights = dict(zip(episode.classes, class_weights, strict=True))
        episode = weigh_classes(weights, episode)
    if prompts:
        episode = support_before_query(episode, bos_token_id=1, positions=32, learn_support=learn_support)
    return Batcher(0, micro_batch_size).episode(replace(episode, classes=()))


def config_of(learner: Learner, **settings: Any) -> Config:
    fixed: dict[str, Any] = {"n_way": CLASSES, "inner_steps": 3, "inner_lr": 0.1}
    if find(settings.get("algorithm", "fomaml")).evaluation:
        fixed["inner_steps"] = 0
    config = Config(
        **{**fixed, **settings, "task_type": "classification" if learner.head_names else "causal_lm"}
    )
    choose_parameters(learner, config)
    return config


def worker_over(model: nn.Module, head_init: str = "learned", bf16: bool = False) -> PlainWorker:
    """A worker over the model itself; a head that is not learned is in a separate group."""
    head = model.head_names if head_init != "learned" else ()
    groups = param_groups(model, {*head, *model.inner_only}, weight_decay=True)
    return PlainWorker(model, groups, CPU, bf16)


def worker_of(learner: nn.Module, config: Config, bf16: bool = False) -> PlainWorker:
    """A worker over a copy of the model; a head that is not learned is zero."""
    choose_parameters(learner, config)
    model = copy.deepcopy(learner)
    if config.head_init != "learned":
        for name in model.head_names:
            model.get_parameter(name).data.zero_()
    return worker_over(model, config.head_init, bf16)


def setup_of(worker: PlainWorker, config: Config, bf16: bool = False) -> Setup:
    return setup(config, worker, worker.model.head_names, CLASSES if worker.model.head_names else 0, bf16)


@dataclass(frozen=True)
class RuleOn:
    """A rule, and the setup and outer step of its tasks."""

    rule: Any
    setup: Any
    outer_step: int = 0

    @property
    def inner(self) -> InnerLoop:
        return self.setup.inner

    def but(self, **settings: Any) -> "RuleOn":
        return replace(self, setup=replace(self.setup, config=self.setup.config.but(**settings)))

    def task(
        self,
        worker: Any,
        episode: Episode,
        into: MetaGradient | None = None,
        meta: MetaParameters | None = None,
    ) -> TaskRun:
        """A task from the worker's weights, added to `into` or to a separate sum."""
        meta = MetaParameters(worker.read()) if meta is None else meta
        into = meta_gradient_of(self, meta.theta) if into is None else into
        return TaskRun(self.setup, worker, meta, episode, into, self.outer_step)


def rule_on(
    learner: nn.Module, outer_step: int = 0, bf16: bool = False, **settings: Any
) -> tuple[RuleOn, PlainWorker]:
    """The rule of these settings, and a worker over a copy of the model."""
    config = config_of(learner, **settings)
    worker = worker_of(learner, config, bf16)
    return RuleOn(find(config.algorithm).rule, setup_of(worker, config, bf16), outer_step), worker


def meta_gradient_of(rule: RuleOn, theta: Tensor) -> MetaGradient:
    """A zero meta-gradient with all parts that a rule adds to."""
    return MetaGradient(theta, MetaParameters.of(theta, rule.inner).extra)


def task_gradient(
    rule: RuleOn, worker: Any, episode: Episode, into: MetaGradient | None = None
) -> SimpleNamespace:
    """The fields of a TaskResult, and the gradient [S] and `extra` that the rule added to `into`."""
    task = rule.task(worker, episode, into)
    return SimpleNamespace(**vars(rule.rule(task)), gradient=task.into.sum, extra=task.into.extra)


def gradient_of(worker: Any, batches: Any) -> Tensor:
    """The gradient of the mean loss, fp32 [S]."""
    gradient = worker.zeros()
    worker.gradient(batches, gradient)
    return gradient


def rule_gradient(
    learner: nn.Module, config: Config, episode: EpisodeRows, outer_step: int = 0
) -> tuple[SimpleNamespace, PlainWorker]:
    worker = worker_of(learner, config)
    theta = worker.read()
    rule = RuleOn(find(config.algorithm).rule, setup_of(worker, config), outer_step)
    prompts = find(config.algorithm).evaluation is not None
    batches = batches_of(episode, prompts=prompts, learn_support=config.loss_on_support)
    found = task_gradient(rule, worker, batches)
    assert torch.equal(worker.read(), theta)
    return found, worker


def oracle_gradient(
    learner: nn.Module,
    config: Config,
    episode: EpisodeRows,
    outer_step: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, Tensor], Any]:
    """The meta-gradient of the oracle, and that of rates."""
    model = copy.deepcopy(learner).to(dtype)
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    if config.head_init != "learned":
        for name in model.head_names:
            model.get_parameter(name).data.zero_()
    theta = {name: model.get_parameter(name).detach().clone() for name in names}
    return reference_gradient(model, theta, episode, config, False, None, outer_step)


def by_name(worker: PlainWorker, vector: Tensor) -> dict[str, Tensor]:
    trained = [(name, param) for name, param in worker.model.named_parameters() if param.requires_grad]
    return {name: worker.gather_param(vector, name, tuple(param.shape)) for name, param in trained}


def meta_parameters(learner: Learner, config: Config, found: dict[str, Tensor]) -> Tensor:
    """The meta-parameters of a gradient as one fp64 vector: all but a head that is reset in every task."""
    dropped = learner.head_names if config.head_init != "learned" else ()
    return torch.cat(
        [value.double().reshape(-1) for name, value in sorted(found.items()) if name not in dropped]
    )


def cosine_and_error(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    assert float(wanted.norm()) > 1e-3
    cosine = float(torch.dot(found, wanted) / (found.norm() * wanted.norm()))
    return cosine, float((found - wanted).norm() / wanted.norm())


def compared(
    learner: Learner, config: Config, worker: PlainWorker, gradient: Tensor, wanted: dict[str, Tensor]
) -> tuple[float, float]:
    """Cosine and relative error of a worker's meta-gradient to that of the oracle."""
    found = meta_parameters(learner, config, by_name(worker, gradient))
    return cosine_and_error(found, meta_parameters(learner, config, wanted))


def against_oracle(learner: Learner, outer_step: int = 0, **settings: Any) -> tuple[float, float]:
    """Cosine and relative error of a rule's meta-gradient to the oracle's."""
    config, episode = config_of(learner, **settings), episode_of(learner)
    found, worker = rule_gradient(learner, config, episode, outer_step)
    assert found.finite
    wanted, _ = oracle_gradient(learner, config, episode, outer_step)
    return compared(learner, config, worker, found.gradient, wanted)


def norm(weights: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in weights.values()))


def identity(value):
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value


def passes_of(learner: Learner, monkeypatch: Any, **settings: Any) -> tuple[int, int]:
    """Count passes with a gradient, and passes without, that one task makes."""
    rule, worker = rule_on(learner, **settings)
    episode = batches_of(episode_of(learner), micro_batch_size=32)
    counted = {True: 0, False: 0}
    call = worker._call

    def counting(batch):
        counted[torch.is_grad_enabled()] += 1
        return call(batch)

    monkeypatch.setattr(
        worker.learner, "score", lambda batches: None
    )  # which shares what rows have in common

    monkeypatch.setattr(worker, "_call", counting)
    task_gradient(rule, worker, episode)
    return counted[True], counted[False]


LEARNERS = {"bert": bert(), "classifier": bert("model"), "llama": llama()}
PROTOTYPE = {"head_init": "prototype", "inner_lr": 0.02}
