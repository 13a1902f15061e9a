"""Prepared rows: written once, the same for every reader, whole or not there, and found again by what they hold."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import pytest

from fmmeta.config import Config
from fmmeta.models.tiny import byte_tokenizer
from fmmeta.tasks import store as stores
from fmmeta.tasks.encode import LONGEST_TOKEN, encode_pairs, encode_texts
from fmmeta.tasks.load import load_sources
from fmmeta.tasks.rows import Row, read_file
from fmmeta.tasks.store import Store, cache_folder, files_digest, prepare, tokenizer_print
from tests.models import write_classes, write_pairs
from tests.unit.helpers import refusal, write_rows

TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fmmeta"


def made(path: Path, **settings) -> Store:
    config = Config(dataset=[str(path)], **settings)
    return prepare(str(path), files_digest([path]), lambda bad: read_file(path, bad), config, TOKENIZER, lambda text: None)


def never(bad):
    raise AssertionError("read again")


def test_rows_come_back_as_they_went_in(tmp_path):
    path = write_pairs(tmp_path / "pairs.jsonl")
    store, rows = made(path, task_type="causal_lm", max_length=20), [json.loads(line) for line in path.open()]
    wanted = encode_pairs(TOKENIZER, [row["input"] for row in rows], [row["output"] for row in rows], 20)
    firsts: dict[tuple[str, ...], int] = {}
    for number, row in enumerate(rows):
        firsts.setdefault((row["task"], row["input"], row["output"]), number)
    assert len(store) == len(firsts)
    for number, same in enumerate(firsts.values()):
        assert (store.text("left", number), store.text("right", number)) == (rows[same]["input"], rows[same]["output"])
        assert Store.cell(store.ids, number).tolist() == wanted[same].input_ids
        assert Store.cell(store.labels, number).tolist() == wanted[same].labels
        assert store.task.names[store.task.codes[number]] == rows[same]["task"]
        assert store.stratum.names[store.stratum.codes[number]] == rows[same]["category"]
    assert store.lengths().tolist() == [len(Store.cell(store.ids, number)) for number in range(len(store))]


def test_rows_of_later_batches_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "CHUNK", 7)
    path = write_classes(tmp_path / "c.jsonl")
    store = made(path)
    texts = [store.text("left", number) for number in range(len(store))]
    assert len(store.ids) == -(-len(store) // 7)
    assert [Store.cell(store.ids, n).tolist() for n in range(len(store))] == encode_texts(TOKENIZER, texts, 128)


def test_a_store_is_made_once_and_mapped_afterwards(tmp_path, cache):
    path = write_classes(tmp_path / "c.jsonl")
    first = made(path)
    config = Config(dataset=["elsewhere"])
    second = prepare("elsewhere", files_digest([path]), never, config, TOKENIZER, lambda text: None)
    assert first.path == second.path
    assert [file.name for file in cache.iterdir()] == [first.path.name]  # nothing passing is left
    assert pickle.loads(pickle.dumps(first)).path == first.path
    assert len(pickle.dumps(first)) < 500


def test_what_a_store_depends_on(tmp_path):
    path, other = write_classes(tmp_path / "c.jsonl"), write_classes(tmp_path / "d.jsonl", classes=11)
    files = {made(path).path, made(other).path, made(path, max_length=9).path, made(path, on_bad_task="skip").path}
    assert len(files) == 4
    assert made(path, n_way=3, seed=5).path in files  # neither changes a token


def test_the_print_of_a_tokenizer_ignores_how_it_was_last_called():
    tokenizer = byte_tokenizer()
    before = tokenizer_print(tokenizer)
    tokenizer(["a", "bb"], truncation=True, max_length=3, padding=True)
    assert tokenizer_print(tokenizer) == before
    tokenizer.add_tokens(["new"])
    assert tokenizer_print(tokenizer) != before


@pytest.mark.parametrize("damage", ["truncate", "overwrite", "empty"])
def test_a_broken_store_is_made_anew(tmp_path, damage):
    path = write_classes(tmp_path / "c.jsonl")
    store = made(path)
    ids, file, size = Store.cell(store.ids, 3).tolist(), store.path, store.bytes
    del store
    if damage == "truncate":
        os.truncate(file, size // 2)
    else:
        file.write_bytes(b"x" * 100 if damage == "overwrite" else b"")
    assert Store.cell(made(path).ids, 3).tolist() == ids


def test_a_store_that_shrinks_under_way_is_an_error_and_no_crash(tmp_path):
    """Reading a mapping past the end of its file would kill the process (SIGBUS)."""
    sources = load_sources(Config(dataset=[str(write_classes(tmp_path / "c.jsonl"))], k_shot=1, num_query=2, n_way=2),
                           TOKENIZER, lambda text: None)  # fmt: skip
    from fmmeta.tasks.schedule import Schedule

    draw = sources.train.draw(Schedule(sources.train.items, 1, 0).meta_batch(0)[0])
    size = draw.store.bytes
    os.truncate(draw.store.path, 64)
    with pytest.raises(OSError, match=f"has 64 bytes instead of {size}: something has changed it"):
        draw.episode()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file"))
    message = refusal(made, write_classes(tmp_path / "c.jsonl"))
    assert message.startswith(f"{tmp_path / 'file' / 'fmmeta'} cannot be written to (")
    assert message.endswith("; set HF_DATASETS_CACHE to a folder with room")


def test_the_cache_is_that_of_datasets(monkeypatch):
    monkeypatch.delenv("HF_DATASETS_CACHE")
    from huggingface_hub.constants import HF_HOME

    assert cache_folder() == Path(HF_HOME) / "datasets" / "fmmeta"


def bad_file(tmp_path: Path, lines: list[bytes]) -> Path:
    path = tmp_path / "bad.jsonl"
    good = [json.dumps({"text": f"t{i}", "label": "abc"[i % 3]}).encode() for i in range(40)]
    path.write_bytes(b"\n".join([*good, *lines]) + b"\n")
    return path


@pytest.mark.parametrize(("line", "said"), [
    (b'{"text": "a\x00b", "label": "a"}', ":41 is not a line of JSON (Invalid control character"),
    (b'{"text": "a\\u0000b", "label": "a"}', ":41 has NUL bytes in text; mend the row"),
    ('{"text": "gr\u00fcn", "label": "a"}'.encode("latin-1"), ":41 is not a line of JSON ('utf-8' codec can't decode byte"),
    ('{"text": "x", "label": "a"}'.encode("utf-16"), ":41 is not a line of JSON ('utf-8' codec can't decode byte"),
    (b'{"text": "cut', ":41 is not a line of JSON (Invalid control character"),
    (b'{"text": "", "label": "a"}', ":41 has text='', which is no text; mend the row"),
    (b'{"label": "a"}', ":41 has text=None, which is no text; mend the row"),
])  # fmt: skip
def test_bad_rows_are_refused_or_left_out(tmp_path, line, said):
    path = bad_file(tmp_path, [line])
    assert f"{path}{said}" in refusal(made, path)
    notes = made(path, on_bad_task="skip").notes
    assert len(made(path, on_bad_task="skip")) == 40
    name = re.escape(str(path))
    assert re.match(rf"dataset={name}: [12] of 4[12] rows cannot be used; the first: {name}:41", notes[0])
    assert notes[0].endswith("; left out")


def test_too_many_bad_rows_stop(tmp_path):
    path = bad_file(tmp_path, [b"{"] * 10)
    said = refusal(made, path, on_bad_task="skip")
    assert said.startswith(f"dataset={path}: 10 of 50 rows cannot be used; the first: {path}:41 is not a line of JSON")
    assert said.endswith("(max_bad_share=0.05)")
    assert len(made(path, on_bad_task="skip", max_bad_share=0.2)) == 40


def test_a_line_of_ten_megabytes_is_read_as_far_as_it_counts(tmp_path):
    long = "word " * 2_000_000
    path = write_rows(tmp_path / "long.jsonl", [{"text": long, "label": "a"}, {"text": "b", "label": "b"}])
    store = made(path, max_length=16)
    assert Store.cell(store.ids, 0).tolist() == encode_texts(TOKENIZER, [long[:100]], 16)[0]
    (pair,) = encode_pairs(TOKENIZER, [long + "the end"], ["yes"], 16)
    assert pair == encode_pairs(TOKENIZER, [(long + "the end")[-LONGEST_TOKEN * 16 :]], ["yes"], 16)[0]
    assert TOKENIZER.decode(pair.input_ids, skip_special_tokens=True).endswith("end\nOutput: yes"[-12:])


def test_csv_rows_after_a_bad_one_are_still_read(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text("text,label\n" + "".join(f"t{i},a\n" for i in range(30)) + "x,y,z\nlast,a\n")
    store = made(path, on_bad_task="skip")
    assert store.text("left", len(store) - 1) == "last"
    assert "32 has another number of fields" in store.notes[0]


def test_rows_from_anywhere_can_be_prepared():
    rows = [Row({"text": f"t{i}", "label": "a"}, f"here:{i}") for i in range(4)]
    store = prepare("here", "four", lambda bad: rows, Config(), TOKENIZER, lambda text: None)
    assert [store.text("left", i) for i in range(4)] == ["t0", "t1", "t2", "t3"]
