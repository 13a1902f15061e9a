"""Prompts that hold the support set, and runs of the rules that compute with them or train nothing."""

import json

import pytest
import torch
import torch.nn.functional as F

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.meta.algorithms.baselines import prompted, support_before_query
from fmmeta.tasks.batching import IGNORE, Batcher, Example, MicroBatch
from fmmeta.training import final
from tests.support.episodes import objective
from tests.support.learners import LEARNERS, config_of, episode_of, setup_of, worker_of
from tests.support.models import write_pairs
from tests.support.short_runs import metrics_of


def run_of(folder, **settings):
    """The result of a short run, and its table on held-out tasks."""
    fixed = {"eval_episodes": 3, "meta_batch_size": 2, "outer_steps": 2, "inner_steps": 2}
    result = MetaTrainer(Config(**{**fixed, "output_dir": str(folder / "run"), **settings})).train()
    return result, json.loads((folder / "run" / "run.json").read_text())["held_out"]


@pytest.fixture
def pairs(llama, tmp_path):
    """Settings of a small language model and its data."""
    return {
        "task_type": "causal_lm",
        "k_shot": 2,
        "num_query": 3,
        "model_name_or_path": str(llama),
        "dataset": [str(write_pairs(tmp_path / "pairs.jsonl"))],
    }


