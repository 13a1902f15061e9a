"""Joint training, in-context learning without training, and training for it (MetaICL).

Joint training is multi-task fine-tuning on the same tasks, without an inner loop.

    g = (grad L_support(theta) + grad L_query(theta)) / 2

The baseline that meta-learning has to beat (for language models: instruction tuning). Caruana, "Multitask
Learning", Machine Learning 28, 1997, section 2. In training a classifier has one head over the classes of all
training tasks (`number_classes`), zero at first and trained like the body. Evaluation drops it and adapts
with the inner loop, from a head that the task initialises. Cost per task: 2 forward and backward passes (of
streams, whose sets are the same rows, one of each chunk), one shard of work.

In-context learning has no gradients: the support set precedes every query in the prompt.

    before: query alone;  after: support pairs, each as a training example ends, then the query

Brown et al., "Language Models are Few-Shot Learners", 2020 (arXiv 2005.14165), section 2. For causal_lm.
Nothing is trained. Where the model's positions do not suffice, the first pairs are left out. Cost per task:
one forward of the support set and one of the query set in one process (learners/shared_prefix.py); elsewhere
one of the query set with prompts K + 1 times as long.

MetaICL trains the model for these prompts, without an inner loop:

    g = grad L_query(theta), each query with the support set before it; labels on its answer alone

Min, Lewis, Zettlemoyer, Hajishirzi, "MetaICL: Learning to Learn In Context", 2022 (arXiv 2110.15943),
section 3. Prompts and evaluation are those of in-context learning. Cost per task: one forward and backward
pass over the query set, with prompts K + 1 times as long; no shards.

Not in the paper: with loss_on_support the answers of the pairs before a query have labels too, except the
first. The same pass then trains on answers that have 1 to K examples before them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from torch import Tensor

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.fields import default_of, shown
from fmmeta.config.settings import Config, InnerConfig
from fmmeta.learners.load import max_positions
from fmmeta.meta import reference
from fmmeta.meta.task import TaskResult, TaskRun
from fmmeta.parallel.costs import Passes
from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.tasks.batching import IGNORE, Episode, Example
from fmmeta.tasks.sources.base import EpisodeRows, EpisodeTransform


def joint(task: TaskRun) -> TaskResult:
    if task.config.learner.ordered:
        return task.backward(task.support)  # both sets are the chunks of one stretch
    mean, support = task.gradient(task.support, 0.5)
    task.between_passes()
    query = task.worker.gradient(task.query, mean, 0.5)
    if finite := support.finite and query.finite:
        task.into.add(mean)
    return TaskResult(1.0, finite, support, query)


def joint_conflicts(config: Config) -> Iterator[str]:
    if config.head_init == "learned":
        yield (
            f"head_init=learned with algorithm={config.algorithm}: its head is that of the training classes"
            " and no start for others; use zero or prototype"
        )


JOINT = AlgorithmSpec(
    "joint",
    joint,
    reference.joint,
    all_classes=True,
    supports=frozenset({"outer_parameters"}),
    conflicts=joint_conflicts,
    passes=lambda config, forwards: Passes(0, config.chunks) if config.learner.ordered else Passes(1, 1),
    work_shards=1,
)


def leading_bos(ids: Sequence[int], bos_token_id: int | None) -> int:
    """Number of tokens that mark the start of a row: 1, or 0 where that token begins chat turns too.

    >>> leading_bos([1, 8, 9], 1), leading_bos([1, 8, 1, 9], 1), leading_bos([8, 9], None)
    (1, 0, 0)
    """
    return int(bos_token_id is not None and ids[:1] == [bos_token_id] and bos_token_id not in ids[1:])


def with_bos(rows: Sequence[Example], bos_token_id: int | None) -> list[tuple[Example, list[int], int]]:
    """Each row with its tokens, and the number of leading ones that mark its start."""
    return [(row, [*row.input_ids], leading_bos([*row.input_ids], bos_token_id)) for row in rows]


def prompted(
    support: Sequence[Example],
    query: Sequence[Example],
    bos_token_id: int | None,
    positions: int | None,
    learn_support: bool = False,
) -> list[Example]:
    """Every query with as many of the last support pairs before it as `positions` hold; one `bos` at the
    start, if any.

    learn_support: the n-th query has the pairs in an order rotated by n, and all answers but that of the
    first pair have labels.
    """
    bare = [
        Example(ids[skip:], row.token_labels[skip:]) for row, ids, skip in with_bos(support, bos_token_id)
    ]
    examples = []
    for number, (row, ids, head) in enumerate(with_bos(query, bos_token_id)):
        turn = number % len(bare) if bare and learn_support else 0
        before, length = list[Example](), len(ids)
        for pair in reversed(bare[turn:] + bare[:turn]):
            length += len(pair.input_ids)
            if positions is not None and length > positions:
                break
            before.insert(0, pair)
        tokens = [token for pair in before for token in pair.input_ids]
        learned = before[1:] if learn_support else []
        answers = [label for pair in learned for label in pair.token_labels]
        ignored = [IGNORE] * (head + len(tokens) - len(answers))
        labels = ignored + answers + row.token_labels[head:]
        examples.append(replace(row, input_ids=ids[:head] + tokens + ids[head:], labels=labels))
    return examples


def support_before_query(
    episode: EpisodeRows, rng: Any = None, alone: bool = False, **options: Any
) -> EpisodeRows:
    """An `EpisodeTransform`: queries that are `prompted`, without a support set.

    alone: the support set becomes the queries without prompts, for `InContext`.
    """
    query = prompted(episode.support, episode.query, **options)
    return replace(episode, support=episode.query if alone else [], query=query)


def others_before_each(
    episode: EpisodeRows, rng: Any = None, bos_token_id: int | None = None, positions: int | None = None
) -> EpisodeRows:
    """An `EpisodeTransform`: support rows with the other ones before each of them, and queries with all of
    them before each.

    An inner loop on these rows learns to use the examples in a prompt: all answers but that of the first pair
    have labels, and the pairs are rotated from row to row. A single support row stays as it is.

    Akyürek et al., "The Surprising Effectiveness of Test-Time Training for Few-Shot Learning", 2025 (arXiv
    2411.07279), section 3, without its augmentations.
    """
    limits, rows = (bos_token_id, positions), [*episode.support]
    learned = list[Example]()
    for turn in range(1, len(rows) + 1):
        *before, last = rows[turn:] + rows[:turn]
        learned += prompted(before, [last], *limits, learn_support=True)
    return replace(episode, support=learned, query=prompted(rows, episode.query, *limits))


PROMPTS = {"in_context": support_before_query, "finetune+in_context": others_before_each}
"""What methods of `fmmeta evaluate` do to episodes; the others leave them as they are."""


def prompts(method: str, tokenizer: Any, hf_config: Any, **options: bool) -> list[EpisodeTransform]:
    """The transforms of a method; prompts are as long as the model's positions allow."""
    if method not in PROMPTS:
        return []
    positions = max_positions(hf_config)
    return [partial(PROMPTS[method], bos_token_id=tokenizer.bos_token_id, positions=positions, **options)]


