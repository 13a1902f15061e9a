"""A loop of the caller (fmmeta.prepare) does what `fmmeta train` does: theta, resume, stops, schedules."""

import os
import random
import signal
import time

import pytest
import torch

from harness.fork_server import environment, places
from tests.support.helpers import fast_or_slow
from tests.support.launch import ROOT, run_ranks
from tests.support.short_runs import LONG, metrics_of, model_of, same, steps_of, until

LOOP = str(ROOT / "examples/own_loop.py")
STEPS = {"outer_steps": 3, "inner_steps": 3, "save_steps": 0, "inner_lr": 0.1, "outer_lr": 1e-3}
ZERO_2 = {"deepspeed": ROOT / "ds_configs/zero2.json", "group_size": 2}
STAGES = {"group_size": 2, "pipeline_stages": 2}
CASES = {  # name: ranks, settings
    "zero2": (4, {**ZERO_2, "algorithm": "fomaml"}),
    "zero2-maml": (4, {**ZERO_2, "algorithm": "maml"}),
    "pipeline": (2, {**STAGES, "algorithm": "fomaml"}),
    "pipeline-maml": (4, {**STAGES, "algorithm": "maml"}),
    "proto_maml": (2, {"algorithm": "proto_maml", "prototype_gradient": True, "gradient_noise_scale": True}),
    "momentum": (1, {"algorithm": "maml", "truncate_steps": 1, "inner_optimizer": "momentum"}),
    "adamw": (1, {"algorithm": "maml", "inner_optimizer": "adamw", "inner_lr": 1e-3, "lora_r": 2}),
    "learned": (2, {"algorithm": "maml", "inner_lr_learned": "layer"}),
    "dynamic": (1, {"algorithm": "fomaml", "task_schedule": "dynamic"}),
    "stale": (1, {"algorithm": "fomaml", "max_staleness": 2}),
    "bad-tasks": (
        2,
        {"algorithm": "fomaml", "on_bad_task": "skip", "episode_transforms": f"{__name__}:sometimes_missing"},
    ),
}
FAST = ("pipeline", "stale")


def sometimes_missing(episode, rng):
    """A transform: one task of each outer step fails to load."""
    if episode.task.seed[-1] == 1:
        raise OSError("disk is missing")
    return episode


def program(settings, folder):
    """The example; without a rate where rates are learned."""
    if "inner_lr_learned" not in settings:
        return LOOP
    text = (ROOT / "examples/own_loop.py").read_text()
    (folder / "loop.py").write_text(text.replace(", lr=config.inner_lr", ""))
    return str(folder / "loop.py")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", fast_or_slow(list(CASES), FAST.__contains__, str))
def test_theta_is_that_of_the_trainer_bit_for_bit(name, flags, tmp_path):
    ranks, settings = CASES[name]
    settings = {**STEPS, **settings}
    for end, words in (("loop", program(settings, tmp_path)), ("trainer", "launch/train.py")):
        run_ranks([words, *flags(tmp_path / end, **settings)], ranks).ok()
    found, wanted = (model_of(tmp_path / end) for end in ("loop", "trainer"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    names = ("step", "query_loss", "support_loss", "skipped_tasks", "grad_norm", "tokens")
    lines, wanted = (
        [{key: line[key] for key in names} for line in metrics_of(tmp_path / end)]
        for end in ("loop", "trainer")
    )
    assert lines == wanted
    assert len(lines) == STEPS["outer_steps"]


@pytest.mark.slow
def test_a_loop_of_first_order_is_not_the_exact_one(flags, tmp_path):
    """The comparisons above would hold for a loop without `order`, too."""
    for algorithm in ("fomaml", "maml"):
        run_ranks([LOOP, *flags(tmp_path / algorithm, **STEPS, algorithm=algorithm)], 1).ok()
    assert not same(tmp_path / "fomaml", tmp_path / "maml")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("leaving", fast_or_slow([(1,), (0, 1)], lambda groups: len(groups) > 1, str))
def test_a_group_that_leaves_its_loop_leaves_the_tasks_to_the_others(leaving, flags, tmp_path):
    """With claimed tasks; if all groups leave, the step has fewer tasks."""
    after, text = "task.backward(task.query, order=order)\n", (ROOT / "examples/own_loop.py").read_text()
    leave = f"{after}                if meta.view.ranks.cross.rank in {leaving}:\n                    break\n"
    (tmp_path / "loop.py").write_text(text.replace(after, leave))
    settings = {**STEPS, "algorithm": "fomaml", "task_schedule": "dynamic"}
    run_ranks([str(tmp_path / "loop.py"), *flags(tmp_path / "run", **settings)], 2).ok()
    tasks = [line["tasks_by_group"] for line in metrics_of(tmp_path / "run")]
    assert len(tasks) == STEPS["outer_steps"]
    for mine, others in tasks:
        assert others <= 1
        assert mine + others == 4 if leaving == (1,) else mine == 1


STOPPED = {"algorithm": "fomaml", **LONG}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings", fast_or_slow([{}, {"max_staleness": 1}], lambda more: not more, lambda more: str([*more]))
)
def test_a_stop_signal_saves_and_the_same_program_resumes(settings, fork_server, flags, tmp_path):
    """Exit code 75 on both ranks; then theta is that of a run that was not stopped (synchronous steps)."""
    run, settings = tmp_path / "run", {**STOPPED, **settings}
    words = [LOOP, *flags(run, **settings)]
    running = start(fork_server, words, tmp_path)
    until(lambda: steps_of(run) >= 2)
    time.sleep(random.random() * 0.3)
    os.kill(running[1].pid, signal.SIGTERM)
    assert fork_server.wait(running, 60) == [75, 75], running[0].text + running[1].text
    assert "stopped by SIGTERM after outer step" in running[0].text
    assert "Traceback" not in running[0].text + running[1].text
    again = start(fork_server, words, tmp_path, EPISODE_S="0")
    assert fork_server.wait(again, 100) == [0, 0], again[0].text
    assert "resumed from" in again[0].text
    assert [line["step"] for line in metrics_of(run)] == [*range(1, LONG["outer_steps"] + 1)]
    if "max_staleness" not in settings:
        run_ranks(
            ["launch/train.py", *flags(tmp_path / "whole", **settings)],
            2,
            per_rank={rank: {"EPISODE_S": "0"} for rank in range(2)},
        ).ok()
        assert same(run, tmp_path / "whole")
    finished = run_ranks(words, 2).ok()
    assert "holds this run, finished" in finished.output[0]


def start(fork_server, words, folder, **env):
    """Two ranks of a program, with torchrun's variables."""
    return [
        fork_server.start(words, folder / f"rank-{rank}.log", environment(**place, **env))
        for rank, place in enumerate(places(2))
    ]