@pytest.mark.timeout(120)
def test_none_trains_nothing_and_evaluates(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(final, "choose_loop", lambda *of: final.BaselineLoop(1.0, 2))
    result, held_out = run_of(tmp_path, algorithm="none")
    assert "algorithm=none trains nothing" in capsys.readouterr().out
    assert (
        result.after == result.after_from_start == held_out["after adaptation, meta-trained"]["accuracy"][0]
    )
    assert held_out["gain"]["loss"] == [0, 0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    trained, _ = run_of(tmp_path / "other", algorithm="fomaml")
    assert trained.after_from_start == result.after  # the same episodes and inner loop


def answering(*tokens: int, answers: int = 1) -> Example:
    """A row whose last tokens are the answer."""
    return Example([*tokens], [IGNORE] * (len(tokens) - answers) + [*tokens[-answers:]])


def test_in_context_prompts_hold_the_support_set():
    support, query = [answering(1, 10, 11), answering(1, 20, 21, 22, answers=2)], answering(1, 30, 31)

    def prompt(rows, asked, **how):
        (found,) = prompted(rows, [asked], **{"bos_token_id": 1, "positions": None, **how})
        return found

    full = prompt(support, query)
    assert full.input_ids == [1, 10, 11, 20, 21, 22, 30, 31]
    assert full.labels == [IGNORE] * 7 + [31]
    assert prompt(support, query, bos_token_id=None).input_ids == [1, 10, 11, 1, 20, 21, 22, 1, 30, 31]
    chat = prompt([answering(1, 10, 1, 11)], answering(1, 30, 1, 31))  # a token that begins each turn stays
    assert chat.input_ids == [1, 10, 1, 11, 1, 30, 1, 31]
    short = prompt(support, query, positions=7)
    assert short.input_ids == [1, 20, 21, 22, 30, 31]
    assert prompt(support, query, positions=6) == short  # it fits to the last place
    assert prompt(support, query, positions=5) == query


def test_prompts_whose_support_examples_are_learned():
    """Each order once, no label on the first answer, and none on the first one that is left."""
    support, query = [answering(1, 10 * i, 10 * i + 1) for i in (1, 2, 3)], [answering(1, 70, 71)] * 4
    found = prompted(support, query, bos_token_id=1, positions=None, learn_support=True)
    assert [row.input_ids for row in found] == [
        [1, 10, 11, 20, 21, 30, 31, 70, 71],
        [1, 20, 21, 30, 31, 10, 11, 70, 71],
        [1, 30, 31, 10, 11, 20, 21, 70, 71],
        [1, 10, 11, 20, 21, 30, 31, 70, 71],
    ]
    assert found[1].labels == [IGNORE, IGNORE, IGNORE, IGNORE, 31, IGNORE, 11, IGNORE, 71]
    (short, *_) = prompted(support, query, bos_token_id=1, positions=7, learn_support=True)
    assert short.input_ids == [1, 20, 21, 30, 31, 70, 71]
    assert short.labels == [IGNORE, IGNORE, IGNORE, IGNORE, 31, IGNORE, 71]


def test_accuracy_counts_each_answer_of_a_prompt():
    """Two answers, of which one has a wrong token; a row without an answer counts as none."""
    labels = torch.tensor([[IGNORE, 3, 4, IGNORE, 5, 6], [IGNORE] * 6, [2, 3, 4, 5, 6, 7]])
    likeliest = torch.tensor([[3, 4, 0, 5, 7, 0], [0] * 6, [3, 4, 5, 6, 7, 0]])  # of the next token
    logits = F.one_hot(likeliest, 8).float()
    _, right, answers = objective(
        logits, MicroBatch({"input_ids": labels}, {"labels": labels}, torch.full((3,), 0.25))
    )
    assert (right.item(), answers.item()) == (2, 3)


def test_in_context_scores_the_query_with_and_without_the_support_set():
    """By hand: the mean answer loss of prompts that are put together here."""
    learner = LEARNERS["llama"]
    config = config_of(learner, algorithm="in_context")
    episode = episode_of(learner, support=3)
    worker = worker_of(learner, config)
    limits = {"bos_token_id": None, "positions": 32}
    batches = Batcher(0, 4).episode(support_before_query(episode, alone=True, **limits))
    assert support_before_query(episode, **limits).support == []
    before, after = setup_of(worker, config).evaluation_method().score(worker, worker.read(), batches)
    prefix = [token for row in episode.support for token in row.input_ids]
    for found, start in ((before, []), (after, prefix)):
        losses = []
        for row in episode.query:
            ids = torch.tensor([[*start, *row.input_ids]])
            logits = learner(input_ids=ids, attention_mask=torch.ones_like(ids))[0].detach()
            losses += [
                float(F.cross_entropy(logits[len(start) + place - 1], torch.tensor(label)))
                for place, label in enumerate(row.labels)
                if label >= 0
            ]
        assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert before.loss != pytest.approx(after.loss, rel=1e-3)


@pytest.mark.timeout(120)
def test_a_run_with_in_context_evaluates(tmp_path, pairs):
    _, held_out = run_of(tmp_path, algorithm="in_context", **pairs)
    before, after = (held_out[f"{when} adaptation, meta-trained"]["loss"][0] for when in ("before", "after"))
    assert after != before


@pytest.mark.timeout(120)
def test_a_meta_icl_run_lowers_the_loss_in_context_and_evaluate_uses_prompts(tmp_path, pairs):
    """The model stores its method and no inner loop; support sets have no loss. A run that learns support
    examples too is evaluated on queries alone.
    """
    own = {"algorithm": "meta_icl", "inner_steps": None, "outer_steps": 4, "outer_lr": 0.01, **pairs}
    _, held_out = run_of(tmp_path, **own, logging_steps=1)
    start, trained = (f"after adaptation, {name}" for name in ("weights at the start", "meta-trained"))
    assert held_out[trained]["loss"][0] < 0.95 * held_out[start]["loss"][0]
    model, (data,) = tmp_path / "run/model", pairs["dataset"]
    stored = json.loads((model / "fmmeta.json").read_text())
    assert stored["method"] == "in_context"
    assert "inner_steps" not in stored
    assert stored["inner_rates"] is None
    assert "| learning | support set in the prompt |" in (model / "README.md").read_text()
    lines = metrics_of(tmp_path / "run")
    assert all(line["support_loss"] is None and line["query_loss"] > 0 for line in lines)
    for asked, methods in (({}, ["in_context"]), ({"method": ["finetune"]}, ["finetune"])):
        found = fmmeta.evaluate(str(model), data, k_shot=2, num_query=3, episodes=3, **asked)
        assert [cell["method"] for cell in found["cells"]] == methods
    _, every_answer = run_of(tmp_path / "every answer", **own, loss_on_support=True)
    assert every_answer[start] == held_out[start]
    assert every_answer[trained] != held_out[trained]


@pytest.mark.timeout(120)
def test_protonet_evaluates_by_its_prototypes(tmp_path):
    _, held_out = run_of(tmp_path, algorithm="protonet", inner_steps=None)
    assert held_out["before adaptation, meta-trained"] == held_out["after adaptation, meta-trained"]
    assert held_out["after adaptation, meta-trained"]["accuracy"][0] > 0.2
