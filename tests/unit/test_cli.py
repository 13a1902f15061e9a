"""The command line reads flags and files of settings, packaged recipes among them; flags win; a failure is
one line on stderr and exit code 2.
"""

import json
import pkgutil
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

import fmmeta
from fmmeta.cli import COMMANDS, parse
from fmmeta.common.install import version
from fmmeta.config import recipes
from fmmeta.config.settings import GROUPS, Config, InnerConfig
from fmmeta.train import train
from fmmeta.training.run_files import write_config
from tests.support.helpers import ROOT
from tests.support.messages import check_message, exit_code, refusal
from tests.support.short_runs import QUICK, same


@pytest.fixture
def written(tmp_path):
    """written(text, name): the path of a new file."""

    def write(text: str | bytes, name: str = "run.yaml") -> str:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(tmp_path / name)

    return write


GIVEN = {"n_way": 3, "inner_lr": 0.01, "bf16": True, "dataset": ["a.csv"], "group_size": "2"}
TARGETS = {"lora_r": 4, "lora_target_modules": ["query", "value"]}


@pytest.mark.parametrize(
    ("flags", "file", "settings"),
    [
        ("", None, {}),
        ("--n_way 3 --inner_lr=1e-2 --bf16 --dataset a.csv --group_size 2", None, GIVEN),
        ("--outer-steps=3 --outer_lr 0.5", None, {"outer_steps": 3, "outer_lr": 0.5}),  # dashes within a flag
        ("--inner_lr_groups head=2 *embed*=0", None, {"inner_lr_groups": ["head=2", "*embed*=0"]}),
        ("", "inner_lr_groups: [head=2, '*embed*=0']", {"inner_lr_groups": ["head=2", "*embed*=0"]}),
        (
            "",
            "n_way: 3\ninner_lr: 1e-2\nbf16: true\ndataset: [a.csv]\ngroup_size: 2\nouter_lr: null\n",
            GIVEN,
        ),
        ("", "n_way: 3\ninner_lr: 0.01\nbf16: yes\ndataset: a.csv\ngroup_size: '2'\n", GIVEN),
        ("", json.dumps(GIVEN, indent="\t"), GIVEN),
        ("--lora_r=4 --lora_target_modules query value", None, TARGETS),
        ("", "lora_r: 4\nlora_target_modules: [query, value]\n", TARGETS),
        (
            "--n_way 7 --bf16 false",
            "n_way: 3\nk_shot: 4\nbf16: true\n",
            {"n_way": 7, "k_shot": 4, "bf16": False},
        ),
        ("--bf16 auto", "bf16: true", {"bf16": None}),
        ("", "bf16: auto", {"bf16": None}),
        ("", '{"bf16": "auto"}', {"bf16": None}),
        ("", '{"bf16": null, "run_name": "\U0001f600"}', {"bf16": None, "run_name": "\U0001f600"}),
        ("", "class_split: 01", {"class_split": "01"}),
        ("", "algorithm: maml\ninner_lr_learned: no", {"algorithm": "maml", "inner_lr_learned": "no"}),
        ("", "output_dir: null\nlabel_column: 'null'", {"label_column": "null"}),
        (
            "",
            "dataset: [letters, rows.csv]\nmix_weights: [2, 1]",
            {"dataset": ["letters", "rows.csv"], "mix_weights": [2.0, 1.0]},
        ),
    ],
)
def test_flags_and_files_become_settings(written, flags, file, settings):
    """A file by --config or by its name alone: its values are read as flags are, and flags win."""
    path = written(file or "", "run.json" if file and file[0] == "{" else "run.yaml")
    for place in (["--config", path], [path]) if file else ([],):
        assert parse([*place, *flags.split()]) == Config(**settings)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--n_wey 3", ("--n_wey is not a flag", "did you mean --n_way?", "--help lists them")),
        ("--n_wey 3 intents", ("--n_wey", "did you mean --n_way?")),
        ("--inner_stepz=3", ("--inner_stepz is not a flag", "did you mean --inner_steps?")),
        ("--learning_rate 1", ("--learning_rate is not a flag", "--help lists")),
        ("--algorithm fomalm", ("algorithm=fomalm is unknown", "did you mean fomaml?")),
        ("--outer_optimizer adam", ("outer_optimizer=adam is unknown", "did you mean adamw?")),
        ("--head_init zeros", ("head_init=zeros is unknown", "did you mean zero?", "use zero, learned")),
        ("--report_to all wandb", ("report_to=all wandb names all and others", "leave out all")),
        ("--warmup_steps 1.5", ("warmup_steps=1.5", "use 0.1 or 10, say")),
        ("--warmup_steps -1", ("warmup_steps=-1", "use 0 or more")),
        (
            "--warmup_steps 3 --lr_scheduler_type constant",
            ("warmup_steps=3", "lr_scheduler_type=constant", "use constant_with_warmup"),
        ),
        (
            "--outer_lr 1e-7 --lr_scheduler_type polynomial",
            ("outer_lr=1e-07", "ends at 1e-07", "use a higher rate"),
        ),
        ("--text_column a\0b", ("text_column='a\\x00b' holds a null character", "remove it")),
        ("--run_name ../up", ("run_name=../up", "use letters, digits, - and _")),
        ("--help modle", ("help=modle", "did you mean model?", "use model, data, algorithm")),
        ("--n_w 3", ("--n_w is not a flag", "did you mean --n_way?")),  # no abbreviations
        ("--n_way x", ("n_way=x is not a whole number", "give one")),
        ("--bf16 maybe", ("bf16=maybe is not true, false or auto", "give one")),
        ("--lora_merge auto", ("lora_merge=auto is not True or False", "give one")),
        ("--float32_matmul_precision highe", ("float32_matmul_precision=highe is", "use highest, high or")),
        ("--dataset=", ("dataset= is empty", "leave it out")),
        ("--output_dir=", ("output_dir= is empty", "leave it out")),
        ("--output_dir ~/runs", ("output_dir=~/runs begins with ~", "write the whole path")),
        ("--n_way", ("--n_way", "expected one argument")),
        ("intent", ("recipe=intent", "did you mean intents?", "8b_zero3, elastic, intents,")),
        ("--config pipelines", ("config=pipelines", "did you mean pipeline?", "give a YAML or JSON file of")),
        ("none.yaml", ("recipe=none.yaml", "give a YAML or JSON file")),
        ("intents pipeline", ("recipe=intents and recipe=pipeline", "give one")),
        ("--config intents pipeline", ("config=intents and recipe=pipeline", "give one")),
    ],
)
def test_bad_flags(flags, parts):
    check_message(refusal(parse, flags.split(" ")), *parts)


