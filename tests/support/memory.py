"""Sizes of a small model for estimates of memory, and a world whose ranks have a given free memory."""

import torch

from fmmeta.parallel import memory
from fmmeta.parallel.layout import Launch, Nodes
from fmmeta.parallel.memory import Sizes
from fmmeta.parallel.process_groups import World

SIZES = Sizes(params=1000, layers=2, hidden=8, heads=4, vocab=0, rows=3, tokens=10, directions=1)


def world_of(monkeypatch, world_size: int, local_world_size: int, free: int) -> World:
    """A world of one process that reports more ranks, with `free` bytes on each."""
    world = World(Launch(), torch.device("cpu"))
    world.launch = Launch(0, world_size, 0, local_world_size)
    world.nodes = Nodes(
        tuple(rank // local_world_size for rank in range(world_size)),
        ("n",) * (world_size // local_world_size),
    )
    monkeypatch.setattr(memory, "free_bytes", lambda device, local: free)
    return world
