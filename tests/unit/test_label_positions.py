"""Language models compute logits before label tokens only, with the same losses and gradients."""

import pytest
import torch
from torch.testing import assert_close

from fmmeta.learners.base import on_device
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.tasks.batching import IGNORE, MicroBatch
from tests.support.models import DECODERS, tiny

CPU = torch.device("cpu")


def batch_of(rows=4, tokens=9):
    """Rows of several lengths, two answers in the first, none in the last."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (rows, tokens), generator=random)
    labels = torch.full_like(ids, IGNORE)
    labels[0, 2:4], labels[0, 6:8], labels[1, 4:], labels[2, 1] = (
        ids[0, 2:4],
        ids[0, 6:8],
        ids[1, 4:],
        ids[2, 1],
    )
    mask = torch.ones_like(ids)
    mask[2, 5:] = 0
    weights = torch.full((rows,), 1 / (rows - 1))
    weights[-1] = 0.0
    return MicroBatch({"input_ids": ids, "attention_mask": mask}, {"labels": labels}, weights)


def taken(learner, batch):
    """Losses, answers, gradients of a micro-batch, and how many rows the output layer saw."""
    seen = []
    hook = learner.hf.get_output_embeddings().register_forward_hook(
        lambda _, inputs, outputs: seen.append(outputs.shape[:-1].numel())
    )
    outputs = learner(**batch.inputs)
    hook.remove()
    rows = learner.losses(outputs, batch).weighted(batch.weights)
    learner.zero_grad()
    rows.loss.sum().backward()
    grads = {name: param.grad for name, param in learner.named_parameters() if param.grad is not None}
    return rows, [*learner.answers(outputs, batch)], grads, seen


@pytest.mark.parametrize("family", DECODERS)
def test_losses_answers_and_gradients_are_those_of_all_logits(family):
    learner, batch = CausalLearner(tiny(family).eval()), batch_of()
    (rows, answers, grads, seen), (whole, others, wanted, all_seen) = (
        taken(learner, one) for one in (on_device(batch, learner, CPU), batch)
    )
    assert (seen, all_seen) == ([10], [36])
    assert_close(rows.loss, whole.loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(rows.correct, whole.correct)
    assert torch.equal(rows.answers, whole.answers)
    assert answers == others
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        assert_close(grad, wanted[name], rtol=1e-4, atol=1e-6)


def test_a_batch_without_labels_has_gradients_of_zero():
    learner, batch = CausalLearner(tiny("llama").eval()), batch_of()
    batch.targets["labels"].fill_(IGNORE)
    rows, _, grads, seen = taken(learner, on_device(batch, learner, CPU))
    assert seen == [0]
    assert rows.loss.tolist() == [0.0] * 4
    assert not any(grad.any() for grad in grads.values())
