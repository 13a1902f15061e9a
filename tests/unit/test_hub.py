"""The hub: model cards with valid metadata, measured results, no local paths and code that runs; `fmmeta
push` against a stand-in on this machine; cached models and data sets load by their ids without a network.
"""

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from huggingface_hub import EvalResult, ModelCard, constants
from huggingface_hub.repocard_data import model_index_to_eval_results

from fmmeta import Config, MetaTrainer
from fmmeta.checkpoint.model_card import PLACEHOLDER, Content, is_hub_id, metadata, public_name, write_card
from fmmeta.checkpoint.push import choose_files
from fmmeta.checkpoint.read import MANIFEST
from fmmeta.cli import main
from fmmeta.learners.load import describe, load_learner, load_tokenizer
from harness.fork_server import ForkServer, environment
from tests.support.exports import exported, run_python
from tests.support.hub import COMMIT as HUB_COMMIT
from tests.support.hub import TOKEN, StandIn, hub_stand_in
from tests.support.launch import alone, train_flags
from tests.support.messages import check_message, check_text, refusal
from tests.support.models import write_classes, write_pairs

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def caches(tmp_path_factory, bert) -> Path:
    """A hub cache with the model acme/tiny-bert and a data sets cache with acme/intents, as after
    a download.
    """
    home = tmp_path_factory.mktemp("home")
    repo = home / "hub" / "models--acme--tiny-bert"
    shutil.copytree(bert, repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    rows = write_classes(home / "rows.jsonl", classes=15)
    datasets.load_dataset("json", data_files={"train": str(rows)}, cache_dir=str(home / "made"))
    (made,) = (home / "made" / "json").glob("*/*/*/dataset_info.json")
    kept = home / "datasets" / "acme___intents" / "default" / "0.0.0" / COMMIT
    shutil.copytree(made.parent, kept)
    (kept / "json-train.arrow").rename(kept / "intents-train.arrow")
    info = json.loads(made.read_text()) | {"dataset_name": "intents", "builder_name": "parquet"}
    (kept / "dataset_info.json").write_text(json.dumps(info))
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
    bert, adapters = (caches / "hub" / f"models--acme--{name}" for name in ("tiny-bert", "adapters"))
    exported(bert / "snapshots" / COMMIT, adapters / "snapshots" / COMMIT, lora_r=2)
    shutil.copytree(bert / "refs", adapters / "refs")
    (adapters / ".no_exist" / COMMIT).mkdir(parents=True)
    (adapters / ".no_exist" / COMMIT / "config.json").touch()  # the cache stores which files the hub lacks
    file = adapters / "snapshots" / COMMIT / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "acme/tiny-bert"}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(caches / "hub"))
    monkeypatch.setattr("fmmeta.learners.files.hub_answers", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # asks once, by itself
    monkeypatch.setattr("huggingface_hub.utils._headers.detect_agent", lambda: None, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: pytest.fail(f"{host} was looked up"))
    for name in ("acme/tiny-bert", "acme/adapters"):
        config = Config(model_name_or_path=name)
        description = describe(config)
        assert load_learner(config, description).head_names == ("hf.classifier.weight", "hf.classifier.bias")
        assert len(load_tokenizer(config, description, pytest.fail)) == 259
    (file.parent / "adapter_model.safetensors").unlink()
    message = refusal(load_learner, config, description)
    check_message(message, "model_name_or_path=acme/adapters", "convert its adapters to safetensors")


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("dataset", " is no path.*check the network and HF_HUB_OFFLINE"),
        ("model_name_or_path", " .*check the path, or the network"),
    ],
)
def test_unknown_hub_id_is_refused_in_one_line(offline, tmp_path, flag, remedy):
    ended = offline(tmp_path, f"--{flag}", "acme/absent")
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert re.search(f"{flag}=acme/absent{remedy}", line)  # with the text of a library's error


SHORT = {
    "outer_steps": 1,
    "meta_batch_size": 2,
    "k_shot": 2,
    "num_query": 2,
    "save_steps": 0,
    "eval_episodes": 3,
}


def trained(model: Path, data: Path, folder: Path, **settings) -> Path:
    given = {"model_name_or_path": str(model), "dataset": [str(data)], "output_dir": str(folder)}
    return MetaTrainer(Config(**given, **{**SHORT, **settings})).train().output_dir


