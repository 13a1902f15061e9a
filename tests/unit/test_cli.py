"""The command line reads flags and --config files; a failure is one line on stderr and exit code 2."""

import json
import os
import pkgutil
import runpy
import subprocess
import sys
from collections.abc import Iterable
from typing import Any
from unittest.mock import Mock

import pytest

import fmmeta
from fmmeta import cli
from fmmeta.cli import parse
from fmmeta.config import recipes
from fmmeta.config.settings import GROUPS, Config, InnerConfig
from tests.support.messages import check_message, refusal


@pytest.fixture
def config_file(tmp_path):
    def write(text: str, name: str = "run.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def exit_code(words: Iterable[str]) -> Any:
    with pytest.raises(SystemExit) as ended:
        cli.main([*words])
    return ended.value.code


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
    assert parse(["--outer-steps=3"]).outer_steps == 3  # dashes within a flag


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--n_wey", "3"], ("--n_wey is not a flag", "did you mean --n_way?", "--help lists them")),
        (["--inner_stepz=3"], ("--inner_stepz is not a flag", "did you mean --inner_steps?")),
        (["--qqq"], ("--qqq is not a flag", "--help lists them")),
        (["stray"], ("recipe=stray", "give a YAML or JSON file")),
        (["--learning_rate", "1"], ("--learning_rate is not a flag", "--help lists")),
        (["--algorithm", "fomalm"], ("algorithm=fomalm is unknown", "did you mean fomaml?")),
        (["--outer_optimizer", "adam"], ("outer_optimizer=adam is unknown", "did you mean adamw?")),
        (["--head_init", "zeros"], ("head_init=zeros is unknown", "did you mean zero?", "use zero, learned")),
        (["--report_to", "wandbs"], ("report_to=wandbs is unknown", "did you mean wandb?")),
        (["--report_to", "all", "wandb"], ("report_to=all wandb names all and others", "leave out all")),
        (["--warmup_steps", "1.5"], ("warmup_steps=1.5", "use 0.1 or 10, say")),
        (["--warmup_steps", "-1"], ("warmup_steps=-1", "use 0 or more")),
        (
            ["--warmup_steps", "3", "--lr_scheduler_type", "constant"],
            ("warmup_steps=3", "lr_scheduler_type=constant", "use constant_with_warmup"),
        ),
        (
            ["--outer_lr", "1e-7", "--lr_scheduler_type", "polynomial"],
            ("outer_lr=1e-07", "ends at 1e-07", "use a higher rate"),
        ),
        (["--text_column", "a\0b"], ("text_column='a\\x00b' holds a null character", "remove it")),
        (["--run_name", "../up"], ("run_name=../up", "use letters, digits, - and _")),
        (["--help", "modle"], ("help=modle", "did you mean model?", "use model, data, algorithm")),
        (["--n_w", "3"], ("--n_w is not a flag", "did you mean --n_way?")),  # no abbreviations
        (["--n_way", "x"], ("n_way=x is not a whole number", "give one")),
        (["--n_way", "2.5"], ("n_way=2.5 is not a whole number", "give one")),
        (["--bf16", "maybe"], ("bf16=maybe is not true, false or auto", "give one")),
        (["--lora_merge", "auto"], ("lora_merge=auto is not True or False", "give one")),
        (
            ["--float32_matmul_precision", "highe"],
            ("float32_matmul_precision=highe is unknown", "use highest, high or medium"),
        ),
        (["--dataset", ""], ("dataset= is empty", "leave it out")),
        (["--output_dir", ""], ("output_dir= is empty", "leave it out")),
        (["--output_dir", "~/runs"], ("output_dir=~/runs begins with ~", "write the whole path")),
        (["--n_way"], ("--n_way", "expected one argument")),
        (["--config"], ("--config", "expected one argument")),
        (["--n_way", "1"], ("n_way=1", "use 2 or more")),
        (["--dataset", "a", "a"], ("dataset=a a", "name each once")),
    ],
)
def test_bad_flags(argv, parts):
    check_message(refusal(parse, argv), *parts)


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
    ("words", "bf16"),
    [
        ([], None),
        (["--bf16"], True),
        (["--bf16", "true"], True),
        (["--bf16=false"], False),
        (["--bf16", "auto"], None),
    ],
)
@pytest.mark.parametrize("command", ["train", "evaluate", "tune", "adapt", "plan"])
def test_bf16_is_open_unless_it_is_given(command, words, bf16):
    assert parse([*words, *(["--gpus=1"] if command == "plan" else [])], command).bf16 is bf16


