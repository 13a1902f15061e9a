"""Checkpoints: written whole (write.py, async_saver.py), found and checked (verify.py), read on any layout
(read.py).
"""

from fmmeta.checkpoint.read import load, load_tables, same_size
from fmmeta.checkpoint.verify import (
    MANIFEST,
    find_corruption,
    list_complete,
    read_state,
    rename_aside,
    undo_partial_save,
)
from fmmeta.checkpoint.write import save

__all__ = [
    "MANIFEST",
    "find_corruption",
    "list_complete",
    "load",
    "load_tables",
    "read_state",
    "rename_aside",
    "same_size",
    "save",
    "undo_partial_save",
]