def read(folder: Path) -> ModelCard:
    """The card of a folder; its metadata survive a round trip, and it holds no path of this machine."""
    card = ModelCard.load(folder / "README.md")
    if "model-index" in str(card):
        index = card.data.to_dict()["model-index"]
        assert model_index_to_eval_results(index) == (card.data.model_name, card.data.eval_results)
    assert "/tmp" not in str(card)
    assert str(folder.parent) not in str(card)
    return card


def test_a_classifier_has_its_held_out_scores_and_runnable_code(bert, classes, tmp_path):
    scaled = {"pooling": "mean", "outer_lr": 0.01, "base_meta_batch_size": 8}
    run = trained(bert, classes, tmp_path / "my-run", **scaled)
    card = read(run / "model")
    assert "over 2 tasks each, outer_lr 0.005" in str(card)  # the rate that was used
    wanted = json.loads((run / "run.json").read_text())["held_out"]["after adaptation, meta-trained"]
    for result, metric in zip(card.data.eval_results, ("accuracy", "loss"), strict=True):
        value, half = (round(number, 4) for number in wanted[metric])
        assert (result.metric_value, result.metric_args) == (value, {"episodes": 3, "ci95": half})
        assert (result.dataset_name, result.dataset_split) == ("rows.jsonl", "test")
        assert result.task_type == "text-classification"
    library, tag = card.data.library_name, card.data.pipeline_tag
    assert (library, tag) == ("sentence-transformers", "sentence-similarity")
    assert card.data.model_name == "my-run"
    assert not {"base_model", "license", "language", "datasets"} & set(card.data.to_dict())
    assert "| this model, adapted |" in card.text
    assert run_python(card.text, run / "model", block=1)["adapted"].labels == ("delivery", "fees")
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    assert run_python(card.text, run / "model")["vectors"].shape == (1, 32)


def test_adapters_and_their_merged_model_have_cards(llama, tmp_path):
    data = write_pairs(tmp_path / "pairs.jsonl")
    settings = {"task_type": "causal_lm", "lora_r": 2, "lora_merge": True, "eval_episodes": 0}
    run = trained(llama, data, tmp_path / "run", **settings)
    for name, library in (("model", "peft"), ("merged", "transformers")):
        card = read(run / name)
        assert (card.data.library_name, card.data.pipeline_tag) == (library, "text-generation")
        assert card.data.eval_results is None  # nothing was measured
        assert "model-index" not in str(card)
        assert "base_model" not in card.data.to_dict()
        pipe = run_python(card.text, run / name)["pipe"]
        assert pipe("river", max_new_tokens=2)[0]["generated_text"].startswith("river")


@pytest.mark.parametrize(("pooling", "algorithm"), [("mean", "protonet"), ("model", "fomaml")])
def test_the_code_of_an_encoders_adapters_runs(bert, classes, tmp_path, pooling, algorithm):
    settings = {"lora_r": 2, "pooling": pooling, "algorithm": algorithm, "meta_batch_size": 1}
    run = trained(bert, classes, tmp_path / "run", **settings)
    card = read(run / "model")
    assert ("inner loop" in str(card)) == (algorithm == "fomaml")
    assert "adamw over 1 task each" in str(card)
    assert (card.data.library_name, card.data.pipeline_tag) == ("peft", "feature-extraction")
    assert run_python(card.text, run / "model")["encoder"].config.hidden_size == 32


LOCAL = "license: mit\nlanguage: [en, de]\nbase_model: acme/base"


def content(base: str, **changed) -> Content:
    fields = {"pooling": "mean", "adapter": False, "summary": "", "facts": {}, "adapted": True}
    return Content(base=base, config=Config(), **{**fields, **changed})


def metadata_of(base: str, **changed) -> dict:
    return metadata(content(base, **changed), "x").to_dict()


