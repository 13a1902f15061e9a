"""Tasks that hang while they load, strata by a function and weights by class, on two ranks: the run ends as
the policy says, and wrong input ends it with one line on both.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_learner, load_tokenizer
from fmmeta.meta.reference import reference_run
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.load import load_sources
from tests.support import matrix
from tests.support.launch import ProcessResults, run_ranks
from tests.support.matrix import Case, ParityFixture, tolerance
from tests.support.messages import check_message
from tests.support.models import write_classes
from tests.support.short_runs import QUICK, metrics_of

HERE = "tests.support.loading"


def train(tmp_path: Path, ranks: int = 2, **flags) -> ProcessResults:
    data = write_classes(tmp_path / "classes.jsonl")
    given = {**QUICK, "dataset": data, "output_dir": tmp_path / "run", "outer_steps": 4, **flags}
    argv = ["launch/train.py", *(f"--{name}={value}" for name, value in given.items())]
    return run_ranks(argv, ranks, 250)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workers", "transform"),
    [(0, "hang_once"), pytest.param(1, "hang_once", marks=pytest.mark.slow), (1, "deaf")],
)
def test_a_task_that_sleeps_for_ever_is_left_out_and_the_run_ends(tmp_path, workers, transform):
    flags = {"num_workers": workers, "episode_transforms": f"{HERE}:{transform}", "max_bad_fraction": 0.5}
    ended = train(tmp_path, on_bad_task="skip", load_timeout=1.5, **flags).ok()
    lines = metrics_of(tmp_path / "run")
    assert [line["skipped_tasks"] for line in lines] == [0, 0, 1, 0]
    (bad,) = lines[2]["bad_tasks"]
    assert bad["error"] == "it was still loading after load_timeout=1.5 s"
    assert f"left out: task {bad['task']}: {bad['error']}" in ended.output[0]
    assert "Traceback" not in "".join(ended.output)
    killed = "did not react to load_timeout; it was killed and replaced" in "".join(ended.output)
    assert killed == (transform == "deaf")


@pytest.mark.timeout(300)
def test_a_hanging_task_ends_all_ranks_if_bad_tasks_are_not_skipped(tmp_path):
    ended = train(tmp_path, load_timeout=1, episode_transforms=f"{HERE}:hang_once")
    assert ended.codes == [2, 2]
    check_message(
        ended.output[0].splitlines()[-1],
        "load_timeout=1 s",
        "correct it, or skip such tasks by --on_bad_task",
    )


def weights_file(tmp_path: Path, content: str) -> str:
    file = tmp_path / "weights.json"
    file.write_text(content)
    return str(file)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            {"episode_transforms": f"{HERE}:hang", "load_timeout": 1},
            (f"episode_transforms={HERE}:hang", "load_timeout=1 s", "fix it, or raise --load_timeout"),
        ),
        (
            {"stratify_by": f"{HERE}:no_such_column"},
            (f"stratify_by={HERE}:no_such_column", "KeyError", "classes.jsonl:1", "fix the function"),
        ),
        (
            {"stratify_by": f"{HERE}:several"},
            (f"stratify_by={HERE}:several", "['c0']", "names no stratum", "return a text or a number"),
        ),
        (
            {"stratify_by": f"{HERE}:none"},
            (f"stratify_by={HERE}:none", "names no stratum", "return a text or a number"),
        ),
        ({"stratify_by": f"{HERE}:NOT_A_FUNCTION"}, ("stratify_by=", "cannot be called", "name a function")),
        (
            {"stratify_by": f"{HERE}:label_number", "stratum_column": "stratum"},
            ("stratify_by=", "stratum_column=stratum", "leave one out"),
        ),
        (
            {"class_weights": '{"c1": 2, "d2": 1}'},
            ("class_weights=", "class 'd2'", "12 classes", "did you mean c2?"),
        ),
        (
            {"class_weights": '{"c1": -2}'},
            ("class_weights=", "class 'c1'", "-2", "write a number from 1e-06 to 1e+06"),
        ),
        ({"class_weights": '{"c1": "2"}'}, ("class_weights=", "'2'", "write a number from 1e-06 to 1e+06")),
        ({"class_weights": '{"c1": NaN}'}, ("class_weights=", "nan", "write a number from 1e-06 to 1e+06")),
        ({"class_weights": "[1, 2]"}, ("class_weights=", "holds no object", 'write {"rare": 3.0}')),
        ({"class_weights": "{"}, ("class_weights=", "cannot be read as JSON", "fix it")),
        ({"base_meta_batch_size": 0}, ("base_meta_batch_size=0", "below 1", "use 1 or more")),
        (
            {"gradient_noise_scale": True, "meta_batch_size": 1},
            ("gradient_noise_scale=True", "meta_batch_size=1", "use --meta_batch_size 2 or more"),
        ),
        ({"load_timeout": 0}, ("load_timeout=0", "no positive number", "leave it out")),
    ],
)
def test_wrong_input_ends_all_ranks_with_one_line(tmp_path, flags, parts):
    if "class_weights" in flags:
        flags = {"class_weights": weights_file(tmp_path, flags["class_weights"])}
    ended = train(tmp_path, **flags)
    assert ended.codes == [2, 2]
    errors = [line for line in ended.output[0].splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "Traceback" not in "".join(ended.output)
    check_message(errors[0], *parts)


CASE = Case((2, 1), "plain", "fomaml", "one", "default", "bert", "fp32", "sgd", "zero", "none", "weighted")
WEIGHTS = {"c0": 2, "c5": 3, "c7": 2}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "stage", "algorithm"),
    [
        ((2, 1), "plain", "fomaml"),
        pytest.param((1, 2), 2, "fomaml", marks=pytest.mark.slow),
        pytest.param((1, 2), 2, "anil", marks=pytest.mark.slow),
    ],
)
def test_class_weights_end_where_the_oracle_ends_with_rows_repeated(
    tmp_path, monkeypatch, layout, stage, algorithm
):
    """A weight of 2 is the same loss as every row of the class twice, which the oracle gets."""
    settings = {"class_weights": weights_file(tmp_path, json.dumps(WEIGHTS))}
    monkeypatch.setitem(matrix.ALSO, "weighted", settings)
    bench, case = ParityFixture(tmp_path), replace(CASE, layout=layout, stage=stage, algorithm=algorithm)
    theta, _ = bench.run([case])[case.id]
    config = Config(**bench.settings(case))
    description = describe(config)
    source = load_sources(config, load_tokenizer(config, description, print), print).train
    schedule = Schedule(source.items, config.meta_batch_size, config.seed)

    def repeated(episode):
        support, query = (
            [row for row in rows for _ in range(WEIGHTS.get(episode.classes[row.labels], 1))]
            for rows in (episode.support, episode.query)
        )
        return replace(episode, support=support, query=query)

    steps = [
        [source.draw(task).episode() for task in schedule.meta_batch(step)]
        for step in range(config.outer_steps)
    ]
    learner = load_learner(config, description).double()
    began = torch.cat([p.detach().flatten() for p in learner.parameters()])
    names = [name for name, _ in learner.named_parameters()]

    def end(episodes):
        found = reference_run(learner, episodes, config).thetas[-1]
        return torch.cat([found[name].flatten() for name in names])

    wanted, unweighted = end([[repeated(one) for one in step] for step in steps]), end(steps)
    travelled = (wanted - began).norm()
    ours = torch.cat([theta[name].double().flatten() for name in names])
    assert (ours - wanted).norm() < tolerance(case) * travelled
    assert (unweighted - wanted).norm() > 0.01 * travelled  # the weights have an effect
