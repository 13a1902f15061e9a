"""TaskRun in a loop: steps on any set at any rate, exact gradients back through them, and what is refused."""

import copy
import json

import pytest
import torch

import fmmeta
from fmmeta import Config
from fmmeta.meta.outer_step import Outcome
from fmmeta.meta.reference import set_gradient, set_loss
from tests.support.learners import LEARNERS, batches_of, by_name, episode_of, rule_on, task_gradient
from tests.support.messages import check_message, refusal
from tests.support.short_runs import QUICK, metrics_of

LLAMA = LEARNERS["llama"]


def task_on(**settings):
    """A task of a small language model, and its rows."""
    rule, worker = rule_on(LLAMA, **{"algorithm": "maml", **settings})
    return rule.task(worker, batches_of(episode_of(LLAMA))), episode_of(LLAMA)


def test_steps_and_backward_are_the_rule_bit_for_bit():
    for algorithm, order in (("fomaml", 1), ("maml", 2)):
        rule, worker = rule_on(LLAMA, algorithm=algorithm, inner_steps=3)
        episode = batches_of(episode_of(LLAMA))
        wanted = task_gradient(rule, worker, episode)
        with rule.task(worker, episode) as task:
            for _ in range(3):
                task.step(task.support, lr=rule.setup.config.inner_lr)
            result = task.backward(order=order)
        assert torch.equal(task.into.sum, wanted.gradient)
        assert torch.equal(worker.read(), task.theta)
        assert (result.query.loss, result.support.loss) == (wanted.query.loss, wanted.support.loss)


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
    off = torch.cat([(found[name].double() - wanted[name] / 2).reshape(-1) for name in wanted]).norm()
    whole = torch.cat([wanted[name].reshape(-1) for name in wanted]).norm() / 2
    assert off < 1e-3 * whole
    assert task.into.weight == 0.5
    plain = task_on()[0]
    with plain:
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


def test_what_a_loop_cannot_do_is_refused_in_one_line():
    def after(**settings):
        task, _ = task_on(**settings)
        task.step()
        return task

    task = after(algorithm="fomaml")
    check_message(
        refusal(task.backward, order=2), "order=2 with algorithm=fomaml", "use algorithm=maml in the settings"
    )
    check_message(refusal(task.backward, weight=0), "weight=0 of a task", "give a positive one")
    task.backward()
    check_message(refusal(task.backward), "backward twice", "give all batches at once")
    check_message(refusal(task.step), "step after backward", "take the steps before backward")
    task = after(inner_lr_learned="layer", inner_steps=1)
    check_message(refusal(task.step), "inner_steps=1 with inner_lr_learned=layer", "raise inner_steps")
    task = after(inner_lr_learned="layer", inner_steps=2)
    check_message(refusal(task.step, lr=0.1), "lr=0.1 with inner_lr_learned=layer", "leave lr out")


def test_a_displacement_is_that_of_reptile():
    rule, worker = rule_on(LLAMA, algorithm="reptile", inner_steps=2)
    episode = batches_of(episode_of(LLAMA))
    wanted = task_gradient(rule, worker, episode)
    with rule.task(worker, episode) as task:
        for _ in range(2):
            task.step()
        task.add_displacement()
    assert torch.equal(task.into.sum, wanted.gradient)
    assert task.result is not None


def test_more_steps_than_the_settings_repeat_the_last_rate():
    task, _ = task_on(algorithm="fomaml", inner_steps=1)
    for _ in range(3):
        task.step()
    rule, worker = rule_on(LLAMA, algorithm="fomaml", inner_steps=3)
    rule.inner.adapt(worker, worker.read(), batches_of(episode_of(LLAMA)).support)
    assert torch.equal(task.worker.read(), worker.read())


SETTINGS = {**QUICK, "num_workers": "0", "outer_steps": 2, "test_episodes": 0, "algorithm": "fomaml"}


