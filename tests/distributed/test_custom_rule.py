"""A rule and optimizers outside the package, chosen by `module:spec`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.helpers import write_rows
from tests.support.launch import ROOT, environment
from tests.support.matrix import ALSO, Case, ParityFixture, tolerance

EXAMPLES = ROOT / "examples"
CASE = Case((1, 1), 2, "custom_rule:spec", "one", "default", "bert", "fp32", "sgd", "learned", "none")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES)  # the oracle, too, finds the module in the current folder
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield ParityFixture(tmp_path, EXAMPLES)
    sys.modules.pop("custom_rule", None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((1, 1), id="1x1"),
        pytest.param((2, 1), id="2x1", marks=pytest.mark.slow),
        pytest.param((2, 2), id="2x2", marks=pytest.mark.slow),
    ],
)
def test_the_example_ends_where_its_reference_ends(bench, layout):
    case = replace(CASE, layout=layout)
    theta, _ = bench.run([case])[case.id]
    assert bench.error(case, theta) < tolerance(case)
    assert bench.error(replace(case, algorithm="reptile"), theta) > 0.01  # the radius was reached


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout", [pytest.param((2, 1), id="2x1"), pytest.param((1, 2), id="1x2", marks=pytest.mark.slow)]
)
def test_optimizers_of_the_user_end_where_the_oracle_ends(layout, tmp_path, monkeypatch):
    """An outer one and an inner one; the optimizers that they replace end elsewhere."""
    monkeypatch.setitem(ALSO, "own", {"inner_optimizer": "tests.support.inner_optimizer:spec"})
    bench, plain = ParityFixture(tmp_path, ROOT), replace(CASE, layout=layout, algorithm="fomaml")
    outer = replace(plain, outer="tests.support.outer_optimizer:spec")
    inner = replace(plain, also="own")
    ended = bench.run([outer, inner])
    for case, away in ((outer, 0.01), (inner, 0.001)):
        theta, _ = ended[case.id]
        assert bench.error(case, theta) < tolerance(plain)
        assert bench.error(plain, theta) > away


def fmmeta(command: str, flags: str, cwd: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "from fmmeta.cli import main; main()", command, *flags.split()],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_the_example_is_chosen_by_a_flag_and_not_imported_from_a_model(tmp_path):
    """Code that a model folder names is not imported when the model is evaluated and adapted."""
    assert len((EXAMPLES / "custom_rule.py").read_text().splitlines()) <= 40
    short = "--outer_steps 2 --inner_steps 1 --meta_batch_size 2 --eval_episodes 2 --num_workers 0"
    fmmeta("train", f"--algorithm custom_rule:spec {short} --output_dir {tmp_path / 'run'}", EXAMPLES)
    model = tmp_path / "run/model"
    assert json.loads((model / "fmmeta.json").read_text())["algorithm"] == "custom_rule:spec"
    (tmp_path / "custom_rule.py").write_text("raise SystemExit('imported')\n")
    rows = [{"text": text, "label": text[0]} for text in ("aa", "ab", "bb", "ba")]
    support = write_rows(tmp_path / "support.jsonl", rows)
    fmmeta("evaluate", f"--model_name_or_path {model} --episodes 2", tmp_path)
    fmmeta(
        "adapt",
        f"--model_name_or_path {model} --support {support} --output_dir {tmp_path / 'adapted'}",
        tmp_path,
    )
