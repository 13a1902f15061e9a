"""The command line: flags and --config files, and failures as one line on stderr with exit code 2."""

from __future__ import annotations

import json

import pytest

from fmmeta import cli
from fmmeta.cli import parse
from fmmeta.config.settings import Config
from tests.support.helpers import refusal


@pytest.fixture
def config_file(tmp_path):
    def write(text: str, name: str = "run.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def test_flags_become_settings():
    config = parse(
        [
            "--n_way",
            "3",
            "--inner_lr=1e-2",
            "--bf16",
            "--dataset",
            "a.csv",
            "--group_size",
            "2",
            "--outer_lr",
            "0.5",
        ]
    )
    assert (config.n_way, config.inner_lr, config.bf16, config.dataset) == (3, 0.01, True, ["a.csv"])
    assert (config.group_size, config.outer_lr) == ("2", 0.5)
    assert parse([]) == Config()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--n_wey", "3"], "--n_wey is not a flag; did you mean --n_way?; --help lists them"),
        (["--outer-steps=3"], None),  # dashes do as well
        (["--inner_stepz=3"], "--inner_stepz is not a flag; did you mean --inner_steps?; --help lists them"),
        (["--qqq"], "--qqq is not a flag; --help lists them"),
        (["stray"], "stray is not a flag; --help lists them"),
        (
            ["--learning_rate", "1"],
            "--learning_rate is not a flag; did you mean --outer_lr?; --help lists them",
        ),
        (["--n_w", "3"], "--n_w is not a flag; did you mean --n_way?; --help lists them"),  # no abbreviations
        (["--n_way", "x"], "argument --n_way/--n-way: invalid int value: 'x'"),
        (["--n_way", "2.5"], "argument --n_way/--n-way: invalid int value: '2.5'"),
        (["--n_way"], "argument --n_way/--n-way: expected one argument"),
        (["--config"], "argument --config: expected one argument"),
        (["--n_way", "1"], "n_way=1 is below 2; use 2 or more"),
        (["--dataset", "a", "a"], "dataset=a a names a data set twice; name each once"),
    ],
)
def test_bad_flags(argv, said):
    if said is None:
        assert parse(argv).outer_steps == 3
    else:
        assert refusal(parse, argv) == said


def test_a_bad_choice_names_the_choices():
    message = refusal(parse, ["--head_init", "zeros"])
    assert message.startswith("argument --head_init/--head-init: invalid choice: 'zeros'")
    assert all(name in message for name in ("zero", "learned", "prototype"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "run.yaml",
            "n_way: 3\ninner_lr: 1e-2\nbf16: true\ndataset: [a.csv]\ngroup_size: 2\nouter_lr: null\n",
        ),
        ("run.yaml", "n_way: 3\ninner_lr: 0.01\nbf16: yes\ndataset: a.csv\ngroup_size: '2'\n"),
        (
            "run.json",
            json.dumps({"n_way": 3, "inner_lr": 0.01, "bf16": True, "dataset": ["a.csv"], "group_size": 2}),
        ),
    ],
)
def test_a_config_file_gives_defaults(config_file, name, text):
    assert parse(["--config", config_file(text, name)]) == Config(
        n_way=3, inner_lr=0.01, bf16=True, dataset=["a.csv"], group_size="2"
    )


def test_a_list_in_a_config_file(config_file):
    path = config_file("lora_r: 4\nlora_target_modules: [query, value]\n")
    assert parse(["--config", path]).lora_target_modules == ["query", "value"]
    assert parse(["--lora_r=4", "--lora_target_modules", "query", "value"]) == parse(["--config", path])