def run_loop(folder, body, **settings):
    """Run a loop with this body of a task; the outcomes."""
    outcomes = []
    with fmmeta.prepare(config=Config(**SETTINGS, **settings, output_dir=str(folder))) as meta:
        for step in meta.steps():
            for task in step.tasks():
                with task:
                    body(task)
            outcomes.append(step.update())
        meta.finish()
    return outcomes


def learn(task):
    task.step()
    task.backward()


def fails_once(task):
    """The second task of the first outer step fails after its step."""
    task.step()
    if tuple(task.drawn.seed[-2:]) == (0, 1):
        raise ValueError("no such answer")
    task.backward()


@pytest.mark.parametrize("schedule", [{}, {"task_schedule": "dynamic"}, {"max_staleness": 1}], ids=str)
def test_a_task_that_fails_is_left_out_or_ends_the_run(schedule, tmp_path):
    settings = {**schedule, "save_steps": 0}
    skip = {**settings, "on_bad_task": "skip"}
    assert run_loop(tmp_path / "skip", fails_once, **skip) == [Outcome.APPLIED] * 2
    lines = metrics_of(tmp_path / "skip")
    assert [line["skipped_tasks"] for line in lines] == [1, 0]
    (bad,) = lines[0]["bad_tasks"]
    assert bad["error"].startswith("ValueError: no such answer (test_own_loop.py, line ")
    line = refusal(run_loop, tmp_path / "raise", fails_once, **settings)
    check_message(line, "ValueError: no such answer", "skip such tasks by --on_bad_task skip")


def test_a_task_without_backward_has_no_part_in_the_step(tmp_path):
    def body(task):
        task.step()
        if task.drawn.seed[-1]:
            task.backward()

    run_loop(tmp_path / "run", body, save_steps=0)
    assert [line["skipped_tasks"] for line in metrics_of(tmp_path / "run")] == [1, 1]


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_loop_may_leave_the_remaining_tasks_of_a_step(schedule, tmp_path):
    config = Config(**SETTINGS, task_schedule=schedule, output_dir=str(tmp_path / "run"))
    with fmmeta.prepare(config=config) as meta:
        for step in meta.steps():
            for task in step.tasks():
                with task:
                    learn(task)
                break
            assert step.update() is Outcome.APPLIED
    line, _ = metrics_of(tmp_path / "run")
    assert line["skipped_tasks"] == 0


def test_a_step_without_update_is_refused(tmp_path):
    def run():
        with fmmeta.prepare(config=Config(**SETTINGS, output_dir=str(tmp_path / "run"))) as meta:
            for step in meta.steps():
                for task in step.tasks():
                    with task:
                        learn(task)

    check_message(refusal(run), "outer step 1 has no update", "call step.update() before the next step")


def test_tasks_per_pass_is_for_algorithms(tmp_path):
    line = refusal(run_loop, tmp_path, learn, tasks_per_pass="2", lora_r=2)
    check_message(line, "tasks_per_pass=2", "leave it out")


def test_a_loop_that_is_left_early_exports_what_it_has_and_is_finished(tmp_path):
    config = Config(**{**SETTINGS, "outer_steps": 9}, output_dir=str(tmp_path / "run"))
    with fmmeta.prepare(None, None, config) as meta:
        for step in meta.steps():
            for task in step.tasks():
                with task:
                    learn(task)
            step.update()
            if meta.view.state.outer_step == 2:
                break
        result = meta.finish()
    assert result.outer_steps == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"]
    with fmmeta.prepare(None, None, config) as meta:
        assert list(meta.steps()) == []
        assert meta.finish().outer_steps == 2
        check_message(refusal(lambda: meta.view), "holds the run, finished")


def test_the_loop_alone_saves_the_last_step_and_gives_the_folder_free(tmp_path):
    """Without `with` and `finish`; another process exports the model later."""
    config = Config(**SETTINGS, output_dir=str(tmp_path / "run"))
    meta = fmmeta.prepare(config=config)
    for step in meta.steps():
        for task in step.tasks():
            with task:
                learn(task)
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
    def run():
        with fmmeta.prepare(config=Config(**SETTINGS, output_dir=str(tmp_path / "run"))) as meta:
            for _ in meta.steps():
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
