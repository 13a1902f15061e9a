"""`fmmeta inspect` and `fmmeta env` print what they promise; names and revisions of hub models; messages that
a new user meets first.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from fmmeta import inspection
from fmmeta.cli import parse
from fmmeta.common import progress
from fmmeta.common.text import nearest
from fmmeta.config.settings import Config
from fmmeta.doctor import EnvConfig, environment, print_environment
from fmmeta.learners.files import cached_file, is_path, split_source
from fmmeta.learners.load import describe
from fmmeta.parallel.memory import unsharded
from fmmeta.training.run_files import known_folder, new_folder
from tests.support.helpers import write_rows
from tests.support.messages import check_message, refusal


def inspect(*words: str) -> None:
    inspection.run(parse(list(words), "inspect"))


def test_inspect_shows_splits_lengths_rows_and_an_episode(capsys):
    inspect("letters")
    text = capsys.readouterr().out
    for part in (
        "25200 rows, 7 strata; tasks: 140 train, 28 valid, 42 test",
        "episodes of 5 classes: 5 support and 5 query rows per class, so 10 rows at least",
        "20 / 20 / 20",
        "lengths in tokens: least 9, median 11",
        "support: 25 rows, 5 of them",
        "<bos>|",
    ):
        assert part in text
    assert text.count("'first-train-0'") == 1
    assert text.endswith("Training would accept this.\n")


def test_the_first_episode_is_drawn_with_the_weights_of_the_mixture(capsys, tmp_path):
    files = []
    for name in ("rare", "common"):
        rows = [{"text": f"{name} {i}", "label": f"{name} {i % 20}"} for i in range(240)]
        files.append(str(write_rows(tmp_path / f"{name}.jsonl", rows)))
    for weights, name in ((["1e-9", "1"], "common"), (["1", "1e-9"], "rare")):
        inspect(*files, "--mix_weights", *weights, "--num_query", "5")
        assert f"stratum '{name}" in capsys.readouterr().out


def test_inspect_shows_the_loss_mask_and_truncated_answers(capsys, tmp_path):
    rows = [
        {"task": f"t{n}", "input": f"{i} and {n}", "output": "9" * (200 if i == 0 else 1)}
        for n in range(5)
        for i in range(12)
    ]
    inspect(str(write_rows(tmp_path / "pairs.jsonl", rows)), "--task_type", "causal_lm")
    text = capsys.readouterr().out
    for part in (
        "[tokens] in brackets count in the loss",
        "|:|[ ][9][<eos>]",
        "5 texts of 60 rows are truncated; raise --max_length",
        "5 answers of these lose their end",
    ):
        assert part in text


def test_inspect_names_all_that_training_would_refuse(capsys, tmp_path):
    rows = [
        {"task": f"t{n}", "input": f"{i}", "output": "x"} for n in range(9) for i in range(2 if n < 2 else 12)
    ]
    message = refusal(inspect, str(write_rows(tmp_path / "few.jsonl", rows)), "--task_type", "causal_lm")
    text = capsys.readouterr().out
    check_message(message, "k_shot=5 and num_query=5 need 10 rows", "has 2", "lower them")
    assert all(f"task 't{n}' has 2" in text for n in (0, 1))
    assert "n_way=1" not in text
    assert text.endswith("Training would be refused:\n")


def test_inspect_shows_the_data_also_if_a_split_would_be_empty(capsys, tmp_path):
    rows = [{"text": f"{n} {i}", "label": f"c{n}"} for n in range(4) for i in range(12)]
    check_message(
        refusal(inspect, str(write_rows(tmp_path / "few.jsonl", rows)), "--n_way", "20"),
        "n_way=20 is above the 4 classes",
        "lower n_way",
    )
    text = capsys.readouterr().out
    assert "48 rows, 1 stratum; classes" in text
    assert "12 / 12 / 12" in text


def test_inspect_opens_task_files_and_names_those_that_would_be_refused(capsys, tmp_path):
    for n in range(6):
        rows = [{"text": f"{i} {n}", "label": f"c{i % 5}"} for i in range(5 if n == 2 else 60)]
        (tmp_path / f"s{n % 2}").mkdir(exist_ok=True)
        write_rows(tmp_path / f"s{n % 2}" / f"t{n}.jsonl", rows)
    check_message(refusal(inspect, str(tmp_path)), "t2.jsonl", "fix or remove the file")
    assert "6 task files, 2 strata" in capsys.readouterr().out


def test_inspect_names_the_first_file_if_none_can_be_read(capsys, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.jsonl").write_text("no JSON")
    assert "t.jsonl:1 is not a line of JSON" in refusal(inspect, str(tmp_path))


def test_env_shows_versions_machine_and_launcher_without_secrets(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("NCCL_DEBUG", "\x1b[31mINFO")
    monkeypatch.setenv("NCCL_API_KEY", "not-for-others")
    found = environment()
    versions = {"fmmeta", "python", "torch", "deepspeed", "transformers", "datasets", "accelerate", "peft"}
    assert versions | {"system", "CPUs", "memory", "GPUs", "CUDA", "NCCL", "launcher"} < {*found}
    assert any(how in found["fmmeta"] for how in ("checkout in ", "editable install in ", "wheel in "))
    print_environment(EnvConfig())
    text = capsys.readouterr().out
    for part in ("MASTER_ADDR=node7", "NCCL_DEBUG=\\u001b[31mINFO", "NCCL_API_KEY=***"):
        assert part in text
    for secret in ("hf_aaa", "not-for-others"):
        assert secret not in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("acme/model", {"pretrained_model_name_or_path": "acme/model"}),
        ("acme/model@v2", {"pretrained_model_name_or_path": "acme/model", "revision": "v2"}),
        ("acme/model@refs/pr/1", {"pretrained_model_name_or_path": "acme/model", "revision": "refs/pr/1"}),
        ("./a@b", {"pretrained_model_name_or_path": "./a@b"}),
        ("/a@b/c", {"pretrained_model_name_or_path": "/a@b/c"}),
    ],
)
def test_a_model_with_its_revision_becomes_arguments_of_transformers(source, expected):
    assert split_source(source) == expected
    assert is_path(source) == ("revision" not in expected and source != "acme/model")


def test_every_file_of_a_model_is_read_at_the_revision(monkeypatch):
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("fmmeta.learners.files.reachable", lambda name: True)
    monkeypatch.setattr(
        "transformers.utils.cached_file", lambda *given, **named: asked.append((*given, named["revision"]))
    )
    config = Config(model_name_or_path="acme/model", model_revision="v2")
    assert config.model_source == "acme/model@v2"
    assert Config(model_name_or_path="acme/model").model_source == "acme/model"
    cached_file(config.model_source, "config.json")
    assert asked == [("acme/model", "config.json", "v2")]


def test_a_revision_of_a_folder_is_refused(tmp_path):
    for model in ("tiny", str(tmp_path)):
        check_message(
            refusal(describe, Config(model_name_or_path=model, model_revision="v2")),
            "model_revision=v2 is for models of the hub",
            "leave it out",
        )


def test_the_folder_of_a_run_without_output_dir_is_its_name_or_that_of_an_unfinished_run(
    tmp_path, monkeypatch
):
    """Whatever the name of its data."""
    monkeypatch.chdir(tmp_path)
    assert str(known_folder(Config(run_name="mine"), {})) == "runs/mine"
    assert known_folder(Config(run_name="mine", output_dir=str(tmp_path)), {}) == tmp_path
    config = Config(dataset=["data[v2].csv"])
    (folder := new_folder(config)).mkdir(parents=True)
    monkeypatch.setattr("fmmeta.training.run_files.is_unfinished", lambda *_: True)
    assert known_folder(config, {}) == folder


def test_group_size_auto_tells_how_to_shard_if_a_zero_stage_has_nothing_to_shard():
    stage: Any = SimpleNamespace(zero_stage=2)
    check_message(unsharded(1, [1, 2, 4], stage), "ZeRO 2 shards inside a group", "give --group_size 2 or 4")
    assert unsharded(2, [1, 2, 4], stage) == unsharded(1, [1], stage) == ""
    assert unsharded(1, [1, 2], SimpleNamespace(zero_stage=0)) == ""  # type: ignore[arg-type]


def show(shown: progress.Progress, monkeypatch, done: int, now: float, total: int, first: int = 0) -> None:
    """Show that a step was done at a time."""
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown.line("outer step", done, total, "", first)


def shown_lines(capsys, monkeypatch, steps: list[tuple[int, float]], total: int, first: int = 0) -> list[str]:
    """Lines of steps with the times at which they were done; the last gives the time left alone."""
    shown = progress.Progress(True, every_s=0)
    for done, now in steps:
        show(shown, monkeypatch, done, now, total, first)
    return [line.removeprefix("outer step ") for line in capsys.readouterr().out.splitlines()]


def test_the_time_left_is_that_of_recent_steps(capsys, monkeypatch):
    """The first steps also compile and start loader processes: here the second and the fourth."""
    seconds = [0, 90, 2, 60, *[2] * 6]
    steps = [(done, float(sum(seconds[:done]))) for done in range(1, 11)]
    shown = shown_lines(capsys, monkeypatch, steps, 60)
    assert shown[:6] == ["1/60", "2/60", "3/60", "4/60", "5/60", "6/60  1:48 left"]
    assert shown[6:] == ["7/60  1:46 left", "8/60  1:44 left", "9/60  1:42 left", "10/60  1:40 left"]
    resumed = shown_lines(capsys, monkeypatch, [(4 + done, now) for done, now in steps[4:]], 60, first=8)
    assert resumed == ["9/60", "10/60", "11/60", "12/60", "13/60", "14/60  1:32 left"]
    assert shown_lines(capsys, monkeypatch, [(8, 0.0), (9, 1.0)], 9) == ["8/9", "9/9"]


def test_the_time_left_counts_every_step_of_a_long_run(capsys, monkeypatch):
    """Every fifth step also validates: 60 s instead of 10."""
    steps = [(done, 10.0 * done + 50 * (done // 5)) for done in range(1, 101)]
    assert shown_lines(capsys, monkeypatch, steps, 200)[-1] == "100/200  33:20 left"


def test_the_time_left_does_not_count_steps_of_other_groups(capsys, monkeypatch):
    """An elastic group that joins again receives the state of a later step."""
    steps = [(1, 10.0), (2, 20.0), *[(50 + n, 30.0 + 10 * n) for n in range(7)], (7, 99.0)]
    shown = shown_lines(capsys, monkeypatch, steps, 60)
    assert shown[-3:] == ["55/60  0:50 left", "56/60  0:40 left", "7/60"]
    assert not any("left" in line for line in shown[:-3])


def test_the_times_of_many_steps_take_bounded_memory(capsys, monkeypatch):
    monkeypatch.setattr(progress, "MARKS", 6)
    steps = [(done, 10.0 * done + max(0, done - 90)) for done in range(1, 101)]
    shown = progress.Progress(True, every_s=0)
    for done, now in steps:
        show(shown, monkeypatch, done, now, 200)
        assert len(shown.marks["outer step"]) <= 6
    assert capsys.readouterr().out.splitlines()[-1] == "outer step 100/200  18:20 left"


def test_nearest_prefers_longer_names_with_the_same_start():
    assert nearest("adam", ["nadam", "adamw", "radam"]) == "; did you mean adamw?"
    assert nearest("x", ["adamw"]) == ""


def test_inspect_names_unread_columns_of_task_files_once_and_refuses_nothing(capsys, tmp_path):
    (tmp_path / "s").mkdir()
    for task in range(5):
        rows = [{"input": f"{i}", "output": f"{i * task}", "source": "web"} for i in range(4)]
        write_rows(tmp_path / "s" / f"t{task}.jsonl", rows)
    inspect(str(tmp_path), "--task_type", "causal_lm", "--k_shot", "1", "--num_query", "1")
    shown = capsys.readouterr().out
    assert shown.count("texts in source are not read") == 1
    assert "Training would accept this" in shown
