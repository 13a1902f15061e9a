"""`fmmeta.adapt_many`, `fmmeta adapt --support DIRECTORY` and `fmmeta predict --adapters`: every task gets
the model that `adapt` gives it alone, whatever happens to the others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fmmeta
from fmmeta.adaptation import command as adapt_command
from fmmeta.adaptation import folder as folders
from fmmeta.adaptation import model as models
from fmmeta.adaptation import predict, task_learner
from fmmeta.adaptation.folder import PARTIAL, support_digest
from fmmeta.adaptation.task_learner import TaskExamples, TaskLearner
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.evaluation.settings import AdaptConfig, PredictConfig
from fmmeta.learners.files import ADAPTER_FILE
from fmmeta.meta.multi_task import MultiTaskInnerLoop
from fmmeta.parallel.workers import create
from fmmeta.tasks.data.images import EncodedImage
from fmmeta.tasks.data.rows import Table
from tests.support.helpers import recorded, refusal, write_rows
from tests.support.launch import environment
from tests.support.messages import check_message
from tests.support.models import WORDS

LORA = {"lora_r": 4, "inner_steps": 3, "inner_lr": 0.5}
QUIET = Progress(enabled=False)


def supports_of(count: int, seed: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Tasks of 2 to 4 classes and 2 or 3 examples of each, of different lengths; the last has single ones."""
    rng, found = random.Random(seed), {}
    for number in range(count):
        words, shots = rng.sample(WORDS, rng.choice([2, 3, 4])), rng.choice([2, 3])
        found[f"task {number}"] = [
            (f"{word} {' '.join(rng.sample(WORDS, rng.randint(1, 4)))}", f"class {word}")
            for word in words
            for _ in range(1 if number == count - 1 else shots)
        ]
    return found


SUPPORTS = supports_of(5)
SOME = {name: SUPPORTS[name] for name in ("task 0", "task 1")}
ONE = {"task 0": SUPPORTS["task 0"]}
ABOUT, NOT = ({label: f"{word} {label}" for _, label in ONE["task 0"]} for word in ("about", "not"))
TEXTS = [f"{word} {WORDS[10]}" for word in WORDS[:5]]


def directory_of(folder: Path, supports=SUPPORTS) -> Path:
    """A directory with a file for each task."""
    folder.mkdir()
    for name, pairs in supports.items():
        write_rows(folder / f"{name}.jsonl", [{"text": text, "label": label} for text, label in pairs])
    return folder


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def apart(one: Path, other: Path) -> float:
    """The largest difference of the weights of two adapter folders."""
    first, second = adapters(one), adapters(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pooling": "mean", "head_init": "prototype", "inner_optimizer": "momentum"},
        {"pooling": "mean", "inner_lr_groups": ["head=3", "*.layer.0=0.5"], "tokens_per_pass": 150},
        {"inner_optimizer": "adamw", "inner_lr": 0.01, "inner_epsilon": 1e-3, "micro_batch_size": 4},
        {
            "peft_config": '{"use_rslora": true, "rank_pattern": {"layer.0.*": 2},'
            ' "alpha_pattern": {"query": 3}}'
        },
    ],
    ids=["zero", "prototype", "rates", "adamw", "patterns"],
)
def test_every_task_equals_the_single_adaptation(bert, tmp_path, settings):
    """Weights, number of steps, accuracy on examples left out, files and answers."""
    flags = {**LORA, **settings}
    models = fmmeta.adapt_many(bert, SUPPORTS, output_dir=tmp_path / "many", **flags)
    assert (list(models), models.failed) == (sorted(SUPPORTS), {})
    for name in SUPPORTS if not settings else ("task 1", "task 4"):
        alone = fmmeta.adapt(bert, SUPPORTS[name], output_dir=tmp_path / name, **flags)
        together, folder = models[name], tmp_path / "many" / name
        assert apart(folder, tmp_path / name) < 1e-5
        assert names_in(folder) == names_in(tmp_path / name)
        assert f"\n# {name}\n" in (folder / "README.md").read_text()
        for fact in ("inner_steps", "left_out", "labels"):
            assert getattr(together, fact) == getattr(alone, fact)
        for one, wanted in zip(together.predict(TEXTS), alone.predict(TEXTS), strict=True):
            assert one == replace(wanted, score=pytest.approx(wanted.score, abs=1e-5))
    if not settings:  # tasks of a pass take different numbers of steps
        assert len({models[name].inner_steps for name in SUPPORTS}) > 1