@pytest.mark.parametrize("command", ["train", "evaluate", "tune", "adapt", "plan"])
def test_bf16_is_open_unless_it_is_given(command):
    fixed = ["--gpus=1"] if command == "plan" else []
    for words, bf16 in (("", None), ("--bf16", True), ("--bf16 true", True), ("--bf16=false", False)):
        assert parse([*words.split(), *fixed], command).bf16 is bf16


OUT = ["--output_dir", "runs/x"]  # the elastic recipe wants one
RANK_3 = {"RANK": "3", "WORLD_SIZE": "8"}
ALIASES = (
    "dataset: [" + "".join(f"&a{n} [{f'*a{n - 1},' * 9}]," for n in range(1, 9)).replace("*a0", "x") + "]"
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("n_wey: 3", ("sets n_wey, which is no setting", "did you mean n_way?")),
        ("per_device_train_batch_size: 3", ("which is no setting", "did you mean")),
        ("max_steps: 3", ("sets max_steps,", "which is no setting")),
        ("n-way: 3", ("sets n-way,", "did you mean n_way?")),
        ("help: true", ("sets help,", "remove it")),
        ("config: other.yaml", ("sets config,", "did you mean peft_config?")),
        ("1: 3", ("sets 1, which is no setting", "remove it")),
        ("n_way: 2.5", ("sets n_way=2.5, which is not a whole number", "give one")),
        ("seed: true", ("sets seed=true, which is not a whole number", "give one")),
        ("mix_weights: [one]", ("sets mix_weights=one", "not a number", "give one")),
        ("n_way: !!int 5x", ("cannot be read", "tag:yaml.org,2002:int", "fix the file")),
        ("n_way: !!bool x", ("cannot be read", "tag:yaml.org,2002:bool", "fix the file")),
        ("dataset: !!set {a, b}", ("cannot be read", "tag:yaml.org,2002:set", "fix the file")),
        ("n_way: 3\nn_way: 4", ("cannot be read", "n_way is set twice in line 2", "fix the file")),
        ("n_way: 3\nk_shot: [1\nnum_query: 2", ("cannot be read: ", "in line 3", "fix the file")),
        ("n_way: 3\n\tk_shot: 2", ("cannot be read", "in line 2", "fix the file")),
        ("n_way: !!python/object:os.system x", ("cannot be read", "in line 1", "fix the file")),
        (b"dataset: \xff\xfe\n", ("fix the file",)),
        ("#" * 2**20 + "\n", (" has 1048577 bytes", "at most 1048576", "give another")),
        (ALIASES, ("sets dataset=", "which is nested", "write one list of values")),
        ("dataset: [[a, b]]", ("sets dataset=[[a, b]]", "nested", "write one list")),
        ("n_way: [3]", ("sets n_way=[3]", "write `n_way: value`")),
        ("n_way: {train: 3}", ("sets n_way={train: 3}", "write `n_way: value`")),
        ("dataset: {train: a}", ("sets dataset={train: a}", "write `dataset: value`")),
        ("- n_way", ("holds no settings", "write `name: value` lines")),
        ("", ("holds no settings", "write `name: value` lines")),
    ],
)
def test_a_file_of_settings_is_checked(written, text, parts):
    """One that is given by --config, and one that is given as the recipe."""
    path = written(text)
    for name, words in (("config", ["--config", path]), ("recipe", [path])):
        check_message(refusal(parse, words), f"{name}={path}", *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("algorithm: mamal", ("algorithm=mamal", "use fomaml, maml,", "module:spec of another")),
        ("k_shot: 0", ("k_shot=0", "use 1 or more")),
        ("report_to: []", ("report_to= names no tracker",)),
    ],
)
def test_values_of_a_file_are_checked_as_flags_are(written, text, parts):
    check_message(refusal(parse, [written(text)]), *parts)


