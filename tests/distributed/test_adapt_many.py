"""`fmmeta adapt --support DIRECTORY` on two ranks: the adapters of one process, and under ZeRO 3 the base
is gathered once for all tasks of a pass.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.helpers import write_rows
from tests.support.launch import run_ranks
from tests.support.models import WORDS, save_bert

COUNT = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model, and a directory of tasks of different sizes, one of them without examples."""
    folder, rng = tmp_path_factory.mktemp("adapt_many"), random.Random(0)
    save_bert(folder / "bert")
    (folder / "tasks").mkdir()
    for number in range(COUNT):
        rows = [
            {"text": f"{word} {' '.join(rng.sample(WORDS, 1 + number % 3))}", "label": word}
            for word in rng.sample(WORDS, 2 + number % 2)
            for _ in range(3)
        ]
        write_rows(folder / "tasks" / f"task-{number}.jsonl", rows)
    (folder / "tasks" / "empty.jsonl").write_text("")
    run_ranks(["-m", "fmmeta", "adapt", *flags(folder, "plain")], 1, cwd=folder)
    return folder


def flags(folder: Path, output: str) -> list[str]:
    values = {
        "model_name_or_path": folder / "bert",
        "support": folder / "tasks",
        "output_dir": folder / output,
        "lora_r": 4,
        "inner_steps": 3,
        "inner_lr": 0.5,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def compare(folder: Path, output: str) -> None:
    """Every adapter equals that of one process to 1e-5."""
    names = [f"task-{number}" for number in range(COUNT)]
    assert sorted(path.name for path in (folder / output).iterdir()) == names
    for name in names:
        one, other = (
            load_file(folder / each / name / "adapter_model.safetensors") for each in ("plain", output)
        )
        assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-5


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(["--deepspeed=zero3"], id="zero3"),
        pytest.param(["--deepspeed=zero2", "--group_size=2"], id="data", marks=pytest.mark.slow),
        pytest.param([], id="groups"),
    ],
)
def test_two_ranks_learn_the_tasks_of_one_process(place, parallel, request):
    """All ranks end with exit code 2, because of the task without examples, after the others are learned."""
    output = request.node.callspec.id
    words = [*flags(place, output), "--tokens_per_pass=700", *parallel]
    ended = run_ranks(["-m", "fmmeta", "adapt", *words], 2, cwd=place, timeout_s=280)
    assert ended.codes == [2, 2], ended.output
    assert f"1 of {COUNT + 1} tasks failed ('empty')" in ended.output[0]
    compare(place, output)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_zero_3_gathers_the_base_once_for_the_tasks_of_a_pass(place):
    gathers = []
    for tokens in ("1", "100000"):
        words = ["-m", "tests.support.scenarios", "adapts", tokens, *flags(place, f"pass-{tokens}")]
        ended = run_ranks(words, 2, timeout_s=280).ok()
        counts = {re.search(r"gathers (\d+) failed 0", text)[1] for text in ended.output}  # type: ignore[index]
        assert len(counts) == 1
        gathers.append(int(counts.pop()))
        compare(place, f"pass-{tokens}")
    assert 0 < gathers[1] * COUNT <= gathers[0] * 1.5  # the steps of a pass are those of its longest task
