"""`fmmeta inspect` and `fmmeta env` print what they promise; names and revisions of hub models; messages that
a new user meets first.
"""

from unittest.mock import Mock

import pytest

from fmmeta import inspection
from fmmeta.cli import parse
from fmmeta.common import progress
from fmmeta.config.settings import Config
from fmmeta.doctor import EnvConfig, environment, print_environment
from fmmeta.learners.files import cached_file, is_path, split_source
from fmmeta.learners.load import describe
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.memory import unsharded
from fmmeta.training.run_files import known_folder, new_folder
from tests.support.helpers import write_rows
from tests.support.messages import check_message, check_text, refusal


def inspect(*words: str) -> None:
    inspection.run(parse(list(words), "inspect"))


def assert_shown(capsys, *parts: str) -> str:
    """The printed text holds these parts; returns it."""
    text = capsys.readouterr().out
    check_text(text, *parts)
    return text


def test_inspect_shows_splits_lengths_rows_and_an_episode(capsys):
    inspect("letters")
    text = assert_shown(
        capsys,
        "25200 rows, 7 strata; tasks: 140 train, 28 valid, 42 test",
        "episodes of 5 classes: 5 support and 5 query rows per class, so 10 rows at least",
        "20 / 20 / 20",
        "lengths in tokens: least 9, median 11",
        "support: 25 rows, 5 of them",
        "<bos>|",
    )
    assert text.count("'first-train-0'") == 1
    assert text.endswith("Training would accept this.\n")


def test_the_first_episode_is_drawn_with_the_weights_of_the_mixture(capsys, tmp_path):
    files = []
    for name in ("rare", "common"):
        rows = [{"text": f"{name} {i}", "label": f"{name} {i % 20}"} for i in range(240)]
        files.append(str(write_rows(tmp_path / f"{name}.jsonl", rows)))
    for weights, name in ((["1e-9", "1"], "common"), (["1", "1e-9"], "rare")):
        inspect(*files, "--mix_weights", *weights, "--num_query", "5")
        assert_shown(capsys, f"stratum '{name}")


def test_inspect_shows_the_loss_mask_and_truncated_answers(capsys, tmp_path):
    rows = [
        {"task": f"t{n}", "input": f"{i} and {n}", "output": "9" * (200 if i == 0 else 1)}
        for n in range(5)
        for i in range(12)
    ]
    inspect(str(write_rows(tmp_path / "pairs.jsonl", rows)), "--task_type", "causal_lm")
    assert_shown(
        capsys,
        "[tokens] in brackets count in the loss",
        "|:|[ ][9][<eos>]",
        "5 texts of 60 rows are truncated; raise --max_length",
        "5 answers of these lose their end",
    )


def test_inspect_names_all_that_training_would_refuse(capsys, tmp_path):
    rows = [
        {"task": f"t{n}", "input": f"{i}", "output": "x"} for n in range(9) for i in range(2 if n < 2 else 12)
    ]
    message = refusal(inspect, str(write_rows(tmp_path / "few.jsonl", rows)), "--task_type", "causal_lm")
    check_message(message, "k_shot=5 and num_query=5 need 10 rows", "has 2", "lower them")
    text = assert_shown(capsys, "task 't0' has 2", "task 't1' has 2")
    assert "n_way=1" not in text
    assert text.endswith("Training would be refused:\n")


def test_inspect_shows_the_data_also_if_a_split_would_be_empty(capsys, tmp_path):
    rows = [{"text": f"{n} {i}", "label": f"c{n}"} for n in range(4) for i in range(12)]
    message = refusal(inspect, str(write_rows(tmp_path / "few.jsonl", rows)), "--n_way", "20")
    check_message(message, "n_way=20 is above the 4 classes", "lower n_way")
    assert_shown(capsys, "48 rows, 1 stratum; classes", "12 / 12 / 12")


def test_inspect_opens_task_files_and_names_those_that_would_be_refused(capsys, tmp_path):
    for n in range(6):
        rows = [{"text": f"{i} {n}", "label": f"c{i % 5}"} for i in range(5 if n == 2 else 60)]
        (tmp_path / f"s{n % 2}").mkdir(exist_ok=True)
        write_rows(tmp_path / f"s{n % 2}" / f"t{n}.jsonl", rows)
    check_message(refusal(inspect, str(tmp_path)), "t2.jsonl", "fix or remove the file")
    assert_shown(capsys, "6 task files, 2 strata")
    for file in tmp_path.rglob("*.jsonl"):
        file.write_text("no JSON")
    assert ".jsonl:1 is not a line of JSON" in refusal(inspect, str(tmp_path))