def test_flags_win_over_the_file(config_file):
    path = config_file("n_way: 3\nk_shot: 4\nbf16: true\n")
    config = parse(["--n_way", "7", "--bf16", "false", f"--config={path}"])
    assert (config.n_way, config.k_shot, config.bf16) == (7, 4, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n_wey: 3", "config=FILE sets n_wey, which is no setting; did you mean n_way?; remove it"),
        (
            "max_steps: 3",
            "config=FILE sets max_steps, which is no setting; did you mean outer_steps?; remove it",
        ),
        ("n-way: 3", "config=FILE sets n-way, which is no setting; did you mean n_way?; remove it"),
        ("help: true", "config=FILE sets help, which is no setting; remove it"),
        ("config: other.yaml", "config=FILE sets config, which is no setting; remove it"),
        ("n_way: 2.5", "argument --n_way/--n-way: invalid int value: '2.5'"),
        ("seed: true", "argument --seed: invalid int value: 'True'"),
        ("n_way: [3]", "config=FILE sets n_way=[3], which is not one value; write `n_way: value`"),
        (
            "deepspeed: {stage: 2}",
            "config=FILE sets deepspeed={'stage': 2}, which is not one value; write `deepspeed: value`",
        ),
        (
            "algorithm: mamal",
            (
                "algorithm=mamal is unknown; use fomaml, maml, reptile, imaml, anil, boil, proto_maml,"
                " meta_sgd, joint, protonet, none, in_context, or module:spec of another"
            ),
        ),
        ("k_shot: 0", "k_shot=0 is below 1; use 1 or more"),
        ("- n_way", "config=FILE holds no settings; write `name: value` lines"),
        ("", "config=FILE holds no settings; write `name: value` lines"),
    ],
)
def test_a_config_file_is_checked(config_file, text, said):
    path = config_file(text)
    assert refusal(parse, ["--config", path]) == said.replace("FILE", path)


def test_an_unreadable_config_file(config_file, tmp_path):
    path = config_file("n_way: [3")
    message = refusal(parse, ["--config", path])
    assert message.startswith(f"config={path} cannot be read: ")
    assert "line 1" in message
    assert message.endswith("; fix the file")
    none = tmp_path / "none.yaml"
    assert (
        refusal(parse, ["--config", str(none)])
        == f"config={none} is not a file; give a YAML or JSON file of settings"
    )
    (tmp_path / "latin.yaml").write_bytes(b"dataset: \xff\xfe\n")
    assert refusal(parse, ["--config", str(tmp_path / "latin.yaml")]).endswith("; fix the file")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train", "--n_way", "1"], "n_way=1 is below 2; use 2 or more"),
        (["train", "--n_wey", "1"], "--n_wey is not a flag; did you mean --n_way?; --help lists them"),
        (["trian"], "command=trian is unknown; did you mean train?; use "),
        (["train", "--config"], "argument --config: expected one argument"),
        (
            ["train", "--dataset", "{tmp}/none.jsonl"],
            "dataset={tmp}/none.jsonl is not a file or folder; check the path",
        ),
        (
            ["train", "--model_name_or_path", "{tmp}/none"],
            "model_name_or_path={tmp}/none is not a folder; check the path",
        ),
        (
            ["train", "--deepspeed", "{tmp}/none.json"],
            "deepspeed={tmp}/none.json is not a file; see ds_configs/ for ready ones",
        ),
    ],
)
def test_a_failure_is_one_line_and_code_2(capfd, tmp_path, argv, said):
    with pytest.raises(SystemExit) as ended:
        cli.main([word.format(tmp=tmp_path) for word in argv])
    lines = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"fmmeta: error: {said.format(tmp=tmp_path)}")


def test_the_launched_script_fails_alike(capfd):
    with pytest.raises(SystemExit) as ended:
        cli.train(["--n_way", "1"])
    assert ended.value.code == 2
    assert capfd.readouterr().err == "fmmeta: error: n_way=1 is below 2; use 2 or more\n"


def test_other_ranks_end_in_silence(capfd, monkeypatch):
    slept = []
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        cli.fail("text")
    assert (ended.value.code, capfd.readouterr().err, slept) == (2, "", [3])


def test_an_error_of_the_code_names_its_task(capfd, monkeypatch, tmp_path):
    """One line on rank 0 and exit code 1; the traceback is in the log of the rank that loaded the task."""

    def batches(self, task):
        raise TypeError("no text")

    monkeypatch.setattr("fmmeta.tasks.loader.LoadEpisode.batches", batches)
    short = ["--outer_steps=1", "--num_workers=0", "--meta_batch_size=1", "--eval_episodes=0"]
    with pytest.raises(SystemExit) as ended:
        cli.train([*short, f"--output_dir={tmp_path}"])
    assert ended.value.code == 1
    *traceback, line = capfd.readouterr().err.splitlines()
    assert "TypeError: no text" in traceback
    assert line.startswith("fmmeta: error: loading task ")
    assert line.endswith(": TypeError: no text; the log of the rank that loaded it has the traceback")


def test_help_and_usage(capsys):
    for argv, code in ((["--help"], 0), ([], 2), (["train", "--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            cli.main(argv)
        assert ended.value.code == code
        assert "usage" in capsys.readouterr().out
