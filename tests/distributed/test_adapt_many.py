"""`fmmeta adapt --support DIRECTORY` on two ranks: the adapters of one process, and under ZeRO 3 the base
is gathered once for all tasks of a pass.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fmmeta.adaptation import command, task_learner
from fmmeta.adaptation.folder import write_task
from fmmeta.cli import parse
from fmmeta.common.progress import Progress
from fmmeta.tasks.data.files import files_of, stem
from tests.support.helpers import write_rows
from tests.support.launch import run_ranks
from tests.support.models import WORDS, save_bert
from tests.support.ranks import counted_gathers, on_ranks

COUNT = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model, and a directory of tasks of different sizes, one of them without examples."""
    folder, rng = tmp_path_factory.mktemp("adapt_many"), random.Random(0)
    save_bert(folder / "bert")
    (folder / "tasks").mkdir()
    for number, name in enumerate(NAMES):
        rows = [
            {"text": f"{word} {' '.join(rng.sample(WORDS, 1 + number % 3))}", "label": word}
            for word in rng.sample(WORDS, 2 + number % 2)
            for _ in range(3)
        ]
        write_rows(folder / "tasks" / f"{name}.jsonl", rows)
    (folder / "tasks" / "empty.jsonl").write_text("")
    run_ranks(["-m", "fmmeta", "adapt", *flags(folder, "plain")], 1, cwd=folder)
    return folder


def flags(folder: Path, output: str) -> list[str]:
    paths = {"model_name_or_path": "bert", "support": "tasks", "output_dir": output}
    loop = ["--lora_r=4", "--inner_steps=3", "--inner_lr=0.5"]
    return [*(f"--{key}={folder / name}" for key, name in paths.items()), *loop]


NAMES = [f"task-{number}" for number in range(COUNT)]


def compare(folder: Path, output: str) -> None:
    """Every adapter equals that of one process to 1e-5."""
    assert sorted(path.name for path in (folder / output).iterdir()) == NAMES
    for name in NAMES:
        files = (folder / each / name / "adapter_model.safetensors" for each in ("plain", output))
        torch.testing.assert_close(*map(load_file, files), atol=1e-5, rtol=0)


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


@on_ranks(2, timeout_s=280)
def adapt_and_count(world, tokens_per_pass, words):
    """`fmmeta adapt` of a directory under ZeRO 3, where nothing stays gathered: all-gathered elements."""
    file = Path(tempfile.mkdtemp()) / "zero3.json"
    file.write_text('{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}')
    words = [*words, f"--deepspeed={file}", f"--tokens_per_pass={tokens_per_pass}"]
    settings, progress = parse(words, "adapt"), Progress(enabled=False)
    Path(settings.output_dir).mkdir(exist_ok=True)
    sources = [(stem(path), str(path)) for path in files_of(Path(settings.support))]
    tasks, _, _ = command.find_tasks(settings, sources, progress.notice)
    learn, counts = task_learner.TaskLearner.learn, []

    def counted(*arguments):
        with counted_gathers() as asked:
            found = [*learn(*arguments)]
        counts.append(asked[0])
        return found

    def finish(learner, learned):
        write_task(command.model_of(learner, learned), learner, learned)

    task_learner.TaskLearner.learn = counted
    assert not command.learn_all(settings, tasks, world, progress, finish)
    return sum(counts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_zero_3_gathers_the_base_once_for_the_tasks_of_a_pass(place):
    gathers = []
    for tokens in (1, 100000):
        first, second = adapt_and_count(tokens, flags(place, f"pass-{tokens}"))
        assert first == second
        gathers.append(first)
        compare(place, f"pass-{tokens}")
    assert 0 < gathers[1] * COUNT <= gathers[0] * 1.5  # the steps of a pass are those of its longest task
