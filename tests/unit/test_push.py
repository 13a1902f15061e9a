"""`fmmeta push` against a stand-in of the hub on this machine, and what it refuses before a request."""

import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard, constants

from fmmeta.checkpoint.model_card import PLACEHOLDER, Content, write_card
from fmmeta.checkpoint.push import choose_files
from fmmeta.checkpoint.read import MANIFEST
from fmmeta.cli import main
from fmmeta.config.settings import Config
from tests.support.exports import exported
from tests.support.hub import COMMIT, TOKEN, StandIn, hub_stand_in
from tests.support.messages import check_message


@pytest.fixture(scope="module")
def made(tmp_path_factory, bert) -> Path:
    """A finished run with a model, its card and what `adapt` writes beside it."""
    run = tmp_path_factory.mktemp("made") / "run"
    exported(bert, run / "model", pooling="mean")
    (run / "run.json").write_text(json.dumps({"finished": True}))
    score = EvalResult("text-classification", "rows", "rows", "accuracy", 0.5, dataset_split="test")
    write_card(
        run / "model",
        Content(
            base="acme/base",
            config=Config(),
            pooling="mean",
            adapter=False,
            summary="A model.",
            facts={"algorithm": "fomaml"},
            results=[score],
        ),
    )
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
        main(["push", *words])
    return ended.value.code