LONG = "x" * 300
TOO_LONG = ("x" * 40 + "...", "300 characters", "give a shorter")


@pytest.mark.parametrize(
    ("command", "parts", "place"),
    [
        ("train --n_way 1", ("n_way=1", "use 2 or more"), {}),
        ("train --n_wey 1", ("--n_wey is not a flag", "did you mean --n_way?"), {}),
        ("train intent", ("recipe=intent is neither",), {}),
        ("evaluate --outer_steps 1", ("--outer_steps is not a flag of evaluate, but of training",), {}),
        ("train --config", ("--config", "expected one argument"), {}),
        ("train --algorithm nowhere:spec", ("algorithm=nowhere:spec ", "write module:name"), {}),
        ("train --dataset {tmp}/none.jsonl", ("dataset={tmp}/none.jsonl", "check the path"), {}),
        ("train --model_name_or_path {tmp}/a", ("model_name_or_path={tmp}/a", "check the path"), {}),
        ("train --deepspeed {tmp}/none.json", ("deepspeed={tmp}/none.json", "or a name of zero0"), {}),
        (f"train {LONG}", TOO_LONG, {}),
        (f"inspect {LONG}", TOO_LONG, {}),
        (f"train --model_name_or_path {LONG}", TOO_LONG, {}),
        # commands of one process, and one process as for `Launch.from_env`: a pod may have another's RANK
        ("train --n_way 1", ("n_way=1", "use 2 or more"), {"RANK": "3"}),
        ("plan --gpus 0", ("gpus=0", "use 1 or more"), RANK_3),
        ("inspect nofile.jsonl", ("dataset=nofile.jsonl", "check the path"), RANK_3),
        ("convert nofile.gguf out", ("model_name_or_path=nofile.gguf", "check the path"), RANK_3),
        ("elastic --groups 0 --output_dir out", ("groups=0", "use 1 or more"), RANK_3),
        ("trian", ("command=trian", "did you mean train?"), RANK_3),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_failure_is_one_line_and_code_2(capfd, monkeypatch, tmp_path, command, parts, place):
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert exit_code(command.format(tmp=tmp_path).split()) == 2
    expected = [part.format(tmp=tmp_path) for part in parts]
    check_message(capfd.readouterr().err, "fmmeta: error: ", *expected)


def test_other_ranks_exit_without_output(capfd, monkeypatch):
    slept = []
    monkeypatch.setattr("fmmeta.cli.time.sleep", slept.append)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert (exit_code(["train", "--n_way", "1"]), capfd.readouterr().err, slept) == (2, "", [3])


def test_error_in_the_code_names_the_task(capfd, monkeypatch, tmp_path):
    """One line on rank 0 and exit code 1; the traceback is in the log of the rank that loaded the task."""
    monkeypatch.setattr("fmmeta.tasks.loader.LoadEpisode.batches", Mock(side_effect=TypeError("no text")))
    short = ["--outer_steps=1", "--num_workers=0", "--meta_batch_size=1", "--eval_episodes=0"]
    assert exit_code(["train", *short, f"--output_dir={tmp_path}"]) == 1
    *traceback, line = capfd.readouterr().err.splitlines()
    assert "TypeError: no text" in traceback
    check_message(line, "fmmeta: error: loading task ", "TypeError: no text", "the log of the rank")


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), ([], 2)])
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
    assert lines[0] == "usage: fmmeta train [RECIPE or FILE.yaml] [--flags]"
    assert "Recipes: 8b_zero3, elastic, intents, " in "\n".join(lines[:5])
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 100
    titles = [line for line in lines[3:] if line.endswith(")") and not line.startswith(" ")]
    assert titles == [f"{title} ({name})" for name, (title, _) in GROUPS.items()]
    shown = flags_in(lines)
    assert 35 <= len(shown) <= 50
    order = ("--model_name_or_path", "--dataset", "--algorithm", "--report_to")
    assert [flag for flag in shown if flag in order] == [shown[0], *order[1:]]
    assert all(name in "\n".join(lines) for name in recipes.names())


