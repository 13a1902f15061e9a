"""Hub ids without a network: a cached model and a cached data set load by their ids."""

import json
import shutil
import socket
import subprocess
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_learner, load_tokenizer
from harness.fork_server import ForkServer, environment
from tests.support.exports import exported
from tests.support.launch import alone, train_flags
from tests.support.messages import check_message, refusal
from tests.support.models import save_bert, write_classes

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Path:
    """A hub cache with the model acme/tiny-bert and a data sets cache with acme/intents, as after
    a download.
    """
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
    (kept / "dataset_info.json").write_text(
        json.dumps({**info, "dataset_name": "intents", "builder_name": "parquet"})
    )
    return home


@pytest.fixture(scope="module")
def offline(caches):
    """Starts a run where the libraries were imported with these caches and without a network."""
    env = environment(HF_HUB_OFFLINE="1", HF_HOME=str(caches), HF_DATASETS_CACHE=str(caches / "datasets"))
    fork_server = ForkServer(env, servers=1)

    def run(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        short = train_flags(tmp_path / "run", outer_steps=1, k_shot=1, num_query=1, eval_episodes=2)
        return alone(fork_server, ["launch/train.py", *short, *flags], tmp_path, env)

    yield run
    fork_server.close()


def test_model_and_dataset_load_from_the_caches_by_id(offline, tmp_path):
    ended = offline(tmp_path, "--model_name_or_path", "acme/tiny-bert", "--dataset", "acme/intents")
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if "acme/intents: " in line]
    check_message(line, "90 rows, 3 strata", "10 train, 0 valid, 5 test")
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_cached_model_is_loaded_without_the_hub(caches, tmp_path, monkeypatch):
    """Model, tokenizer and adapters: without the check the client would send six requests for each file."""
    bert = caches / "hub" / "models--acme--tiny-bert"
    adapters = caches / "hub" / "models--acme--adapters"
    exported(bert / "snapshots" / COMMIT, adapters / "snapshots" / COMMIT, lora_r=2)
    shutil.copytree(bert / "refs", adapters / "refs")
    (adapters / ".no_exist" / COMMIT).mkdir(parents=True)
    (adapters / ".no_exist" / COMMIT / "config.json").touch()  # the cache stores which files the hub lacks
    file = adapters / "snapshots" / COMMIT / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "acme/tiny-bert"}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(caches / "hub"))
    monkeypatch.setattr("fmmeta.learners.files.hub_answers", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "huggingface_hub.utils._headers.detect_agent", lambda: None, raising=False
    )  # asks once, by itself
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: pytest.fail(f"{host} was looked up"))
    for name in ("acme/tiny-bert", "acme/adapters"):
        config = Config(model_name_or_path=name)
        description = describe(config)
        assert load_learner(config, description).head_names == ("hf.classifier.weight", "hf.classifier.bias")
        assert len(load_tokenizer(config, description, pytest.fail)) == 259
    (file.parent / "adapter_model.safetensors").unlink()
    check_message(
        refusal(load_learner, config, description),
        "model_name_or_path=acme/adapters",
        "convert its adapters to safetensors",
    )


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ["--dataset", "acme/absent"],
            ("dataset=acme/absent is no path", "check the network and HF_HUB_OFFLINE"),
        ),
        (
            ["--model_name_or_path", "acme/absent"],
            ("model_name_or_path=acme/absent ", "check the path, or the network"),
        ),
    ],
)
def test_unknown_hub_id_is_refused_in_one_line(offline, tmp_path, flags, parts):
    ended = offline(tmp_path, *flags)
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert all(part in ended.stderr for part in parts), ended.stderr  # with the text of a library's error
