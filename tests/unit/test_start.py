"""Starts and resumed starts of a run: what changes theta beside the flags is compared (precision, the
DeepSpeed file, the code of transforms); a start that is refused leaves neither folders nor a lock.
"""

import importlib
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fmmeta.common.progress import LOGGER
from fmmeta.config.settings import Config
from fmmeta.evaluation.results import check_output
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World
from fmmeta.train import MetaTrainer, train
from fmmeta.training import build
from fmmeta.training.build import read_inputs, settings_of
from fmmeta.training.callbacks import Callback
from fmmeta.training.run_files import lock_folder, open_run, write_run
from tests.support.checkpoints import WHOLE, saved
from tests.support.fake_runs import start_of
from tests.support.helpers import one_rank
from tests.support.messages import check_message, check_text, refusal
from tests.support.models import write_classes
from tests.support.short_runs import QUICK

TRANSFORM = """
from dataclasses import replace

def upper(example, rng):
    return replace(example, text=example.text.{how}())
"""


def edit(file: Path, change: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


DEEPSPEED = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}
SHORT = {**QUICK, "meta_batch_size": 1, "outer_steps": 1}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run that has made one outer step."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "ds.json").write_text(json.dumps(DEEPSPEED))
    train(Config(**SHORT, output_dir=str(folder / "run"), deepspeed=str(folder / "ds.json")))
    edit(folder / "run" / "run.json", {"finished": False})
    return folder


@pytest.fixture
def ds(begun, tmp_path):
    """The DeepSpeed file beside a copy of that run."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    return tmp_path / "ds.json"


@pytest.fixture
def config(tmp_path, ds):
    fixed = {**SHORT, "output_dir": str(tmp_path / "run"), "deepspeed": str(ds)}
    return lambda **settings: Config(**{**fixed, **settings})


ACCEPTED = "accepted from here on: "
TWO_STEPS = {"outer_steps": 2}


@pytest.mark.parametrize(
    ("file", "settings", "parts"),
    [
        ({"bf16": {"enabled": True}}, {}, ("precision: fp32 -> bf16", "use the values before ->, another")),
        ({}, {"float32_matmul_precision": "high"}, ("(float32_matmul_precision: highest -> high);",)),
        (
            {"gradient_predivide_factor": 2.0},
            {},
            ("deepspeed_values: {} -> {", "'gradient_predivide_factor'"),
        ),
    ],
)
def test_settings_that_change_theta_are_refused_on_resume(config, ds, file, settings, parts):
    edit(ds, file)
    check_message(refusal(train, config(**settings)), *parts)


@pytest.mark.parametrize(
    ("file", "settings", "accepted", "parts"),
    [
        ({"bf16": {"enabled": True}}, {}, ["precision"], (f"{ACCEPTED}precision: fp32 -> bf16",)),
        ({"bf16": {"enabled": False}}, {"bf16": True}, [], ("do not change theta: bf16: None -> True",)),
        # moments start again; rates that are learned from here on start at inner_lr
        ({}, {"outer_optimizer": "rmsprop", **TWO_STEPS}, ["outer_optimizer", "outer_steps"], (ACCEPTED,)),
        ({}, {"outer_optimizer": "nadam", **TWO_STEPS}, ["outer_optimizer", "outer_steps"], (ACCEPTED,)),
        ({}, {"inner_lr_learned": "layer", **TWO_STEPS}, ["inner_lr_learned", "outer_steps"], (ACCEPTED,)),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}},
            {},
            [],
            ("do not change theta: ", "deepspeed_layout: ", "'stage': 1", "'stage': 2"),
        ),
    ],
)
def test_other_settings_are_named_on_resume(config, ds, capsys, file, settings, accepted, parts):
    """accepted: those that change theta."""
    edit(ds, file)
    result = train(config(**settings, accept_changed_settings=accepted))
    assert result.outer_steps == settings.get("outer_steps", 1)
    check_text(capsys.readouterr().out, *parts)


@pytest.fixture
def has_bf16(monkeypatch):
    """Calling it lets bf16 be the default, as on GPUs."""
    return lambda: monkeypatch.setattr(build, "chosen_bf16", lambda config, *_: config.bf16 is not False)


def settings_of_run(folder: str | Path) -> dict[str, Any]:
    return json.loads(Path(folder, "run.json").read_text())["settings"]


@pytest.mark.parametrize("recorded", ["bf16", "fp32"])
def test_a_resume_keeps_the_precision_unless_another_is_given(config, tmp_path, has_bf16, recorded):
    """On hardware with another default too; from the checkpoint of another folder as well."""
    in_bf16, folder = recorded == "bf16", tmp_path / recorded
    train(config(bf16=in_bf16, output_dir=str(folder)))
    if not in_bf16:
        has_bf16()
    named = {"output_dir": str(tmp_path / "new"), "resume_from_checkpoint": str(folder / "checkpoint-1")}
    for more in ({"output_dir": str(folder)}, named):
        edit(folder / "run.json", {"finished": False})
        settings = settings_of_run(train(config(**more)).output_dir)
        assert (settings["bf16"], settings["precision"]) == (None, recorded)
    edit(folder / "run.json", {"finished": False})
    message = refusal(train, config(bf16=not in_bf16, output_dir=str(folder)))
    assert f"precision: {recorded} -> {'fp32' if in_bf16 else 'bf16'}" in message


def test_a_run_without_output_dir_is_found_on_other_hardware(config, tmp_path, monkeypatch, has_bf16):
    monkeypatch.chdir(tmp_path)
    first = train(config(output_dir=None)).output_dir
    edit(Path(first) / "run.json", {"finished": False})
    has_bf16()
    assert train(config(output_dir=None)).output_dir == first
    other = train(config(output_dir=None)).output_dir  # the first one is finished
    assert other != first
    assert settings_of_run(other)["precision"] == "bf16"


def test_matrix_products_have_their_precision_in_the_run_alone(config):
    class Seen(Callback):
        def on_train_begin(self, run):
            self.precision = torch.get_float32_matmul_precision()

    given = config(float32_matmul_precision="high", accept_changed_settings=["float32_matmul_precision"])
    MetaTrainer(given, callbacks=[seen := Seen()]).train()
    assert (seen.precision, torch.get_float32_matmul_precision()) == ("high", "highest")


def recorded_of(config: Config) -> dict[str, Any]:
    """The settings that a run would record."""
    world = World(Launch(), torch.device("cpu"))
    return read_inputs(config, world, lambda text: None).settings(config)


def test_changed_code_of_a_transform_changes_the_fingerprint(tmp_path, monkeypatch):
    """Under the same name; a file that is only imported afterwards stands for another process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for module, how in (("first", "upper"), ("first", "upper"), ("second", "lower")):
        (tmp_path / f"{module}.py").write_text(TRANSFORM.format(how=how))
        importlib.invalidate_caches()
        found.append(recorded_of(Config(example_transforms=[f"{module}:upper"]))["transforms_fingerprint"])
    assert found[0] == found[1] != found[2]


