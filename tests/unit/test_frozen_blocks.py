"""Blocks below all trained parameters run once for each micro-batch, and numbers stay what they are."""

import json
from collections import Counter
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.classification import PooledClassifier
from fmmeta.learners.lora import inject
from fmmeta.learners.task_axis import TaskAxis
from fmmeta.parallel.workers.full_model import TaskBatch
from tests.support.learners import CLASSES, batches_of, config_of, episode_of, rule_on, task_gradient
from tests.support.models import tiny

SIZES = {"num_hidden_layers": 3, "vocab_size": 40, "initializer_range": 0.3}
TARGETS = {
    "bert": ["query", "dense"],
    "roberta": ["query", "dense"],
    "llama": ["q_proj", "down_proj"],
    "qwen3": ["q_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
}
RULES = {
    "fomaml": {"algorithm": "fomaml"},
    "exact": {"algorithm": "maml"},
    "differences": {"algorithm": "maml", "second_order": "differences"},
    "reptile": {"algorithm": "reptile"},
    "imaml": {"algorithm": "imaml"},
}


def adapted(family: str, block: int = 2) -> nn.Module:
    """A model of three blocks, one of them with adapters."""
    encoder = family in ("bert", "roberta")
    hf = tiny(family, 2, "AutoModel" if encoder else "", **SIZES).eval()
    learner = PooledClassifier(hf, CLASSES, "mean") if encoder else CausalLearner(hf)
    options = json.dumps({"layers_to_transform": [block]})
    targets = TARGETS[family]
    inject(learner, config_of(learner, lora_r=2, lora_target_modules=targets, peft_config=options))
    draw = torch.Generator().manual_seed(3)
    for name, param in learner.named_parameters():
        if "lora_B" in name:
            param.data.copy_(0.3 * torch.randn(param.shape, generator=draw))
    return learner


def blocks_of(learner: nn.Module) -> nn.ModuleList:
    return next(one for one in learner.modules() if isinstance(one, nn.ModuleList))


class Runs:
    """How often each block computes inside."""

    def __init__(self, learner: nn.Module) -> None:
        self.hooks, self.counted = ExitStack(), Counter()
        for number, block in enumerate(blocks_of(learner)):
            part = next(one for one in block.modules() if hasattr(one, "weight") and "Norm" in str(type(one)))
            count = part.register_forward_hook(lambda *_, number=number: self.counted.update([number]))
            self.hooks.callback(count.remove)

    def __enter__(self) -> list[int]:
        self.found = []
        return self.found

    def __exit__(self, *error) -> None:
        self.hooks.close()
        self.found += [self.counted[number] for number in range(3)]


def worker_and_rule(learner: nn.Module, works: bool, **settings):
    rule, worker = rule_on(learner, lora_r=2, **settings)
    worker.can_skip_blocks = works
    worker.learner.score = lambda batches: None  # which shares what rows have in common
    return rule, worker


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("family", TARGETS)
def test_the_meta_gradient_is_that_of_all_blocks(family, name):
    learner = adapted(family)
    episode, gradients, counts = episode_of(learner), [], []
    for works in (True, False):
        rule, worker = worker_and_rule(learner, works, **RULES[name])
        for _ in range(2):  # the first one finds the frozen blocks, and compares
            batches = batches_of(episode)
            with Runs(worker.learner) as runs:
                found = task_gradient(rule, worker, batches)
        gradients.append(found.gradient)
        counts.append(runs)
    sets = len(batches.support) + len(batches.query)
    (*frozen, trained), plain = counts
    assert frozen == [sets, sets]
    assert plain == [trained] * 3
    assert trained > sets
    assert gradients[0].any()
    if name in ("exact", "imaml"):  # products of autograd have another kernel of attention
        assert float((gradients[0] - gradients[1]).norm()) < 1e-5 * float(gradients[1].norm())
    else:
        assert torch.equal(*gradients)


def test_a_task_of_another_support_set_uses_nothing_of_the_last_one():
    learner = adapted("llama")
    rule, worker = worker_and_rule(learner, True, **RULES["fomaml"])
    plain_rule, plain = worker_and_rule(learner, False, **RULES["fomaml"])
    for seed in (5, 6, 7):
        batches = batches_of(episode_of(learner, seed=seed))
        found = task_gradient(rule, worker, batches).gradient
        assert torch.equal(found, task_gradient(plain_rule, plain, batches).gradient)


@pytest.mark.parametrize("block", [0, 1])
def test_only_blocks_below_all_adapters_are_left_out(block):
    learner = adapted("llama", block)
    rule, worker = worker_and_rule(learner, True, **RULES["fomaml"])
    for _ in range(2):
        batches = batches_of(episode_of(learner))
        with Runs(worker.learner) as runs:
            task_gradient(rule, worker, batches)
    sets = len(batches.support) + len(batches.query)
    assert [count == sets for count in runs] == [number < block for number in range(3)]


def test_trained_embeddings_leave_no_block_out():
    learner = adapted("llama")
    learner.hf.get_input_embeddings().weight.requires_grad_()
    rule, worker = worker_and_rule(learner, True, **RULES["fomaml"])
    for _ in range(2):
        with Runs(worker.learner) as runs:
            task_gradient(rule, worker, batches_of(episode_of(learner)))
    assert len({*runs}) == 1


class Reads(nn.Module):
    """A block that adds to its output what the first block has computed, which is not an input of it."""

    def __init__(self, block: nn.Module, first: nn.Module) -> None:
        super().__init__()
        self.block, self.first = block, [first]
        first.register_forward_pre_hook(
            lambda module, args: setattr(module, "seen", args[0].detach()[..., 0].mean())
        )

    def forward(self, hidden, *args, **named):
        return self.block(hidden, *args, **named) + self.first[0].seen


def test_a_model_whose_later_blocks_read_more_of_a_block_runs_all_of_them():
    learner = adapted("llama")
    gradients = []
    for works in (True, False):
        rule, worker = worker_and_rule(learner, works, **RULES["fomaml"])
        blocks = blocks_of(worker.learner)
        first = next(one for one in blocks[0].modules() if isinstance(one, nn.Linear))
        blocks[2] = Reads(blocks[2], first)
        worker.frozen.lists = [[*blocks]] if works else []
        for seed in (5, 6):
            found = task_gradient(rule, worker, batches_of(episode_of(learner, seed=seed)))
        gradients.append(found.gradient)
        assert worker.frozen.lists == []
    assert torch.equal(*gradients)


def test_several_tasks_in_a_pass_share_the_frozen_blocks():
    learner = adapted("llama")
    sets = [batches_of(episode_of(learner, seed=seed), 16).support for seed in (5, 6)]
    found, counts = [], []
    for works in (True, False):
        _, worker = worker_and_rule(learner, works)
        tasks = TaskBatch(worker, TaskAxis(worker.learner), worker.read(), 2)
        with Runs(worker.learner) as runs:
            for _ in range(4):
                tasks.step(sets, lambda phi, grad, piece: phi.sub_(0.1 * grad))
        found.append(tasks.phi)
        counts.append(runs)
    assert counts == [[3, 3, 7], [4, 4, 4]]  # frozen: the pass that finds them, and two of the comparison
    assert torch.equal(*found)
