"""Loops of the user: steps on any set at any rate, exact gradients back through them, what is refused; and
outer schedules of the user, by `--task_schedule module:class`.
"""

import copy
import json
from pathlib import Path

import pytest
import torch

import fmmeta
from fmmeta import Config
from fmmeta.meta.outer_step import Outcome
from fmmeta.meta.reference import set_gradient, set_loss
from fmmeta.training.schedules import DynamicSchedule, StaticSchedule
from tests.support.learners import LEARNERS, batches_of, by_name, episode_of, norm, rule_on, task_gradient
from tests.support.messages import check_message, refusal
from tests.support.short_runs import QUICK, metrics_of, same

LLAMA = LEARNERS["llama"]


def task_on(**settings):
    """A task of a small language model, and its rows."""
    rule, worker = rule_on(LLAMA, **{"algorithm": "maml", **settings})
    return rule.task(worker, batches_of(episode_of(LLAMA))), episode_of(LLAMA)


@pytest.mark.parametrize(
    ("algorithm", "end"),
    [
        ("fomaml", lambda task: task.backward(order=1)),
        ("maml", lambda task: task.backward(order=2)),
        ("reptile", lambda task: task.add_displacement()),
    ],
)
def test_a_loop_of_steps_is_the_rule_bit_for_bit(algorithm, end):
    rule, worker = rule_on(LLAMA, algorithm=algorithm, inner_steps=3)
    episode = batches_of(episode_of(LLAMA))
    wanted = task_gradient(rule, worker, episode)
    with rule.task(worker, episode) as task:
        for _ in range(3):
            task.step(task.support, lr=rule.setup.config.inner_lr)
        end(task)
    assert torch.equal(task.into.sum, wanted.gradient)
    assert torch.equal(worker.read(), task.theta)
    assert task.result.support.loss == wanted.support.loss
    if algorithm != "reptile":
        assert task.result.query.loss == wanted.query.loss


def test_exact_gradients_go_back_through_steps_on_other_sets_at_other_rates():
    """The oracle: autograd in fp64 through the same steps."""
    task, rows = task_on()
    sets = [(task.support, rows.support), (task.query, rows.query), (task.support, rows.support)]
    rates, exact = (0.1, 0.05, 0.2), copy.deepcopy(LLAMA).double()
    theta = {name: p for name, p in exact.named_parameters() if p.requires_grad}
    phi = theta
    with task:
        for (batches, wanted), lr in zip(sets, rates, strict=True):
            task.step(batches, lr=lr)
            gradient = set_gradient(exact, phi, wanted, False, create_graph=True)
            phi = {name: phi[name] - lr * gradient[name] for name in phi}
        before = task.loss()
        task.backward(order=2, weight=0.5)
    loss = set_loss(exact, phi, rows.query, False)
    assert before == pytest.approx(loss.item(), rel=1e-5)
    wanted = dict(zip(theta, torch.autograd.grad(loss, list(theta.values())), strict=True))
    found = by_name(task.worker, task.into.sum)
    off = {name: found[name].double() - value / 2 for name, value in wanted.items()}
    assert norm(off) < 1e-3 * norm(wanted) / 2
    assert task.into.weight == 0.5
    with task_on()[0] as plain:
        for (batches, _), lr in zip(sets, rates, strict=True):
            plain.step(batches, lr=lr)
        plain.backward(order=1)
    size = task.dot(plain.into.sum, plain.into.sum) ** 0.5
    assert (plain.into.sum / 2 - task.into.sum).norm() > 0.01 * size  # the second order counts


def test_the_worker_holds_theta_after_a_task_without_backward():
    task, _ = task_on(algorithm="fomaml")
    with task:
        task.step()
        assert not torch.equal(task.worker.read(), task.theta)
    assert torch.equal(task.worker.read(), task.theta)
    assert not task.into.sum.any()
    assert task.result is None


