"""The report's confusion matrix equals that of a plain PyTorch loop on the first held-out episode."""

import copy

import torch
import torch.nn.functional as F

from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World
from fmmeta.training import build
from fmmeta.training.final import confusion
from fmmeta.training.scoring import TEST, HeldOut, Scoring
from tests.support.messages import check_message
from tests.support.models import write_classes, write_pairs


def held_out_of(config: Config) -> tuple[HeldOut, build.RunInputs, build.Runtime]:
    """The held-out evaluation, inputs and runtime of a run before its first outer step."""
    world, messages = World(Launch(), torch.device("cpu")), []
    inputs = build.read_inputs(config, world, messages.append)
    plan = build.plan_parallel(config, inputs, world, messages.append)
    ranks = world.split(plan.group_size, plan.engine == "deepspeed")
    parts = build.build(config, inputs, plan, ranks)
    scoring = Scoring(parts.worker, ranks, Progress(enabled=False))
    return HeldOut(config, scoring, parts.load), inputs, parts


def test_counts_equal_those_of_a_plain_loop(tmp_path, bert):
    config = Config(
        model_name_or_path=str(bert),
        dataset=[str(write_classes(tmp_path / "data.jsonl", 15, 12))],
        n_way=3,
        n_way_max=4,
        k_shot=1,
        num_query=4,
        inner_lr=0.05,
        inner_steps=20,
        micro_batch_size=5,
        eval_episodes=6,
        seed=3,
    )
    held_out, plan, parts = held_out_of(config)
    source = plan.sources.test
    theta = parts.meta_params.theta.clone()
    found = confusion(held_out, source, parts.meta_params.theta, parts.setup.evaluation_method())
    assert torch.equal(parts.worker.read(), theta)  # as it was

    episode = source.draw(held_out.tasks(source, TEST)[0]).episode()
    model = copy.deepcopy(
        parts.worker.model
    ).float()  # a PlainWorker's; the loop below shares nothing else with it
    for name in model.head_names:
        model.get_parameter(name).data.zero_()

    def loss_and_answers(rows) -> tuple[torch.Tensor, list[int]]:
        logits = torch.cat(
            [
                model(input_ids=ids, attention_mask=torch.ones_like(ids))[1]
                for ids in (torch.tensor([row.input_ids]) for row in rows)
            ]
        )
        logits = logits[:, : len(episode.classes)]
        return F.cross_entropy(logits, torch.tensor([row.labels for row in rows])), logits.argmax(1).tolist()

    optimizer = torch.optim.SGD(model.parameters(), config.inner_lr)
    for _ in range(config.inner_steps):
        optimizer.zero_grad()
        loss_and_answers(episode.support)[0].backward()
        optimizer.step()
    counts = [[0] * len(episode.classes) for _ in episode.classes]
    for row, answer in zip(episode.query, loss_and_answers(episode.query)[1], strict=True):
        counts[row.labels][answer] += 1
    task = {"task": episode.task.name, "stratum": episode.task.stratum}
    assert found == {**task, "classes": [*episode.classes], "counts": counts}
    assert [sum(row) for row in counts] == [4] * len(counts)
    answers = [sum(column) for column in zip(*counts, strict=True)]
    assert sum(count > 0 for count in answers) > 1  # not one answer to everything
    assert counts != [
        list(column) for column in zip(*counts, strict=True)
    ]  # rows and columns are not the same


def test_language_models_have_no_confusion(tmp_path, llama):
    config = Config(
        model_name_or_path=str(llama),
        dataset=[str(write_pairs(tmp_path / "pairs.jsonl"))],
        task_type="causal_lm",
        k_shot=2,
        num_query=2,
        eval_episodes=2,
    )
    held_out, plan, parts = held_out_of(config)
    learning = parts.setup.evaluation_method()
    found = confusion(held_out, plan.sources.test, parts.meta_params.theta, learning)
    assert found.keys() == {"left_out"}
    check_message(found["left_out"], "task_type=causal_lm", "not classes")