def test_env_shows_versions_machine_and_launcher_without_secrets(capsys, monkeypatch):
    given = {"MASTER_ADDR": "node7", "NCCL_DEBUG": "\x1b[31mINFO"}
    for name, value in {**given, "HF_TOKEN": "hf_" + "a" * 30, "NCCL_API_KEY": "not-for-others"}.items():
        monkeypatch.setenv(name, value)
    found = environment()
    versions = {"fmmeta", "python", "torch", "deepspeed", "transformers", "datasets", "accelerate", "peft"}
    assert versions | {"system", "CPUs", "memory", "GPUs", "CUDA", "NCCL", "launcher"} < {*found}
    assert any(how in found["fmmeta"] for how in ("checkout in ", "editable install in ", "wheel in "))
    print_environment(EnvConfig())
    text = assert_shown(capsys, "MASTER_ADDR=node7", "NCCL_DEBUG=\\u001b[31mINFO", "NCCL_API_KEY=***")
    assert not [secret for secret in ("hf_aaa", "not-for-others") if secret in text]


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
    read = Mock()
    monkeypatch.setattr("fmmeta.learners.files.reachable", lambda name: True)
    monkeypatch.setattr("transformers.utils.cached_file", read)
    source = Config(model_name_or_path="acme/model", model_revision="v2").model_source
    assert source == "acme/model@v2"
    cached_file(source, "config.json")
    assert (read.call_args.args, read.call_args.kwargs["revision"]) == (("acme/model", "config.json"), "v2")


def test_a_revision_of_a_folder_is_refused(tmp_path):
    parts = ("model_revision=v2 is for models of the hub", "leave it out")
    for model in ("tiny", str(tmp_path)):
        config = Config(model_name_or_path=model, model_revision="v2")
        check_message(refusal(describe, config), *parts)


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
    stage = DeepSpeedSettings(2, False, False)
    check_message(unsharded(1, [1, 2, 4], stage), "ZeRO 2 shards inside a group", "give --group_size 2 or 4")
    assert unsharded(2, [1, 2, 4], stage) == unsharded(1, [1], stage) == ""
    assert unsharded(1, [1, 2], DeepSpeedSettings(0, False, False)) == ""


STEPS = range(1, 101)
SLOW = [
    0.0,
    90,
    92,
    152,
    154,
    156,
    158,
    160,
    162,
    164,
]  # the second and the fourth step also compile and start
LEFT = ["6/60  1:48 left", "7/60  1:46 left", "8/60  1:44 left", "9/60  1:42 left", "10/60  1:40 left"]


@pytest.mark.parametrize(
    ("times", "total", "first", "marks", "shown"),
    [
        ([*enumerate(SLOW, 1)], 60, 0, 1000, ["1/60", "2/60", "3/60", "4/60", "5/60", *LEFT]),
        # resumed after step 8
        ([*enumerate(SLOW, 5)][4:], 60, 8, 1000, [*(f"{n}/60" for n in range(9, 14)), "14/60  1:32 left"]),
        ([(8, 0.0), (9, 1.0)], 9, 0, 1000, ["8/9", "9/9"]),
        # every step of a long run counts, though every fifth also validates: 60 s instead of 10
        ([(n, 10.0 * n + 50 * (n // 5)) for n in STEPS], 200, 0, 1000, ["100/200  33:20 left"]),
        # an elastic group that joins again receives the state of a later step, of other groups
        (
            [(1, 10.0), (2, 20.0), *[(50 + n, 30.0 + 10 * n) for n in range(7)], (7, 99.0)],
            60,
            0,
            1000,
            [*(f"{n}/60" for n in (1, 2, *range(50, 55))), "55/60  0:50 left", "56/60  0:40 left", "7/60"],
        ),
        # bounded memory
        ([(n, 10.0 * n + max(0, n - 90)) for n in STEPS], 200, 0, 6, ["100/200  18:20 left"]),
    ],
)
def test_the_time_left_is_that_of_recent_steps(capsys, monkeypatch, times, total, first, marks, shown):
    """times: of steps, when they were done. marks: how many times are stored. shown: the last lines."""
    monkeypatch.setattr(progress, "MARKS", marks)
    lines = progress.Progress(True, every_s=0)
    for done, now in times:
        monkeypatch.setattr(progress.time, "monotonic", lambda now=now: now)
        lines.line("outer step", done, total, "", first)
    assert len(lines.marks["outer step"]) <= marks
    printed = capsys.readouterr().out.replace("outer step ", "").splitlines()
    assert printed[-len(shown) :] == shown


def test_inspect_names_unread_columns_of_task_files_once_and_refuses_nothing(capsys, tmp_path):
    (tmp_path / "s").mkdir()
    for task in range(5):
        rows = [{"input": f"{i}", "output": f"{i * task}", "source": "web"} for i in range(4)]
        write_rows(tmp_path / "s" / f"t{task}.jsonl", rows)
    inspect(str(tmp_path), "--task_type", "causal_lm", "--k_shot", "1", "--num_query", "1")
    assert assert_shown(capsys, "Training would accept this").count("texts in source are not read") == 1