@pytest.mark.parametrize(
    ("settings", "refused", "parts"),
    [
        ({}, lambda task: task.backward(order=2), ("order=2 with algorithm=fomaml", "use algorithm=maml in")),
        ({}, lambda task: task.backward(weight=0), ("weight=0 of a task", "give a positive one")),
        ({"done": True}, lambda task: task.backward(), ("backward twice", "give all batches at once")),
        ({"done": True}, lambda task: task.step(), ("step after backward", "take the steps before backward")),
        (
            {"inner_lr_learned": "layer", "inner_steps": 1},
            lambda task: task.step(),
            ("inner_steps=1 with inner_lr_learned=layer", "raise inner_steps"),
        ),
        (
            {"inner_lr_learned": "layer", "inner_steps": 2},
            lambda task: task.step(lr=0.1),
            ("lr=0.1 with inner_lr_learned=layer", "leave lr out"),
        ),
    ],
)
def test_what_a_loop_cannot_do_is_refused_in_one_line(settings, refused, parts):
    done = settings.get("done", False)
    task, _ = task_on(algorithm="fomaml", **{key: settings[key] for key in settings if key != "done"})
    task.step()
    if done:
        task.backward()
    check_message(refusal(refused, task), *parts)


def test_more_steps_than_the_settings_repeat_the_last_rate():
    task, _ = task_on(algorithm="fomaml", inner_steps=1)
    for _ in range(3):
        task.step()
    rule, worker = rule_on(LLAMA, algorithm="fomaml", inner_steps=3)
    rule.inner.adapt(worker, worker.read(), batches_of(episode_of(LLAMA)).support)
    assert torch.equal(task.worker.read(), worker.read())


HERE = "tests.unit.test_own_loop"
SETTINGS = {**QUICK, "num_workers": "0", "outer_steps": 2, "test_episodes": 0, "algorithm": "fomaml"}


def config_of(folder, **settings) -> Config:
    return Config(**{**SETTINGS, "save_steps": 0, **settings}, output_dir=str(folder))


def learn(task):
    task.step()
    task.backward()


def take(step, body=learn):
    for task in step.tasks():
        with task:
            body(task)


def run_loop(config, body=learn):
    """Run a loop with this body of a task; the outcomes, and metrics.jsonl."""
    outcomes = []
    with fmmeta.prepare(config=config) as meta:
        for step in meta.steps():
            take(step, body)
            outcomes.append(step.update())
        meta.finish()
    return outcomes, metrics_of(Path(config.output_dir))


def fails_once(task):
    """The second task of the first outer step fails after its step."""
    task.step()
    if tuple(task.drawn.seed[-2:]) == (0, 1):
        raise ValueError("no such answer")
    task.backward()


@pytest.mark.parametrize("schedule", [{}, {"task_schedule": "dynamic"}, {"max_staleness": 1}], ids=str)
def test_a_task_that_fails_is_left_out_or_ends_the_run(schedule, tmp_path):
    skip = config_of(tmp_path / "skip", on_bad_task="skip", **schedule)
    outcomes, lines = run_loop(skip, fails_once)
    assert outcomes == [Outcome.APPLIED] * 2
    assert [line["skipped_tasks"] for line in lines] == [1, 0]
    (bad,) = lines[0]["bad_tasks"]
    assert bad["error"].startswith("ValueError: no such answer (test_own_loop.py, line ")
    line = refusal(run_loop, config_of(tmp_path / "raise", **schedule), fails_once)
    check_message(line, "ValueError: no such answer", "skip such tasks by --on_bad_task skip")


def test_a_task_without_backward_has_no_part_in_the_step(tmp_path):
    def body(task):
        task.step()
        if task.drawn.seed[-1]:
            task.backward()

    _, lines = run_loop(config_of(tmp_path / "run"), body)
    assert [line["skipped_tasks"] for line in lines] == [1, 1]


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_loop_may_leave_the_remaining_tasks_of_a_step(schedule, tmp_path):
    with fmmeta.prepare(config=config_of(tmp_path / "run", task_schedule=schedule)) as meta:
        for step in meta.steps():
            with next(iter(step.tasks())) as task:
                learn(task)
            assert step.update() is Outcome.APPLIED
    assert [line["skipped_tasks"] for line in metrics_of(tmp_path / "run")] == [0, 0]


