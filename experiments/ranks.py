"""ranks.yaml: how much larger the gain of a low rank is than that of rank 16."""

from typing import Any

from experiments.report import Units, units
from experiments.run import Cell


def gain(results: dict[str, Any], cell: Cell, rank: int) -> Units:
    """joint - FOMAML of a model and seed, by class or function."""
    joint, fomaml = (
        units(results.get(f"test {cell.axes['model']} {row} {rank} {cell.axes['seed']}", {}), "loss.after")
        for row in ("joint", "FOMAML")
    )
    return {unit: joint[unit] - value for unit, value in fomaml.items() if unit in joint}


def above_rank_16(results: dict[str, Any], cell: Cell) -> Units:
    """The gain at the rank of a cell minus that at 16; nothing while one is missing."""
    here, there = gain(results, cell, cell.axes["rank"]), gain(results, cell, 16)
    return {unit: value - there[unit] for unit, value in here.items() if unit in there}