def test_auto_leaves_open_what_a_file_sets(config_file):
    path = config_file("bf16: true\n")
    assert parse([f"--config={path}", "--bf16", "auto"]).bf16 is None
    for name, text in (
        ("a.json", '{"bf16": "auto"}'),
        ("b.json", '{"bf16": null}'),
        ("c.yaml", "bf16: auto"),
    ):
        assert parse([f"--config={config_file(text, name)}"]).bf16 is None
    assert Config(**{"bf16": "auto"}).bf16 is None


ALIASES = (
    "dataset: [" + "".join(f"&a{n} [{f'*a{n - 1},' * 9}]," for n in range(1, 9)).replace("*a0", "x") + "]"
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("n_wey: 3", ("config={path} sets n_wey,", "did you mean n_way?")),
        ("max_steps: 3", ("config={path} sets max_steps,", "which is no setting")),
        ("n-way: 3", ("config={path} sets n-way,", "did you mean n_way?")),
        ("help: true", ("config={path} sets help,", "remove it")),
        ("config: other.yaml", ("config={path} sets config,", "did you mean peft_config?")),
        ("n_way: 2.5", ("config={path} sets n_way=2.5, which is not a whole number", "give one")),
        ("seed: true", ("config={path} sets seed=true, which is not a whole number", "give one")),
        ("n_way: !!int 5x", ("config={path} cannot be read", "tag:yaml.org,2002:int", "fix the file")),
        ("n_way: !!bool x", ("config={path} cannot be read", "tag:yaml.org,2002:bool", "fix the file")),
        ("dataset: !!set {a, b}", ("config={path} cannot be read", "tag:yaml.org,2002:set", "fix the file")),
        (
            "n_way: 3\nn_way: 4",
            ("config={path} cannot be read", "n_way is set twice in line 2", "fix the file"),
        ),
        ("#" * 2**20 + "\n", ("config={path} has 1048577 bytes", "at most 1048576", "give another")),
        (ALIASES, ("config={path} sets dataset=", "which is nested", "write one list of values")),
        ("n_way: [3]", ("config={path} sets n_way=[3]", "write `n_way: value`")),
        ("deepspeed: {stage: 2}", ("config={path} sets deepspeed=", "write `deepspeed: value`")),
        ("algorithm: mamal", ("algorithm=mamal", "use fomaml, maml,", "module:spec of another")),
        ("k_shot: 0", ("k_shot=0", "use 1 or more")),
        ("- n_way", ("config={path} holds no settings", "write `name: value` lines")),
        ("", ("config={path} holds no settings", "write `name: value` lines")),
    ],
)
def test_a_config_file_is_checked(config_file, text, parts):
    path = config_file(text)
    check_message(refusal(parse, ["--config", path]), *[part.format(path=path) for part in parts])


def test_an_unreadable_config_file(config_file, tmp_path):
    path = config_file("n_way: [3")
    message = refusal(parse, ["--config", path])
    assert message.startswith(f"config={path} cannot be read: ")
    assert "line 1" in message
    assert message.endswith("; fix the file")
    none = tmp_path / "none.yaml"
    check_message(
        refusal(parse, ["--config", str(none)]), f"config={none}", "give a YAML or JSON file of settings"
    )
    (tmp_path / "latin.yaml").write_bytes(b"dataset: \xff\xfe\n")
    assert refusal(parse, ["--config", str(tmp_path / "latin.yaml")]).endswith("; fix the file")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["train", "--n_way", "1"], ("n_way=1", "use 2 or more")),
        (["train", "--n_wey", "1"], ("--n_wey is not a flag", "did you mean --n_way?")),
        (["evaluate", "--outer_steps", "1"], ("--outer_steps is not a flag of evaluate, but of training",)),
        (["trian"], ("command=trian", "did you mean train?")),
        (["train", "--config"], ("--config", "expected one argument")),
        (["train", "--algorithm", "nowhere:spec"], ("algorithm=nowhere:spec ", "write module:name")),
        (["train", "--dataset", "{tmp}/none.jsonl"], ("dataset={tmp}/none.jsonl", "check the path")),
        (
            ["train", "--model_name_or_path", "{tmp}/none"],
            ("model_name_or_path={tmp}/none", "check the path"),
        ),
        (
            ["train", "--deepspeed", "{tmp}/none.json"],
            ("deepspeed={tmp}/none.json", "or a name of zero0"),
        ),
    ],
)
def test_a_failure_is_one_line_and_code_2(capfd, tmp_path, argv, parts):
    assert exit_code(word.format(tmp=tmp_path) for word in argv) == 2
    (line,) = capfd.readouterr().err.splitlines()
    check_message(line, "fmmeta: error: ", *[part.format(tmp=tmp_path) for part in parts])


