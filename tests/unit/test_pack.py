"""Packed rows: nothing is lost, no row attends to another, loss, accuracy and gradients stay; models that
cannot are refused.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import BloomConfig, Lfm2Config, Lfm2ForCausalLM

from fmmeta.config.settings import Config
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.forward_options import check_packing
from fmmeta.learners.lazy_weights import open_lazy_model
from fmmeta.learners.load import describe, empty_learner, load_learner
from fmmeta.learners.stages import plan_stages, take_stage
from fmmeta.tasks.batching import IGNORE, Batcher, Example, collate, pack
from tests.support.episodes import objective
from tests.support.messages import check_message, refusal
from tests.support.models import save, save_llama

VOCAB = 50
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


def test_a_row_as_long_as_a_sequence_is_packed_alone():
    rows = [Example([1] * n, [IGNORE] * n) for n in (9, 9, 3, 3)]
    assert [len(sequence.input_ids) for sequence in pack(rows, 1, 9)] == [9, 9, 6]


def test_no_loss_is_taken_on_the_first_token_of_a_row():
    rows = [Example([1, 2], [1, 2]), Example([3, 4], [3, 4])]
    (sequence,) = pack(rows, 1, 4)
    assert list(sequence.labels) == [IGNORE, 2, IGNORE, 4]


def test_positions_restart_with_each_row_and_not_on_padding():
    rows = [Example([1] * n, [IGNORE] * n) for n in (8, 3, 2, 1)]
    batch = collate(pack(rows, 1, 8), 1.0, pad_token_id=0)
    assert set(batch.inputs) == {"input_ids", "position_ids"}
    found = batch.inputs["position_ids"].tolist()
    assert found == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 0, 1, 1]]
    assert batch.tokens == 14


def families() -> dict[str, tuple]:
    gpt2 = {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "pad_token_id": 0,
    }
    return {
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, num_key_value_heads=2)),
        "mistral": (
            hf.MistralForCausalLM,
            hf.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4),
        ),
        "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SMALL, num_key_value_heads=2)),
        "neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**SMALL)),
        "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(**gpt2)),
    }


# Eager Mistral gives no numbers in fp64 for padding outside of its window, unpacked; fp32 and bf16
# do.
CASES = [
    (name, attention)
    for name in families()
    for attention in ("sdpa", "eager")
    if (name, attention) != ("mistral", "eager")
]


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_loss_accuracy_and_gradients_equal_those_of_unpacked_rows(name, attention):
    """Parts of the loss summed over two ranks, packed and not, in fp64: nothing but the order of additions
    may differ.
    """
    make, config = families()[name]
    torch.manual_seed(0)
    config._attn_implementation = attention
    hf = make(config).double().eval()
    with torch.no_grad():
        for param in hf.parameters():  # away from the start, where attention sees next to nothing
            param.add_(0.2 * torch.randn_like(param))
    rng = torch.Generator().manual_seed(1)
    rows = []
    for length in (5, 15, 3, 12, 7, 2, 8, 2, 3, 2, 4):
        ids = torch.randint(1, VOCAB, (length,), generator=rng).tolist()
        rows.append(Example(ids, [IGNORE, *ids[1:]]))
    greedy = hf(torch.tensor([rows[0].input_ids])).logits.argmax(-1)[0]  # one row that is right
    ids = [rows[0].input_ids[0], int(greedy[0])]
    rows.append(Example(ids, [IGNORE, ids[1]]))

    learner = CausalLearner(hf)

    def passes(packing) -> tuple[list[float], dict[str, torch.Tensor], int]:
        hf.zero_grad()
        total, width = torch.zeros(3, dtype=torch.float64), 0
        for rank in range(2):
            for batch in Batcher(0, 8, rank, 2, packing).split(rows):
                batch.weights = batch.weights.double()
                parts = objective(learner(**batch.inputs), batch)
                parts[0].backward()
                total += torch.stack([part.detach().double() for part in parts])
                width += batch.inputs["input_ids"].numel()
        return total.tolist(), {n: p.grad.clone() for n, p in hf.named_parameters()}, width

    def packing(rows, least):
        return pack(rows, least, 24)

    (loss, right, count), gradients, cells = passes(None)
    (packed_loss, *packed_counts), packed_gradients, packed_cells = passes(packing)
    assert packed_loss == pytest.approx(loss, rel=2e-6)  # objective takes its log-softmax in fp32
    assert packed_counts == [right, count]
    assert count == 12
    assert right >= 1
    assert packed_cells < cells
    off = sum(float((packed_gradients[n] - g).square().sum()) for n, g in gradients.items())
    assert off < 1e-12 * sum(float(g.square().sum()) for g in gradients.values())


def learner_of(folder: Path):
    config = Config(model_name_or_path=str(folder), task_type="causal_lm", packing=True)
    return load_learner(config, describe(config))


def test_a_model_that_separates_packed_rows_is_accepted(tmp_path):
    learner = learner_of(save_llama(tmp_path))
    assert learner.hf.config._attn_implementation == "sdpa"
    learner.hf.config._attn_implementation = (  # cannot run here, and need not for the check
        "flash_attention_2"
    )
    check_packing(learner.hf, lambda given: learner(**given))


def test_a_model_without_positions_is_refused_before_its_weights_are_read(tmp_path):
    BloomConfig(vocab_size=259, hidden_size=8, n_layer=1, n_head=2).save_pretrained(tmp_path)
    config = Config(model_name_or_path=str(tmp_path), task_type="causal_lm", packing=True)
    check_message(refusal(empty_learner, config, describe(config)), "packing=True", "leave it out")


def test_a_model_whose_rows_see_each_other_is_refused(tmp_path):
    """Short convolutions reach across the seam, whatever the positions are."""
    torch.manual_seed(0)
    sizes = {**SMALL, "vocab_size": 259, "num_key_value_heads": 2}
    save(Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=["conv", "full_attention"])), tmp_path)
    check_message(refusal(learner_of, tmp_path), "packing=True", " of their spread); leave it out")


class Neighbours(nn.Module):
    """Adds to each token what the token before it has."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.roll(1, 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_each_stage_of_a_pipeline_is_tried_alone(tmp_path, stage):
    """No stage of one layer lets a row see another one, until a layer of it looks at neighbours."""
    settings = {"task_type": "causal_lm", "pipeline_stages": 2, "packing": True}
    config = Config(model_name_or_path=str(save_llama(tmp_path)), **settings)
    model = open_lazy_model(config, describe(config))
    learner = model.learner
    model.materialize([name for name, _ in learner.named_parameters()])
    part = take_stage(learner, plan_stages(learner, 2), stage)
    check_packing(learner.hf, part.alone)
    part.base.layers[stage].mlp = Neighbours()
    check_message(refusal(check_packing, learner.hf, part.alone), "packing=True", "leave it out")


def test_classification_is_not_packed():
    check_message(refusal(Config, packing=True), "packing=True", "task_type=classification", "leave it out")
