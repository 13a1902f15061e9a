"""strata.yaml: tasks of an epoch by stratum and group."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import table
from fmmeta.config.settings import Config
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.schedule.meta_batches import Items, Schedule
from fmmeta.tasks.sources.load import load_sources


def all_classes(study: Any) -> Items:
    """Every class of CLINC150, whatever its splits, as one source."""

    def items(**settings: Any) -> list[Items]:
        config = Config(dataset=[f"{study.data}/clinc150"], **settings)
        sources = load_sources(config, byte_tokenizer(), lambda text: None)
        return [source.items for source in (sources.train, sources.valid, sources.test) if source]

    splits = Path(study.folder, "splits.json")
    splits.write_text(json.dumps({"train": [item.name for part in items() for item in part]}))
    return items(class_splits=str(splits))[0]


def measure(study: Any, cell: Any) -> dict[str, Any]:
    """Tasks of each stratum by group or node, and the largest deviation from an equal share."""
    items, count = all_classes(study), cell.axes["number"]
    if cell.axes["sharding"] == "node":
        orders = Schedule(items, count, seed=42, nodes=count).orders
        shares = [Counter(items[item].stratum for item in order.epoch(0)) for order in orders]
    else:
        schedule, shares = Schedule(items, 10, seed=42), [Counter[str]() for _ in range(count)]
        for step in range(len(items) // 10):
            for group, share in enumerate(shares):
                share.update(task.stratum for task in schedule.share(step, count, group))
    tasks = {stratum: [share[stratum] for share in shares] for stratum in items.strata}
    off = max(abs(one - sum(each) / count) for each in tasks.values() for one in each)
    return {"tasks": {stratum: " ".join(map(str, each)) for stratum, each in tasks.items()}, "off": off}


def show(study: Any, results: dict[str, Any]) -> str:
    found = {name: results[name] for name in study.cells if name in results}
    strata = next(iter(found.values()))["tasks"]
    rows = [[stratum, *(cell["tasks"][stratum] for cell in found.values())] for stratum in strata]
    return f"{table(['stratum', *found], rows)}\n{max(cell['off'] for cell in found.values()):g}"
