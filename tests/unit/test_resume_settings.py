"""What changes theta beside the flags is compared on resume: precision, the DeepSpeed file, the code of
transforms.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fmmeta.config.settings import Config
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World
from fmmeta.train import MetaTrainer, train
from fmmeta.training import build
from fmmeta.training.build import read_inputs, settings_of
from fmmeta.training.callbacks import Callback
from fmmeta.training.run_files import write_run
from tests.support.messages import check_message, refusal
from tests.support.models import write_classes

TRANSFORM = """
from dataclasses import replace

def upper(example, rng):
    return replace(example, text=example.text.{how}())
"""


def edit(file: Path, change: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


@pytest.fixture
def ds(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}))
    return file


@pytest.fixture
def config(tmp_path, ds):
    """Of a run that has made one outer step of two."""

    def make(**settings: Any) -> Config:
        return Config(
            output_dir=str(tmp_path / "run"),
            inner_steps=1,
            meta_batch_size=1,
            num_workers="0",
            eval_episodes=0,
            deepspeed=str(ds),
            **{"outer_steps": 1, **settings},
        )

    train(make())
    edit(tmp_path / "run" / "run.json", {"finished": False})
    return make


def test_an_edited_file_that_changes_the_precision_is_refused(config, ds, tmp_path, capsys):
    """So is another precision of matrix products; bf16 by the flag or by the file is the same precision."""
    message = refusal(train, config(float32_matmul_precision="high"))
    assert "(float32_matmul_precision: highest -> high);" in message
    edit(ds, {"bf16": {"enabled": True}})
    message = refusal(train, config())
    check_message(message, "precision: fp32 -> bf16", "use the values before ->, another output_dir")
    train(config(accept_changed_settings=["precision"]))
    assert "accepted from here on: precision: fp32 -> " in capsys.readouterr().out
    edit(tmp_path / "run" / "run.json", {"finished": False})
    edit(ds, {"bf16": {"enabled": "auto"}})  # the same precision, by the flag
    train(config(bf16=True))
    assert "do not change theta: bf16: None -> True\n" in capsys.readouterr().out


def has_bf16(monkeypatch):
    """Let bf16 be the default, as on GPUs."""
    monkeypatch.setattr(build, "chosen_bf16", lambda config, *_: config.bf16 is not False)


@pytest.mark.parametrize("recorded", ["bf16", "fp32"])
def test_a_resume_keeps_the_precision_unless_another_is_given(config, tmp_path, monkeypatch, recorded):
    """On hardware with another default too; from the checkpoint of another folder as well."""
    in_bf16, folder = recorded == "bf16", tmp_path / recorded
    train(replace(config(bf16=in_bf16), output_dir=str(folder)))
    if not in_bf16:
        has_bf16(monkeypatch)
    named = {"output_dir": str(tmp_path / "new"), "resume_from_checkpoint": str(folder / "checkpoint-1")}
    for more in ({"output_dir": str(folder)}, named):
        edit(folder / "run.json", {"finished": False})
        result = train(replace(config(), **more))
        settings = json.loads((Path(result.output_dir) / "run.json").read_text())["settings"]
        assert (settings["bf16"], settings["precision"]) == (None, recorded)
    edit(folder / "run.json", {"finished": False})
    message = refusal(train, replace(config(bf16=not in_bf16), output_dir=str(folder)))
    assert f"precision: {recorded} -> {'fp32' if in_bf16 else 'bf16'}" in message


def test_a_run_without_output_dir_is_found_on_other_hardware(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = train(replace(config(), output_dir=None))
    edit(Path(first.output_dir) / "run.json", {"finished": False})
    has_bf16(monkeypatch)
    assert train(replace(config(), output_dir=None)).output_dir == first.output_dir
    other = train(replace(config(), output_dir=None))  # the first one is finished
    assert other.output_dir != first.output_dir
    settings = json.loads((Path(other.output_dir) / "run.json").read_text())["settings"]
    assert settings["precision"] == "bf16"


def test_matrix_products_have_their_precision_in_the_run_alone(config):
    found = []

    class Seen(Callback):
        def on_train_begin(self, run):
            found.append(torch.get_float32_matmul_precision())

    given = config(float32_matmul_precision="high", accept_changed_settings=["float32_matmul_precision"])
    MetaTrainer(given, callbacks=[Seen()]).train()
    assert [*found, torch.get_float32_matmul_precision()] == ["high", "highest"]


@pytest.mark.parametrize(
    "changes",
    [{"outer_optimizer": "rmsprop"}, {"outer_optimizer": "nadam"}, {"inner_lr_learned": "layer"}],
)
def test_other_optimizers_and_learned_rates_are_accepted(config, changes, capsys):
    """Moments start again; rates that are learned from here on start at inner_lr."""
    more = {"outer_steps": 2, **changes}
    assert train(config(**more, accept_changed_settings=list(more))).outer_steps == 2
    assert "accepted from here on: " in capsys.readouterr().out


def test_an_edited_layout_is_named_and_other_values_are_refused(config, ds, tmp_path, capsys):
    edit(ds, {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}})
    train(config())
    output = capsys.readouterr().out
    for part in ("do not change theta: deepspeed_layout: ", "'stage': 1", "'stage': 2"):
        assert part in output
    edit(tmp_path / "run" / "run.json", {"finished": False})
    edit(ds, {"gradient_predivide_factor": 2.0})
    check_message(refusal(train, config()), "deepspeed_values: {} -> {", "'gradient_predivide_factor'")


def test_changed_code_of_a_transform_changes_the_fingerprint(tmp_path, monkeypatch):
    """Under the same name; a file that is only imported afterwards stands for another process."""
    monkeypatch.chdir(tmp_path)
    found = []
    for module, how in (("first", "upper"), ("first", "upper"), ("second", "lower")):
        (tmp_path / f"{module}.py").write_text(TRANSFORM.format(how=how))
        world = World(Launch(), torch.device("cpu"))
        monkeypatch.syspath_prepend(str(tmp_path))
        config = Config(example_transforms=[f"{module}:upper"])
        made = read_inputs(config, world, lambda text: None)
        found.append(made.settings(config)["transforms_fingerprint"])
    assert found[0] == found[1] != found[2]


def test_changed_class_weights_in_the_same_file_change_the_settings(tmp_path):
    file, found = tmp_path / "weights.json", []
    data = write_classes(tmp_path / "classes.jsonl")
    for content in ('{"c1": 2}', '{"c1": 2.0, "c2": 1.5}', None):
        file.write_text(content or "")
        given = {"k_shot": 2, "num_query": 2, "class_weights": str(file) if content else None}
        config = Config(dataset=[str(data)], **given)
        made = read_inputs(config, World(Launch(), torch.device("cpu")), lambda text: None)
        found.append(made.settings(config)["class_weights_fingerprint"])
    assert found[0] != found[1]
    assert found[2] == ""


def test_bits_are_promised_on_cpus_and_with_deterministic_algorithms(tmp_path):
    def promise(device_type, **given):
        write_run(tmp_path, settings_of(Config(**given), "f"), "", device_type)
        return json.loads((tmp_path / "run.json").read_text())["promise"]

    assert promise("cpu").startswith("theta is the same bit for bit")
    assert "the same to rounding" in promise("cuda")
    assert promise("cuda", task_schedule="dynamic").startswith("task_schedule=dynamic")
    torch.use_deterministic_algorithms(True)
    try:
        assert promise("cuda").startswith("theta is the same bit for bit")
    finally:
        torch.use_deterministic_algorithms(False)
