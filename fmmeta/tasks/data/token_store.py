"""Tokenised rows on disk, written once per content, tokenizer and settings, and memory-mapped.

    <datasets cache>/fmmeta/<key>.arrow      an Arrow stream (datasets.Dataset.from_file reads it too)

A file gets its name after it is complete, and the name is a digest of all that its content depends on. So
processes and runs share files without locks. Batches are written as they are tokenised; what is known after
them is in the metadata of the last one, which has no rows.
"""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Warn
from fmmeta.common.security import publish, publishing, source_of
from fmmeta.config.settings import KEYED, Config
from fmmeta.tasks.batching import Example
from fmmeta.tasks.data.columns import Bad, Row, refuse, stratifier
from fmmeta.tasks.data.encode import RowEncoder, full_rows
from fmmeta.tasks.data.files import ending
from fmmeta.tasks.data.images import EncodedImage, ImageReader
from fmmeta.tasks.data.rows import (
    IN_MEMORY,
    Table,
    Tabulator,
    as_plain,
    columns_of,
    label_rows,
    label_texts,
    stored_row,
)

# part of every key: raise it when the columns, their meaning or the way texts become tokens change
FORMAT = 8
CHUNK = 8192  # rows of a record batch, and of a call of the tokenizer
# 64-bit offsets: the texts of a batch may have more than 2 GiB
TEXT, TOKENS = pa.large_string(), pa.list_(pa.int32())
KINDS = {
    "input_ids": TOKENS,
    "labels": TOKENS,
    "image": pa.large_binary(),
    "content": pa.uint64(),
}
Contents = Mapping[str, np.ndarray]
"""What identifies the rows of each unit of splits: `rows.content_key`, uint64."""
BYTES_PER_TOKEN = 4
OF_TOKENIZER = (
    "eos_token_id",
    "special_tokens_map",
    "added_tokens_decoder",
    "split_special_tokens",
    "clean_up_tokenization_spaces",
    "truncation_side",
)


class TokenStore:
    """Rows by number. Tokens, labels and texts are read from disk when they are needed.

    table: columns `input_ids`, `labels` and those of `rows.Table`; of images `image`, their bytes or null,
    and `image_where`. kind: the class of the learner. encoder: of rows that become examples when they are
    drawn; None for those whose tokens are stored. label_rows: with --label_names, the number of the row that
    holds the text of each class; these rows come last. of_data: the table without them.
    """

    def __init__(self, path: Path, kind: Any, encoder: RowEncoder | None = None) -> None:
        self.path, self.bytes, self.kind, self.encoder = path, path.stat().st_size, kind, encoder
        stream = pa.ipc.open_stream(pa.memory_map(str(path)))
        *batches, last = stream.iter_batches_with_custom_metadata()
        facts = json.loads((last.custom_metadata or {})[b"fmmeta"])
        self.table = pa.Table.from_batches([one.batch for one in batches])
        self.notes: list[str] = facts["notes"]
        self.fingerprint: str = facts["fingerprint"]
        self.named_tasks = bool(self.text("task", 0))
        rows = self.table.num_rows - facts.get("label_rows", 0)
        self.of_data = self.table.slice(0, rows)
        self.label_rows = {self.text("target", row): row for row in range(rows, self.table.num_rows)}

    def __len__(self) -> int:
        return self.of_data.num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.path, self.kind, self.encoder)  # another process maps the file for itself

    def check(self) -> None:
        """Raise `OSError` if the size of the file has changed: reading a mapping past its end would kill the
        process.
        """
        size = os.stat(self.path).st_size
        if size != self.bytes:
            raise OSError(f"{self.path} has {size} bytes instead of {self.bytes}: something has changed it")

    def text(self, column: str, row: int) -> str:
        """`input`, `target`, `unit`, `task` or `stratum` of a row."""
        return self.table[column][row].as_py()

    def value(self, row: int) -> Any:
        """What the learner has stored of a row."""
        image = None
        if "image" in self.table.column_names:
            image = EncodedImage(self.text("image_where", row), self.table["image"][row].as_py())
        source, target, values = (self.text(one, row) for one in ("input", "target", "values"))
        return stored_row(self.kind, source, target, values, image)

    def input_ids(self, row: int) -> list[int]:
        return self.table["input_ids"][row].values.to_numpy().tolist()

    def labels(self, row: int) -> list[int]:
        """One label per token (causal_lm); empty for classification."""
        return self.table["labels"][row].values.to_numpy().tolist()

    def facts(self, support: Sequence[int], query: Sequence[int]) -> dict[str, Any]:
        """Of an episode of these rows, where they are encoded now. Raises `UsageError`."""
        if self.encoder is None:
            return {}
        return self.encoder.facts(*([self.value(row) for row in rows] for rows in (support, query)))

    def examples(self, rows: Sequence[int], facts: Mapping[str, Any]) -> list[Example]:
        """Rows with their inputs, and the labels of their tokens. facts: of their episode.

        Raises `UsageError` for an image that cannot be decoded, and `OSError` for a file that cannot be read.
        """
        if self.encoder is None:
            return [Example(self.input_ids(row), self.labels(row)) for row in rows]
        return self.encoder.examples([self.value(row) for row in rows], facts)

    def contents(self) -> Contents:
        """See `Contents`."""
        found = self.of_data.group_by("unit", use_threads=False).aggregate([("content", "list")])
        units = zip(found["unit"].to_pylist(), found["content_list"], strict=True)
        return {unit: keys.values.to_numpy() for unit, keys in units}

    def lengths(self) -> np.ndarray:
        """Tokens of every row, those with the text of a class included."""
        return np.concatenate([np.diff(chunk.offsets) for chunk in self.table["input_ids"].chunks])


