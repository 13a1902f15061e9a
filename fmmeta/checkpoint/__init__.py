"""Checkpoints: written whole (write.py, saver.py), found and checked (whole.py), read on any layout (read.py)."""

from fmmeta.checkpoint.read import load, load_tables, same_size
from fmmeta.checkpoint.verify import MANIFEST, complete, fault, put_back, read_state, set_aside
from fmmeta.checkpoint.write import save

__all__ = ["MANIFEST", "complete", "fault", "load", "load_tables", "put_back", "read_state", "same_size", "save", "set_aside"]
