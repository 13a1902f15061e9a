"""The same losses and gradients from fewer tokens: packed rows, of which none attends to another; logits
before labels alone; encoders whose layers see no padding. Models that cannot are refused.
"""

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
)

from fmmeta.config.settings import Config
from fmmeta.learners.base import on_device
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.classification import NativeClassifier, PooledClassifier
from fmmeta.learners.forward_options import check_packing, checkpoint_layers
from fmmeta.learners.lazy_weights import open_lazy_model
from fmmeta.learners.load import describe, empty_learner, load_learner
from fmmeta.learners.stages import plan_stages, take_stage
from fmmeta.learners.unpadded import MODELS
from fmmeta.tasks.batching import IGNORE, Batcher, Example, MicroBatch, collate, pack
from tests.support.episodes import objective
from tests.support.messages import check_message, refusal
from tests.support.models import DECODERS, save, save_llama, tiny

VOCAB = 50
CPU = torch.device("cpu")
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


@st.composite
def sets(draw) -> list[Example]:
    rows = []
    for number, length in enumerate(draw(st.lists(st.integers(2, 12), min_size=1, max_size=12))):
        ids = [
            number + 1,
            *draw(st.lists(st.integers(1, VOCAB - 1), min_size=length - 1, max_size=length - 1)),
        ]
        prompt = draw(st.integers(1, length - 1))
        rows.append(Example(ids, [IGNORE] * prompt + ids[prompt:]))
    return sorted(rows, key=lambda row: len(row.input_ids), reverse=True)


def unpacked(sequence: Example) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The rows of a sequence, cut where the positions start again."""
    starts = [i for i, position in enumerate(sequence.position_ids) if position == 0]
    assert starts[0] == 0
    found = []
    for begin, end in pairwise([*starts, len(sequence.input_ids)]):
        assert list(sequence.position_ids[begin:end]) == list(range(end - begin))
        found.append((tuple(sequence.input_ids[begin:end]), tuple(sequence.labels[begin:end])))
    return found


@given(sets(), st.integers(12, 40), st.integers(1, 5))
def test_every_row_is_in_one_sequence(rows, length, least):
    packed = pack(rows, least, length)
    wanted = sorted((tuple(row.input_ids), tuple(row.labels)) for row in rows)
    assert sorted(row for sequence in packed for row in unpacked(sequence)) == wanted
    assert all(len(sequence.input_ids) <= length for sequence in packed)
    assert len(packed) >= min(least, len(rows))  # ranks that could work do
    tokens = sum(len(row.input_ids) for row in rows)
    assert len(packed) <= max(least, 2 * -(-tokens // length))
    assert pack(rows, least, length) == packed


def test_no_loss_is_taken_on_the_first_token_of_a_row():
    rows = [Example([1, 2], [1, 2]), Example([3, 4], [3, 4])]
    (sequence,) = pack(rows, 1, 4)
    assert list(sequence.labels) == [IGNORE, 2, IGNORE, 4]


def test_positions_restart_with_each_row_and_not_on_padding():
    """A row as long as a sequence is packed alone."""
    batch = collate(pack([Example([1] * n, [IGNORE] * n) for n in (8, 3, 2, 1)], 1, 8), 1.0, pad_token_id=0)
    assert {*batch.inputs} == {"input_ids", "position_ids"}
    found = batch.inputs["position_ids"].tolist()
    assert found == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 0, 1, 1]]
    assert batch.tokens == 14


GROUPED = {**SMALL, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 4},
    "qwen2": GROUPED,
    "gpt_neox": SMALL,
    "gpt2": SMALL,
}
# Eager Mistral gives no numbers in fp64 for padding outside of its window, unpacked; fp32 and bf16 do.
EAGER = [name for name in FAMILIES if name != "mistral"]


def gradients_of(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "sdpa") for name in FAMILIES), *((name, "eager") for name in EAGER)],
)
def test_loss_accuracy_and_gradients_equal_those_of_unpacked_rows(name, attention):
    """Parts of the loss summed over two ranks, packed and not, in fp64: nothing but the order of additions
    may differ.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **FAMILIES[name], attn_implementation=attention)
    hf = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for param in hf.parameters():  # away from the start, where attention sees next to nothing
            param.add_(0.2 * torch.randn_like(param))
    rows = []
    for length in (5, 15, 3, 12, 7, 2, 8, 2, 3, 2, 4):
        ids = torch.randint(1, VOCAB, (length,)).tolist()
        rows.append(Example(ids, [IGNORE, *ids[1:]]))
    greedy = hf(torch.tensor([rows[0].input_ids])).logits.argmax(-1)[0]  # one row that is right
    rows.append(Example([rows[0].input_ids[0], int(greedy[0])], [IGNORE, int(greedy[0])]))
    learner = CausalLearner(hf)

    def passes(packing) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        hf.zero_grad()
        total, width = torch.zeros(3, dtype=torch.float64), 0
        for rank in range(2):
            for batch in Batcher(0, 8, rank, 2, packing).split(rows):
                batch.weights = batch.weights.double()
                parts = objective(learner(**batch.inputs), batch)
                parts[0].backward()
                total += torch.stack([part.detach().double() for part in parts])
                width += batch.inputs["input_ids"].numel()
        return total, gradients_of(hf), width

    wanted, gradients, cells = passes(None)
    found, packed_gradients, packed_cells = passes(partial(pack, length=24))
    assert_close(found, wanted, rtol=2e-6, atol=0)  # objective takes its log-softmax in fp32
    assert (int(wanted[2]), bool(wanted[1] >= 1)) == (12, True)
    assert packed_cells < cells
    off = sum(float((packed_gradients[n] - g).square().sum()) for n, g in gradients.items())
    assert off < 1e-12 * sum(float(g.square().sum()) for g in gradients.values())


