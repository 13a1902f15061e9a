"""Joint training of classifiers: labels over the classes of all tasks, plain multi-task fine-tuning."""

import itertools
import json
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from fmmeta import Config, MetaTrainer
from fmmeta.learners.load import describe, load_tokenizer
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import number_classes
from fmmeta.tasks.sources.load import load_sources
from tests.support.helpers import write_rows
from tests.support.models import write_classes


def sources_of(*datasets, **settings):
    given = {"n_way": 2, "k_shot": 1, "num_query": 1, "algorithm": "joint", **settings}
    config = Config(dataset=[str(path) for path in datasets], **given)
    return load_sources(config, load_tokenizer(config, describe(config), print), print)


def classes_of(sources) -> list[str]:
    return list(map("/".join, sources.numbers))


def numbers_of(sources) -> dict[str, set[int]]:
    """Label numbers of each class, by the names of its task and its own."""
    found: dict[str, set[int]] = defaultdict(set)
    for task in (task for step in range(30) for task in Schedule(sources.train.items, 2, 0).meta_batch(step)):
        draw = number_classes(sources.numbers, sources.train.draw(task))
        assert [*draw.classes] == classes_of(sources)
        for row, label in (*draw.support, *draw.query):
            own = [draw.store.text(name, row) for name in ("task", "target")]
            data = task.name.split("/")[:-1] if "/" in task.name else []
            found["/".join([*data, *filter(None, own)])].add(label)
    return found


def tasks_file(path, tasks: int):
    """Tasks with classes of the same names."""
    numbers = itertools.product(range(tasks), range(3), range(4))
    return write_rows(
        path, [{"task": f"t{t}", "text": f"{t} {c} {i}", "label": f"c{c}"} for t, c, i in numbers]
    )


def test_a_class_has_one_number_in_all_episodes(tmp_path):
    """Equal names in other tasks and data sets are other classes."""
    classes, splits = write_classes(tmp_path / "classes.jsonl"), tmp_path / "splits.json"
    one, two = (tasks_file(tmp_path / f"{name}.jsonl", 6) for name in "ab")
    splits.write_text(json.dumps({"train": ["t0", "t1", "t2"], "valid": [], "test": []}))
    for sources, count in (
        (sources_of(classes), None),
        (sources_of(one, task_splits=str(splits)), 9),
        (sources_of(one, two), None),
    ):
        names = classes_of(sources)
        assert len(names) == len(set(names)) == (count or len(names))
        assert numbers_of(sources) == {name: {number} for number, name in enumerate(names)}
    assert len(names) == 3 * len(sources.train.items)
    assert not sources_of(classes, algorithm="fomaml").numbers


FIXED = {
    "algorithm": "joint",
    "n_way": 2,
    "k_shot": 2,
    "num_query": 3,
    "meta_batch_size": 3,
    "inner_steps": 2,
    "outer_steps": 4,
    "lr_scheduler_type": "constant",
    "eval_episodes": 4,
    "save_steps": 0,
    "max_grad_norm": 0.3,
}


@pytest.fixture
def run(tmp_path):
    """Trains on nine classes; the settings and the table of held-out tasks."""
    data = write_classes(tmp_path / "classes.jsonl", classes=9)

    def make(model, name="run", **settings):
        given = {**FIXED, "model_name_or_path": str(model), "dataset": [str(data)], **settings}
        config = Config(output_dir=str(tmp_path / name), **given)
        MetaTrainer(config).train()
        return config, json.loads((tmp_path / name / "run.json").read_text())["held_out"]

    return make


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("outer", "at_most"),
    [
        ({"outer_optimizer": "sgd", "outer_lr": 0.5, "weight_decay": 0.0}, 1e-5),
        ({"outer_lr": 3e-3, "adam_epsilon": 1e-4}, 1e-4),
    ],
)
def test_joint_training_equals_plain_fine_tuning(run, bert, tmp_path, outer, at_most):
    """A plain torch loop over a plain classifier with an output per training class; labels by name."""
    config, _ = run(bert, **outer)
    tokenizer = load_tokenizer(config, describe(config), print)
    source = load_sources(config, tokenizer, print).train
    names = sorted(name for (name,) in source.class_keys())
    model = AutoModelForSequenceClassification.from_pretrained(
        bert, num_labels=len(names), ignore_mismatched_sizes=True
    ).eval()
    assert len(names) > config.n_way
    for part in (model.classifier.weight, model.classifier.bias):
        part.data.zero_()
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = (
        torch.optim.SGD(groups, lr=config.outer_lr)
        if config.outer_optimizer == "sgd"
        else torch.optim.AdamW(groups, lr=config.outer_lr, eps=config.adam_epsilon)
    )
    began = {name: p.detach().clone() for name, p in model.named_parameters()}
    schedule = Schedule(source.items, config.meta_batch_size, config.seed)
    for step in range(config.outer_steps):
        loss = torch.zeros(())
        for task in schedule.meta_batch(step):
            draw = source.draw(task)
            for rows in (draw.support, draw.query):
                batch = tokenizer(
                    [draw.store.text("input", row) for row, _ in rows], padding=True, return_tensors="pt"
                )
                labels = torch.tensor([names.index(draw.store.text("target", row)) for row, _ in rows])
                logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                loss = loss + F.cross_entropy(logits, labels) / 2 / config.meta_batch_size
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, config.max_grad_norm)
        optimizer.step()
    found = load_file(tmp_path / "run" / "model" / "model.safetensors")
    body = [name for name in began if not name.startswith("classifier")]
    wanted = {name: model.get_parameter(name).detach().double() for name in body}
    off, travelled = (
        sum(float((start[name] - wanted[name]).square().sum()) for name in body) for start in (found, began)
    )
    assert (off / travelled) ** 0.5 < at_most
    assert float(model.classifier.weight.detach().abs().max()) > 0.01
    assert found["classifier.weight"].shape == (2, 32)  # the head stays behind
    assert not found["classifier.weight"].any()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("head", ["zero", "prototype"])
def test_exported_model_gives_the_held_out_scores_of_the_run(run, bert, tmp_path, head):
    """Evaluating the exported folder gives the scores that the run stored at its end."""
    inner_lr, model = (
        (0.1, bert) if head == "zero" else (0.01, "tiny")
    )  # class means over the trained BERT make no errors
    settings = {"head_init": head, "inner_lr": inner_lr}
    _, joint = run(model, **settings, outer_lr=1e-2, adam_epsilon=1e-4)
    _, none = run(tmp_path / "run" / "model", "none", **settings, algorithm="none")
    after, before, start = (
        "after adaptation, meta-trained",
        "before adaptation, meta-trained",
        "after adaptation, weights at the start",
    )
    for row in (after, before):
        assert joint[row]["loss"][0] == pytest.approx(none[row]["loss"][0], rel=1e-5)
    assert abs(joint[after]["loss"][0] - joint[start]["loss"][0]) > 1e-3


@pytest.mark.timeout(120)
def test_adapters_and_the_merged_model_are_exported_without_the_joint_head(run, bert, tmp_path):
    """They have zeros for the classes of an episode, not the head over all training classes."""
    run(bert, lora_r=2, lora_merge=True, outer_lr=0.1, eval_episodes=0, outer_steps=2)
    for file in ("model/adapter_model.safetensors", "merged/model.safetensors"):
        found = load_file(tmp_path / "run" / file)
        (weight,) = [value for name, value in found.items() if name.endswith("classifier.weight")]
        assert torch.equal(weight, torch.zeros(2, 32))