@dataclass(frozen=True)
class InContext:
    """Scores the query set without and with the support set in the prompt; see `EvaluationMethod`. Episodes
    are those of `support_before_query` with `alone`.
    """

    def score(self, worker: Worker, theta: Tensor, episode: Episode) -> tuple[PassStats, PassStats]:
        """Collective: group."""
        return worker.forward(episode.support), worker.forward(episode.query)


IN_CONTEXT = AlgorithmSpec(
    "in_context",
    needs="generates",
    method="in_context",
    evaluation=InContext(),
    learning="support set in the prompt",
    rows_before_query=lambda config: config.most_shots,
    supports=frozenset({"offload_outer"}),
)


def meta_icl(task: TaskRun) -> TaskResult:
    return task.backward(task.query)


def meta_icl_conflicts(config: Config) -> Iterator[str]:
    if config.loss_on_support and config.k_shot == 1:
        yield (
            "loss_on_support=True with k_shot=1: the first answer of a prompt has no loss, and there is no"
            " other; use k_shot=2 or more, or leave it out"
        )
    for item in fields(InnerConfig):
        value = getattr(config, item.name)
        if value not in (default_of(item), META_ICL.defaults.get(item.name)):
            yield (
                f"{item.name}={shown(value)} means nothing for algorithm={config.algorithm}, which has no"
                " inner loop; leave it out"
            )


META_ICL = replace(
    IN_CONTEXT,
    name="meta_icl",
    rule=meta_icl,
    reference=reference.in_prompt,
    defaults={"inner_steps": 0, "inner_lr": 0.1},
    supports=frozenset({"loss_on_support", "offload_outer", "outer_parameters"}),
    conflicts=meta_icl_conflicts,
    passes=lambda config, forwards: Passes(0, 1),
    adds_directly=lambda config: True,
)
