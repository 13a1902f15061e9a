"""`fmmeta.adapt_many`, `fmmeta adapt --support DIRECTORY` and `fmmeta predict --adapters`: every task gets
the model that `adapt` gives it alone, whatever happens to the others.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fmmeta
from fmmeta.adaptation import command as adapt_command
from fmmeta.adaptation import many, predict, task_learner
from fmmeta.adaptation.folder import support_digest
from fmmeta.adaptation.many import PARTIAL
from fmmeta.adaptation.task_learner import TaskExamples, TaskLearner
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.evaluation.settings import AdaptConfig, PredictConfig
from fmmeta.meta.multi_task import MultiTaskInnerLoop
from fmmeta.models.files import ADAPTER_FILE
from fmmeta.parallel.workers import create
from fmmeta.tasks.data.images import EncodedImage
from fmmeta.tasks.data.rows import Table
from tests.support.helpers import refusal, write_rows
from tests.support.launch import environment, python
from tests.support.messages import check_message
from tests.support.models import WORDS

LORA = {"lora_r": 4, "inner_steps": 3, "inner_lr": 0.5}


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
        {"inner_optimizer": "adamw", "inner_lr": 0.01, "inner_epsilon": 1e-3},
        {"inner_lr_schedule": "linear", "micro_batch_size": 4},
        {
            "peft_config": '{"use_rslora": true, "rank_pattern": {"layer.0.*": 2},'
            ' "alpha_pattern": {"query": 3}}'
        },
    ],
    ids=["zero", "prototype", "rates", "adamw", "schedule", "patterns"],
)
def test_every_task_equals_the_single_adaptation(bert, tmp_path, settings):
    """Weights, number of steps, accuracy on examples left out, files and answers."""
    flags = {**LORA, **settings}
    models = fmmeta.adapt_many(bert, SUPPORTS, output_dir=tmp_path / "many", **flags)
    assert (list(models), models.failed) == (sorted(SUPPORTS), {})
    steps = set()
    for name, support in SUPPORTS.items():
        alone = fmmeta.adapt(bert, support, output_dir=tmp_path / name, **flags)
        assert apart(tmp_path / "many" / name, tmp_path / name) < 1e-5
        assert names_in(tmp_path / "many" / name) == names_in(tmp_path / name)
        assert f"\n# {name}\n" in (tmp_path / "many" / name / "README.md").read_text()
        together = models[name]
        assert (together.inner_steps, together.left_out, together.labels) == (
            alone.inner_steps,
            alone.left_out,
            alone.labels,
        )
        answers, wanted = together.predict(TEXTS), alone.predict(TEXTS)
        assert [one.output for one in answers] == [one.output for one in wanted]
        assert [one.score for one in answers] == pytest.approx([one.score for one in wanted], abs=1e-5)
        steps.add(alone.inner_steps)
    if not settings:
        assert len(steps) > 1  # tasks of a pass take different numbers of steps


@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.float64, 1e-8), (torch.float32, 1e-3)])
def test_adamw_differs_from_the_single_adaptation_by_amplified_rounding_alone(
    bert, monkeypatch, dtype, epsilon
):
    """At balanced classes and a head of zeros the gradient of its bias is 0, and 2e-8 computed in fp32. AdamW
    divides it by |g| + epsilon, so that at 1e-8 its rounding moves the bias by a share of the rate. In fp64
    the same steps, or a higher epsilon in fp32, give equal weights.
    """
    real = create.load_learner

    def load(*args):
        torch.set_default_dtype(torch.float32)  # the same initial weights
        learner = real(*args).to(dtype)
        torch.set_default_dtype(dtype)
        return learner

    monkeypatch.setattr(create, "load_learner", load)
    flags = {"inner_optimizer": "adamw", "inner_lr": 0.01, "inner_epsilon": epsilon, "early_stopping": False}
    settings = AdaptConfig(model_name_or_path=str(bert), **{**LORA, **flags})
    try:
        together = TaskLearner(settings, 4, Progress(enabled=False))
        tasks = [encoded(together, name, SUPPORTS[name]) for name in ("task 0", "task 1")]
        assert [len(one.task.labels) for one in tasks] == [3, 4]
        learned = {one.task.name: one.weights for one in together.learn(tasks)}
        for one in tasks:
            alone = TaskLearner(settings, len(one.task.labels), Progress(enabled=False))
            (wanted,) = alone.learn([encoded(alone, one.task.name, SUPPORTS[one.task.name])])
            found = learned[one.task.name]
            assert found is not None
            assert wanted.weights is not None
            for name, value in wanted.weights.items():
                assert float((found[name] - value).abs().max()) < 1e-6, name
    finally:
        torch.set_default_dtype(torch.float32)


def test_language_models_learn_many_tasks(llama, tmp_path):
    supports = {name: [(text, label[-1]) for text, label in pairs] for name, pairs in SUPPORTS.items()}
    flags = {**LORA, "task_type": "causal_lm"}
    models = fmmeta.adapt_many(llama, supports, output_dir=tmp_path / "many", **flags)
    for name, support in list(supports.items())[:2]:
        alone = fmmeta.adapt(llama, support, output_dir=tmp_path / name, **flags)
        assert apart(tmp_path / "many" / name, tmp_path / name) < 1e-5
        assert models[name].predict(TEXTS, 4) == alone.predict(TEXTS, 4)


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
    columns = Table([], [], [], [text for text, _ in pairs], [label for _, label in pairs])
    return learner.encode(TaskExamples(name, columns, tuple(sorted(set(columns.target)))))


@pytest.mark.parametrize("kind", ["element", "layer"])
def test_rates_belong_to_the_same_elements_of_every_task(bert, kind):
    settings = AdaptConfig(model_name_or_path=str(bert), **LORA)
    learner, draw = TaskLearner(settings, 3, Progress(enabled=False)), torch.Generator().manual_seed(0)
    assert learner.loop is not None
    worker, theta, rates = learner.model.worker, learner.theta, learner.inner.rates
    if kind == "element":
        rates = replace(rates, element=torch.rand(len(theta), generator=draw))
    else:
        rates = replace(rates, table=rates.table * torch.rand(len(rates.layers.names), generator=draw))
    inner = replace(learner.inner, rates=rates)
    sets = [
        learner.model.batcher.split(encoded(learner, name, pairs[:4]).examples)
        for name, pairs in list(SUPPORTS.items())[:2]
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
    learner = TaskLearner(settings, 4, Progress(enabled=False))
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
    assert max(map(len, TaskLearner(settings, 4, Progress(enabled=False))._passes(sets))) == 2
    monkeypatch.setattr(task_learner, "host_bytes", lambda ranks: of_task - 1)
    check_message(refusal(TaskLearner, settings, 4, Progress(enabled=False)), "lora_r=4", "lower --lora_r")


def test_bad_tasks_are_named_and_the_others_are_learned(bert, tmp_path, capsys, terminal):
    tasks = directory_of(tmp_path / "tasks")
    (tasks / "empty.jsonl").write_text("")
    write_rows(tasks / "one class.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "x"}])
    (tasks / "vanished.jsonl").symlink_to(tasks / "nowhere.jsonl")  # listed, and cannot be opened
    write_rows(tasks / "task 0.csv", [{"text": "a", "label": "x"}])
    (tasks / ".jsonl").write_text("{}")  # hidden files are no tasks
    (tasks / "notes.txt").write_text("no data file")
    shutil.copy(tasks / "task 1.jsonl", tasks / f"{'n' * 201}.jsonl")
    out = tmp_path / "out"
    settings = AdaptConfig(model_name_or_path=str(bert), support=str(tasks), output_dir=str(out), **LORA)
    check_message(
        refusal(many.run, settings), f"support={tasks}: 5 of 9 tasks failed", "run the same command again"
    )
    assert sorted(path.name for path in out.iterdir()) == ["task 1", "task 2", "task 3", "task 4"]
    assert "".join(capsys.readouterr()).count("task 0 has several files") == 1
    for name in ("empty", "one class", "vanished", f"{'n' * 201}"):
        (tasks / f"{name}.jsonl").unlink()
    (tasks / "task 0.csv").unlink()
    many.run(settings)
    assert sorted(path.name for path in out.iterdir()) == sorted(SUPPORTS)


def test_reasons_of_failed_tasks(bert, tmp_path):
    supports = {
        **dict(list(SUPPORTS.items())[:1]),
        "none": [],
        "../up": SUPPORTS["task 1"],
        "": SUPPORTS["task 1"],
        "tab\t": SUPPORTS["task 1"],
        "no file": tmp_path / "nowhere.jsonl",
        "diverges": [(text * 3, label) for text, label in SUPPORTS["task 2"]],
        "number": 3,
    }
    models = fmmeta.adapt_many(bert, supports, output_dir=tmp_path / "out", **LORA)
    assert list(models) == ["diverges", "task 0"]
    parts = {
        "none": ("none=[]", "give pairs of text and class"),
        "../up": ("'../up'", "rename it"),
        "": ("''", "rename it"),
        "tab\t": ("control character", "rename it"),
        "no file": (f"support={tmp_path / 'nowhere.jsonl'}", "restore it"),
        "number": ("number=3", "give [(text, class), ...]"),
    }
    for name, text in parts.items():
        check_message(models.failed[name], *text)
        assert name not in models
        with pytest.raises(UsageError, match="was not learned"):
            models[name]
    with pytest.raises(KeyError):
        models["unknown"]
    models = fmmeta.adapt_many(
        bert, {"diverges": SUPPORTS["task 2"]}, output_dir=tmp_path / "far", lora_r=4, inner_lr=3e38
    )
    check_message(models.failed["diverges"], "inner_lr=3e+38", "lower --inner_lr")


@pytest.mark.parametrize("function", ["write_folder", "publish"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_command_resumes_without_a_lost_or_doubled_task(
    bert, tmp_path, monkeypatch, function, error
):
    flags = {**LORA, "early_stopping": False}
    fmmeta.adapt_many(bert, SUPPORTS, output_dir=tmp_path / "undisturbed", **flags)
    calls, original = [], getattr(many, function)

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise error
        return original(*args)

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(many, function, interrupted)
        with pytest.raises((KeyboardInterrupt, UsageError)):
            fmmeta.adapt_many(bert, SUPPORTS, output_dir=out, **flags)
    (out / f".task 4{PARTIAL}" / "merged").mkdir(parents=True)  # as SIGKILL leaves it
    complete = {path.name: path.stat().st_ino for path in out.iterdir() if not path.name.startswith(".")}
    assert len(complete) == 2
    models = fmmeta.adapt_many(bert, SUPPORTS, output_dir=out, **flags)
    assert sorted(models) == sorted(path.name for path in out.iterdir()) == sorted(SUPPORTS)
    assert complete.items() <= {path.name: path.stat().st_ino for path in out.iterdir()}.items()
    for name in SUPPORTS:
        assert apart(out / name, tmp_path / "undisturbed" / name) < 1e-5


def test_only_partial_folders_of_the_tasks_are_removed(bert, tmp_path):
    out, some = tmp_path / "out", dict(list(SUPPORTS.items())[:2])
    (out / ".rsync.partial").mkdir(parents=True)
    (out / ".rsync.partial" / "data").write_text("of another program")
    (out / f".task 0{PARTIAL}").write_text("a file")
    (out / f".bad{PARTIAL}").mkdir()  # of a task that fails now
    flags = {**LORA, "inner_steps": 1, "early_stopping": False}
    models = fmmeta.adapt_many(bert, {**some, "bad": [("a", "x")]}, output_dir=out, **flags)
    assert list(models) == ["task 1"]
    check_message(
        models.failed["task 0"], f"output_dir={out}", f".task 0{PARTIAL} is no folder", "move it away"
    )
    assert (out / ".rsync.partial" / "data").read_text() == "of another program"
    assert (out / f".task 0{PARTIAL}").read_text() == "a file"
    assert not (out / f".bad{PARTIAL}").exists()
    (out / f".task 0{PARTIAL}").unlink()
    assert list(fmmeta.adapt_many(bert, some, output_dir=out, **flags)) == ["task 0", "task 1"]


@pytest.mark.slow
def test_a_killed_process_resumes(bert, tmp_path):
    """SIGKILL as soon as 1, 2, ... folders are there."""
    supports = supports_of(6)
    tasks, out = directory_of(tmp_path / "tasks", supports), tmp_path / "out"
    flags = [f"--{key}={value}" for key, value in LORA.items()]
    words = [sys.executable, "-m", "fmmeta", "adapt", f"--model_name_or_path={bert}", f"--support={tasks}"]
    for wanted in (1, 3):
        process = subprocess.Popen(
            [*words, f"--output_dir={out}", *flags], env=environment(), stdout=subprocess.DEVNULL
        )
        while process.poll() is None and len(list(out.glob("task*"))) < wanted:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert all(
            (path / "fmmeta.json").is_file() and (path / "README.md").is_file() for path in out.glob("task*")
        )
    ended = subprocess.run(
        [*words, f"--output_dir={out}", *flags], env=environment(), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in out.iterdir()) == sorted(supports)
    models = fmmeta.adapt_many(bert, supports, output_dir=tmp_path / "undisturbed", **LORA)
    assert all(apart(out / name, tmp_path / "undisturbed" / name) < 1e-5 for name in models)


def test_folders_of_other_settings_or_examples_are_not_taken_for_complete(bert, tmp_path):
    out, some = tmp_path / "out", dict(list(SUPPORTS.items())[:2])
    fmmeta.adapt_many(bert, some, output_dir=out, **LORA)
    check_message(
        refusal(fmmeta.adapt_many, bert, some, output_dir=out, **{**LORA, "inner_lr": 0.25}),
        "inner_lr 0.5 -> 0.25",
        "another output_dir",
    )
    fmmeta.adapt_many(bert, some, output_dir=out, micro_batch_size=7, tokens_per_pass=9, **LORA)
    same = {"gradient_checkpointing": True, "attn_implementation": "eager", "text_column": "text"}
    assert len(fmmeta.adapt_many(bert, some, output_dir=out, **same, **LORA)) == 2
    (out / "foreign").mkdir()
    (out / "file").write_text("")
    others = {
        "task 0": some["task 1"],
        "foreign": some["task 0"],
        "file": some["task 0"],
        "new": some["task 1"],
    }
    models = fmmeta.adapt_many(bert, others, output_dir=out, **LORA)
    assert list(models) == ["new"]
    check_message(models.failed["task 0"], "task 0 was learned from other examples", "remove the folder")
    check_message(models.failed["foreign"], "foreign is there", "move it away")
    check_message(models.failed["file"], "file is there", "move it away")


def test_folders_learned_from_other_weights_are_not_taken_for_complete(bert, tmp_path):
    model, some = shutil.copytree(bert, tmp_path / "model"), dict(list(SUPPORTS.items())[:1])
    fmmeta.adapt_many(model, some, output_dir=tmp_path / "out", **LORA)
    assert list(fmmeta.adapt_many(model, some, output_dir=tmp_path / "out", **LORA)) == ["task 0"]
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: 0.9 * one for name, one in weights.items()}, model / "model.safetensors", {"format": "pt"}
    )
    message = refusal(fmmeta.adapt_many, model, some, output_dir=tmp_path / "out", **LORA)
    check_message(message, "task 0 was learned from other weights", "another output_dir")


def test_folders_learned_with_other_descriptions_are_not_taken_for_complete(bert, tmp_path):
    file, some = tmp_path / "names.json", dict(list(SUPPORTS.items())[:1])
    given = {"output_dir": tmp_path / "out", "label_names": str(file), **LORA}
    labels = sorted({label for _, label in some["task 0"]})
    file.write_text(json.dumps({label: f"about {label}" for label in labels}))
    fmmeta.adapt_many(bert, some, **given)
    assert list(fmmeta.adapt_many(bert, some, **given)) == ["task 0"]  # complete
    file.write_text(json.dumps({label: f"not {label}" for label in labels}))
    message = refusal(fmmeta.adapt_many, bert, some, **given)
    check_message(message.replace(str(tmp_path), "DIR"), "label_names", '"not class', "another output_dir")


def test_folders_learned_with_other_options_of_adapters_are_not_taken_for_complete(bert, tmp_path):
    file, some = tmp_path / "peft.json", dict(list(SUPPORTS.items())[:1])
    given = {**LORA, "output_dir": tmp_path / "out", "peft_config": str(file), "lora_r": None}
    file.write_text('{"r": 2}')
    fmmeta.adapt_many(bert, some, **given)
    assert list(fmmeta.adapt_many(bert, some, **given)) == ["task 0"]  # complete
    file.write_text('{"r": 3}')
    message = refusal(fmmeta.adapt_many, bert, some, **given)
    check_message(message.replace(str(tmp_path), "DIR"), "peft_config", '"r": 2', "another output_dir")


def test_other_content_of_an_image_file_is_another_example(tmp_path):
    file = tmp_path / "0.png"
    table = Table(["c"], [""], [""], ["0.png"], ["c"], image=[EncodedImage(str(file))])
    digests = set()
    for content in (b"one", b"other"):
        file.write_bytes(content)
        digests.add(support_digest(table))
    file.unlink()
    assert len({*digests, support_digest(table)}) == 3


def test_one_task_is_not_adapted_to_by_several_processes(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    file = write_rows(tmp_path / "s.jsonl", [{"text": "a", "label": "b"}])
    settings = AdaptConfig(support=str(file), output_dir=str(tmp_path / "out"))
    message = refusal(adapt_command.run, settings)
    check_message(message, f"support={file} is one task", "2 were started", "start one, or give a directory")
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_refused(bert, tmp_path):
    out = {"output_dir": tmp_path / "out"}
    check_message(
        refusal(fmmeta.adapt_many, bert, [("a", "b")], **out), "supports=[('a', 'b')]", "give {name"
    )
    check_message(refusal(fmmeta.adapt_many, bert, {3: []}, **out), "the name 3", "give a text")
    check_message(refusal(fmmeta.adapt_many, bert, {}, **out), "holds no tasks", "examples for each")
    check_message(
        refusal(fmmeta.adapt_many, bert, SUPPORTS, output_dir=None), "output_dir is missing", "name a folder"
    )
    tasks = directory_of(tmp_path / "tasks")
    check_message(refusal(fmmeta.adapt, bert, tasks), f"support={tasks} is a directory", "adapt_many")
    check_message(
        refusal(AdaptConfig, support=str(tasks), query=str(tasks / "task 0.jsonl")), "query=", "--adapters"
    )
    check_message(
        refusal(fmmeta.adapt, bert, SUPPORTS["task 0"], group_size="2"), "group_size=2", "leave them out"
    )
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, bert):
    """A directory with adapters of two ranks and different layers, damaged ones, folders of other kinds."""
    folder = tmp_path_factory.mktemp("mixed") / "adapters"
    fmmeta.adapt_many(bert, dict(list(SUPPORTS.items())[:3]), output_dir=folder, **LORA)
    patterns = '{"rank_pattern": {"key": 5}, "alpha_pattern": {"layer.0.*": 30}, "use_rslora": true}'
    wide = {**LORA, "lora_r": 7, "lora_target_modules": ["all-linear"], "peft_config": patterns}
    for name, support in list(SUPPORTS.items())[3:]:
        fmmeta.adapt(bert, support, output_dir=folder / name, **wide)
    for name in ("damaged", "nan", "dora"):
        shutil.copytree(folder / "task 0", folder / name)
    file = folder / "damaged" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    save_file(
        {name: value * torch.nan for name, value in adapters(folder / "nan").items()},
        folder / "nan" / "adapter_model.safetensors",
    )
    config = json.loads((folder / "dora" / "adapter_config.json").read_text())
    (folder / "dora" / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    shutil.copytree(folder / "task 0", folder / "pattern")
    patterns = {**config, "alpha_pattern": {"(a+)+$": 3}}
    (folder / "pattern" / "adapter_config.json").write_text(json.dumps(patterns))
    (folder / "foreign").mkdir()
    fmmeta.adapt("tiny", SUPPORTS["task 0"], output_dir=folder / "another base", **LORA)
    fmmeta.adapt(bert, SUPPORTS["task 0"], output_dir=folder / "whole", inner_steps=1)
    (folder.parent / "outside").mkdir()
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


@pytest.mark.parametrize("rows_in_pass", [1, 5, 64])
def test_rows_of_many_adapters_get_the_answers_of_their_models(mixed, tmp_path, rows_in_pass, monkeypatch):
    rows = [{"text": text, "adapter": name} for name in SUPPORTS for text in TEXTS]
    random.Random(rows_in_pass).shuffle(rows)
    calls, original = [], predict.read_adapter
    monkeypatch.setattr(predict, "read_adapter", lambda *args: calls.append(args[1]) or original(*args))
    memory = 2 if rows_in_pass == 1 else 64
    lines, error = answers_of(mixed, rows, tmp_path, micro_batch_size=rows_in_pass, adapters_in_memory=memory)
    assert not error
    models = {name: fmmeta.load(mixed / name) for name in SUPPORTS}
    for row, line in zip(rows, lines, strict=True):
        (wanted,) = models[row["adapter"]].predict([row["text"]])
        assert (line["text"], line["adapter"], line["label"]) == (row["text"], row["adapter"], wanted.output)
        assert line["score"] == pytest.approx(wanted.score, abs=1e-5)
    assert (len(calls) > len(SUPPORTS)) == (memory == 2)  # loaded again only if they were dropped


def test_the_adapter_that_was_used_longest_ago_leaves_the_memory(mixed, tmp_path, monkeypatch):
    calls, original = [], predict.read_adapter
    monkeypatch.setattr(predict, "read_adapter", lambda *args: calls.append(args[1]) or original(*args))
    names = ["task 0", "task 1", "task 0", "task 2", "task 2", "task 0", "task 1"]
    rows = [{"text": TEXTS[0], "adapter": name} for name in names]
    answers_of(mixed, rows, tmp_path, micro_batch_size=1, adapters_in_memory=2)
    assert calls == ["task 0", "task 1", "task 2", "task 1"]


def test_adapters_are_read_again_when_their_files_change(mixed, tmp_path, capsys, terminal):
    """Those that could not be used are tried again, and changed weights are read."""
    folder = tmp_path / "adapters"
    shutil.copytree(mixed / "task 0", folder / "task 0")
    shutil.copytree(mixed / "task 0", folder / "later")
    (folder / "later" / ADAPTER_FILE).unlink()
    adapters = predict.AdapterDirectory(PredictConfig(adapters=str(folder)))
    row = predict.Input(TEXTS[0], "later")
    assert [isinstance(adapters.answer([row])[0], str) for _ in range(2)] == [True, True]
    assert capsys.readouterr().err.count("adapter later: ") == 1
    shutil.copy(mixed / "task 0" / ADAPTER_FILE, folder / "later")
    (answer,), (wanted,) = adapters.answer([row]), fmmeta.load(mixed / "task 0").predict([row.text])
    assert answer == replace(wanted, score=answer.score)
    shutil.rmtree(folder / "later")
    shutil.copytree(mixed / "task 1", folder / "later")
    (answer,), (wanted,) = adapters.answer([row]), fmmeta.load(mixed / "task 1").predict([row.text])
    assert answer == replace(wanted, score=answer.score)
    assert answer.score == pytest.approx(wanted.score, abs=1e-5)


def test_one_pass_answers_rows_of_many_adapters(mixed, tmp_path, monkeypatch):
    seen, original = [], predict.collate
    monkeypatch.setattr(
        predict, "collate", lambda rows, *rest: seen.append(len(rows)) or original(rows, *rest)
    )
    answers_of(mixed, [{"text": TEXTS[0], "adapter": name} for name in SUPPORTS], tmp_path)
    assert seen == [len(SUPPORTS)]


def test_adapters_that_cannot_be_used_are_named_and_the_others_answer(mixed, tmp_path):
    bad = {
        "damaged": "adapter_model.safetensors cannot be read",
        "nan": "NaNs",
        "dora": "another kind than plain LoRA",
        "pattern": "alpha_pattern is not one that fmmeta writes",
        "foreign": "holds no adapter of fmmeta",
        "another base": "differs from the other adapters",
        "whole": "give a whole model to --model_name_or_path",
        "link": "leaves its folder",
        "../adapters/task 0": "is no folder in it",
        "missing": "is no folder in it",
    }
    rows = [{"text": TEXTS[0], "adapter": name} for name in ["another base", "task 1", *bad, "task 4"]]
    lines, error = answers_of(mixed, rows, tmp_path)
    check_message(
        error.replace(str(mixed), "DIR"), f"{len(bad) + 1} of {len(rows)} inputs", f"{len(bad)} adapters"
    )
    for row, line in zip(rows, lines, strict=True):
        assert line["adapter"] == row["adapter"]
        assert bad.get(row["adapter"], "") in line.get("error", "")
        assert ("label" in line) == (row["adapter"] not in bad)


@pytest.mark.parametrize("order", [1, -1])
def test_the_settings_of_most_adapters_are_those_of_a_pass(bert, tmp_path, order):
    """Also where the first row names another adapter, and where its folder is the first one."""
    flags = {**LORA, "inner_steps": 1, "early_stopping": False}
    short = {"another": SUPPORTS["task 0"]}
    fmmeta.adapt_many(bert, short, output_dir=tmp_path / "out", max_length=8, **flags)
    fmmeta.adapt_many(bert, dict(list(SUPPORTS.items())[:2]), output_dir=tmp_path / "out", **flags)
    rows = [{"text": TEXTS[0], "adapter": name} for name in ("another", "task 0", "task 1")][::order]
    lines, error = answers_of(tmp_path / "out", rows, tmp_path, micro_batch_size=1)
    assert "1 of 3 inputs" in error
    assert [line["adapter"] for line in lines if "label" in line] == ["task 0", "task 1"][::order]
    check_message(
        next(line["error"] for line in lines if "error" in line), "max_length 8 and not 128", "another"
    )


def test_a_number_names_the_folder_of_an_adapter(mixed, tmp_path):
    shutil.copytree(mixed / "task 0", tmp_path / "adapters" / "0")
    ((line,), error) = answers_of(tmp_path / "adapters", [{"text": TEXTS[0], "adapter": 0}], tmp_path)
    assert (line["adapter"], "label" in line, error) == ("0", True, "")
    message = refusal_of(tmp_path / "adapters", tmp_path, '{"text": "a", "adapter": ["0"]}\n')
    check_message(message, "names no adapter under adapter", "--adapter_column")


def test_a_directory_without_adapters_is_refused(tmp_path):
    (tmp_path / "adapters" / "empty").mkdir(parents=True)
    message = refusal_of(tmp_path / "adapters", tmp_path, '{"text": "a", "adapter": "empty"}\n')
    check_message(message, f"adapters={tmp_path}/adapters has no folder", "give the output_dir")


def test_rows_without_an_adapter_and_wrong_settings_are_refused(mixed, tmp_path):
    _, error = "", refusal_of(mixed, tmp_path, '{"text": "a"}\n')
    check_message(error.replace(str(tmp_path), "TMP"), "in.jsonl:1 names no adapter", "--adapter_column")
    error = refusal_of(mixed, tmp_path, "plain\n", "in.txt")
    check_message(error.replace(str(tmp_path), "TMP"), "in.txt:1 names no adapter", "write JSON objects")
    check_message(
        refusal(PredictConfig, "x", adapters=str(mixed)).replace(str(mixed), "DIR"),
        "adapters=",
        "leave one out",
    )
    check_message(refusal(PredictConfig, adapters="nowhere"), "adapters=nowhere", "give the output_dir")


def refusal_of(folder: Path, tmp_path: Path, text: str, name: str = "in.jsonl") -> str:
    (tmp_path / name).write_text(text)
    return refusal(
        predict.run,
        PredictConfig(adapters=str(folder), input=str(tmp_path / name), output=str(tmp_path / "o")),
    )


@pytest.mark.slow
def test_a_language_model_answers_rows_of_many_adapters(llama, tmp_path):
    supports = {name: [(text, label[-2:]) for text, label in pairs] for name, pairs in SUPPORTS.items()}
    flags = {**LORA, "task_type": "causal_lm", "inner_steps": 20}
    models = fmmeta.adapt_many(llama, supports, output_dir=tmp_path / "out", **flags)
    rows = [{"input": text, "adapter": name} for text in TEXTS[:2] for name in supports]
    lines, error = answers_of(tmp_path / "out", rows, tmp_path, max_new_tokens=4)
    assert not error
    for row, line in zip(rows, lines, strict=True):
        assert line["output"] == models[row["adapter"]].predict([row["input"]], 4)[0].output
    assert len({line["output"] for line in lines}) > 1


def test_adapters_that_give_no_answer_are_named(bert, tmp_path):
    """One whose scores are not finite, and a name that is too long for a folder."""
    fmmeta.adapt_many(bert, SUPPORTS, output_dir=tmp_path / "out", **LORA)
    file = tmp_path / "out" / "task 1" / ADAPTER_FILE
    tensors = load_file(file)
    head = {name: torch.full_like(one, 3e38) for name, one in tensors.items() if "lora_" not in name}
    assert head
    save_file({**tensors, **head}, file)
    rows = [{"text": TEXTS[0], "adapter": name} for name in ("task 0", "task 1", "b" * 300)]
    lines, error = answers_of(tmp_path / "out", rows, tmp_path)
    assert "label" in lines[0]
    assert lines[1]["error"].startswith("with this adapter: ")
    assert "is no folder in it" in lines[2]["error"]
    check_message(error, "2 of 3 inputs have no answer, since 2 adapters cannot be used", "b, task 1)")


def test_data_of_one_task_are_refused_beside_many(bert, tmp_path):
    for name in ("query", "support"):
        message = refusal(fmmeta.adapt_many, bert, SUPPORTS, output_dir=tmp_path, **{name: "rows.csv"})
        check_message(message, f"{name}=", "rows.csv", "goes with one task", "use adapt")


def test_the_command_reads_a_directory_and_answers(bert, tmp_path):
    tasks = directory_of(tmp_path / "tasks", dict(list(SUPPORTS.items())[:2]))

    def command(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return python(["-m", "fmmeta", *words], tmp_path, cwd=tmp_path, stdin=stdin)

    (tasks / "empty.jsonl").write_text("")
    flags = [f"--{key}={value}" for key, value in LORA.items()]
    ended = command("adapt", f"--model_name_or_path={bert}", "--support=tasks", "--output_dir=out", *flags)
    assert ended.returncode == 2
    assert "fmmeta: error: support=tasks: 1 of 3 tasks failed ('empty')" in ended.stderr
    assert "fmmeta: task 'empty' failed: " in ended.stdout
    rows = '{"text": "a", "adapter": "task 0"}\n{"text": "b", "adapter": "x"}\n'
    ended = command("predict", "--adapters=out", stdin=rows)
    assert ended.returncode == 2
    first, second = map(json.loads, ended.stdout.splitlines())
    assert (first["adapter"], second["adapter"]) == ("task 0", "x")
    assert {"label", "score"} <= first.keys()
    assert "error" in second
    assert "1 of 2 inputs have no answer" in ended.stderr
