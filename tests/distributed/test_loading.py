"""Tasks that hang while they load, strata by a function and weights by class, on two ranks: the run ends as
the policy says, and wrong input ends it with one line on both.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fmmeta.config.settings import Config
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.meta.reference import reference_run
from fmmeta.tasks.sources.load import load_sources
from tests.support import matrix
from tests.support.launch import ProcessResults, run_ranks
from tests.support.matrix import Case, ParityFixture, oracle_inputs, relative_error, tolerance
from tests.support.messages import check_message, refusal
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
@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            {"episode_transforms": f"{HERE}:hang", "load_timeout": 1},
            (f"episode_transforms={HERE}:hang", "load_timeout=1 s", "fix it, or raise --load_timeout"),
        ),
        (
            {"episode_transforms": f"{HERE}:hang_once", "load_timeout": 1},
            ("load_timeout=1 s", "correct it, or skip such tasks by --on_bad_task"),
        ),
        (
            {"stratify_by": f"{HERE}:no_such_column"},
            (f"stratify_by={HERE}:no_such_column", "KeyError", "classes.jsonl:1", "fix the function"),
        ),
    ],
)
def test_what_a_rank_cannot_load_ends_all_ranks_with_one_line(tmp_path, flags, parts):
    ended = train(tmp_path, **flags)
    assert ended.codes == [2, 2]
    (line,) = [line for line in ended.output[0].splitlines() if "error:" in line]
    assert "Traceback" not in "".join(ended.output)
    check_message(line, *parts)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
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
def test_wrong_input_is_refused(tmp_path, settings, parts):
    if "class_weights" in settings:
        (tmp_path / "weights.json").write_text(settings["class_weights"])
        settings = {"class_weights": str(tmp_path / "weights.json")}
    data = str(write_classes(tmp_path / "classes.jsonl"))

    def load():
        load_sources(Config(dataset=[data], n_way=2, k_shot=1, **settings), byte_tokenizer(), print)

    check_message(refusal(load), *parts)


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
    file = tmp_path / "weights.json"
    file.write_text(json.dumps(WEIGHTS))
    monkeypatch.setitem(matrix.ALSO, "weighted", {"class_weights": str(file)})
    bench, case = ParityFixture(tmp_path), replace(CASE, layout=layout, stage=stage, algorithm=algorithm)
    theta, _ = bench.run([case])[case.id]
    config = Config(**bench.settings(case))
    learner, began, steps = oracle_inputs(config.but(class_weights=None))

    def repeated(episode):
        support, query = (
            [row for row in rows for _ in range(WEIGHTS.get(episode.classes[row.labels], 1))]
            for rows in (episode.support, episode.query)
        )
        return replace(episode, support=support, query=query)

    twice = [[repeated(episode) for episode in step] for step in steps]
    wanted, unweighted = (reference_run(learner, one, config).thetas[-1] for one in (twice, steps))
    assert relative_error(theta, wanted, began) < tolerance(case)
    assert relative_error(unweighted, wanted, began) > 0.01  # the weights have an effect