@pytest.mark.parametrize(
    ("base", "adapter", "named"),
    [
        ("acme/base", False, {"base_model": "acme/base"}),
        ("acme/base", True, {"base_model": "acme/base", "base_model_relation": "adapter"}),
        *((base, False, {}) for base in ("tiny", "/work", "./model", "a/b/c")),
    ],
)
def test_the_base_model_is_a_hub_id_or_left_out(tmp_path, monkeypatch, base, adapter, named):
    monkeypatch.setattr("fmmeta.learners.files.hub_answers", lambda: False)
    found = metadata_of(base, adapter=adapter)
    assert {name: value for name, value in found.items() if name.startswith("base_model")} == named
    (tmp_path / "acme" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("acme/base")
    assert public_name("acme/base") == "base"


@pytest.mark.parametrize(
    ("header", "adapter", "kept"),
    [
        (LOCAL, False, {"license": "mit", "language": ["en", "de"], "base_model": "acme/base"}),
        # the adapters are those of the local folder, not of its base
        (LOCAL, True, {"license": "mit", "language": ["en", "de"]}),
        ("license: [mit]\nlanguage: no\nbase_model: /home/me/model", False, {}),
        ("license: '<b>'\nlanguage: ['<b>', en]\nbase_model: [a, b]", False, {}),
        ("license: 'MIT\\n---'\nlanguage: {en: de}\nbase_model: 3", False, {}),
        ("language: [[", False, {}),
        ("- a list", False, {}),
    ],
)
def test_license_language_and_base_come_from_the_card_of_a_local_base(tmp_path, header, adapter, kept):
    """What is invalid in it is left out."""
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
    found = metadata_of(str(tmp_path), adapter=adapter)
    assert {name: found[name] for name in found if name not in ("library_name", "tags")} == kept


def test_names_from_data_cannot_end_the_metadata_block(tmp_path):
    name, folder = "rows\n---\n# title: [<b>]", tmp_path / "a: b\n---\nc"
    folder.mkdir()
    results = [EvalResult("text-classification", name, name, "accuracy", 0.5)]
    write_card(folder, content("tiny", results=results, dataset=["letters", "acme/set", str(tmp_path)]))
    card = ModelCard.load(folder / "README.md")
    assert [one.dataset_name for one in card.data.eval_results] == [name]
    assert card.data.datasets == ["acme/set"]
    assert card.text.lstrip().startswith("# a\\: b")


@pytest.fixture(scope="module")
def made(tmp_path_factory, bert) -> Path:
    """A finished run with a model, its card and what `adapt` writes beside it."""
    run = tmp_path_factory.mktemp("made") / "run"
    exported(bert, run / "model", pooling="mean")
    (run / "run.json").write_text(json.dumps({"finished": True}))
    score = EvalResult("text-classification", "rows", "rows", "accuracy", 0.5, dataset_split="test")
    write_card(run / "model", content("acme/base", results=[score], adapted=False))
    (run / "model" / "predictions.jsonl").write_text("{}\n")
    (run / "model" / ".hidden").write_text("x")
    shutil.copytree(run / "model" / "1_Pooling", run / "model" / "merged")
    return run


@pytest.fixture
def run(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture
def hub(monkeypatch):
    with hub_stand_in() as state:
        monkeypatch.setattr(constants, "ENDPOINT", state.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield state


def push(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(["push", "--repo_id=acme/intents", *words])
    return ended.value.code


def refused(capsys, *words: str) -> str:
    """The line of a push that ends with exit code 2."""
    assert push(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert TOKEN not in line
    return line


def test_a_dry_run_lists_the_files_and_asks_the_hub_nothing(hub: StandIn, run, capsys, monkeypatch):
    """Not those of an unfinished command."""
    monkeypatch.setenv("HF_TOKEN", "")
    unfinished = ("fmmeta.trials.json", "results.finished.json")
    for name in unfinished:
        (run / "model" / name).write_text("{}")
    assert push("--folder", str(run), "--dry_run") == 0
    assert hub.paths() == []
    chosen, left_out = choose_files(run / "model")
    assert [left_out[name] for name in unfinished] == ["of an unfinished fmmeta tune or evaluate"] * 2
    text = capsys.readouterr().out
    check_text(text, "fmmeta.json", *chosen)
    assert "uploaded" not in text


def test_the_listed_files_are_uploaded_in_one_commit(hub: StandIn, run, capsys):
    model = run / "model"
    before = (model / "README.md").read_text()
    assert push("--folder", str(run)) == 0
    assert [path for path in hub.paths() if "agent" not in path] == [
        "POST /api/repos/create",
        "POST /api/validate-yaml",
        "POST /api/models/acme/intents/preupload/main",
        "POST /api/models/acme/intents/commit/main",
    ]
    (created,) = [body for path, body in hub.requests if path.endswith("/create")]
    assert (created["organization"], created["name"]) == ("acme", "intents")
    text = capsys.readouterr().out
    assert f"/acme/intents/commit/{HUB_COMMIT}" in text.splitlines()[-1]
    listed = [line.split()[-1] for line in text.splitlines() if line.startswith("  ") and "left" not in line]
    assert listed == sorted(hub.files)
    assert {"model.safetensors", "1_Pooling/config.json", "tokenizer.json", "fmmeta.json"} <= set(listed)
    for name in ("predictions.jsonl", "merged", ".hidden"):
        assert f"left out: {name}" in text
        assert not any(path.startswith(name) for path in hub.files)
    assert hub.files["model.safetensors"] == (model / "model.safetensors").read_bytes()
    card = ModelCard(hub.files["README.md"].decode())
    assert card.data.model_name == "acme/intents"
    assert "--model_name_or_path acme/intents" in card.text
    assert PLACEHOLDER not in card.text
    assert (model / "README.md").read_text() == before


def test_a_private_repository_and_a_branch_are_created_if_asked(hub: StandIn, run):
    assert push("--folder", str(run / "model"), "--private", "--revision", "v2") == 0
    (created,) = [body for path, body in hub.requests if path.endswith("/create")]
    assert created["visibility"] == "private"
    assert {f"POST /api/models/acme/intents/{name}/v2" for name in ("branch", "commit")} <= {*hub.paths()}


@pytest.mark.parametrize(
    ("where", "status"),
    [("repos/create", 401), ("repos/create", 403), ("commit", 403), ("commit", 404), ("repos/create", 507)],
)
def test_a_refusal_of_the_hub_is_one_line(hub: StandIn, run, capsys, where, status):
    hub.refuse = {where: status}
    line = refused(capsys, "--folder", str(run))
    check_message(line, "repo_id=acme/intents", f"{status} ", "check the network, the token (`hf auth login`")
    assert not hub.files


@pytest.mark.parametrize(
    ("owner", "name", "value", "remedy"),
    [
        (constants, "HF_HUB_OFFLINE", True, "unset the `HF_HUB_OFFLINE`"),
        (huggingface_hub, "get_token", lambda: None, "hf auth login"),
        (constants, "ENDPOINT", "http://127.0.0.1:9", "check the network"),
    ],
)
def test_a_push_without_a_token_or_a_network_is_refused(
    hub: StandIn, run, capsys, monkeypatch, owner, name, value, remedy
):
    monkeypatch.setattr(owner, name, value)
    check_message(refused(capsys, "--folder", str(run)), "repo_id=acme/intents", remedy)
    assert not hub.requests


@pytest.mark.parametrize("repo_id", ["", "intents", "acme/intents/v2", "acme/in tents", "-a/b", "a/b--c"])
def test_a_bad_name_of_a_repository_is_refused(run, capsys, repo_id):
    line = refused(capsys, f"--repo_id={repo_id}", "--folder", str(run))
    check_message(line, f"repo_id={repo_id}" if repo_id else "repo_id is missing", "give", "USER/NAME")


@pytest.mark.parametrize(
    ("spoil", "part", "remedy"),
    [
        ({"model/training_args.bin": "pickle"}, "training_args.bin", "move it out of the folder"),
        ({"model/notes.txt": Path("/etc/hostname")}, "is a link that leaves its folder", "copy the file"),
        ({"model/notes.txt": Path("none.txt")}, "notes.txt, which is no file", "remove it"),
        ({"model/notes.txt": os.mkfifo}, "notes.txt, which is no file", "remove it"),
        ({"model/model.safetensors": Path.unlink}, "holds no model", "fmmeta adapt"),
        ({"run.json": "{}"}, "not finished", "resume it"),
        ({"run.json": "{"}, "run.json cannot be read", "fix or replace it"),
        ({MANIFEST: "{}"}, "is a checkpoint", "its model/"),
        (
            {"model/README.md": "---\na: [\n---\n"},
            "the metadata of README.md cannot be read",
            "fix or remove it",
        ),
        (
            {
                "model/model.safetensors": Path.unlink,
                "model/adapter_model.safetensors": "",
                "model/adapter_config.json": '{"base_model_name_or_path": "/work"}',
            },
            "which is not on the hub",
            "push merged/",
        ),
        ({"": shutil.rmtree}, "is no folder", "give that of a run or of a model"),
    ],
)
def test_a_folder_that_must_not_be_uploaded_is_refused(hub: StandIn, run, capsys, spoil, part, remedy):
    """Files with these contents, links to these paths, and what these functions make of a path."""
    for name, how in spoil.items():
        if isinstance(how, str):
            (run / name).write_text(how)
        elif isinstance(how, Path):
            (run / name).symlink_to(how)
        else:
            how(run / name)
    check_message(refused(capsys, "--folder", str(run)), part, remedy)
    assert not hub.requests
