"""Encoders whose layers see real tokens only: the same outputs and gradients as with padding."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from fmmeta.learners.classification import NativeClassifier, PooledClassifier
from fmmeta.learners.forward_options import checkpoint_layers
from fmmeta.learners.unpadded import MODELS

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "num_labels": 3,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "embedding_size": 8,
}
LENGTHS = (5, 9, 1, 7)


def learner_of(kind: str, model_type: str, attention: str = "sdpa", checkpointing: bool = False):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL)
    auto = AutoModel if kind == "pooled" else AutoModelForSequenceClassification
    hf = auto.from_config(config, attn_implementation=attention)
    if checkpointing:
        checkpoint_layers(hf)
    return (PooledClassifier(hf, 3, "mean") if kind == "pooled" else NativeClassifier(hf, 3)).train()


def batch(lengths=LENGTHS):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(2, 40, mask.shape, generator=torch.Generator().manual_seed(1))
    return torch.where(mask > 0, ids, 1), mask


def outputs_and_gradients(learner, ids, mask):
    """Features, logits and gradients of a pass, and how many tokens a layer saw."""
    seen, learner = [], copy.deepcopy(learner)
    hook = learner.get_submodule(
        "hf." + next(n for n, _ in learner.hf.named_modules() if n.endswith("layer.1.output.dense"))
    )
    hook.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[:-1].numel()))
    features, logits = learner(input_ids=ids, attention_mask=mask)
    (logits.square().sum() + features.sin().sum()).backward()
    return (
        features,
        logits,
        {name: p.grad for name, p in learner.named_parameters() if p.grad is not None},
        seen,
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["pooled", "native"])
@pytest.mark.parametrize("model_type", MODELS)
def test_outputs_and_gradients_are_those_with_padding(model_type, kind, checkpointing):
    learner, (ids, mask) = learner_of(kind, model_type, checkpointing=checkpointing), batch()
    assert learner.unpadded.works
    features, logits, gradients, seen = outputs_and_gradients(learner, ids, mask)
    learner.unpadded.works = False
    wanted, others, wanted_gradients, padded = outputs_and_gradients(learner, ids, mask)
    assert set(seen) == {sum(LENGTHS)}
    assert set(padded) == {mask.numel()}
    torch.testing.assert_close(features, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, others, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-4, atol=1e-5)


def test_rows_of_equal_length_are_not_unpadded():
    learner, (ids, mask) = learner_of("pooled", "bert"), batch((6, 6))
    *_, seen = outputs_and_gradients(learner, ids, mask)
    assert seen == [12]
    assert learner.unpadded.seen is None


def test_the_saved_model_has_no_trace_of_unpadding():
    learner = learner_of("pooled", "bert")
    assert learner.hf.config._attn_implementation == "sdpa"
    assert "fmmeta" not in learner.hf.config.to_json_string()


@pytest.mark.parametrize(
    ("model_type", "attention"), [("bert", "eager"), ("distilbert", "sdpa"), ("mpnet", "eager")]
)
def test_other_models_and_attentions_are_unchanged(model_type, attention):
    learner, (ids, mask) = learner_of("pooled", model_type, attention), batch()
    assert not learner.unpadded.works
    learner(input_ids=ids, attention_mask=mask)
    assert learner.unpadded.seen is None