def test_other_ranks_exit_without_output(capfd, monkeypatch):
    slept = []
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert (exit_code(["train", "--n_way", "1"]), capfd.readouterr().err, slept) == (2, "", [3])


@pytest.mark.parametrize(
    ("command", "parts", "world_size"),
    [
        ("train --n_way 1", ("n_way=1", "use 2 or more"), ""),  # one process, as for `Launch.from_env`
        ("plan --gpus 0", ("gpus=0", "use 1 or more"), "8"),
        ("inspect nofile.jsonl", ("dataset=nofile.jsonl", "check the path"), "8"),
        ("convert nofile.gguf out", ("model_name_or_path=nofile.gguf", "check the path"), "8"),
        ("elastic --groups 0 --output_dir out", ("groups=0", "use 1 or more"), "8"),
        ("trian", ("command=trian", "did you mean train?"), "8"),
    ],
)
def test_commands_of_one_process_print_errors_whatever_rank_the_environment_names(
    command, parts, world_size, capfd, monkeypatch
):
    """A pod of a cluster may have RANK of another program."""
    monkeypatch.setenv("RANK", "3")
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    assert exit_code(command.split()) == 2
    check_message(capfd.readouterr().err, "fmmeta: error: ", *parts)


def test_error_in_the_code_names_the_task(capfd, monkeypatch, tmp_path):
    """One line on rank 0 and exit code 1; the traceback is in the log of the rank that loaded the task."""
    monkeypatch.setattr("fmmeta.tasks.loader.LoadEpisode.batches", Mock(side_effect=TypeError("no text")))
    short = ["--outer_steps=1", "--num_workers=0", "--meta_batch_size=1", "--eval_episodes=0"]
    assert exit_code(["train", *short, f"--output_dir={tmp_path}"]) == 1
    *traceback, line = capfd.readouterr().err.splitlines()
    assert "TypeError: no text" in traceback
    check_message(line, "fmmeta: error: loading task ", "TypeError: no text", "the log of the rank")


@pytest.mark.parametrize("words", [["train"], ["inspect"], ["train", "--model_name_or_path"]])
def test_a_name_that_is_too_long_for_a_path_is_one_line(capsys, words):
    assert exit_code([*words, "x" * 300]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    check_message(line, "x" * 40 + "...", "300 characters", "give a shorter")


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), ([], 2), (["train", "--help"], 0)])
def test_help_and_usage(capsys, words, code):
    assert exit_code(words) == code
    assert "usage" in capsys.readouterr().out


def help_of(capsys, *words: str) -> list[str]:
    assert exit_code(words) == 0
    return capsys.readouterr().out.splitlines()


def flags_in(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith("  --")]


def test_help_of_train_shows_the_common_flags_in_groups_on_at_most_120_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = help_of(capsys, "train", "--help")
    assert "Recipes: 8b_zero3, elastic, intents, " in "\n".join(lines[:5])
    assert lines[0] == "usage: fmmeta train [RECIPE or FILE.yaml] [--flags]"
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 100
    shown = flags_in(lines)
    assert 35 <= len(shown) <= 50
    titles = [line for line in lines[3:] if line.endswith(")") and not line.startswith(" ")]
    assert titles == [f"{title} ({name})" for name, (title, _) in GROUPS.items()]
    assert shown.index("--model_name_or_path") == 0
    assert shown.index("--dataset") < shown.index("--algorithm") < shown.index("--report_to")
    assert all(name in "\n".join(lines) for name in recipes.names())


