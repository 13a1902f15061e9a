"""Several tasks in one pass, over ranks of a group and groups: the oracle's theta, and ZeRO 3 gathers the
base once.
"""

import tempfile
from pathlib import Path

import pytest
import torch

from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config
from fmmeta.training import build
from fmmeta.training.callbacks import Callback
from fmmeta.training.loop import train
from fmmeta.training.run import Run
from fmmeta.training.run_files import RunStart
from tests.support.matrix import Case, ParityFixture, tolerance
from tests.support.models import save_bert, save_llama, write_classes, write_pairs
from tests.support.ranks import counted_gathers, on_ranks

ROWS = [
    ((1, 2), 3, "fomaml", "llama", "fp32", "zero", "none"),
    ((1, 2), 3, "reptile", "bert", "fp32", "learned", "micro"),
    ((1, 2), 2, "fomaml", "bert", "fp32", "prototype", "none"),
    ((1, 2), 0, "fomaml", "llama", "fp32", "zero", "micro"),
    ((1, 2), 3, "fomaml", "llama", "bf16", "zero", "none"),
    ((2, 1), "plain", "fomaml", "bert", "fp32", "zero", "none"),
    ((2, 1), "plain", "maml", "bert", "fp32", "learned", "none"),
    ((1, 2), 2, "maml", "llama", "fp32", "zero", "micro"),
]
POOLED = [
    ((1, 2), 3, "anil", "zero", 1),
    ((1, 2), 2, "protonet", "prototype", 1),
    ((1, 2), 0, "anil", "learned", 2),  # stages
    ((2, 1), "plain", "anil", "prototype", 1),
]
CASES = [
    Case(layout, stage, algorithm, "several", "default", model, dtype, "sgd", head, extra, "multi_task")
    for layout, stage, algorithm, model, dtype, head, extra in ROWS
]
CASES += [
    Case(
        layout, stage, algorithm, "several", "default", "bert", "fp32", "sgd", head, "micro", "pooled", stages
    )
    for layout, stage, algorithm, head, stages in POOLED
]


EIGHT = {
    "num_query": 2,
    "k_shot": 2,
    "group_size": "2",
    "deepspeed": "ds_configs/zero3.json",
    "meta_batch_size": 8,
    "outer_steps": 2,
    "inner_steps": 2,
    "inner_lr": 0.3,
    "outer_optimizer": "sgd",
    "outer_lr": 0.5,
    "eval_episodes": 0,
    "save_steps": 0,
    "num_workers": "0",
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return ParityFixture(tmp_path_factory.mktemp("multi_task"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout", [pytest.param((1, 2), marks=[pytest.mark.slow, pytest.mark.long]), (2, 1)], ids=str
)
def test_ends_where_the_oracle_ends(bench, layout):
    chosen = [case for case in CASES if case.layout == layout]
    outcomes = bench.run(chosen)
    errors = {case.id: bench.error(case, outcomes[case.id][0]) for case in chosen}
    assert {
        name: error
        for name, error in errors.items()
        if error >= tolerance(next(case for case in chosen if case.id == name))
    } == {}


@on_ranks(2, timeout_s=560)
def gathers(world, settings):
    """An outer step of 8 tasks under ZeRO 3, one by one and all in one pass: the elements that are gathered,
    and how far theta ends apart.
    """
    ends, ranks = {}, world.split(2)
    for at_once in ("1", "8"):
        config = Config(**settings, tasks_per_pass=at_once)
        inputs = build.read_inputs(config, world, lambda text: None)
        zero = inputs.deepspeed.file["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = 0  # nothing stays gathered
        parts = build.build(config, inputs, inputs.parallel_plan(config, 2, "cpu"), ranks)
        began = parts.meta_params.theta.clone()
        start = RunStart(Path(tempfile.mkdtemp()), None, False)
        run = Run(config, inputs, ranks, parts, start, Progress(enabled=False))
        run.resume()
        ends[at_once] = run.theta, began, counted_steps(run)
    (alone, began, counts), (together, _, fewer) = ends.values()
    squares = [(a - b).double().square().sum() for a, b in ((alone, together), (alone, began))]
    apart, travelled = ranks.group.sum_(torch.stack(squares))
    return counts[1], fewer[1], float((apart / travelled).sqrt())


def counted_steps(run):
    """Elements that are all-gathered in each outer step of a run."""
    counts = []
    with counted_gathers() as asked:

        class Counting(Callback):
            def on_step_end(self, run, outcome):
                counts.append(asked[0])
                asked[0] = 0

        run.callbacks.built_in = [Counting(), *run.callbacks.built_in]
        train(run)
    return counts


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["adapters", "heads"])
def test_zero_3_gathers_the_base_once_for_eight_tasks(kind, tmp_path):
    if kind == "adapters":
        model, data = save_llama(tmp_path / "llama"), write_pairs(tmp_path / "pairs.jsonl")
        own = {"task_type": "causal_lm", "lora_r": 2}
    else:
        model, data = save_bert(tmp_path / "bert"), write_classes(tmp_path / "rows.jsonl")
        own = {"algorithm": "anil", "n_way": 2}
    settings = {"model_name_or_path": str(model), "dataset": [str(data)], **EIGHT, **own}
    for single, pooled, apart in gathers(settings):
        # passes of several tasks leave out the adapters' modules: DeepSpeed then gathers for the forward and
        # for the backward pass, and in passes of one task for both together
        assert 0 < {"adapters": 4, "heads": 8}[kind] * pooled <= single
        assert apart < 1e-5