PACKING = {"task_type": "causal_lm", "packing": True}


def test_models_that_separate_packed_rows_are_accepted_and_others_refused(tmp_path):
    """Bloom has no positions, which is known before its weights are read; short convolutions reach across the
    seam, whatever the positions are.
    """
    config = Config(**PACKING, model_name_or_path=str(save_llama(tmp_path / "llama")))
    learner = load_learner(config, describe(config))
    assert learner.hf.config._attn_implementation == "sdpa"
    learner.hf.config._attn_implementation = (
        "flash_attention_2"  # cannot run here, and need not for the check
    )
    check_packing(learner.hf, lambda given: learner(**given))
    BloomConfig(vocab_size=259, hidden_size=8, n_layer=1, n_head=2).save_pretrained(tmp_path / "bloom")
    lfm2 = Lfm2Config(**{**GROUPED, "vocab_size": 259}, layer_types=["conv", "full_attention"])
    torch.manual_seed(0)
    save(Lfm2ForCausalLM(lfm2), tmp_path / "lfm2")
    for name, load, part in (
        ("bloom", empty_learner, "leave it out"),
        ("lfm2", load_learner, " of their spread); leave it out"),
    ):
        config = Config(**PACKING, model_name_or_path=str(tmp_path / name))
        check_message(refusal(load, config, describe(config)), "packing=True", part)
    check_message(refusal(Config, packing=True), "packing=True", "task_type=classification", "leave it out")


@pytest.mark.parametrize("stage", [0, 1])
def test_each_stage_of_a_pipeline_is_tried_alone(llama, stage):
    """No stage of one layer lets a row see another one, until a layer of it looks at neighbours."""
    config = Config(**PACKING, model_name_or_path=str(llama), pipeline_stages=2)
    model = open_lazy_model(config, describe(config))
    learner = model.learner
    model.materialize([name for name, _ in learner.named_parameters()])
    part = take_stage(learner, plan_stages(learner, 2), stage)
    check_packing(learner.hf, part.alone)
    part.base.layers[stage].mlp = Neighbours()
    check_message(refusal(check_packing, learner.hf, part.alone), "packing=True", "leave it out")