@pytest.mark.parametrize("words", [["train", "--help-all"], ["--help"], ["--version"]])
def test_help_whose_reader_has_exited_ends_without_a_traceback(words):
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "fmmeta", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("columns", ["40", "80", "100", "120", "300"])
def test_help_all_shows_every_flag_once_with_one_default_within_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    lines = help_of(capsys, "train", "--help-all")
    flags = flags_in(lines)
    assert sorted(flags) == sorted([f"--{name}" for name in Config.__dataclass_fields__] + ["--config"])
    assert all(len(line) <= max(int(columns), 52) for line in lines if "http" not in line)
    text = " ".join(" ".join(lines).split())
    for part in text.split(" --"):
        assert part.count("(default: ") <= 1, part
    assert "(default: None)" not in text
    assert "(default: [])" not in text


def test_help_of_one_group_shows_its_flags_only(capsys):
    flags = flags_in(help_of(capsys, "train", "--help", "inner"))
    assert flags == [*(f"--{name}" for name in InnerConfig.__dataclass_fields__), "--config"]


@pytest.mark.parametrize("command", sorted(set(cli.COMMANDS) - {"train"}))
def test_help_of_a_command_shows_its_own_flags_first(capsys, command):
    lines = help_of(capsys, command, "--help")
    settings = pkgutil.resolve_name(cli.COMMANDS[command].settings)
    own = [f"--{name}" for name in settings.__dataclass_fields__ if name not in Config.__dataclass_fields__]
    assert lines[0].startswith(f"usage: fmmeta {command} ")
    assert flags_in(lines)[: len(own)] == own


def test_version_is_printed(capsys):
    assert help_of(capsys, "--version") == [f"fmmeta {fmmeta.__version__}"]


@pytest.mark.parametrize(
    ("given", "outer_steps", "steps"),
    [
        *((0, 150, 0), (7, 150, 7), (0.1, 150, 15), (0.001, 150, 1), (0.5, 150, 75), (1, 150, 1)),
        (0.07, 100, 7),  # 0.07 * 100 > 7: not rounded up for a floating-point error
    ],
)
def test_warmup_steps_below_1_are_a_share_of_outer_steps(given, outer_steps, steps):
    assert Config(warmup_steps=given, outer_steps=outer_steps).warmup == steps


def test_words_before_the_flags_of_inspect_are_data_sets():
    config = parse(["letters", "digits", "--n_way", "3"], "inspect")
    assert (config.dataset, config.n_way) == (["letters", "digits"], 3)


@pytest.mark.parametrize("name", recipes.names())
def test_inspect_reads_data_as_the_recipe_of_a_run_does(name, tmp_path):
    of_run = parse([name, "--output_dir", "x"], "train")
    for words in ([name, "a.csv", "b.csv"], ["--config", name, "--dataset", "a.csv", "b.csv"]):
        config = parse([*words, "--k_shot", "3"], "inspect")
        assert (config.dataset, config.k_shot) == (["a.csv", "b.csv"], 3)
        same = recipes.read("recipe", name, Config).keys() & vars(config).keys() - {"dataset", "k_shot"}
        assert {one: getattr(config, one) for one in same} == {one: getattr(of_run, one) for one in same}
    assert parse([name], "inspect").dataset == of_run.dataset
    path = tmp_path / "run.yaml"
    path.write_text("n_way: 3\nouter_lr: 0.1\n")
    assert parse([str(path), "a.csv"], "inspect").n_way == 3
    path.write_text("outer_rate: 0.1\n")
    assert "sets outer_rate, which is no setting" in refusal(parse, [str(path), "a.csv"], "inspect")


@pytest.mark.parametrize("words", [["--local_rank=1", "train"], ["train", "--local_rank=1"]])
def test_the_flag_of_the_deepspeed_launcher_is_dropped(monkeypatch, capfd, words):
    monkeypatch.setattr(sys, "argv", ["fmmeta", *words, "--k_shot", "0"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("fmmeta", run_name="__main__")
    assert left.value.code == 2
    assert "k_shot=0" in capfd.readouterr().err