@pytest.mark.parametrize("columns", ["40", "100", "300"])
def test_help_all_shows_every_flag_once_with_one_default_within_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    lines = help_of(capsys, "train", "--help-all")
    assert sorted(flags_in(lines)) == sorted(
        [*(f"--{name}" for name in Config.__dataclass_fields__), "--config"]
    )
    assert all(len(line) <= max(int(columns), 52) for line in lines if "http" not in line)
    text = " ".join(" ".join(lines).split())
    assert not [part for part in text.split(" --") if part.count("(default: ") > 1]
    assert not re.search(r"\(default: (None|\[\])\)", text)


def test_help_of_one_group_shows_its_flags_only(capsys):
    flags = flags_in(help_of(capsys, "train", "--help", "inner"))
    assert flags == [*(f"--{name}" for name in InnerConfig.__dataclass_fields__), "--config"]


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"train"}))
def test_help_of_a_command_shows_its_own_flags_first(capsys, command):
    lines = help_of(capsys, command, "--help")
    settings = pkgutil.resolve_name(COMMANDS[command].settings)
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


@pytest.mark.parametrize("name", recipes.names())
def test_inspect_reads_data_as_the_recipe_of_a_run_does(name):
    of_run = parse([name, *OUT], "train")
    for words in ([name, "a.csv", "b.csv"], ["--config", name, "--dataset", "a.csv", "b.csv"]):
        config = parse([*words, "--k_shot", "3"], "inspect")
        assert (config.dataset, config.k_shot) == (["a.csv", "b.csv"], 3)
        same = recipes.read("recipe", name, Config).keys() & vars(config).keys() - {"dataset", "k_shot"}
        assert {one: getattr(config, one) for one in same} == {one: getattr(of_run, one) for one in same}
    assert parse([name], "inspect").dataset == of_run.dataset


def test_words_before_the_flags_of_inspect_are_a_recipe_and_data_sets(written):
    config = parse(["letters", "digits", "--n_way", "3"], "inspect")
    assert (config.dataset, config.n_way) == (["letters", "digits"], 3)
    assert parse([written("n_way: 3\nouter_lr: 0.1\n"), "a.csv"], "inspect").n_way == 3
    unknown = [written("outer_rate: 0.1\n"), "a.csv"]
    assert "sets outer_rate, which is no setting" in refusal(parse, unknown, "inspect")


@pytest.mark.parametrize("name", recipes.names())
def test_a_packaged_recipe_is_valid_and_begins_with_its_purpose_and_command(name):
    text = (recipes.FOLDER / f"{name}.yaml").read_text()
    head = text.split("model_name_or_path", 1)[0]
    assert head.count("\n# ") >= 2
    assert f"train {name}" in head
    assert "It needs" in head
    config = parse([name, *OUT])
    assert config.model_name_or_path != "tiny"
    assert config.dataset != ["letters"]
    keys = [line.split(":")[0] for line in text.splitlines()]
    assert all(keys.count(key) == 1 for key in yaml.safe_load(text))
    assert max(map(len, text.splitlines())) <= 125


def test_flags_win_and_config_is_the_same_wherever_the_name_stands():
    wanted = parse(["intents", "--n_way", "3", "--lr_scheduler_type", "cosine"])
    assert (wanted.n_way, wanted.algorithm, wanted.lr_scheduler_type) == (3, "protonet", "cosine")
    assert parse(["--n_way", "3", "intents", "--lr_scheduler_type=cosine"]) == wanted
    assert parse(["--config", "intents", "--n_way", "3", "--lr_scheduler_type", "cosine"]) == wanted
    assert "intents is not a flag" in refusal(parse, ["intents"], "evaluate")


