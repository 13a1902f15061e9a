"""Documents as tasks: a task is a stretch of one document, cut into chunks that are learned in their order.

    a folder of .txt and .md files     a file is a document, its folder the stratum
    rows with a text                   a row is a document, or a part of the one in its column `document`

A row of a task has `--context` tokens before its chunk, on which no loss is taken, and `--chunk` tokens.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.progress import Warn
from fmmeta.common.security import inside
from fmmeta.common.text import counted
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import IGNORE, Example
from fmmeta.tasks.data.columns import Bad, Row, cell, column_like, is_missing, pick
from fmmeta.tasks.data.files import files_of, is_document
from fmmeta.tasks.data.rows import prefixed
from fmmeta.tasks.data.splits import few
from fmmeta.tasks.data.token_store import TokenStore, digest, files_digest
from fmmeta.tasks.schedule.meta_batches import Item, Items, Task
from fmmeta.tasks.sources.base import ClassKey, Draw, EpisodeRows, TaskSource

SAME_LINE, SAME_SHARE = 20, 0.5  # characters of a line that is compared; share of a near duplicate's lines


@dataclass(frozen=True)
class Stretch(Draw):
    """A stretch of the tokens of the rows in `support`, which are one document. begin: of its first chunk."""

    begin: int = field(kw_only=True)
    config: Config = field(kw_only=True)

    def read(self) -> EpisodeRows:
        """Each chunk, with its context, as a row of both sets and as the sample of an inner step."""
        ids = [token for row, _ in self.support for token in self.store.input_ids(row)]
        end = self.begin + self.config.chunks * self.config.chunk
        examples = chunked(ids, self.config, self.begin, end)
        return EpisodeRows(self.task, examples, examples, samples=tuple([one] for one in examples))

    def identity(self) -> Any:
        return [[one.input_ids, one.labels] for one in self.read().support]


def chunked(ids: Sequence[int], config: Config, begin: int, end: int) -> list[Example]:
    """Each chunk of the tokens from `begin` to `end`, with its context, as a row; the last may be shorter."""
    examples = list[Example]()
    for start in range(begin, end, config.chunk):
        first = max(0, start - config.context)
        tokens = ids[first : min(end, start + config.chunk)]
        unseen = max(1, start - first)  # nothing precedes the first token of a document
        examples.append(Example(tokens, [IGNORE] * unseen + [*tokens[unseen:]]))
    return examples


class StreamSource(TaskSource):
    """Stretches of documents. rows: numbers of the rows of each, in their order."""

    def __init__(
        self, config: Config, store: TokenStore, rows: Mapping[str, np.ndarray], strata: Mapping[str, str]
    ) -> None:
        self.config, self.store, self.rows, self.strata = config, store, rows, strata
        lengths = store.lengths()
        self.lengths = [int(lengths[numbers].sum()) for numbers in rows.values()]
        tokens = config.chunks * (config.context + config.chunk)
        self.items = Items.of(Item(name, strata[name], tokens) for name in rows)

    def draw(self, task: Task) -> Draw:
        name, taken = self.items.names[task.item], self.config.chunks * self.config.chunk
        begin = int(np.random.default_rng(task.seed).integers(self.lengths[task.item] - taken + 1))
        numbers = [(int(row), 0) for row in self.rows[name]]
        return Stretch(task, numbers, [], store=self.store, begin=begin, config=self.config)

    def class_keys(self, setting: str = "") -> list[ClassKey]:
        raise UsageError(f"{setting} needs the names of all classes, and documents have none")

    def num_rows(self) -> int:
        return sum(length // self.config.chunk for length in self.lengths)

    def part(self, chosen: np.ndarray) -> "StreamSource":
        pairs = zip(self.rows.items(), chosen, strict=True)
        return StreamSource(self.config, self.store, dict(one for one, is_in in pairs if is_in), self.strata)


def long_enough(
    config: Config, store: TokenStore, strata: Mapping[str, str], notice: Callable[[str], None]
) -> dict[str, str]:
    """The documents that are long enough, with their strata; the others are left out, with a notice.

    Raises `UsageError` if none is, and for a document in several strata.
    """
    needed = config.chunks * config.chunk
    rows = store.of_data.select(["unit", "stratum"]).append_column("tokens", [store.lengths()[: len(store)]])
    sums = rows.group_by("unit").aggregate([("tokens", "sum"), ("stratum", "count_distinct")])
    counts = zip(sums["unit"].to_pylist(), sums["stratum_count_distinct"].to_pylist(), strict=True)
    if several := sorted(name for name, count in counts if count > 1):
        raise UsageError(
            f"{counted(len(several), 'document')} ({few(several)}) have parts in several strata; give each"
            " document a name and a stratum, or name other columns: --task_column, --stratum_column"
        )
    tokens = dict(zip(sums["unit"].to_pylist(), sums["tokens_sum"].to_pylist(), strict=True))
    kept = {name: stratum for name, stratum in strata.items() if tokens[name] >= needed}
    short = len(strata) - len(kept)
    what = f"{short} of {counted(len(strata), 'document')} have fewer than chunks * chunk = {needed} tokens"
    if not kept:
        raise UsageError(f"{what}; lower chunks={config.chunks} or chunk={config.chunk}")
    if short:
        notice(Warn(f"left out: {what}"))
    return kept


def text_files(dataset: str | Path) -> list[Path]:
    """The .txt and .md files of a folder and its folders, or the file itself; none of any other data set, nor
    of a folder with files of rows (`texts_beside_rows`). Raises `UsageError` for a link that is not followed.
    """
    root = Path(dataset)
    if root.is_file():
        return [root] if is_document(root) else []
    if root.is_dir() and files_of(root):
        return []
    found = visible(root)
    for path in found:
        if path.is_symlink() and (path.is_dir() or (is_document(path) and not path.exists())):
            what = "a folder, which is not followed" if path.is_dir() else "nothing"
            raise UsageError(f"{path} is a link to {what}; copy what it names, or remove the link")
    return [inside(root, path) for path in found if is_document(path) and path.is_file()]


def visible(root: Path) -> list[Path]:
    """All that is in a folder and its folders, sorted, without hidden files and folders."""
    paths = sorted(root.rglob("*"))
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts)]


def texts_beside_rows(dataset: str | Path) -> str:
    """A message about .txt and .md files that are not read, since the folder has files of rows; one about a
    README.md alone, which tells of the rows, is empty.
    """
    root = Path(dataset)
    if not root.is_dir() or text_files(root) or not (rows := files_of(root)):
        return ""
    texts = [path for path in visible(root) if is_document(path) and path.name != "README.md"]
    if not texts:
        return ""
    return (
        f"{dataset}: the rows of {rows[0].name} are read, and {counted(len(texts), '.txt or .md file')}"
        f" ({few([str(path.relative_to(root)) for path in texts])}) beside them not; move one kind to another"
        " folder"
    )


def texts_digest(root: Path, files: Sequence[Path]) -> str:
    """A digest of the names, sizes and bytes of text files."""
    sizes = [(name_below(root, path), path.stat().st_size) for path in files]
    return digest([sizes, files_digest(files)])


def name_below(root: Path, path: Path) -> str:
    """The name of a document: that of its file below the folder, or of the file that is the data set."""
    return path.name if path == root else str(path.relative_to(root))


def document_column(config: Config, columns: Collection[str]) -> str | None:
    """The column with the name of a row's document: --task_column, else `document` or `task`. Raises
    `UsageError` if --task_column is none of the columns.
    """
    if config.task_column is not None:
        return pick(config, columns, "task_column")
    return column_like("document", columns) or column_like("task", columns)


def document_of(config: Config, row: Row) -> str | None:
    """The name of a row's document, if it has one."""
    name = row.values.get(str(document_column(config, row.values)))
    return None if is_missing(name) else str(name)


