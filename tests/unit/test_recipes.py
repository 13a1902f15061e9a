"""A recipe is named by its file or its name; flags win; a bad recipe ends with one line."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fmmeta.cli import main, parse
from fmmeta.common.install import version
from fmmeta.config import recipes
from fmmeta.config.settings import Config
from fmmeta.train import train
from fmmeta.training.run_files import write_config
from tests.support.messages import check_message, refusal
from tests.support.short_runs import QUICK, same

OUT = ["--output_dir", "runs/x"]  # the elastic recipe wants one


def write(tmp_path, text: str, name: str = "mine.yaml") -> str:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return str(tmp_path / name)


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


def test_a_packaged_name_comes_before_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "n_way: 3", "intents")
    assert parse(["intents"]).n_way == 5
    assert parse(["./intents"]).n_way == 3


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("class_split: 01", {"class_split": "01"}),
        ("algorithm: maml\ninner_lr_learned: no", {"inner_lr_learned": "no"}),
        ("outer_lr: 1e-4", {"outer_lr": 1e-4}),
        ("bf16: yes\noutput_dir: null\nlabel_column: 'null'", {"bf16": True, "label_column": "null"}),
        ("dataset: [letters, rows.csv]\nmix_weights: [2, 1]", {"mix_weights": [2.0, 1.0]}),
        ("report_to: []", None),
        ('{"n_way": 3, "bf16": true, "class_splits": null}', {"n_way": 3, "bf16": True}),
    ],
)
def test_values_are_read_as_flags_are(tmp_path, text, values):
    path = write(tmp_path, text)
    if values is None:
        assert "report_to= names no tracker" in refusal(parse, [path])
        return
    config = parse([path])
    assert {name: getattr(config, name) for name in values} == values


BAD = [
    ("n_wey: 3", ("sets n_wey, which is no setting", "did you mean n_way?")),
    ("per_device_train_batch_size: 3", ("per_device_train_batch_size, which is no setting", "did you mean")),
    ("1: 3", ("sets 1, which is no setting", "remove it")),
    ("- n_way", ("holds no settings", "write `name: value` lines")),
    ("", ("holds no settings", "write `name: value` lines")),
    ("n_way: 3\nk_shot: [1\nnum_query: 2", ("cannot be read", "in line 3", "fix the file")),
    ("n_way: 3\n\tk_shot: 2", ("cannot be read", "in line 2", "fix the file")),
    ("n_way: !!python/object:os.system x", ("cannot be read", "in line 1", "fix the file")),
    ("dataset: [[a, b]]", ("sets dataset=[[a, b]]", "nested", "write one list")),
    ("n_way: {train: 3}", ("sets n_way={train: 3}", "write `n_way: value`")),
    ("dataset: {train: a}", ("sets dataset={train: a}", "write `dataset: value`")),
    ("mix_weights: [one]", ("sets mix_weights=one", "not a number", "give one")),
]


@pytest.mark.parametrize(("text", "parts"), BAD)
def test_a_bad_recipe_is_refused_in_one_line(tmp_path, text, parts):
    path = write(tmp_path, text)
    check_message(refusal(parse, [path]), f"recipe={path}", *parts)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["intent"],
            ("recipe=intent", "did you mean intents?", "8b_zero3, elastic, intents,"),
        ),
        (
            ["--config", "pipelines"],
            ("config=pipelines", "did you mean pipeline?", "give a YAML"),
        ),
        (["none.yaml"], ("recipe=none.yaml", "give a YAML or JSON file")),
        (["intents", "pipeline"], ("recipe=intents and recipe=pipeline", "give one")),
        (["--config", "intents", "pipeline"], ("config=intents and recipe=pipeline", "give one")),
        (["--n_wey", "3", "intents"], ("--n_wey", "did you mean --n_way?")),
    ],
)
def test_a_wrong_name_is_refused_in_one_line(argv, parts):
    check_message(refusal(parse, argv), *parts)


def test_the_command_ends_with_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fmmeta", "train", "intent"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    check_message(capsys.readouterr().err, "fmmeta: error: recipe=intent is neither")


def test_an_elastic_run_takes_a_recipe_without_its_tune(capsys, tmp_path):
    """A `tune` that is typed, or is beside `elastic` in the file, is refused."""
    typed = ["--tune", '{"init_interpolations": [0]}']
    for command, flags in (("train", ["--elastic", *OUT]), ("elastic", OUT)):
        config = parse(["intents", *flags], command)
        assert (config.tune, config.init_interpolation) == (None, 0.3)
        assert capsys.readouterr().out == (
            "fmmeta: intents without its tune, which elastic runs do not have\n"
        )
        check_message(refusal(parse, ["intents", *flags, *typed], command), "elastic=True with tune")
    both = write(tmp_path, "elastic: true\ntune: {init_interpolations: [0]}")
    check_message(refusal(parse, [both, *OUT]), "elastic=True with tune")
    assert not capsys.readouterr().out


def test_other_commands_take_no_recipe():
    assert "intents is not a flag" in refusal(parse, ["intents"], "evaluate")


def saved(folder, config) -> str:
    write_config(folder, config)
    return str(folder / "config.yaml")


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
    again = parse([saved(tmp_path, config), *(["--output_dir", "shared"] if config.elastic else [])])
    left_out = ("lighthouse", "group_name")
    assert replace(again, **{name: getattr(config, name) for name in left_out}) == config


def test_config_yaml_holds_what_differs_from_the_defaults_by_group(tmp_path):
    config = Config(outer_steps=3, n_way=3, output_dir="runs/x", head_init="learned")
    text = Path(saved(tmp_path, config)).read_text()
    assert text.startswith(f"# Written by fmmeta {version('fmmeta')}: ")
    lines = [line for line in text.splitlines()[3:] if line]
    assert lines == ["# model", "head_init: learned", "# data", "n_way: 3", "# algorithm", "outer_steps: 3"]


def test_config_yaml_does_not_replace_a_file_of_the_user(tmp_path):
    path = write(tmp_path, "n_way: 3 # mine", "config.yaml")
    saved(tmp_path, Config(n_way=4))
    assert Path(path).read_text() == "n_way: 3 # mine"
    saved(tmp_path / "..", Config())  # and a file of fmmeta is replaced
    assert "n_way: 4" in Path(saved(tmp_path / "..", Config(n_way=4))).read_text()


def test_config_yaml_holds_no_secrets(tmp_path):
    text = Path(
        saved(tmp_path, Config(dataset=["hf://user:hf_abcdefghijklmnopqrstuvwxyz123456@x"]))
    ).read_text()
    assert "abcdefghijklmnopqrstuvwxyz" not in text


def test_config_yaml_of_a_run_starts_it_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [f"--{name}={value}" for name, value in {**QUICK, "outer_steps": 2, "save_steps": 0}.items()]
    train(parse(["intents", "--model_name_or_path=tiny", "--dataset=letters", *flags, "--output_dir=first"]))
    text = Path("first/config.yaml").read_text()
    assert "algorithm: protonet" in text
    assert "\noutput_dir" not in text
    train(parse(["first/config.yaml", "--output_dir=second"]))
    assert same(Path("first"), Path("second"))
    assert Path("second/config.yaml").read_text() == text
    train(parse(["first/config.yaml", "--output_dir=third", "--seed=1"]))
    assert not same(Path("first"), Path("third"))


def test_json_is_read_with_tabs_and_characters_outside_the_basic_plane(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"run_name": "\U0001f600", "outer_lr": 1e-5, "bf16": False}, indent="\t"))
    config = parse(["--config", str(file)])
    assert (config.run_name, config.outer_lr, config.bf16) == ("\U0001f600", 1e-5, False)