def test_a_packaged_name_comes_before_a_file_of_that_name(tmp_path, written, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written("n_way: 3", "intents")
    assert (parse(["intents"]).n_way, parse(["./intents"]).n_way) == (5, 3)


def test_an_elastic_run_takes_a_recipe_without_its_tune(capsys, written):
    """A `tune` that is typed, or is beside `elastic` in the file, is refused."""
    typed = ["--tune", '{"init_interpolations": [0]}']
    for command, flags in (("train", ["--elastic", *OUT]), ("elastic", OUT)):
        config = parse(["intents", *flags], command)
        assert (config.tune, config.init_interpolation) == (None, 0.3)
        assert capsys.readouterr().out == (
            "fmmeta: intents without its tune, which elastic runs do not have\n"
        )
        check_message(refusal(parse, ["intents", *flags, *typed], command), "elastic=True with tune")
    both = written("elastic: true\ntune: {init_interpolations: [0]}")
    check_message(refusal(parse, [both, *OUT]), "elastic=True with tune")
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mix_temperature": float("inf"), "dataset": ["letters", "rows.csv"]},
        {"class_split": "01", "algorithm": "protonet", "n_way": 3, "inner_lr_groups": ["head=10", "*e*=0"]},
        {"task_type": "causal_lm", "prompt_template": "Q: {input}\nA:", "lora_r": 4, "outer_lr": 2e-5},
        {"text_column": "a: b #c", "label_column": "null", "inner_lr_learned": "no", "bf16": True},
        {"algorithm": "reptile", "outer_optimizer": "sgd", "group_size": "2", "eval_episodes": 7},
        {"algorithm": "meta_sgd", "inner_lr_learned": "element"},
        {"elastic": True, "output_dir": "shared", "lighthouse": "http://head:1", "group_name": "a"},
        {"model_name_or_path": "größe/modell", "outer_lr": 2e-5, "test_episodes": 0},
    ],
)
def test_config_yaml_gives_the_same_settings(tmp_path, settings):
    config = Config(**settings)
    write_config(tmp_path, config)
    place = ["--output_dir", "shared"] if config.elastic else []
    again = parse([str(tmp_path / "config.yaml"), *place])
    assert replace(again, lighthouse=config.lighthouse, group_name=config.group_name) == config


def test_config_yaml_holds_what_differs_from_the_defaults_by_group_and_no_secrets(tmp_path):
    token = "hf_abcdefghijklmnopqrstuvwxyz123456"
    given = {"outer_steps": 3, "n_way": 3, "output_dir": "runs/x", "head_init": "learned"}
    write_config(tmp_path, Config(**given, dataset=[f"hf://user:{token}@x"]))
    text = (tmp_path / "config.yaml").read_text()
    assert text.startswith(f"# Written by fmmeta {version('fmmeta')}: ")
    lines = [line for line in text.splitlines()[3:] if line and not line.startswith(("dataset:", "- "))]
    assert lines == ["# model", "head_init: learned", "# data", "n_way: 3", "# algorithm", "outer_steps: 3"]
    assert token[3:] not in text


def test_config_yaml_replaces_a_file_of_fmmeta_but_none_of_the_user(tmp_path, written):
    path = Path(written("n_way: 3 # mine", "config.yaml"))
    write_config(tmp_path, Config(n_way=4))
    assert path.read_text() == "n_way: 3 # mine"
    path.unlink()
    write_config(tmp_path, Config(n_way=3))
    write_config(tmp_path, Config(n_way=4))
    assert "n_way: 4" in path.read_text()


def test_config_yaml_of_a_run_starts_it_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [f"--{name}={value}" for name, value in {**QUICK, "outer_steps": 2, "save_steps": 0}.items()]
    flags += ["--model_name_or_path=tiny", f"--dataset={ROOT}/examples/data/intents.jsonl"]
    train(parse(["intents", *flags, "--output_dir=first"]))
    text = Path("first/config.yaml").read_text()
    assert "algorithm: protonet" in text
    assert "\noutput_dir" not in text
    train(parse(["first/config.yaml", "--output_dir=second"]))
    assert same(Path("first"), Path("second"))
    assert Path("second/config.yaml").read_text() == text


@pytest.mark.parametrize("words", [["--local_rank=1", "train"], ["train", "--local_rank=1"]])
def test_the_flag_of_the_deepspeed_launcher_is_dropped(monkeypatch, capfd, words):
    monkeypatch.setattr(sys, "argv", ["fmmeta", *words, "--k_shot", "0"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("fmmeta", run_name="__main__")
    assert left.value.code == 2
    assert "k_shot=0" in capfd.readouterr().err