class Neighbours(nn.Module):
    """Adds to each token what the token before it has."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.roll(1, 1)


def batch_of(rows=4, tokens=9):
    """Rows of several lengths, two answers in the first, none in the last."""
    ids = torch.randint(3, 40, (rows, tokens), generator=torch.Generator().manual_seed(0))
    labels, mask = torch.full_like(ids, IGNORE), torch.ones_like(ids)
    for row, begin, end in ((0, 2, 4), (0, 6, 8), (1, 4, 9), (2, 1, 2)):
        labels[row, begin:end] = ids[row, begin:end]
    mask[2, 5:] = 0
    weights = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0])
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
    return rows, [*learner.answers(outputs, batch)], gradients_of(learner), seen


@pytest.mark.parametrize("family", DECODERS)
def test_logits_before_labels_alone_give_the_losses_answers_and_gradients_of_all(family):
    learner, batch = CausalLearner(tiny(family).eval()), batch_of()
    rows, answers, grads, seen = taken(learner, on_device(batch, learner, CPU))
    whole, others, wanted, all_seen = taken(learner, batch)
    assert (seen, all_seen) == ([10], [36])
    assert_close(rows.loss, whole.loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(rows.correct, whole.correct)
    assert torch.equal(rows.answers, whole.answers)
    assert answers == others
    assert_close(grads, wanted, rtol=1e-4, atol=1e-6)


def test_a_batch_without_labels_has_gradients_of_zero():
    learner, batch = CausalLearner(tiny("llama").eval()), batch_of()
    batch.targets["labels"].fill_(IGNORE)
    rows, _, grads, seen = taken(learner, on_device(batch, learner, CPU))
    assert seen == [0]
    assert rows.loss.tolist() == [0.0] * 4
    assert not any(grad.any() for grad in grads.values())


LENGTHS = (5, 9, 1, 7)
ENCODER = {
    **{"hidden_size": 16, "intermediate_size": 24, "vocab_size": 40, "embedding_size": 8},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3},
    **{"num_labels": 3, "pad_token_id": 1, "max_position_embeddings": 24, "num_attention_heads": 2},
}


def encoder(kind: str, model_type: str, attention: str = "sdpa", checkpointing: bool = False):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**ENCODER, "num_hidden_layers": 2})
    auto = AutoModel if kind == "pooled" else AutoModelForSequenceClassification
    hf = auto.from_config(config, attn_implementation=attention)
    if checkpointing:
        checkpoint_layers(hf)
    return (PooledClassifier(hf, 3, "mean") if kind == "pooled" else NativeClassifier(hf, 3)).train()


def outputs_and_gradients(learner, lengths=LENGTHS):
    """Features, logits and gradients of a pass over rows of such lengths; how many tokens a layer saw."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(2, 40, mask.shape, generator=torch.Generator().manual_seed(1))
    seen, learner = [], copy.deepcopy(learner)
    layer = next(n for n, _ in learner.hf.named_modules() if n.endswith("layer.1.output.dense"))
    learner.hf.get_submodule(layer).register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].shape[:-1].numel())
    )
    features, logits = learner(input_ids=torch.where(mask > 0, ids, 1), attention_mask=mask)
    (logits.square().sum() + features.sin().sum()).backward()
    return features, logits, gradients_of(learner), {*seen}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["pooled", "native"])
@pytest.mark.parametrize("model_type", MODELS)
def test_encoders_without_padding_have_the_outputs_and_gradients_with_it(model_type, kind, checkpointing):
    learner = encoder(kind, model_type, checkpointing=checkpointing)
    assert learner.unpadded.works
    *found, gradients, seen = outputs_and_gradients(learner)
    learner.unpadded.works = False
    *wanted, wanted_gradients, padded = outputs_and_gradients(learner)
    assert (seen, padded) == ({sum(LENGTHS)}, {max(LENGTHS) * len(LENGTHS)})
    assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert_close(gradients, wanted_gradients, rtol=1e-4, atol=1e-5)


def test_rows_of_equal_length_are_not_unpadded_and_a_saved_model_has_no_trace_of_it():
    learner = encoder("pooled", "bert")
    *_, seen = outputs_and_gradients(learner, (6, 6))
    assert seen == {12}
    assert learner.unpadded.seen is None
    assert learner.hf.config._attn_implementation == "sdpa"
    assert "fmmeta" not in learner.hf.config.to_json_string()


@pytest.mark.parametrize(
    ("model_type", "attention"), [("bert", "eager"), ("distilbert", "sdpa"), ("mpnet", "eager")]
)
def test_other_models_and_attentions_are_not_unpadded(model_type, attention):
    learner = encoder("pooled", model_type, attention)
    assert not learner.unpadded.works
    ids = torch.full((2, 5), 7)
    learner(input_ids=ids, attention_mask=torch.ones_like(ids).tril(2))
    assert learner.unpadded.seen is None
