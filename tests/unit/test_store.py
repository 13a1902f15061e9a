"""Prepared rows: written once, the same for every reader, whole or not there, and found again by what they
hold.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from fmmeta.common import security
from fmmeta.common.processes import TimedOut
from fmmeta.config.settings import Config
from fmmeta.learners.classification import NativeClassifier
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.data import token_store as stores
from fmmeta.tasks.data.encode import LONGEST_TOKEN, encode_pairs, encode_texts
from fmmeta.tasks.data.files import read_file, stream_file
from fmmeta.tasks.data.rows import tabulate
from fmmeta.tasks.data.token_store import TokenStore, cache_folder, files_digest, prepare, tokenizer_print
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import EpisodeShape
from fmmeta.tasks.sources.load import FolderSource, load_sources, task_files
from tests.support.helpers import refusal, write_rows
from tests.support.messages import check_message
from tests.support.models import write_classes, write_pairs

TOKENIZER = byte_tokenizer()
SHORT = {"n_way": 2, "k_shot": 1, "num_query": 1}


def first_draw(config: Config):
    source = load_sources(config, TOKENIZER, silent).train
    return source.draw(Schedule(source.items, 1, 0).meta_batch(0)[0])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fmmeta"


@pytest.fixture
def classes(tmp_path) -> Path:
    return write_classes(tmp_path / "c.jsonl")


@pytest.fixture
def chunks(monkeypatch) -> int:
    """A batch has 7 rows."""
    monkeypatch.setattr(stores, "CHUNK", 7)
    return 7


def silent(text: str) -> None:
    pass


def made(path: Path, tokenizer=TOKENIZER, rows=None, **settings) -> TokenStore:
    """The store of a file. rows: how it is read."""
    config = Config(dataset=[str(path)], **settings)
    read = rows or (lambda bad: stream_file(path, bad))
    return prepare(str(path), files_digest([path]), read, config, tokenizer, silent)


def input_ids(store: TokenStore) -> list[list[int]]:
    return [store.input_ids(number) for number in range(len(store))]


def test_stored_rows_equal_the_input(tmp_path, chunks):
    """Also those of later batches, whose texts may have more than 2 GiB; of equal rows the first stays."""
    path = write_pairs(tmp_path / "pairs.jsonl")
    store = made(path, task_type="causal_lm", max_length=20)
    columns = ("task", "category", "input", "output")
    rows = [*{tuple(row[name] for name in columns): 0 for row in map(json.loads, path.open())}]
    wanted = encode_pairs(TOKENIZER, [row[2] for row in rows], [row[3] for row in rows], 20)
    stored = [
        [store.text(name, n) for name in ("task", "stratum", "input", "target")] for n in range(len(store))
    ]
    assert stored == [[*row] for row in rows]
    assert input_ids(store) == [one.input_ids for one in wanted]
    assert [store.labels(number) for number in range(len(store))] == [one.labels for one in wanted]
    assert store.lengths().tolist() == [len(one.input_ids) for one in wanted]
    assert store.table["input_ids"].num_chunks == -(-len(store) // chunks)
    names = ("unit", "stratum", "task", "input", "target", "values")
    assert {store.table.schema.field(name).type for name in names} == {pa.large_string()}


def test_a_store_is_made_once_and_mapped_afterwards(classes, cache):
    """Also where another process has written it meanwhile."""
    first = made(classes)
    second = prepare("elsewhere", files_digest([classes]), None, Config(dataset=["d"]), TOKENIZER, silent)
    assert first.path == second.path
    assert pickle.loads(pickle.dumps(first)).path == first.path
    assert len(pickle.dumps(first)) < 500
    number, parts = first.path.stat().st_ino, iter([tabulate("c", read_file(classes), Config(), print)])
    stores.write((first.path, first.path), parts, Config(), TOKENIZER, {"notes": []})
    assert first.path.stat().st_ino == number
    assert [file.name for file in cache.iterdir()] == [first.path.name]  # nothing passing is left


def test_which_settings_a_store_depends_on(tmp_path, classes):
    other = write_classes(tmp_path / "d.jsonl", classes=11)
    found = [made(classes), made(other), made(classes, max_length=9), made(classes, on_bad_task="skip")]
    paths = {store.path for store in found}
    assert len(paths) == 4
    assert made(classes, n_way=3, seed=5).path in paths  # neither changes a token


@pytest.mark.parametrize("damage", ["truncate", "overwrite", "empty"])
def test_a_damaged_store_is_rebuilt(classes, damage):
    store = made(classes)
    ids, file, content = store.input_ids(3), store.path, store.path.read_bytes()
    del store
    file.write_bytes(
        {"truncate": content[: len(content) // 2], "overwrite": b"x" * 100, "empty": b""}[damage]
    )
    assert made(classes).input_ids(3) == ids


def test_a_store_without_its_last_batch_is_rebuilt(tmp_path, classes, monkeypatch):
    """At an end of a batch the rest is a valid stream of fewer rows."""
    monkeypatch.setattr(stores, "CHUNK", 40)
    store, cut = made(classes), tmp_path / "cut.arrow"
    whole, rows, mark = store.path.read_bytes(), len(store), 8  # bytes of the mark at the end of a stream
    for size in range(0, len(whole) - mark, 8):
        cut.write_bytes(whole[:size])
        assert stores.stored(NativeClassifier, cut) is None
    cut.write_bytes(whole)
    assert len(stores.stored(NativeClassifier, cut) or []) == rows


def test_rows_are_tokenised_and_stored_as_they_are_read(classes, cache, chunks, monkeypatch):
    """The memory of a large data set would be that of all its rows and tokens otherwise."""
    read, sizes, encode = [0], [], NativeClassifier.encode

    def rows(bad):
        for row in stream_file(classes, bad):
            read[0] += 1
            yield row

    def watched(*arguments):
        sizes.append((read[0], sum(file.stat().st_size for file in cache.iterdir())))
        return encode(*arguments)

    monkeypatch.setattr(NativeClassifier, "encode", watched)
    store = made(classes, rows=rows)
    of_rows, of_files = zip(*sizes, strict=True)
    assert [*of_rows[:-1]] == [*range(chunks, len(store), chunks)]
    assert [*of_files] == sorted({*of_files})


def test_a_column_that_only_later_rows_have_is_refused(tmp_path, monkeypatch):
    """The columns are chosen before all rows are read; others than those with a role may come later."""
    monkeypatch.setattr(stores, "CHUNK", 2)
    rows = [{"text": f"t{i}", "label": "a"} for i in range(3)]
    assert len(made(write_rows(tmp_path / "a.jsonl", [*rows, {**rows[0], "text": "x", "more": "y"}]))) == 4
    path = write_rows(tmp_path / "b.jsonl", [*rows, {**rows[0], "Category": "y"}])
    check_message(refusal(made, path), f"{path} has a column Category that its first 2 rows", "with null")


@pytest.mark.parametrize("error", [TimedOut, KeyboardInterrupt])
@pytest.mark.parametrize("where", [(NativeClassifier, "encode"), (security, "publish")])
def test_an_interrupted_write_leaves_no_file(classes, cache, monkeypatch, error, where):
    def fail(*_, **__):
        assert list(cache.iterdir()) or where[1] == "encode"
        raise error

    monkeypatch.setattr(*where, fail)
    with pytest.raises(error):
        made(classes)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("write", ["w.write_text('x')", "w.mkdir(); (w / 'part').write_text('x')"])
def test_what_a_killed_writer_has_left_is_removed_by_the_next_process(tmp_path, monkeypatch, write):
    """Not the files of writers that live, of others, or of writers on another host: those after a day."""
    code = "import os, sys; from pathlib import Path; from fmmeta.common.security import publishing\n"
    code += f"with publishing(Path(sys.argv[1])) as w: {write}; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "made"], check=False).returncode == -9
    away, other = tmp_path / ".made.0123abcd-1-0123abcd.tmp", tmp_path / ".of-others.tmp"
    away.touch()
    other.touch()
    os.utime(other, (0, 0))
    with security.publishing(tmp_path / "mine") as mine:
        mine.touch()
        assert {*tmp_path.iterdir()} == {mine, away, other}
        os.utime(away, (0, time.time() - 86401))
        monkeypatch.setattr(security, "_swept", set())  # as in another process
        security.publish_text(tmp_path / "made", "text")
        assert {*tmp_path.iterdir()} == {mine, tmp_path / "made", other}


def test_notes_of_a_store_are_those_of_its_own_file(tmp_path):
    first = bad_file(tmp_path, [b"{"])
    for path in (first, shutil.copy(first, tmp_path / "second.jsonl"), first):
        (note,) = made(path, on_bad_task="skip").notes
        assert note.startswith(f"dataset={path}: 1 of 41 rows cannot be used; the first: {path}:41 is not")


@pytest.mark.parametrize("folder", [False, True])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, cache, monkeypatch, folder):
    """Its rows would be those of the digest of the earlier content, for every later run."""
    (tmp_path / "d" / "s").mkdir(parents=True)
    path = write_classes(tmp_path / "d" / "s" / "t.jsonl")
    before = path.read_bytes()

    def changed(file, *arguments):
        file.write_bytes(before.replace(b"text", b"sentence"))
        return read_file(file, *arguments)

    config = Config(dataset=[str(tmp_path / "d" if folder else path)], **SHORT)
    with monkeypatch.context() as patch:
        patch.setattr("fmmeta.tasks.sources.load.stream_file", changed)
        message = refusal(first_draw, config)
    check_message(message, f"{path} changed while it was read", "start again")
    assert not cache.exists()
    path.write_bytes(before)
    assert first_draw(config)


def test_a_store_truncated_while_open_raises_an_error(classes):
    """Reading a mapping past the end of its file would kill the process (SIGBUS)."""
    draw = first_draw(Config(dataset=[str(classes)], **SHORT))
    size = draw.store.bytes
    os.truncate(draw.store.path, 64)
    with pytest.raises(OSError, match=f"has 64 bytes instead of {size}:"):
        draw.episode()


def test_the_cache_is_that_of_datasets(monkeypatch):
    monkeypatch.delenv("HF_DATASETS_CACHE")
    from huggingface_hub.constants import HF_HOME

    assert cache_folder() == Path(HF_HOME) / "datasets" / "fmmeta"


def bad_file(tmp_path: Path, lines: list[bytes]) -> Path:
    path = tmp_path / "bad.jsonl"
    good = [json.dumps({"text": f"t{i}", "label": "abc"[i % 3]}).encode() for i in range(40)]
    path.write_bytes(b"\n".join([*good, *lines]) + b"\n")
    return path


NO_JSON = "41 is not a line of JSON"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b'{"text": "a\x00b", "label": "a"}', [f"{NO_JSON} (Invalid"]),
        (b'{"text": "a\\u0000b", "label": "a"}', ["41 has NUL bytes in text", "fix the row"]),
        ('{"text": "gr\u00fcn", "label": "a"}'.encode("latin-1"), ["'utf-8'", NO_JSON]),
        ('{"text": "x", "label": "a"}'.encode("utf-16"), ["'utf-8'", NO_JSON]),
        (b'{"text": "cut', [f"{NO_JSON} (Invalid"]),
        (b'{"text": "", "label": "a"}', ["text=''", "fix the row"]),
        (b'{"label": "a"}', ["text=None", "fix the row"]),
    ],
)
def test_bad_rows_are_refused_or_left_out(tmp_path, line, parts):
    path = bad_file(tmp_path, [line])
    check_message(refusal(made, path), f"{path}:41 ", *parts)
    store, name = made(path, on_bad_task="skip"), re.escape(str(path))
    assert len(store) == 40
    assert re.fullmatch(rf"dataset={name}: [12] of 4[12] rows .*{name}:41.*; left out", store.notes[0])


def test_too_many_bad_rows_stop_also_where_a_store_was_made_with_another_bound(tmp_path):
    """Rows that repeat another one count: 10 of 410 are bad, although 40 different ones are left."""
    path = bad_file(tmp_path, [b"{"] * 10)
    assert len(made(path, on_bad_task="skip", max_bad_fraction=0.2)) == 40
    message = refusal(made, path, on_bad_task="skip")
    check_message(message, f"dataset={path}", "10 of 50 rows", f"{path}:41 ", "(max_bad_fraction=0.05)")
    path.write_bytes(path.read_bytes() + b"".join(path.read_bytes().splitlines(True)[:40]) * 9)
    store = made(path, on_bad_task="skip", max_bad_fraction=0.03)
    assert len(store) == 40
    assert any("10 of 410 rows" in note for note in store.notes)
    assert "10 of 410 rows" in refusal(made, path, on_bad_task="skip", max_bad_fraction=0.02)


def test_a_changed_bound_of_a_packed_file_is_checked_again(classes):
    config = Config(dataset=[str(gzip_of(classes, classes.with_suffix(".jsonl.gz")))], **SHORT)
    first_draw(config)
    assert "unpacks to more than" in refusal(first_draw, config.but(max_file_gib=1e-6))


def test_a_line_of_ten_megabytes_is_read_up_to_max_length(tmp_path):
    long = "word " * 2_000_000
    path = write_rows(tmp_path / "long.jsonl", [{"text": long, "label": "a"}, {"text": "b", "label": "b"}])
    assert made(path, max_length=16).input_ids(0) == encode_texts(TOKENIZER, [long[:100]], 16)[0]
    (pair,) = encode_pairs(TOKENIZER, [long + "the end"], ["yes"], 16)
    assert pair == encode_pairs(TOKENIZER, [(long + "the end")[-LONGEST_TOKEN * 16 :]], ["yes"], 16)[0]
    assert TOKENIZER.decode(pair.input_ids, skip_special_tokens=True).endswith("end\nOutput: yes"[-12:])


CHAT = "{% for message in messages %}{{ bos_token + message.content + eos_token }}{% endfor %}"
CHANGES = {
    "eos": lambda tokenizer: setattr(tokenizer, "eos_token", "<pad>"),
    "bos": lambda tokenizer: setattr(tokenizer, "bos_token", "<pad>"),
    "pad": lambda tokenizer: setattr(tokenizer, "pad_token", "<eos>"),
    "extra": lambda tokenizer: tokenizer.add_special_tokens({"additional_special_tokens": ["Z"]}),
    "chat template": lambda tokenizer: setattr(tokenizer, "chat_template", "!" + CHAT),
    "added token": lambda tokenizer: tokenizer.add_tokens(["word"]),
    "truncation side": lambda tokenizer: setattr(tokenizer, "truncation_side", "left"),
    "split special tokens": lambda tokenizer: setattr(tokenizer, "split_special_tokens", True),
    "spaces": lambda tokenizer: setattr(tokenizer, "clean_up_tokenization_spaces", True),
    "class": lambda tokenizer: setattr(tokenizer, "__class__", type("Other", (type(tokenizer),), {})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tokenizer_with_another_setting_has_another_store(tmp_path, change):
    """A base and an instruct checkpoint may share tokenizer.json and differ in the end-of-answer token. What
    the last call of a tokenizer set does not count.
    """
    path, first, other = write_pairs(tmp_path / "pairs.jsonl"), byte_tokenizer(), byte_tokenizer()
    settings = {"task_type": "causal_lm", "prompt_template": "chat"}
    first.chat_template = other.chat_template = CHAT
    CHANGES[change](other)
    stored = made(path, first, **settings).path
    first(["a", "bb"], truncation=True, max_length=3, padding=True)
    assert made(path, first, **settings).path == stored != made(path, other, **settings).path


def recording(value, seen: set[str]):
    """A copy of an object that records the name of each attribute read, also by methods of its class."""

    class Recording(type(value)):
        def __getattribute__(self, name):
            seen.add(name)
            return super().__getattribute__(name)

    found = copy.deepcopy(value)
    found.__class__ = Recording
    return found


# they change no token; the backend, and what others are made of
HARMLESS = {"model_input_names", "model_max_length", "verbose", "deprecation_warnings"}
INNER = {"_tokenizer", "_special_tokens_map", "_in_target_context_manager"}


@pytest.mark.parametrize(
    "settings",
    [
        {"task_type": "classification"},
        {"task_type": "causal_lm"},
        {"task_type": "causal_lm", "prompt_template": "chat"},
    ],
)
def test_every_attribute_that_encoding_reads_is_in_the_key(settings):
    """A new read, here or in another transformers, fails this test until store.py knows the attribute."""
    tokenizer, seen = byte_tokenizer(), set[str]()
    tokenizer.chat_template = CHAT
    config = Config(dataset=["d"], max_length=24, **settings)
    row = dict(zip(config.learner.kind.pair, ("a long text " * 9, "an answer"), strict=True))
    config.learner.kind.encode(config, recording(tokenizer, seen), [row], {})
    names = {name for name in seen if not name.isupper() and not name.startswith("__")}
    data = {name for name in names if not callable(getattr(tokenizer, name, len))}
    assert data - HARMLESS - INNER <= {*stores.OF_TOKENIZER, "chat_template"}
    assert seen & {"split_special_tokens", "eos_token_id"}


@pytest.mark.parametrize("task_type", ["classification", "causal_lm"])
def test_all_settings_that_rows_depend_on_are_in_the_key(tmp_path, task_type):
    write, seen = write_pairs if task_type == "causal_lm" else write_classes, set[str]()
    (tmp_path / "s").mkdir()
    gzip_of(write(tmp_path / "t.jsonl"), tmp_path / "s" / "t.jsonl.gz")
    config = Config(dataset=[str(tmp_path)], task_type=task_type, on_bad_task="skip", **SHORT)
    source = FolderSource(
        task_files(str(tmp_path), config.max_length),
        EpisodeShape.of(config),
        recording(config, seen),
        TOKENIZER,
    )
    source.draw(Schedule(source.items, 1, 0).meta_batch(0)[0])
    assert "max_file_gib" in seen
    # stratify_by is in the key with the source of its module, and that there is a collate function
    assert {name for name in seen if name in Config.__dataclass_fields__} - {"stratify_by"} <= {*stores.KEYED}


def gzip_of(path: Path, target: Path) -> Path:
    target.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return target


def test_a_store_is_synced_before_it_is_renamed(classes, monkeypatch):
    """A name that is on the disk before its bytes are would lead to a file of zeros after a power cut."""
    events: list[tuple[str, str]] = []
    synced, renamed = os.fsync, Path.replace

    def sync(file):
        events.append(("sync", os.readlink(f"/proc/self/fd/{file}")))
        synced(file)

    def rename(self, to):
        events.append(("name", str(self)))
        return renamed(self, to)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    store = made(classes)
    passing = next(path for kind, path in events if kind == "name")
    assert events == [("sync", passing), ("name", passing), ("sync", str(store.path.parent))]


def test_a_cache_that_cannot_be_written_is_named(classes, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(classes))
    remedy = "; set HF_DATASETS_CACHE to a folder with room"
    check_message(refusal(made, classes), f"{classes / 'fmmeta'} cannot be written to (", remedy)


def test_labels_of_named_tasks_are_in_the_fingerprint(tmp_path):
    """What a run resumes with, and what ranks compare."""
    rows = [{"text": f"t{i}", "label": "ab"[i % 2], "task": "one"} for i in range(20)]
    first = made(write_rows(tmp_path / "first.jsonl", rows)).fingerprint
    rows[0]["label"] = "b"
    assert made(write_rows(tmp_path / "second.jsonl", rows)).fingerprint != first


def test_the_fingerprint_of_a_slow_tokenizer_covers_its_merges(tmp_path):
    from transformers import CTRLTokenizer

    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "a@@": 1, "b": 2, "ab": 3}))
    prints, ids = set(), []
    for merges in ("#\na b</w>\n", "#\n\n"):
        (tmp_path / "merges.txt").write_text(merges)
        tokenizer = CTRLTokenizer(
            vocab_file=str(tmp_path / "vocab.json"), merges_file=str(tmp_path / "merges.txt")
        )
        prints.add(tokenizer_print(tokenizer))
        ids.append(tokenizer("ab")["input_ids"])
    assert ids == [[3], [1, 2]]
    assert len(prints) == 2
