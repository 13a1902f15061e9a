"""A loss outside the package, chosen by `--task_type module:spec`: every rule and layout learns by it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.launch import ROOT, environment
from tests.support.matrix import ALSO, Case, ParityFixture, tolerance

CLASSES = {"task_type": "examples.own_loss:classes"}
ANSWERS = {"task_type": "examples.own_loss:answers"}
OWN = {
    "classes": CLASSES,
    "classes-lora": {**CLASSES, "lora_r": 4},
    "classes-pooled": {**CLASSES, "tasks_per_pass": "2"},
    "answers": ANSWERS,
    "answers-lora": {**ANSWERS, "lora_r": 4},
    "answers-lora-tasks": {**ANSWERS, "lora_r": 4, "tasks_per_pass": "2"},
    "answers-packing": {**ANSWERS, "packing": True},
}
ROWS = [  # layout, stage, algorithm, model, head, also, pipeline stages (-T: tensor ranks)
    ((1, 1), "plain", "fomaml", "bert", "learned", "classes", 1),
    ((1, 1), "plain", "maml-adapters", "llama", "zero", "answers-lora", 1),
    ((2, 1), "plain", "fomaml", "llama", "zero", "answers-lora-tasks", 1),
    ((1, 1), 2, "anil", "bert", "learned", "classes", 1),
    ((1, 1), 3, "protonet", "bert", "prototype", "classes", 1),
    ((2, 1), "plain", "anil", "bert", "learned", "classes-pooled", 1),
    ((1, 2), 1, "reptile", "bert", "prototype", "classes-lora", 1),
    ((1, 2), 3, "fomaml", "llama", "zero", "answers-packing", 1),
    ((1, 2), 0, "fomaml", "llama3", "zero", "answers", 2),
    ((1, 2), 0, "anil", "bert", "learned", "classes", 2),
    ((1, 2), 0, "fomaml", "llama3", "zero", "answers", -2),
]
CASES = [
    Case.of_row(layout, stage, algorithm, model, "fp32", "sgd", head, also, spread)
    for layout, stage, algorithm, model, head, also, spread in ROWS
]


@pytest.fixture(scope="module", autouse=True)
def own():
    with pytest.MonkeyPatch.context() as patch:
        for name, settings in OWN.items():
            patch.setitem(ALSO, name, settings)
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory, own):
    return ParityFixture(tmp_path_factory.mktemp("own"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_ends_where_the_oracle_ends_with_the_same_loss(case, bench):
    theta, _ = bench.outcome(case, CASES)
    assert bench.error(case, theta) < tolerance(case)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.id)
def test_the_loss_matters(case, bench):
    theta, _ = bench.outcome(case, CASES)
    assert bench.error(replace(case, also="nothing"), theta) > 0.01


def test_the_example_trains_and_evaluate_wants_the_loss_by_name(tmp_path):
    example = ROOT / "examples" / "own_loss.py"
    assert len(example.read_text().splitlines()) <= 40
    where = {
        "cwd": example.parent,
        "env": environment(),
        "text": True,
        "capture_output": True,
        "timeout": 200,
    }

    def fmmeta(*words):
        return subprocess.run([sys.executable, "-m", "fmmeta", *words], **where)

    short = ["--outer_steps=2", "--eval_episodes=2", "--num_workers=0", f"--output_dir={tmp_path / 'run'}"]
    ran = fmmeta("train", "--task_type=own_loss:classes", *short)
    assert ran.returncode == 0, ran.stderr
    model = tmp_path / "run" / "model"
    stored = json.loads((model / "fmmeta.json").read_text())
    assert (stored["task_type"], stored["own_task_type"]) == ("classification", "own_loss:classes")
    assert "loss (units of loss)" in (model / "README.md").read_text()
    few = [
        f"--model_name_or_path={model}",
        "--episodes=2",
        "--num_query=1",
        f"--output={tmp_path / 'r.json'}",
    ]
    refused = fmmeta("evaluate", *few)
    assert refused.returncode == 2
    assert "give --task_type own_loss:classes to use yours, or classification" in refused.stderr
    losses = []
    for kind in ("own_loss:classes", "classification"):
        ran = fmmeta("evaluate", *few, f"--task_type={kind}")
        assert ran.returncode == 0, ran.stderr
        losses.append(json.loads((tmp_path / "r.json").read_text())["loss"])
    assert losses[0] < 0.9 * losses[1]  # (1 - p)^2 is well below 1 for five classes
