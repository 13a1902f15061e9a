"""Which group meets which strata? The tasks of one epoch, by stratum and group.

    python -m benchmarks.strata --dataset ../shared/data/clinc150

Prints the table of docs/data.md; the last line is the largest deviation of a group from its share of a
stratum, in tasks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.common import table
from fmmeta.config.settings import Config
from fmmeta.models.tiny import byte_tokenizer
from fmmeta.tasks.schedule.meta_batches import Items, Schedule
from fmmeta.tasks.sources.load import load_sources

PER_STEP = 10  # tasks of a meta-batch


def by_group(items: Items, num_groups: int) -> list[Counter[str]]:
    """`global`: what each group runs in the outer steps of the first epoch."""
    schedule, steps = Schedule(items, PER_STEP, seed=42), len(items) // PER_STEP
    return [
        Counter(task.stratum for step in range(steps) for task in schedule.share(step, num_groups, group))
        for group in range(num_groups)
    ]


def by_node(items: Items, nodes: int) -> list[Counter[str]]:
    """`node`: what each node draws from in an epoch."""
    schedule = Schedule(items, nodes, seed=42, nodes=nodes)
    return [Counter(items[item].stratum for item in order.epoch(0)) for order in schedule.orders]


def deviation(shares: list[Counter[str]]) -> float:
    whole = sum(shares, Counter())
    return max(
        abs(share[stratum] - count / len(shares)) for share in shares for stratum, count in whole.items()
    )


def strata_table(items: Items) -> tuple[str, float]:
    """The table, and the largest deviation of all its columns."""
    columns = {
        "global, 2 groups": by_group(items, 2),
        "global, 4 groups": by_group(items, 4),
        "node, 2 nodes": by_node(items, 2),
        "node, 4 nodes": by_node(items, 4),
    }
    rows = [
        [stratum, *(" ".join(str(share[stratum]) for share in shares) for shares in columns.values())]
        for stratum in items.strata
    ]
    return table(["stratum", *columns], rows), max(map(deviation, columns.values()))


def all_classes(dataset: str) -> Items:
    """Every class of a data set, whatever its splits, as one source."""

    def items(**settings: str) -> list[Items]:
        sources = load_sources(Config(dataset=[dataset], **settings), byte_tokenizer(), lambda text: None)  # type: ignore
        return [source.items for source in (sources.train, sources.valid, sources.test) if source]

    with tempfile.TemporaryDirectory() as folder:
        splits = Path(folder) / "splits.json"
        splits.write_text(json.dumps({"train": [item.name for part in items() for item in part]}))
        return items(class_splits=str(splits))[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="../shared/data/clinc150")
    given = parser.parse_args()
    text, worst = strata_table(all_classes(given.dataset))
    print(f"{text}\n{worst:g}")


if __name__ == "__main__":
    main()
