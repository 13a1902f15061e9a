"""Tokenised rows on disk, written once per content, tokenizer and settings, and memory-mapped.

    <datasets cache>/fmmeta/<key>.arrow      an Arrow stream (datasets.Dataset.from_file reads it too)

A file appears whole, under a name that says what is in it, so that processes and runs can share it without
locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError
from fmmeta.common.security import publish
from fmmeta.config.settings import KEYED, Config
from fmmeta.tasks.data.columns import Table, tabulate
from fmmeta.tasks.data.encode import encode
from fmmeta.tasks.data.rows import Bad, Row, ending

FORMAT = (
    2  # part of every key: raise it when the columns, their meaning or the way texts become tokens change
)
CHUNK = 8192  # rows of a record batch, and of a call of the tokenizer
OF_TOKENIZER = (
    "eos_token_id",
    "special_tokens_map",
    "split_special_tokens",
    "clean_up_tokenization_spaces",
    "truncation_side",
)


@dataclass(frozen=True)
class Coded:
    """A column of few different strings: `codes` [rows] are numbers into `names`, in order of first
    appearance.
    """

    names: list[str]
    codes: np.ndarray


class TokenStore:
    """Rows by number: tokens, labels and texts stay on disk until asked for, the rest is codes in memory."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path, self.bytes = path, path.stat().st_size
        self.table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        facts = json.loads((self.table.schema.metadata or {})[b"fmmeta"])
        self.notes: list[str] = facts["notes"]
        self.fingerprint: str = facts["fingerprint"]
        self.task, self.member, self.stratum = map(self.coded, ("task", "member", "stratum"))
        self.ids, self.labels = self._ragged("input_ids"), self._ragged("labels")

    def __len__(self) -> int:
        return self.table.num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.path,)  # another process maps the file for itself

    def check(self) -> None:
        """Raise `OSError` if the file is not whole any more: reading a mapping past its end would kill the
        process.
        """
        size = os.stat(self.path).st_size
        if size != self.bytes:
            raise OSError(f"{self.path} has {size} bytes instead of {self.bytes}: something has changed it")

    def text(self, column: str, row: int) -> str:
        """`left` (text or input) or `right` (class or output) of a row."""
        return self.table.column(column)[row].as_py()

    def lengths(self) -> np.ndarray:
        """Tokens of every row."""
        return np.concatenate([np.diff(offsets) for offsets, _ in self.ids] or [np.zeros(0, dtype=np.int32)])

    @staticmethod
    def cell(ragged: Sequence[tuple[np.ndarray, np.ndarray]], row: int) -> np.ndarray:
        offsets, values = ragged[row // CHUNK]
        at = row % CHUNK
        return values[offsets[at] : offsets[at + 1]]

    def coded(self, column: str) -> Coded:
        array = self.table.column(column).dictionary_encode().combine_chunks()
        chunk = array.chunk(0) if hasattr(array, "chunk") else array
        return Coded(chunk.dictionary.to_pylist(), chunk.indices.to_numpy(zero_copy_only=False))

    def _ragged(self, column: str) -> list[tuple[np.ndarray, np.ndarray]]:
        chunks = self.table.column(column).chunks
        return [(chunk.offsets.to_numpy(), chunk.values.to_numpy()) for chunk in chunks]


def prepare(
    name: str,
    content: str,
    read: Callable[[Bad], Sequence[Row]],
    config: Config,
    tokenizer: Any,
    notice: Callable[[str], None],
    one_task: bool = False,
) -> TokenStore:
    """The store of a data set, made by `read` and the tokenizer if no process has made it before.

    content: says which rows `read` gives. Raises `UsageError` for rows that cannot be used, as on_bad_task
    has it.
    """
    settings = {key: getattr(config, key) for key in KEYED}
    if config.prompt_template == "chat":
        settings["chat_template"] = tokenizer.get_chat_template()
    key = digest([FORMAT, content, tokenizer_print(tokenizer), settings, one_task])
    path = cache_folder() / f"{key}.arrow"
    store = open_store(path)
    if store is None:
        bad, notes = BadRows(name, config), list[str]()
        rows = read(bad)
        if not rows:
            bad.judge(0, notes.append)
        table = tabulate(name, rows, config, notes.append, bad, one_task)
        bad.judge(len(table.left), notes.append)
        write(path, table, config, tokenizer, notes)
        store = TokenStore(path)
    for note in store.notes:
        notice(note)
    return store


def open_store(path: Path) -> TokenStore | None:
    """The store, or None where there is none or a broken one."""
    import pyarrow as pa

    try:
        return TokenStore(path) if path.is_file() else None
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return None


def write(path: Path, table: Table, config: Config, tokenizer: Any, notes: list[str]) -> None:
    """Tokenise and write a store under a passing name, then give it its own."""
    import pyarrow as pa

    batches, seen = [], hashlib.sha256(json.dumps([table.member, table.stratum]).encode())
    for begin in range(0, len(table.left), CHUNK):
        part = slice(begin, begin + CHUNK)
        examples = encode(tokenizer, config, table.left[part], table.right[part])
        labels = [e.labels if config.task_type == "causal_lm" else [] for e in examples]
        seen.update(repr([(e.input_ids, label) for e, label in zip(examples, labels, strict=True)]).encode())
        columns = {
            "input_ids": pa.array([e.input_ids for e in examples], pa.list_(pa.int32())),
            "labels": pa.array(labels, pa.list_(pa.int32())),
            "left": pa.array(table.left[part]),
            "right": pa.array(table.right[part]),
            "task": pa.array(table.task[part]),
            "member": pa.array(table.member[part]),
            "stratum": pa.array(table.stratum[part]),
        }
        batches.append(pa.record_batch(columns))
    if config.task_type == "classification" and table.task[0]:
        seen.update(json.dumps(table.right).encode())  # classes; without named tasks they are the members
    facts = {b"fmmeta": json.dumps({"notes": notes, "fingerprint": seen.hexdigest()}).encode()}
    schema = batches[0].schema.with_metadata(facts)
    temporary = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            for batch in batches:
                stream.write_batch(batch.replace_schema_metadata(facts))
        publish(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UsageError(
            f"{path.parent} cannot be written to ({error}); set HF_DATASETS_CACHE to a folder with room"
        ) from None


class BadRows:
    """What cannot be used of a data set: raised, or counted and judged, as on_bad_task has it."""

    def __init__(self, name: str, config: Config) -> None:
        self.name, self.config = name, config
        self.errors: list[str] = []

    def __call__(self, error: UsageError) -> None:
        if self.config.on_bad_task == "raise":
            raise error
        self.errors.append(str(error))

    def judge(self, good: int, notice: Callable[[str], None]) -> None:
        """Say how many there were. Raises `UsageError` if they are too many, or all."""
        bad = len(self.errors)
        if not bad:
            return
        said = f"dataset={self.name}: {bad} of {bad + good} rows cannot be used; the first: {self.errors[0]}"
        if not good or bad > self.config.max_bad_fraction * (bad + good):
            raise UsageError(f"{said} (max_bad_fraction={self.config.max_bad_fraction})")
        notice(f"{said}; left out")


def cache_folder() -> Path:
    """Where `datasets` keeps what it has prepared."""
    from huggingface_hub.constants import HF_HOME

    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets") / "fmmeta"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def files_digest(files: Sequence[Path]) -> str:
    """Of the files' kinds and bytes; an unreadable file counts by its error, which reading it will meet
    again.
    """
    seen = hashlib.sha256()
    for file in files:
        seen.update((ending(file) or "").encode())
        try:
            with file.open("rb") as opened:
                while part := opened.read(2**20):
                    seen.update(part)
        except OSError as error:
            seen.update(str(error).encode())
    return seen.hexdigest()


def tokenizer_print(tokenizer: Any) -> str:
    """What a tokenizer does to a text, as a digest: settings and the whole fast tokenizer, or the files of a
    slow one.

    A chat template counts where it is used only (`prepare`).
    """
    settings = [
        type(tokenizer).__qualname__,
        *(repr(getattr(tokenizer, name, None)) for name in OF_TOKENIZER),
    ]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        return digest(
            [settings, {**parts, "truncation": None, "padding": None}]
        )  # these two are what the last call asked for
    with tempfile.TemporaryDirectory() as folder:  # merges and scores are in no vocabulary
        tokenizer.save_vocabulary(folder)
        files = files_digest(sorted(Path(folder).iterdir()))
    return digest([settings, tokenizer.get_vocab(), repr(tokenizer.init_kwargs), files])
