"""Hub ids, without a network: a model and a data set that lie in the caches load by their ids when HF_HUB_OFFLINE is set."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch import alone
from tests.models import save_bert, write_classes
from tests.nursery import Nursery, environment

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Path:
    """A hub cache with the model acme/tiny-bert and a data sets cache with acme/intents, as downloads leave them."""
    import datasets

    home = tmp_path_factory.mktemp("home")
    repo = home / "hub" / "models--acme--tiny-bert"
    save_bert(repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    rows = write_classes(home / "rows.jsonl", classes=15)
    datasets.load_dataset("json", data_files={"train": str(rows)}, cache_dir=str(home / "made"))
    (made,) = (home / "made" / "json").glob("*/*/*/dataset_info.json")
    kept = home / "datasets" / "acme___intents" / "default" / "0.0.0" / COMMIT
    shutil.copytree(made.parent, kept)
    (kept / "json-train.arrow").rename(kept / "intents-train.arrow")
    info = json.loads(made.read_text())
    (kept / "dataset_info.json").write_text(json.dumps({**info, "dataset_name": "intents", "builder_name": "parquet"}))
    return home


@pytest.fixture(scope="module")
def offline(caches):
    """Starts a run where the libraries were imported with these caches and without a network."""
    env = environment(HF_HUB_OFFLINE="1", HF_HOME=str(caches), HF_DATASETS_CACHE=str(caches / "datasets"))
    nursery = Nursery(env, mothers=1)

    def run(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        words = ["launch/train.py", "--output_dir", str(tmp_path / "run"), "--outer_steps", "1", "--k_shot", "1",
                 "--num_query", "1", "--eval_episodes", "2", *flags]  # fmt: skip
        return alone(nursery, words, tmp_path, env)

    yield run
    nursery.close()


def test_model_and_data_set_by_id(offline, tmp_path):
    ended = offline(tmp_path, "--model_name_or_path", "acme/tiny-bert", "--dataset", "acme/intents")
    assert ended.returncode == 0, ended.stderr
    assert "acme/intents: 90 rows, 3 strata; classes: 5 train, 5 valid, 5 test" in ended.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(("flags", "text"), [
    (["--dataset", "acme/absent"], "dataset=acme/absent is neither a path nor a readable hub data set"),
    (["--model_name_or_path", "acme/absent"],
     "model_name_or_path=acme/absent is no folder, and the hub cannot be reached for a model of that name; check the path, "
     "or the network"),
])  # fmt: skip
def test_an_id_that_is_not_there_is_one_line(offline, tmp_path, flags, text):
    ended = offline(tmp_path, *flags)
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert text in ended.stderr