def test_changed_class_weights_in_the_same_file_change_the_settings(tmp_path):
    file, found = tmp_path / "weights.json", []
    given = {"k_shot": 2, "num_query": 2, "dataset": [str(write_classes(tmp_path / "classes.jsonl"))]}
    for content in ('{"c1": 2}', '{"c1": 2.0, "c2": 1.5}', ""):
        file.write_text(content)
        settings = recorded_of(Config(**given, class_weights=str(file) if content else None))
        found.append(settings["class_weights_fingerprint"])
    assert found[0] != found[1]
    assert found[2] == ""


@pytest.mark.parametrize(
    ("device", "settings", "deterministic", "promise"),
    [
        ("cpu", {}, False, "theta is the same bit for bit"),
        ("cuda", {}, False, "the same to rounding"),
        ("cuda", {"task_schedule": "dynamic"}, False, "task_schedule=dynamic"),
        ("cuda", {}, True, "theta is the same bit for bit"),
    ],
)
def test_bits_are_promised_on_cpus_and_with_deterministic_algorithms(
    tmp_path, monkeypatch, device, settings, deterministic, promise
):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    write_run(tmp_path, settings_of(Config(**settings), "f"), "", device)
    assert promise in json.loads((tmp_path / "run.json").read_text())["promise"]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{"group_size": "2"}, {"resume_from_checkpoint": "none"}],
    ids=["after the folder is open", "while it is opened"],
)
def test_a_refused_start_leaves_no_folder_and_no_lock(tmp_path, settings, there):
    run = tmp_path / "runs" / "a"
    if there:
        run.mkdir(parents=True)
    check_output(run / "new" / "results.json")  # of evaluate and tune
    refusal(train, Config(output_dir=str(run), **settings))
    assert list(tmp_path.rglob("*")) == ([run.parent, run] if there else [])


def test_runs_that_begin_in_the_same_second_have_different_folders(tmp_path, monkeypatch):
    """Jobs of an array: none waits for the lock of another one. Each is found again when it resumes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits for a lock"))
    monkeypatch.setattr("fmmeta.training.run_files.git_commit", lambda: None)  # may sleep in subprocess
    settings, world = [settings_of(Config(seed=seed), "f") for seed in range(3)], one_rank().world
    starts = [open_run(Config(seed=seed), settings[seed], world) for seed in range(3)]
    names = [f"20260101-000000{number}-fomaml-letters" for number in ("", "-2", "-3")]
    assert [str(start.folder) for start in starts] == [f"runs/{name}" for name in names]
    write_run(starts[1].folder, settings[1], "", finished=False)
    saved(starts[1].folder, WHOLE, 4)
    for start in starts:
        start.lock.close()
    assert [path.name for path in Path("runs").iterdir()] == [names[1]]
    assert start_of(Config(seed=1), settings[1]).checkpoint == starts[1].folder / "checkpoint-4"


def test_a_refused_elastic_group_removes_only_its_lock(tmp_path):
    """The lock is of the group that writes; another one's is left alone."""
    run = tmp_path / "run"
    config, world = Config(output_dir=str(run), elastic=True), one_rank().world
    for left in ([], [".lock"]):
        made = open_run(config, settings_of(config, "f"), world)
        writer = lock_folder(run) if left else None
        made.lock.close()
        assert [file.name for file in run.glob("*")] == left
    writer.close()


def test_a_start_that_waits_for_a_removed_folder_creates_it(tmp_path, monkeypatch):
    folder, taken, waits = tmp_path / "run", [], threading.Event()
    monkeypatch.setattr(LOGGER, "handle", lambda record: waits.set())  # that it waits
    refused = lock_folder(folder)
    thread = threading.Thread(target=lambda: taken.append(lock_folder(folder, 20)))
    thread.start()
    assert waits.wait(20)
    refused.close()
    thread.join()
    assert (folder / ".lock").read_text().startswith("process ")
    assert refusal(lock_folder, folder, 0.1).startswith(f"output_dir={folder} is in use by process ")
    (folder / "run.json").write_text("{}")
    taken[0].close()
    assert [file.name for file in folder.iterdir()] == ["run.json"]
