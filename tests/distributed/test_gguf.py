"""GGUF files on two ranks: one rank converts, and a damaged file ends every rank with exit code 2."""

import json
from pathlib import Path

from tests.support.gguf_files import use_test_cache, write_gguf
from tests.support.launch import ProcessResults, run_ranks, train_flags
from tests.support.messages import check_message
from tests.support.models import write_pairs

SETTINGS = {
    "task_type": "causal_lm",
    "max_length": 48,
    "outer_steps": 1,
    "meta_batch_size": 2,
    "k_shot": 2,
    "num_query": 2,
}


def train(folder: Path, **settings: object) -> ProcessResults:
    return run_ranks(["launch/train.py", *train_flags(folder, **settings)], 2, before=use_test_cache)


def test_two_ranks_train_from_a_file_that_is_converted_once(tmp_path, monkeypatch):
    cache, file = tmp_path / "cache", write_gguf(tmp_path / "model.gguf")
    monkeypatch.setenv("FMMETA_TEST_CACHE", str(cache))
    data = write_pairs(tmp_path / "pairs.jsonl")
    ended = train(tmp_path / "file", model_name_or_path=file, dataset=data, **SETTINGS).ok()
    assert "\n".join(ended.output).count("is converted once") == 1
    folders = list((cache / "fmmeta" / "gguf").iterdir())
    assert len(folders) == 1
    settings = json.loads((tmp_path / "file" / "run.json").read_text())["settings"]
    assert settings["model_name_or_path"] == str(folders[0])


def test_a_damaged_file_ends_every_rank_with_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("FMMETA_TEST_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:-1000])
    ended = train(tmp_path / "run", model_name_or_path=file, **SETTINGS)
    assert ended.codes == [2, 2]
    assert "Traceback" not in "".join(ended.output)
    last = ended.output[0].splitlines()[-1]
    check_message(last.replace(str(tmp_path), "<tmp>"), "is truncated or damaged", "download it again")
    assert not ended.others
