"""A small BERT and a small Llama with gradients above rounding, episodes, and comparisons with the oracle."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms.baselines import prompted
from fmmeta.meta.algorithms.setup import Setup, setup
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.meta.reference import reference_gradient
from fmmeta.models.learner import CausalLearner, Learner, NativeClassifier, PooledClassifier
from fmmeta.parallel.param_map import param_groups
from fmmeta.parallel.workers.full_model import PlainWorker
from fmmeta.tasks.batching import IGNORE, Batcher, Episode, Example
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeRows

CPU = torch.device("cpu")
CLASSES = 3


def bert(pooling: str = "mean", classes: int = CLASSES) -> Learner:
    """A BERT of one layer with a nonzero head."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    torch.manual_seed(1)
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=40,
        max_position_embeddings=16,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=classes,
        initializer_range=0.3,
    )
    if pooling == "model":
        return NativeClassifier(BertForSequenceClassification(config), classes)
    return PooledClassifier(BertModel(config), classes, pooling)


def llama() -> Learner:
    """A Llama of two layers with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        vocab_size=40,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return CausalLearner(LlamaForCausalLM(config))


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
    learn_support: bool = False,
    class_weights: Sequence[float] = (),
) -> Episode:
    """Rows of a classifier have no prompts; a prompt has at most the 32 positions of `llama`."""
    batcher = Batcher(0, micro_batch_size)
    support, query = (
        batcher.split(rows, class_weights=class_weights) for rows in (episode.support, episode.query)
    )
    if isinstance(episode.query[0].labels, int):
        return Episode(support, query)
    prompts = prompted(episode.support, episode.query, 1, 32, learn_support)
    return Episode(support, query, batcher.split(prompts))


def config_of(learner: Learner, **settings: Any) -> Config:
    fixed: dict[str, Any] = {"n_way": CLASSES, "inner_steps": 3, "inner_lr": 0.1}
    if find(settings.get("algorithm", "fomaml")).in_prompt:
        fixed["inner_steps"] = 0
    return Config(
        **{**fixed, **settings, "task_type": "classification" if learner.head_names else "causal_lm"}
    )


def worker_over(model: nn.Module, head_init: str = "learned", bf16: bool = False) -> PlainWorker:
    """A worker over the model itself; a head that is not learned is in a separate group."""
    per_task = model.head_names if head_init != "learned" else ()
    return PlainWorker(model, param_groups(model, per_task, weight_decay=True), CPU, bf16)


def worker_of(learner: nn.Module, config: Config, bf16: bool = False) -> PlainWorker:
    """A worker over a copy of the model; a head that is not learned is zero."""
    model = copy.deepcopy(learner)
    if config.head_init != "learned":
        for name in model.head_names:
            model.get_parameter(name).data.zero_()
    return worker_over(model, config.head_init, bf16)


def setup_of(worker: PlainWorker, config: Config, bf16: bool = False) -> Setup:
    return setup(config, worker, worker.model.head_names, CLASSES if worker.model.head_names else 0, bf16)


def meta_gradient_of(rule: Any, theta: Tensor) -> MetaGradient:
    """A zero meta-gradient with all parts that a rule adds to."""
    learned, kept = rule.inner.rates.meta_parameter, rule.inner.optimizer.kept
    extra = {} if kept is None else {"exp_avg": theta, "exp_avg_sq": theta}
    return MetaGradient(theta, extra if learned is None else {**extra, "rates": learned})


def task_gradient(
    rule: Any, worker: Any, episode: Episode, into: MetaGradient | None = None
) -> SimpleNamespace:
    """The fields of a TaskResult, and the gradient [S] and `extra` that the rule added to `into`."""
    theta = worker.read()
    into = meta_gradient_of(rule, theta) if into is None else into
    result = rule.task_gradient(worker, MetaParameters(theta), episode, into)
    return SimpleNamespace(**vars(result), gradient=into.sum, extra=into.extra)


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
    rule = find(config.algorithm).rule(setup_of(worker, config), outer_step)
    found = task_gradient(rule, worker, batches_of(episode, learn_support=config.loss_on_support))
    assert torch.equal(worker.read(), theta)
    return found, worker


def oracle_gradient(
    learner: nn.Module,
    config: Config,
    episode: EpisodeRows,
    outer_step: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, Tensor], Any]:
    """The meta-gradient of the oracle, and those of rates and optimizer state."""
    model = copy.deepcopy(learner).to(dtype)
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    if config.head_init != "learned":
        for name in model.head_names:
            model.get_parameter(name).data.zero_()
    theta = {name: model.get_parameter(name).detach().clone() for name in names}
    wanted, of_rates, memory = reference_gradient(model, theta, episode, config, False, None, outer_step)
    return wanted, (of_rates, memory)


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


def against_oracle(learner: Learner, outer_step: int = 0, **settings: Any) -> tuple[float, float]:
    """Cosine and relative error of a rule's meta-gradient to the oracle's."""
    config, episode = config_of(learner, **settings), episode_of(learner)
    found, worker = rule_gradient(learner, config, episode, outer_step)
    assert found.finite
    wanted, _ = oracle_gradient(learner, config, episode, outer_step)
    return cosine_and_error(
        meta_parameters(learner, config, by_name(worker, found.gradient)),
        meta_parameters(learner, config, wanted),
    )


def norm(weights: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in weights.values()))