def refused(capsys, *words: str) -> str:
    """The line of a push that ends with exit code 2."""
    assert push(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert TOKEN not in line
    return line


@pytest.mark.parametrize("name", ["fmmeta.trials.json", "results.finished.json"])
def test_unfinished_results_are_not_uploaded(name, run):
    (run / "model" / name).write_text("{}")
    chosen, left_out = choose_files(run / "model")
    assert "fmmeta.json" in chosen
    assert left_out[name] == "of an unfinished fmmeta tune or evaluate"


def test_a_dry_run_lists_the_files_and_asks_the_hub_nothing(hub: StandIn, run, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")
    assert push("--repo_id", "acme/intents", "--folder", str(run), "--dry_run") == 0
    assert hub.paths() == []
    text = capsys.readouterr().out
    assert all(name in text for name in choose_files(run / "model")[0])
    assert "uploaded" not in text


def test_the_listed_files_are_uploaded_in_one_commit(hub: StandIn, run, capsys):
    before = (run / "model" / "README.md").read_text()
    assert push("--repo_id", "acme/intents", "--folder", str(run)) == 0
    paths = [path for path in hub.paths() if "agent" not in path]
    assert paths == [
        "POST /api/repos/create",
        "POST /api/validate-yaml",
        "POST /api/models/acme/intents/preupload/main",
        "POST /api/models/acme/intents/commit/main",
    ]
    (created,) = [body for path, body in hub.requests if path.endswith("/create")]
    assert (created["organization"], created["name"]) == ("acme", "intents")
    text = capsys.readouterr().out
    assert f"/acme/intents/commit/{COMMIT}" in text.splitlines()[-1]
    listed = [line.split()[-1] for line in text.splitlines() if line.startswith("  ") and "left" not in line]
    assert listed == sorted(hub.files)
    assert {"model.safetensors", "1_Pooling/config.json", "tokenizer.json", "fmmeta.json"} <= set(listed)
    for name in ("predictions.jsonl", "merged", ".hidden"):
        assert f"left out: {name}" in text
        assert not any(path.startswith(name) for path in hub.files)
    assert hub.files["model.safetensors"] == (run / "model" / "model.safetensors").read_bytes()
    card = ModelCard(hub.files["README.md"].decode())
    assert card.data.model_name == "acme/intents"
    assert "--model_name_or_path acme/intents" in card.text
    assert PLACEHOLDER not in card.text
    assert (run / "model" / "README.md").read_text() == before


def test_a_private_repository_and_a_branch_are_created_if_asked(hub: StandIn, run, capsys):
    words = ["--repo_id", "acme/intents", "--folder", str(run / "model")]
    assert push(*words, "--private", "--revision", "v2") == 0
    (created,) = [body for path, body in hub.requests if path.endswith("/create")]
    assert created["visibility"] == "private"
    assert "POST /api/models/acme/intents/branch/v2" in hub.paths()
    assert "POST /api/models/acme/intents/commit/v2" in hub.paths()


@pytest.mark.parametrize(
    ("where", "status"),
    [("repos/create", 401), ("repos/create", 403), ("commit", 403), ("commit", 404), ("repos/create", 507)],
)
def test_a_refusal_of_the_hub_is_one_line(hub: StandIn, run, capsys, where, status):
    hub.refuse = {where: status}
    line = refused(capsys, "--repo_id", "acme/intents", "--folder", str(run))
    check_message(line, "repo_id=acme/intents", f"{status} ", "check the network, the token (`hf auth login`")
    assert not hub.files


def test_a_push_without_a_token_or_a_network_is_refused(hub: StandIn, run, capsys, monkeypatch):
    words = ["--repo_id", "acme/intents", "--folder", str(run)]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_message(refused(capsys, *words), "repo_id=acme/intents", "unset the `HF_HUB_OFFLINE`")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    check_message(refused(capsys, *words), "repo_id=acme/intents", "hf auth login")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    check_message(refused(capsys, *words), "repo_id=acme/intents", "check the network")
    assert not hub.requests


@pytest.mark.parametrize("repo_id", ["", "intents", "acme/intents/v2", "acme/in tents", "-a/b", "a/b--c"])
def test_a_bad_name_of_a_repository_is_refused(run, capsys, repo_id):
    line = refused(capsys, f"--repo_id={repo_id}", "--folder", str(run))
    check_message(line, f"repo_id={repo_id}" if repo_id else "repo_id is missing", "give", "USER/NAME")


CONTENTS = {
    "pickle": ("model/training_args.bin", "pickle"),
    "unfinished": ("run.json", "{}"),
    "broken run": ("run.json", "{"),
    "checkpoint": (MANIFEST, "{}"),
    "broken card": ("model/README.md", "---\na: [\n---\n"),
}
TARGETS = {"link": "/etc/hostname", "dangling link": "none.txt"}


def spoil(run: Path, how: str) -> None:
    weights, notes = run / "model" / "model.safetensors", run / "model" / "notes.txt"
    if how in CONTENTS:
        name, text = CONTENTS[how]
        (run / name).write_text(text)
    elif how in TARGETS:
        notes.symlink_to(TARGETS[how])
    elif how == "pipe":
        os.mkfifo(notes)
    elif how == "no weights":
        weights.unlink()
    else:  # a local base
        weights.rename(run / "model" / "adapter_model.safetensors")
        base = json.dumps({"base_model_name_or_path": str(run)})
        (run / "model" / "adapter_config.json").write_text(base)


@pytest.mark.parametrize(
    ("how", "part", "remedy"),
    [
        ("pickle", "training_args.bin", "move it out of the folder"),
        ("link", "is a link that leaves its folder", "copy the file"),
        ("dangling link", "notes.txt, which is no file", "remove it"),
        ("pipe", "notes.txt, which is no file", "remove it"),
        ("no weights", "holds no model", "fmmeta adapt"),
        ("unfinished", "not finished", "resume it"),
        ("broken run", "run.json cannot be read", "fix or replace it"),
        ("checkpoint", "is a checkpoint", "its model/"),
        ("broken card", "the metadata of README.md cannot be read", "fix or remove it"),
        ("local base", "which is not on the hub", "push merged/"),
    ],
)
def test_a_folder_that_must_not_be_uploaded_is_refused(hub: StandIn, run, capsys, how, part, remedy):
    spoil(run, how)
    check_message(refused(capsys, "--repo_id", "acme/intents", "--folder", str(run)), part, remedy)
    assert not hub.requests


def test_a_folder_that_does_not_exist_is_refused(capsys):
    line = refused(capsys, "--repo_id", "acme/intents", "--folder", "none")
    check_message(line, "folder=none is no folder", "give that of a run or of a model")