def read_texts(root: Path, files: Iterable[Path], bad: Bad) -> Iterator[Row]:
    """A row for each file."""
    for path in files:
        try:
            with usage_errors(f"{path} cannot be read as UTF-8", "fix or remove the file"):
                text = path.read_text(encoding="utf-8-sig")
        except UsageError as error:
            bad(error)
            continue
        name = name_below(root, path)
        stratum = str(Path(name).parent) if Path(name).parent.name else "all"
        yield Row({"text": text, "task": name, "stratum": stratum}, str(path))


def documents(
    config: Config,
    read: Callable[[Bad], Iterable[Row]],
    note: Callable[[str], None],
    are_files: bool,
    bad: Bad,
) -> Iterator[Row]:
    """Rows with the name of their document in the column `task`: the name of the file, or that of
    `document_column`, else a hash of the text.

    Of rows that are whole documents, files or without a name, near duplicates are left out: more than half of
    their long lines, by characters, are in documents before them; of those without such lines, equal ones. So
    are empty texts. note: gets a line about those.
    """
    seen, left_out, empty = set[bytes](), list[str](), list[str]()
    for row in read(bad):
        values = row.values
        try:
            with prefixed(f"{row.origin}:"):
                column = str(pick(config, values, "text_column"))
                name = values["task"] if are_files else document_of(config, row)
            if values[column] == "":
                empty.append(row.origin)
                continue
            with prefixed(row.origin):
                text = cell(row, column)
        except UsageError as error:
            bad(error)
            continue
        if are_files or name is None:
            lines = [line.strip() for line in text.splitlines() if len(line.strip()) >= SAME_LINE] or [text]
            keys = [hashlib.blake2b(line.encode(errors="replace"), digest_size=8).digest() for line in lines]
            shared = sum(len(line) for line, key in zip(lines, keys, strict=True) if key in seen)
            seen.update(keys)
            if shared > SAME_SHARE * sum(map(len, lines)):
                left_out.append(row.origin)
                continue
        name = digest(text)[:12] if name is None else name
        yield replace(row, values={**values, config.task_column or "task": name})
    for what, found in (("whose lines are mostly in earlier ones", left_out), ("without a text", empty)):
        if found:
            count = counted(len(found), "document")
            note(f"left out: {count} {what}, the first: {found[0]}")
