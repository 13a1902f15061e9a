"""The losses of micro-batches add up to the mean over the set, however it is split over ranks."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fmmeta.tasks.augment import sample_support, sampled_rows
from fmmeta.tasks.batching import (
    IGNORE,
    Batcher,
    Episode,
    Example,
    MicroBatch,
    SupportSet,
    batches_of_step,
    collate,
    each_batch,
)
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeRows
from tests.support.episodes import objective
from tests.support.learners import (
    compared,
    config_of,
    episode_of,
    llama,
    oracle_gradient,
    rule_on,
    task_gradient,
)

PAD, VOCAB, CLASSES = 0, 50, 4
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


@dataclass
class Cut:
    """A set of rows and how it is split into micro-batches."""

    rows: list[Example]
    group_size: int
    micro_batch_size: int
    max_tokens: int = 0

    def by_rank(self) -> list[list[MicroBatch]]:
        cut = (PAD, self.micro_batch_size)
        return [
            Batcher(*cut, rank, self.group_size, None, self.max_tokens).split(self.rows)
            for rank in range(self.group_size)
        ]

    def all(self) -> list[MicroBatch]:
        return [batch for batches in self.by_rank() for batch in batches]


@st.composite
def cuts(draw, causal: bool | None = None, bounded: bool = False) -> Cut:
    causal = draw(st.booleans()) if causal is None else causal
    rows = []
    for number, length in enumerate(draw(st.lists(st.integers(2, 12), min_size=1, max_size=20))):
        ids = [
            number + 1,
            *draw(st.lists(st.integers(1, VOCAB - 1), min_size=length - 1, max_size=length - 1)),
        ]
        prompt = draw(st.integers(1, length - 1))
        labels = [IGNORE] * prompt + ids[prompt:] if causal else number % CLASSES
        rows.append(Example(ids, labels))
    budget = draw(st.integers(1, 40)) if bounded else 0
    return Cut(rows, draw(st.integers(1, 4)), draw(st.integers(1, 6)), budget)


def rows_of(batch: MicroBatch) -> list[tuple[tuple[int, ...], object]]:
    """The rows with a weight above 0, without padding."""
    found = []
    for ids, mask, labels, weight in zip(
        *batch.inputs.values(), batch.targets["labels"], batch.weights, strict=True
    ):
        if weight > 0:
            n = int(mask.sum())
            found.append(
                (tuple(ids[:n].tolist()), int(labels) if labels.ndim == 0 else tuple(labels[:n].tolist()))
            )
    return found


@given(cuts() | cuts(bounded=True))
def test_rows_with_weight_are_the_whole_set(cut):
    wanted = [
        (tuple(r.input_ids), r.labels if isinstance(r.labels, int) else tuple(r.labels)) for r in cut.rows
    ]
    found = [row for batch in cut.all() for row in rows_of(batch)]
    assert sorted(found, key=repr) == sorted(wanted, key=repr)


@given(cuts() | cuts(bounded=True))
def test_weights_sum_to_one(cut):
    """The sum is over rows for classes and over label tokens for causal_lm."""
    total = 0.0
    for batch in cut.all():
        counted = (batch.targets["labels"].view(len(batch.weights), -1) != IGNORE).sum(1)
        total += float((batch.weights.double() * counted).sum())
    assert total == pytest.approx(1, abs=1e-6)


@given(cuts())
def test_number_size_padding_and_fillers(cut):
    """Ranks get the same number of micro-batches."""
    rounds = {len(batches) for batches in cut.by_rank()}
    assert rounds == {-(-len(cut.rows) // (cut.group_size * cut.micro_batch_size))}
    for batch in cut.all():
        ids, masks = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        lengths = masks.sum(1)
        assert 1 <= len(lengths) <= cut.micro_batch_size
        assert ids.shape[1] == lengths.max()  # no wider than its longest row
        assert (ids[masks == 0] == PAD).all()
        for mask, n in zip(masks, lengths, strict=True):
            assert mask.tolist() == [1] * n + [0] * (len(mask) - n)
        if (labels := batch.targets["labels"]).ndim == 2:
            assert (labels[masks == 0] == IGNORE).all()
        if (batch.weights == 0).any():
            assert len(batch.weights) == 1  # a filler stands alone: a rank without rows
        assert batch.tokens == int(masks[batch.weights > 0].sum())


def test_a_rank_without_rows_gets_a_filler():
    parts = Cut([Example([5, 6], 1)], group_size=3, micro_batch_size=2).by_rank()
    assert [[batch.weights.tolist() for batch in batches] for batches in parts] == [[[1.0]], [[0.0]], [[0.0]]]


@pytest.mark.parametrize(
    ("lengths", "rows", "max_tokens", "shapes"),
    [
        ((2, 9, 3, 8, 2, 9), 2, 0, [(2, 9), (2, 8), (2, 2)]),
        ((4, 30, 4, 4, 31, 4), 8, 32, [(1, 31), (1, 30), (4, 4)]),  # long ones stand alone
    ],
)
def test_rows_of_similar_length_share_a_micro_batch(lengths, rows, max_tokens, shapes):
    found = Batcher(PAD, rows, max_tokens=max_tokens).split([Example([1] * n, 0) for n in lengths])
    assert [tuple(batch.inputs["input_ids"].shape) for batch in found] == shapes


@given(cuts())
def test_parts_of_the_loss_add_up_to_the_mean(cut):
    """A table predicts each token from the one before; of classes the logits are the mean of its rows."""

    def logits(batch: MicroBatch) -> torch.Tensor:
        ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"][..., None]
        if batch.targets["labels"].ndim == 2:
            return TABLE[ids]
        return ((TABLE[ids] * mask).sum(1) / mask.sum(1))[:, :CLASSES]

    parts = zip(*(objective(logits(batch), batch) for batch in cut.all()), strict=True)
    loss, right, rows = map(sum, parts)
    assert int(rows) == len(cut.rows)
    if isinstance(cut.rows[0].labels, int):
        scores = torch.stack([TABLE[list(row.input_ids)].mean(0)[:CLASSES] for row in cut.rows])
        labels = torch.tensor([row.labels for row in cut.rows])
        assert int(right) == int((scores.argmax(1) == labels).sum())
    else:
        scores = torch.cat([TABLE[list(row.input_ids)][:-1] for row in cut.rows])
        labels = torch.tensor([label for row in cut.rows for label in row.labels[1:]])
    assert float(loss) == pytest.approx(float(F.cross_entropy(scores, labels, ignore_index=IGNORE)), rel=1e-5)


def test_causal_row_is_correct_when_every_label_token_is():
    follows = torch.full((VOCAB, VOCAB), 0.0)
    follows[1, 2] = follows[2, 3] = 1.0  # 1 -> 2 -> 3, else -> 0
    batch = collate([Example([1, 2, 3], [IGNORE, 2, 3]), Example([1, 2, 4], [IGNORE, 2, 4])], 0.25, PAD)
    _, right, rows = objective(follows[batch.inputs["input_ids"]], batch)
    assert (int(right), int(rows)) == (1, 2)


@given(cuts(bounded=True))
def test_token_budget_holds_and_ranks_have_equally_many_micro_batches(cut):
    """No more micro-batches are made than the budget and equal numbers per rank require."""
    assert len({len(batches) for batches in cut.by_rank()}) == 1
    for batch in cut.all():
        assert batch.inputs["input_ids"].numel() <= cut.max_tokens or len(batch.weights) == 1
        assert len(batch.weights) <= cut.micro_batch_size
    lengths, least, at = sorted((len(row.input_ids) for row in cut.rows), reverse=True), 0, 0
    while at < len(lengths):
        at += max(1, min(cut.micro_batch_size, cut.max_tokens // lengths[at]))
        least += 1
    assert len(cut.all()) == -(-least // cut.group_size) * cut.group_size


def test_token_budget_does_not_change_the_meta_gradient():
    """FOMAML over micro-batches of a few tokens equals the oracle, which has no micro-batches."""
    learner = llama()
    config, episode = config_of(learner, algorithm="fomaml"), episode_of(learner)
    rule, worker = rule_on(learner, algorithm="fomaml")
    batcher = Batcher(0, 32, max_tokens=12)
    batches = Episode(batcher.split(episode.support), batcher.split(episode.query))
    assert len({len(batch.weights) for batch in batches.support}) > 1
    found = task_gradient(rule, worker, batches)
    wanted, _ = oracle_gradient(learner, config, episode)
    assert compared(learner, config, worker, found.gradient, wanted)[1] < 1e-5


def test_inner_steps_learn_from_parts_of_a_shuffle_epoch_by_epoch():
    """Every epoch has each row once, in another order; the parts differ by a row at most."""
    rows, size = list(range(50)), 16
    steps = list(sampled_rows(rows, size, 12, (1, 2)))
    epochs = [steps[begin : begin + 4] for begin in (0, 4, 8)]
    for epoch in epochs:
        assert sorted(row for part in epoch for row in part) == rows
        assert {len(part) for part in epoch} == {12, 13}
    assert epochs[0] != epochs[1] != epochs[2]
    assert steps == list(sampled_rows(rows, size, 12, (1, 2)))
    assert steps[:4] == list(sampled_rows(rows, size, 4, (1, 2)))
    assert steps != list(sampled_rows(rows, size, 12, (1, 3)))


def test_samples_of_a_support_set_are_micro_batches_of_every_rank():
    """Weights of a sample add up to 1 over the ranks; a batch size of the whole set changes nothing."""
    rows = [Example(list(range(1, 2 + index % 5)), index % 3) for index in range(11)]
    episode = EpisodeRows(Task(0, "t", "s", 1, (7,)), rows, [], ("a", "b", "c"))
    sampled = sample_support(4, 5, episode)
    sets = [Batcher(0, 4, rank, 2).episode(sampled).support for rank in range(2)]
    for k in range(5):
        one, other = (batches_of_step(support, k) for support in sets)
        assert len(one) == len(other)
        assert sum(float(batch.weights.sum()) for batch in (*one, *other)) == pytest.approx(1)
        assert sum(int((batch.weights > 0).sum()) for batch in (*one, *other)) in (3, 4)
    assert batches_of_step(sets[0], 5) is sets[0].steps[0]  # more steps than were planned
    moved = each_batch(sets[0], lambda batch: batch)
    assert isinstance(moved, SupportSet)
    assert moved.steps == sets[0].steps
    for size, steps in ((0, 5), (11, 5), (4, 0)):
        whole = Batcher(0, 4).episode(sample_support(size, steps, episode)).support
        assert batches_of_step(whole, 3) is whole


@pytest.mark.parametrize(("ranks", "rows"), [(1, 32), (2, 2), (3, 1)])
def test_class_weights_give_torchs_weighted_mean_however_a_set_is_split(ranks, rows):
    weights, lengths = [1.0, 2.5, 0.25], torch.arange(2, 9)
    examples = [Example([1] * (2 + i), i % 3, weight=weights[i % 3]) for i in range(7)]
    logits = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    wanted = F.cross_entropy(logits[lengths], torch.arange(7) % 3, torch.tensor(weights))
    found = torch.zeros(())
    for rank in range(ranks):
        for batch in Batcher(PAD, rows, rank, ranks).split(examples):
            chosen = logits[batch.inputs["attention_mask"].sum(1)]
            losses = F.cross_entropy(chosen, batch.targets["labels"], reduction="none")
            found += (losses * batch.weights).sum()
    assert torch.allclose(found, wanted, atol=1e-6)