def prepare(
    name: str,
    content: str,
    read: Callable[[Bad], Iterable[Row]],
    config: Config,
    tokenizer: Any,
    notice: Callable[[str], None],
    one_task: bool = False,
    notes: Sequence[str] = (),
) -> TokenStore:
    """Open the store of a data set, or write it from `read` and the tokenizer if it does not exist.

    content: digest of the rows that `read` returns. notes: more lines about them, complete when `read` has
    ended, which are shown now and whenever the store is opened. Raises `UsageError` for unusable rows, as
    `--on_bad_task` says.
    """
    settings = {key: getattr(config, key) for key in KEYED}
    if config.prompt_template == "chat":
        settings["chat_template"] = tokenizer.get_chat_template()
    if stratifier(config) is not None and not one_task:
        module = str(config.stratify_by).partition(":")[0]
        settings["stratify_by"] = [config.stratify_by, source_of(sys.modules.get(module))]
    settings["task_type"] = config.learner.name
    kind, images = config.learner.kind, isinstance(tokenizer, ImageReader)
    settings["rows"] = source_of(sys.modules.get(kind.__module__))
    encoder = None if kind.pair and not images else RowEncoder(config, tokenizer)
    root = Path("" if name == IN_MEMORY else name)  # paths below it are stored as absolute ones
    where = str(root.absolute()) if images and root.exists() else ""
    key = [FORMAT, content, where, tokenizer_print(tokenizer), settings, one_task]
    # notes name files, so that a store with notes is that of one data set
    path, noted = (cache_folder() / f"{digest(one)}.arrow" for one in (key, [*key, name]))
    store, facts = stored(kind, path, noted, encoder=encoder), dict[str, Any]()
    if store is None:
        parts = tables(name, read, config, tokenizer, one_task, facts, notes)
        store = TokenStore(write((path, noted), parts, config, tokenizer, facts), kind, encoder)
    for note in store.notes:
        notice(note)
    if message := full_rows(config, store.lengths().tolist()):
        notice(Warn(f"{name}: {message}"))
    return store


def stored(kind: Any, *paths: Path, encoder: RowEncoder | None = None) -> TokenStore | None:
    """The first of these stores that exists and is complete."""
    for path in paths:
        with contextlib.suppress(pa.ArrowException, OSError, ValueError, KeyError):
            return TokenStore(path, kind, encoder)
    return None


def tables(
    name: str,
    read: Callable[[Bad], Iterable[Row]],
    config: Config,
    tokenizer: Any,
    one_task: bool,
    facts: dict[str, Any],
    notes: Sequence[str],
) -> Iterator[Table]:
    """The rows in parts, as they are read, and at last those with the texts of classes.

    facts: gets the notes and the number of the last rows. Raises `UsageError`.
    """
    errors, tabulator = list[UsageError](), None
    bad = refuse if config.on_bad_task == "raise" else errors.append
    rows = iter(read(bad))
    while part := [*islice(rows, CHUNK)]:
        tabulator = tabulator or Tabulator(
            name, columns_of(part), config, bad, one_task, not config.learner.ordered, tokenizer
        )
        yield tabulator.add(part)
    count = len(errors) + (tabulator.count - tabulator.wrong if tabulator else 0)
    facts["notes"] = [f"{check_errors(name, errors, count, config)}; left out"] if errors else []
    facts["notes"] += notes
    if not count:
        found = f" ({'; '.join(notes)})" if notes else ""
        raise UsageError(f"dataset={name} has no row that can be used{found}; give other data")
    if tabulator:
        tabulator.finish(facts["notes"].append)
        texts = label_texts(config, sorted(tabulator.firsts.get("target", ())))
        facts["label_rows"] = len(texts)
        yield label_rows(texts)


