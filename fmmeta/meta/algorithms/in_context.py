"""In-context learning, a baseline without gradients: the support set precedes every query in the prompt.

    before: query alone;  after: support pairs, each as a training example ends, then the query

Brown et al., "Language Models are Few-Shot Learners", 2020 (arXiv 2005.14165), section 2. For causal_lm.
Nothing is trained. Where the model's positions do not suffice, the first pairs are left out. Cost per task:
one forward of the query set with prompts K + 1 times as long.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.tasks.batching import IGNORE, Episode, Example


def prompted(
    support: Sequence[Example], query: Sequence[Example], bos_token_id: int | None, positions: int | None
) -> list[Example]:
    """Every query with as many of the last support pairs before it as `positions` hold; one `bos` at the
    start, if any.
    """
    pairs = [list(row.input_ids) for row in support]
    bare = [ids[1:] if ids[:1] == [bos_token_id] else ids for ids in pairs]
    examples = []
    for row in query:
        ids, labels = list(row.input_ids), list(row.labels)  # type: ignore[arg-type]
        start = ids[:1] == [bos_token_id] and bos_token_id is not None
        prefix: list[int] = []
        for pair in reversed(bare):
            if positions is not None and len(prefix) + len(pair) + len(ids) > positions:
                break
            prefix = pair + prefix
        head = 1 if start else 0
        examples.append(
            Example(ids[:head] + prefix + ids[head:], labels[:head] + [IGNORE] * len(prefix) + labels[head:])
        )
    return examples


@dataclass(frozen=True)
class InContext:
    """Scores the query set without and with the support set in the prompt; see `EvaluationMethod`."""

    def score(self, worker: Worker, theta: Tensor, episode: Episode) -> tuple[PassStats, PassStats]:
        """Collective: group."""
        return worker.forward(episode.query), worker.forward(episode.prompted)


def conflicts(config: Config) -> Iterator[str]:
    spread = {"pipeline_stages": config.pipeline_stages, "tensor_parallel_size": config.tensor_parallel_size}
    for name, value in spread.items():
        if value > 1:
            yield (
                f"{name}={value} with algorithm={config.algorithm} is not tested: whole support sets travel"
                " as prompts; use ZeRO 3"
            )


spec = AlgorithmSpec(
    "in_context",
    task_type="causal_lm",
    in_prompt=True,
    supports=frozenset({"offload_outer"}),
    conflicts=conflicts,
)