def test_adamw_differs_from_the_single_adaptation_by_amplified_rounding_alone(bert, monkeypatch):
    """At balanced classes and a head of zeros the gradient of its bias is 0, and 2e-8 computed in fp32. AdamW
    divides it by |g| + epsilon, so that at 1e-8 its rounding moves the bias by a share of the rate. In fp64
    the same steps give equal weights; in fp32 a higher epsilon does, as above.
    """
    real = create.load_learner

    def load(*args):
        torch.set_default_dtype(torch.float32)  # the same initial weights
        learner = real(*args).double()
        torch.set_default_dtype(torch.float64)
        return learner

    monkeypatch.setattr(create, "load_learner", load)
    flags = {"inner_optimizer": "adamw", "inner_lr": 0.01, "inner_epsilon": 1e-8, "early_stopping": False}
    settings = AdaptConfig(model_name_or_path=str(bert), **{**LORA, **flags})
    try:
        together = TaskLearner(settings, 4, QUIET)
        tasks = [encoded(together, name, SUPPORTS[name]) for name in SOME]
        assert [len(one.task.labels) for one in tasks] == [3, 4]
        learned = {one.task.name: one.weights for one in together.learn(tasks)}
        for one in tasks:
            alone = TaskLearner(settings, len(one.task.labels), QUIET)
            (wanted,) = alone.learn([encoded(alone, one.task.name, SUPPORTS[one.task.name])])
            torch.testing.assert_close(learned[one.task.name], wanted.weights, atol=1e-6, rtol=0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_language_models_learn_many_tasks_and_answer_rows_of_them(llama, tmp_path):
    supports = {name: [(text, label[-2:]) for text, label in pairs] for name, pairs in SUPPORTS.items()}
    flags = {**LORA, "task_type": "causal_lm", "inner_steps": 20, "early_stopping": False}
    out = tmp_path / "many"
    models = fmmeta.adapt_many(llama, supports, output_dir=out, **flags)
    for name in SOME:
        alone = fmmeta.adapt(llama, supports[name], output_dir=tmp_path / name, **flags)
        assert apart(out / name, tmp_path / name) < 1e-5
        assert models[name].predict(TEXTS, 4) == alone.predict(TEXTS, 4)
    rows = [{"input": text, "adapter": name} for text in TEXTS[:2] for name in supports]
    lines, error = answers_of(out, rows, tmp_path, max_new_tokens=4)
    assert not error
    for row, line in zip(rows, lines, strict=True):
        assert line["output"] == models[row["adapter"]].predict([row["input"]], 4)[0].output
    assert len({line["output"] for line in lines}) > 1


@pytest.mark.slow
def test_whole_models_and_the_builtin_model_learn_many_tasks(bert, tmp_path):
    """Without LoRA one task at a time; the built-in model's folders hold their base under its final path."""
    some = dict(list(SUPPORTS.items())[:3])
    whole = fmmeta.adapt_many(bert, some, output_dir=tmp_path / "whole", inner_steps=2)
    tiny = fmmeta.adapt_many("tiny", some, output_dir=tmp_path / "tiny", **LORA)
    for name, support in some.items():
        alone = fmmeta.adapt(bert, support, inner_steps=2)
        assert [one.score for one in whole[name].predict(TEXTS)] == pytest.approx(
            [one.score for one in alone.predict(TEXTS)], abs=1e-6
        )
        stored = json.loads((tmp_path / "tiny" / name / "adapter_config.json").read_text())
        assert stored["base_model_name_or_path"] == str(tmp_path / "tiny" / name / "base")
        assert tiny[name].inner_steps == fmmeta.adapt("tiny", support, **LORA).inner_steps


def encoded(learner: TaskLearner, name: str, pairs) -> task_learner.Encoded:
    """A task as the learner sees it."""
    values, (texts, labels) = ["{}"] * len(pairs), map(list, zip(*pairs, strict=True))
    columns = Table(input=texts, target=labels, values=values)
    return learner.encode(TaskExamples(name, columns, tuple(sorted(set(columns.target)))))


@pytest.mark.parametrize("kind", ["element", "table"])
def test_rates_belong_to_the_same_elements_of_every_task(bert, kind):
    settings = AdaptConfig(model_name_or_path=str(bert), **LORA)
    learner, draw = TaskLearner(settings, 3, QUIET), torch.Generator().manual_seed(0)
    assert learner.loop is not None
    worker, theta, rates = learner.model.worker, learner.theta, learner.inner.rates
    layers = rates.table * torch.rand(len(rates.layers.names), generator=draw)
    drawn = torch.rand(len(theta), generator=draw) if kind == "element" else layers
    inner = replace(learner.inner, rates=replace(rates, **{kind: drawn}))
    sets = [
        learner.model.batcher.split(encoded(learner, name, pairs[:4]).examples)
        for name, pairs in SOME.items()
    ]
    together = MultiTaskInnerLoop(inner, learner.loop.axis).adapt(worker, theta, sets, [3, 2])
    for support, steps, (_, weights) in zip(sets, (3, 2), together, strict=True):
        replace(inner, steps=steps).adapt(worker, theta, support)
        alone = worker.read()
        worker.write(theta)
        for name, value in weights.items():
            assert torch.allclose(value, worker.gather_param(alone, name, tuple(value.shape)), atol=1e-6)


def test_passes_are_cut_by_tokens_and_by_memory(bert, monkeypatch):
    settings = AdaptConfig(model_name_or_path=str(bert), **LORA)
    learner = TaskLearner(settings, 4, QUIET)
    sets = [encoded(learner, name, pairs).examples for name, pairs in SUPPORTS.items()]
    sizes = [(len(rows), max(len(row.input_ids) for row in rows)) for rows in sets]
    for budget in (1, 600, 1200, 10**6):
        learner.settings = replace(settings, tokens_per_pass=budget)
        passes = learner._passes(sets)
        assert sorted(number for one in passes for number in one) == list(range(len(sets)))
        for numbers in passes:
            rows, tokens = (max(sizes[number][part] for number in numbers) for part in (0, 1))
            assert len(numbers) == 1 or len(numbers) * rows * tokens <= budget
    assert len(passes) == 1
    of_task = 4 * 5 * sum(torch.Size(shape).numel() for shape in learner.model.worker.trained_shapes.values())
    monkeypatch.setattr(task_learner, "host_bytes", lambda ranks: 4 * of_task)
    assert max(map(len, TaskLearner(settings, 4, QUIET)._passes(sets))) == 2
    monkeypatch.setattr(task_learner, "host_bytes", lambda ranks: of_task - 1)
    check_message(refusal(TaskLearner, settings, 4, QUIET), "lora_r=4", "lower --lora_r")


def test_bad_tasks_are_named_and_the_others_are_learned(bert, tmp_path, capsys, terminal):
    long, out = "n" * 201, tmp_path / "out"
    bad = {"empty": [], "one class": [("a", "x"), ("b", "x")], long: SUPPORTS["task 1"]}
    tasks = directory_of(tmp_path / "tasks", {**SUPPORTS, **bad})
    (tasks / "vanished.jsonl").symlink_to(tasks / "nowhere.jsonl")  # listed, and cannot be opened
    write_rows(tasks / "task 0.csv", [{"text": "a", "label": "x"}])
    (tasks / ".jsonl").write_text("{}")  # hidden files are no tasks
    (tasks / "notes.txt").write_text("no data file")
    settings = AdaptConfig(model_name_or_path=str(bert), support=str(tasks), output_dir=str(out), **LORA)
    said = refusal(adapt_command.run, settings)
    check_message(said, f"support={tasks}: 5 of 9 tasks failed", "run the same command again")
    assert sorted(path.name for path in out.iterdir()) == ["task 1", "task 2", "task 3", "task 4"]
    assert "".join(capsys.readouterr()).count("task 0 has several files") == 1
    for name in (*(f"{name}.jsonl" for name in (*bad, "vanished")), "task 0.csv"):
        (tasks / name).unlink()
    adapt_command.run(settings)
    assert sorted(path.name for path in out.iterdir()) == sorted(SUPPORTS)


def test_reasons_of_failed_tasks(bert, tmp_path):
    far = [(text * 3, label) for text, label in SUPPORTS["task 2"]]
    nowhere = tmp_path / "nowhere.jsonl"
    bad = {
        "none": ([], ("none=[]", "give pairs")),
        "../up": (far, ("'../up'", "rename it")),
        "": (far, ("''", "rename it")),
        "tab\t": (far, ("control character", "rename it")),
        "no file": (nowhere, (f"support={nowhere}", "restore it")),
        "number": (3, ("number=3 holds no rows", "give pairs")),
    }
    supports = {**SOME, "long rows": far, **{name: support for name, (support, _) in bad.items()}}
    models = fmmeta.adapt_many(bert, supports, output_dir=tmp_path / "out", **LORA)
    assert list(models) == ["long rows", "task 0", "task 1"]
    for name, (_, parts) in bad.items():
        check_message(models.failed[name], *parts)
        check_message(refusal(models.__getitem__, name), "was not learned")
    with pytest.raises(KeyError):
        models["unknown"]
    models = fmmeta.adapt_many(bert, {"far": far}, output_dir=tmp_path / "far", lora_r=4, inner_lr=3e38)
    check_message(models.failed["far"], "inner_lr=3e+38", "lower --inner_lr")


@pytest.mark.parametrize("function", ["write_folder", "publish"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_command_resumes_without_a_lost_or_doubled_task(
    bert, undisturbed, tmp_path, monkeypatch, function, error
):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        recorded(patch, folders, function, at=2, error=error)
        with pytest.raises((KeyboardInterrupt, UsageError)):
            fmmeta.adapt_many(bert, SUPPORTS, output_dir=out, **ALL_STEPS)
    (out / f".task 4{PARTIAL}" / "merged").mkdir(parents=True)  # as SIGKILL leaves it
    complete = {path.name: path.stat().st_ino for path in out.iterdir() if not path.name.startswith(".")}
    assert len(complete) == 2
    models = fmmeta.adapt_many(bert, SUPPORTS, output_dir=out, **ALL_STEPS)
    assert sorted(models) == sorted(path.name for path in out.iterdir()) == sorted(SUPPORTS)
    assert complete.items() <= {path.name: path.stat().st_ino for path in out.iterdir()}.items()
    for name in SUPPORTS:
        assert apart(out / name, undisturbed / name) < 1e-5


ALL_STEPS = {**LORA, "early_stopping": False}


@pytest.fixture(scope="module")
def undisturbed(bert, tmp_path_factory):
    """The folder of a command that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    fmmeta.adapt_many(bert, SUPPORTS, output_dir=folder, **ALL_STEPS)
    return folder


def test_only_partial_folders_of_the_tasks_are_removed(bert, tmp_path):
    out = tmp_path / "out"
    other, first, second, bad = (out / f".{name}{PARTIAL}" for name in ("rsync", "task 0", "task 1", "bad"))
    for folder in (other, bad):  # of another program, and of a task that fails now
        folder.mkdir(parents=True)
    first.write_text("a file")
    flags = {**LORA, "inner_steps": 1, "early_stopping": False, "output_dir": out}
    models = fmmeta.adapt_many(bert, {**SOME, "bad": [("a", "x")]}, **flags)
    assert list(models) == ["task 1"]
    parts = f"output_dir={out}", f"{first.name} is no folder", "move it away"
    check_message(models.failed["task 0"], *parts)
    assert sorted(out.glob(".*")) == sorted([other, first])
    first.unlink()
    second.mkdir()  # of a process that was killed when the task was complete
    assert list(fmmeta.adapt_many(bert, SOME, **flags)) == [*SOME]
    assert [*out.glob(".*")] == [other]


@pytest.mark.slow
def test_a_killed_process_resumes(bert, undisturbed, tmp_path):
    """SIGKILL as soon as 1, 2, ... folders are there."""
    out = tmp_path / "out"
    flags = {"model_name_or_path": bert, "support": directory_of(tmp_path / "tasks"), "output_dir": out}
    flags |= {"lora_r": 4, "inner_steps": 3, "inner_lr": 0.5}
    words = [f"--{key}={value}" for key, value in flags.items()]
    command = [sys.executable, "-m", "fmmeta", "adapt", *words, "--no_early_stopping"]
    for wanted in (1, 3):
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
        while process.poll() is None and len(list(out.glob("task*"))) < wanted:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for path in out.glob("task*"):
            assert {"fmmeta.json", "README.md"} <= {*names_in(path)}
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in out.iterdir()) == sorted(SUPPORTS)
    assert all(apart(out / name, undisturbed / name) < 1e-5 for name in SUPPORTS)


def test_folders_of_other_settings_or_examples_are_not_taken_for_complete(bert, tmp_path):
    out = tmp_path / "out"
    fmmeta.adapt_many(bert, SOME, output_dir=out, **LORA)
    check_message(
        refusal(fmmeta.adapt_many, bert, SOME, output_dir=out, **{**LORA, "inner_lr": 0.25}),
        "inner_lr 0.5 -> 0.25",
        "another output_dir",
    )
    same = {"gradient_checkpointing": True, "attn_implementation": "eager", "text_column": "text"}
    for more in ({"micro_batch_size": 7, "tokens_per_pass": 9}, same):
        assert len(fmmeta.adapt_many(bert, SOME, output_dir=out, **more, **LORA)) == 2
    (out / "foreign").mkdir()
    (out / "file").write_text("")
    others = dict.fromkeys(("task 0", "foreign", "file", "new"), SOME["task 1"])
    models = fmmeta.adapt_many(bert, others, output_dir=out, **LORA)
    assert list(models) == ["new"]
    for name, parts in (
        ("task 0", ("task 0 was learned from other examples", "remove the folder")),
        ("foreign", ("foreign is there", "move it away")),
        ("file", ("file is there", "move it away")),
    ):
        check_message(models.failed[name], *parts)


def test_folders_learned_from_other_weights_are_not_taken_for_complete(bert, tmp_path):
    model, out = shutil.copytree(bert, tmp_path / "model"), tmp_path / "out"
    fmmeta.adapt_many(model, SOME, output_dir=out, **LORA)
    assert list(fmmeta.adapt_many(model, SOME, output_dir=out, **LORA)) == [*SOME]
    file = model / "model.safetensors"
    save_file({name: 0.9 * one for name, one in load_file(file).items()}, file, {"format": "pt"})
    check_message(
        refusal(fmmeta.adapt_many, model, SOME, output_dir=out, **LORA),
        "task 0 was learned from other weights",
        "another output_dir",
    )


@pytest.mark.parametrize(
    ("settings", "before", "after", "parts"),
    [
        ({}, ABOUT, NOT, ("label_names", '"not class')),
        ({"lora_r": None}, {"r": 2}, {"r": 3}, ("peft_config", '"r": 2')),
    ],
    ids=["descriptions", "options of adapters"],
)
def test_folders_learned_with_another_file_are_not_taken_for_complete(
    bert, tmp_path, settings, before, after, parts
):
    file = tmp_path / "file.json"
    given = {**LORA, **settings, parts[0]: str(file), "output_dir": tmp_path / "out"}
    file.write_text(json.dumps(before))
    fmmeta.adapt_many(bert, ONE, **given)
    assert list(fmmeta.adapt_many(bert, ONE, **given)) == [*ONE]  # complete
    file.write_text(json.dumps(after))
    check_message(refusal(fmmeta.adapt_many, bert, ONE, **given), *parts, "another output_dir")


def test_other_content_of_an_image_file_is_another_example(tmp_path):
    file = tmp_path / "0.png"
    table = Table(["c"], [""], [""], ["0.png"], ["c"], image=[EncodedImage(str(file))], values=["{}"])
    digests = {support_digest(table)}  # without the file
    for content in (b"one", b"other"):
        file.write_bytes(content)
        digests.add(support_digest(table))
    assert len(digests) == 3


def test_one_task_is_not_adapted_to_by_several_processes(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    file, out = write_rows(tmp_path / "s.jsonl", [{"text": "a", "label": "b"}]), tmp_path / "out"
    check_message(
        refusal(adapt_command.run, AdaptConfig(support=str(file), output_dir=str(out))),
        f"support={file} is one task",
        "2 were started",
        "start one, or give a directory",
    )
    assert not out.exists()


def test_wrong_arguments_are_refused(tmp_path):
    tasks, out = directory_of(tmp_path / "tasks"), {"output_dir": tmp_path / "out"}
    many, query = fmmeta.adapt_many, str(tasks / "task 0.jsonl")
    for call, given, parts in (
        (many, {"supports": [("a", "b")], **out}, ("supports=[('a', 'b')]", "give {name")),
        (many, {"supports": {3: []}, **out}, ("the name 3", "give a text")),
        (many, {"supports": {}, **out}, ("holds no tasks", "examples for each")),
        (many, {"supports": SOME, "output_dir": None}, ("output_dir is missing", "name a folder")),
        *(
            (many, {"supports": SOME, **out, name: "rows.csv"}, (f"{name}=", "goes with one", "use adapt"))
            for name in ("query", "support")
        ),
        (fmmeta.adapt, {"support": tasks}, (f"support={tasks} is a directory", "adapt_many")),
    ):
        check_message(refusal(call, "tiny", **given), *parts)
    check_message(refusal(AdaptConfig, support=str(tasks), query=query), "query=", "--adapters")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, bert):
    """A directory with adapters of two ranks and different layers, damaged ones, folders of other kinds."""
    folder = tmp_path_factory.mktemp("mixed") / "adapters"
    fmmeta.adapt_many(bert, dict(list(SUPPORTS.items())[:3]), output_dir=folder, **LORA)
    patterns = '{"rank_pattern": {"key": 5}, "alpha_pattern": {"layer.0.*": 30}, "use_rslora": true}'
    wide = {**LORA, "lora_r": 7, "lora_target_modules": ["all-linear"], "peft_config": patterns}
    for name, model, flags in (
        *((name, bert, wide) for name in ("task 3", "task 4")),
        ("another base", "tiny", LORA),
        ("whole", bert, {"inner_steps": 1}),
    ):
        fmmeta.adapt(model, SUPPORTS.get(name, SUPPORTS["task 0"]), output_dir=folder / name, **flags)
    weights, config = adapters(folder / "task 0"), folder / "task 0" / "adapter_config.json"
    head = {name: torch.full_like(one, 3e38) for name, one in weights.items() if "lora_" not in name}
    assert head
    damaged = {
        "nan": {name: value * torch.nan for name, value in weights.items()},
        "infinite": {**weights, **head},  # its scores are not finite
        "dora": {"use_dora": True},
        "pattern": {"alpha_pattern": {"(a+)+$": 3}},
        "0": {},
        "damaged": {},
    }
    for name, content in damaged.items():
        shutil.copytree(folder / "task 0", folder / name)
        if name in ("nan", "infinite"):
            save_file(content, folder / name / ADAPTER_FILE)
        else:
            changed = json.loads(config.read_text()) | content
            (folder / name / "adapter_config.json").write_text(json.dumps(changed))
    os.truncate(folder / "damaged" / ADAPTER_FILE, (folder / "0" / ADAPTER_FILE).stat().st_size - 50)
    for outside in (folder / "foreign", folder.parent / "outside"):
        outside.mkdir()
    (folder / "link").symlink_to(folder.parent / "outside")
    return folder


def answers_of(folder: Path, rows, tmp_path: Path, **settings):
    """Lines of output for these rows, and the error at the end."""
    source, target, text = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "answers.jsonl", ""
    try:
        predict.run(PredictConfig(adapters=str(folder), input=str(source), output=str(target), **settings))
    except UsageError as error:
        text = str(error)
    return [json.loads(line) for line in target.read_text().splitlines()], text


@pytest.mark.parametrize("rows_in_pass", [1, 5, 25])
def test_rows_of_many_adapters_get_the_answers_of_their_models(mixed, tmp_path, rows_in_pass, monkeypatch):
    """Rows of all adapters share a pass."""
    rows = [{"text": text, "adapter": name} for name in SUPPORTS for text in TEXTS]
    random.Random(rows_in_pass).shuffle(rows)
    passes = recorded(monkeypatch, models, "collate")
    lines, error = answers_of(mixed, rows, tmp_path, micro_batch_size=rows_in_pass)
    assert not error
    assert [len(one.args[0]) for one in passes] == [rows_in_pass] * (25 // rows_in_pass)
    alone = {name: fmmeta.load(mixed / name) for name in SUPPORTS}
    for row, line in zip(rows, lines, strict=True):
        (wanted,) = alone[row["adapter"]].predict([row["text"]])
        assert line == {**row, "label": wanted.output, "score": pytest.approx(wanted.score, abs=1e-5)}


def test_the_adapter_that_was_used_longest_ago_leaves_the_memory(mixed, tmp_path, monkeypatch):
    calls = recorded(monkeypatch, predict.AdapterDirectory, "_load")
    names = ["task 0", "task 1", "task 0", "task 2", "task 2", "task 0", "task 1"]
    rows = [{"text": TEXTS[0], "adapter": name} for name in names]
    for most, loaded in (  # loaded again only if they were dropped
        ({"adapters_in_memory": 2}, ["task 0", "task 1", "task 2", "task 1"]),
        ({}, ["task 0", "task 1", "task 2"]),
    ):
        calls.clear()
        answers_of(mixed, rows, tmp_path, micro_batch_size=1, **most)
        assert [one.args[1] for one in calls] == loaded


def test_adapters_are_read_again_when_their_files_change(mixed, tmp_path, capsys, terminal):
    """Those that could not be used are tried again, and changed weights are read."""
    later, row = tmp_path / "later", predict.Input(TEXTS[0], {"text": TEXTS[0]}, "later")
    for name in ("task 0", "later"):
        shutil.copytree(mixed / "task 0", tmp_path / name)
    (later / ADAPTER_FILE).unlink()
    adapters = predict.AdapterDirectory(PredictConfig(adapters=str(tmp_path)))
    assert [isinstance(adapters.answer([row])[0], str) for _ in range(2)] == [True, True]
    assert capsys.readouterr().err.count("adapter later: ") == 1
    for name in ("task 0", "task 1"):
        shutil.rmtree(later)
        shutil.copytree(mixed / name, later)
        (wanted,) = fmmeta.load(mixed / name).predict([row.text])
        assert adapters.answer([row]) == [replace(wanted, score=pytest.approx(wanted.score, abs=1e-5))]


def test_adapters_that_cannot_be_used_are_named_and_the_others_answer(mixed, tmp_path):
    bad = {
        "damaged": "adapter_model.safetensors cannot be read",
        "nan": "NaNs",
        "infinite": "with this adapter: ",
        "dora": "another kind than plain LoRA",
        "pattern": "alpha_pattern is not one that fmmeta writes",
        "foreign": "holds no adapter of fmmeta",
        "another base": "differs from the other adapters",
        "whole": "give a whole model to --model_name_or_path",
        "link": "leaves its folder",
        "../adapters/task 0": "is no folder in it",
        "missing": "is no folder in it",
        "b" * 300: "is no folder in it",  # too long for one
    }
    names = ["another base", "task 1", *bad, "task 4", 0]  # a number names a folder too
    rows = [{"text": TEXTS[0], "adapter": name} for name in names]
    lines, error = answers_of(mixed, rows, tmp_path)
    parts = f"{len(bad) + 1} of {len(rows)} inputs have no answer", f"{len(bad)} adapters cannot be used"
    check_message(error.replace(str(mixed), "DIR"), *parts, f" {60 * 'b'}, ")
    for row, line in zip(rows, lines, strict=True):
        assert line["adapter"] == str(row["adapter"])
        assert bad.get(row["adapter"], "") in line.get("error", "")
        assert ("label" in line) == (row["adapter"] not in bad)


@pytest.mark.parametrize("order", [1, -1])
def test_the_settings_of_most_adapters_are_those_of_a_pass(bert, tmp_path, order):
    """Also where the first row names another adapter, and where its folder is the first one."""
    flags = {**LORA, "inner_steps": 1, "early_stopping": False}
    short = {"another": SUPPORTS["task 0"]}
    fmmeta.adapt_many(bert, short, output_dir=tmp_path / "out", max_length=8, **flags)
    fmmeta.adapt_many(bert, SOME, output_dir=tmp_path / "out", **flags)
    rows = [{"text": TEXTS[0], "adapter": name} for name in ("another", "task 0", "task 1")][::order]
    lines, error = answers_of(tmp_path / "out", rows, tmp_path, micro_batch_size=1)
    assert "1 of 3 inputs" in error
    assert [line["adapter"] for line in lines if "label" in line] == ["task 0", "task 1"][::order]
    check_message(
        next(line["error"] for line in lines if "error" in line), "max_length 8 and not 128", "another"
    )


def test_directories_without_adapters_and_with_a_model_are_refused(tmp_path):
    (tmp_path / "adapters" / "empty").mkdir(parents=True)
    folder = str(tmp_path / "adapters")
    without = PredictConfig(adapters=folder, output=str(tmp_path / "o"))
    for call, given, parts in (
        (partial(predict.run, without), {}, (f"adapters={folder} has no folder", "give the output_dir")),
        (partial(PredictConfig, "x"), {"adapters": folder}, ("adapters=", "leave one out")),
        (PredictConfig, {"adapters": "nowhere"}, ("adapters=nowhere", "give the output_dir")),
    ):
        check_message(refusal(call, **given), *parts)


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("in.jsonl", '{"text": "a"}', ("in.jsonl:1 names no adapter under adapter", "--adapter_column")),
        ("in.jsonl", '{"text": "a", "adapter": ["0"]}', ("names no adapter under adapter", "--adapter_")),
        ("in.txt", "plain", ("in.txt:1 names no adapter", "write JSON objects")),
    ],
)
def test_rows_without_an_adapter_are_refused(mixed, tmp_path, name, text, parts):
    (tmp_path / name).write_text(f"{text}\n")
    given = PredictConfig(adapters=str(mixed), input=str(tmp_path / name), output=str(tmp_path / "o"))
    check_message(refusal(predict.run, given), *parts)