def check_errors(name: str, errors: Sequence[UsageError], count: int, config: Config) -> str:
    """A line about bad rows of `count`. Raises `UsageError` if there are too many."""
    found = f"dataset={name}: {len(errors)} of {count} rows cannot be used; the first: {errors[0]}"
    if len(errors) == count or len(errors) > config.max_bad_fraction * count:
        raise UsageError(f"{found} (max_bad_fraction={config.max_bad_fraction})")
    return found


def write(
    paths: tuple[Path, Path], parts: Iterator[Table], config: Config, tokenizer: Any, facts: dict[str, Any]
) -> Path:
    """Tokenise and write a store under a temporary name, then rename it: to the second path if it has notes.

    A complete store that another process has written meanwhile stays: others may have mapped it, and on a
    network file system a file that is replaced takes its bytes with it.
    """
    seen = hashlib.sha256()
    kept = (table for table in parts if table.unit)
    first = next(kept)  # bad rows are refused before a folder is made
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        with publishing(paths[0]) as temporary:
            batch = record_batch(first, config, tokenizer, seen)
            with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
                for table in kept:
                    stream.write_batch(record_batch(table, config, tokenizer, seen))
                if isinstance(tokenizer, ImageReader):
                    seen.update(tokenizer.fingerprint.encode())
                facts["fingerprint"] = seen.hexdigest()
                stream.write_batch(batch.slice(0, 0), custom_metadata={"fmmeta": json.dumps(facts)})
            path = paths[bool(facts["notes"])]
            if stored(config.learner.kind, path) is not None:
                temporary.unlink()
            elif path != paths[0]:
                publish(temporary, path)
    except OSError as error:
        raise UsageError(
            f"{paths[0].parent} cannot be written to ({error}); set HF_DATASETS_CACHE to a folder with room"
        ) from None
    return path


def record_batch(table: Table, config: Config, tokenizer: Any, seen: Any) -> pa.RecordBatch:
    """Rows with their tokens, and in the digest `seen` all that a model reads of them."""
    seen.update(json.dumps([table.unit, table.stratum, table.target]).encode())
    columns, kind, most = dict(vars(table)), config.learner.kind, config.max_length - 1
    images, values = columns.pop("image"), columns["values"]
    if kind.pair and not images:
        examples = kind.encode(config, tokenizer, table.rows(kind), {})
        pairs = [(one.input_ids, one.labels if isinstance(one.labels, list) else []) for one in examples]
    else:  # the size of rows that are not tokenised yet; an image counts as one token
        pairs = [([0] * max(1, min(most, len(one) // BYTES_PER_TOKEN)), []) for one in values]
    if images:
        columns["image"] = [one.content for one in images]
        columns["image_where"] = [one.where for one in images]
        seen.update(json.dumps(table.input).encode())
    if not kind.pair:
        seen.update(json.dumps(values).encode())
    columns["input_ids"], columns["labels"] = zip(*pairs, strict=True)
    arrays = {name: pa.array(column, KINDS.get(name, TEXT)) for name, column in columns.items()}
    for name in ("input_ids", "labels"):
        seen.update(arrays[name].offsets.to_numpy().tobytes() + arrays[name].values.to_numpy().tobytes())
    return pa.record_batch(arrays)


def cache_folder() -> Path:
    """A folder in the cache of `datasets`."""
    from huggingface_hub.constants import HF_HOME

    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets") / "fmmeta"


def digest(value: Any) -> str:
    """A digest of a value as JSON, arrays as lists and other objects as texts: 32 hexadecimal digits."""
    written = json.dumps(value, sort_keys=True, default=as_plain)
    return hashlib.sha256(written.encode()).hexdigest()[:32]


def files_digest(files: Sequence[Path]) -> str:
    """A digest of the files' endings and bytes. An unreadable file counts by its error, which reading it
    raises again.
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
    """A digest of all that affects a tokenizer's tokens: its settings, and the whole fast tokenizer or the
    files of a slow one.

    The chat template is not part of it: `prepare` adds it where it is used. Of images, a digest of the
    settings of their processor, with which no file is written: another one is other data.
    """
    if isinstance(tokenizer, ImageReader):
        return tokenizer.fingerprint
    settings = [
        type(tokenizer).__qualname__,
        *(repr(getattr(tokenizer, name, None)) for name in OF_TOKENIZER),
    ]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # truncation and padding are those of the last call
        return digest([settings, {**json.loads(backend.to_str()), "truncation": None, "padding": None}])
    with tempfile.TemporaryDirectory() as folder:  # merges and scores are not in the vocabulary
        tokenizer.save_vocabulary(folder)
        files = files_digest(sorted(Path(folder).iterdir()))
    return digest([settings, tokenizer.get_vocab(), repr(tokenizer.init_kwargs), files])