def test_a_step_without_update_and_several_tasks_per_pass_are_refused(tmp_path):
    def run():
        with fmmeta.prepare(config=config_of(tmp_path / "run")) as meta:
            for step in meta.steps():
                take(step)

    check_message(refusal(run), "outer step 1 has no update", "call step.update() before the next step")
    several = config_of(tmp_path, tasks_per_pass="2", lora_r=2)
    check_message(refusal(run_loop, several), "tasks_per_pass=2", "leave it out")


def test_a_loop_that_is_left_early_exports_what_it_has_and_is_finished(tmp_path):
    config = config_of(tmp_path / "run", outer_steps=9)
    with fmmeta.prepare(None, None, config) as meta:
        for step in meta.steps():
            take(step)
            step.update()
            if meta.view.state.outer_step == 2:
                break
        assert meta.finish().outer_steps == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"]
    with fmmeta.prepare(None, None, config) as meta:
        assert list(meta.steps()) == []
        assert meta.finish().outer_steps == 2
        check_message(refusal(lambda: meta.view), "holds the run, finished")


def test_the_loop_alone_saves_the_last_step_and_gives_the_folder_free(tmp_path):
    """Without `with` and `finish`; another process exports the model later."""
    config = config_of(tmp_path / "run", save_steps=Config.save_steps)
    meta = fmmeta.prepare(config=config)
    for step in meta.steps():
        take(step)
        step.update()
    theta = meta.view.theta.clone()
    del meta
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    assert not (tmp_path / "run" / ".lock").exists()
    with fmmeta.prepare(config=config) as meta:
        assert meta.view.theta.equal(theta)
        assert list(meta.steps()) == []
        assert meta.finish().outer_steps == 2


def test_an_error_of_the_loop_is_raised_as_it_is(tmp_path):
    def fails():
        with fmmeta.prepare(config=config_of(tmp_path / "run")) as meta:
            for _ in meta.steps():
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()


class Same(StaticSchedule):
    """The schedule `static`."""


class FirstOnly(StaticSchedule):
    """An outer step closes after the first task of each group."""

    def passes(self, number, size):
        yield next(super().passes(number, size))


class FirstClaimed(DynamicSchedule):
    """As `FirstOnly`, of the tasks that a group claims."""

    def passes(self, number, size):
        yield next(super().passes(number, size))


def test_a_schedule_of_the_user_says_when_a_step_closes(tmp_path):
    """It is found by name; a run does not resume with another one."""
    tokens, schedules = {}, ("static", f"{HERE}:Same", f"{HERE}:FirstOnly", f"{HERE}:FirstClaimed")
    for name in schedules:
        folder = tmp_path / name.partition(":")[2]
        fmmeta.MetaTrainer(config_of(folder, task_schedule=name, save_steps=1)).train()
        tokens[name] = sum(line.get("tokens", 0) for line in metrics_of(folder))
    assert same(tmp_path, tmp_path / "Same")
    assert not same(tmp_path, tmp_path / "FirstOnly")
    assert tokens[f"{HERE}:FirstOnly"] < 0.5 * tokens["static"]
    assert [line["tasks_by_group"] for line in metrics_of(tmp_path / "FirstClaimed")] == [[1], [1]]
    other = config_of(tmp_path / "Same", task_schedule=f"{HERE}:FirstOnly", outer_steps=3, save_steps=1)
    check_message(refusal(fmmeta.MetaTrainer(other).train), "task_schedule", "FirstOnly")


def test_names_that_are_no_schedule_are_refused(tmp_path):
    check_message(refusal(Config, task_schedule="sorted"), "task_schedule=sorted", "module:class of yours")
    own = f"{HERE}:Same"
    check_message(
        refusal(Config, task_schedule=own, max_staleness=1), f"task_schedule={own}", "max_staleness=1"
    )
    no_class = fmmeta.MetaTrainer(config_of(tmp_path / "run", task_schedule=f"{HERE}:SETTINGS"))
    check_message(refusal(no_class.train), f"{HERE}:SETTINGS", "subclass")
