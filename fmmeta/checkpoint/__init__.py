"""Checkpoints: written completely or not at all, verified, and read on any layout."""

from fmmeta.checkpoint.read import (
    MANIFEST,
    find_corruption,
    list_complete,
    load,
    load_tables,
    read_state,
    rename_aside,
    undo_partial_save,
)

__all__ = [
    "MANIFEST",
    "find_corruption",
    "list_complete",
    "load",
    "load_tables",
    "read_state",
    "rename_aside",
    "undo_partial_save",
]
