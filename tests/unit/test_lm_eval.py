"""lm-evaluation-harness with fmmeta's methods (fmmeta.adaptation.lm_eval.py), on three tasks in files."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from transformers import AutoModelForCausalLM, AutoTokenizer

from fmmeta.adaptation.lm_eval import FewShotLM, known_tasks
from tests.support.helpers import refusal, write_rows
from tests.support.launch import python
from tests.support.messages import check_message

WORDS = ["red", "blue", "tree", "hill", "river", "stone", "cloud", "apple"]
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "label",
    "fewshot_split": "train",
}
TASKS = {
    "choice": CHOICE,
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "fewshot_split": "train",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "trained": {
        **{key: value for key, value in CHOICE.items() if key != "fewshot_split"},
        "training_split": "train",
    },
    "no_examples": {key: value for key, value in CHOICE.items() if key != "fewshot_split"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of tasks, whose rows ask for the first of two words."""
    parent = tmp_path_factory.mktemp("lm_eval")
    rng, files = random.Random(0), {}
    for split, count in (("train", 12), ("test", 6)):
        rows = []
        for _ in range(count):
            first, other = rng.sample(WORDS, 2)
            question = f"Which comes first, {first} or {other}?"
            choices, text = sorted([first, other]), f"{first} {other} {first}"
            of_task = {"label": choices.index(first), "choices": choices, "answer": first, "text": text}
            rows.append({"question": question, **of_task})
        files[split] = str(write_rows(parent / f"{split}.jsonl", rows))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
    (parent / "tasks").mkdir()
    for name, task in TASKS.items():  # JSON is YAML
        (parent / "tasks" / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **task}))
    return parent / "tasks"


def scored(folder, model, tasks, shots=0, **options):
    """Results and responses of each task, in fp32 on the CPU, two rows at a time."""
    given = {"device": "cpu", "batch_size": 2, "bootstrap_iters": 0, "num_fewshot": shots}
    run: Any = simple_evaluate
    found = run(model=model, tasks=[*tasks], task_manager=known_tasks(str(folder)), **given, **options)
    responses = {
        name: [one["filtered_resps"] for one in sorted(rows, key=lambda one: one["doc_id"])]
        for name, rows in found["samples"].items()
    }
    return found["results"], responses


@pytest.mark.parametrize("shots", [0, 3])
def test_without_inner_steps_every_number_is_that_of_the_harness_own_model(folder, llama, shots):
    tasks = ("choice", "generation") if shots else ("choice", "generation", "perplexity")
    theirs = scored(folder, "hf", tasks, shots, model_args={"pretrained": str(llama), "dtype": "float32"})
    settings: Any = (("finetune", {"inner_steps": 0}), ("in_context", {}))
    for method, options in settings:
        model = FewShotLM(str(llama), method, include_path=str(folder), batch_size=2, **options)
        assert scored(folder, model, tasks, shots) == theirs


def by_hand(llama, folder, steps, rate):
    """Log-likelihoods of the choices after plain SGD on the three examples that seed 1234 draws."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(llama)
    train, test = (
        [json.loads(line) for line in (folder.parent / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    )

    def losses(question, answer):
        ids = tokenizer(question + answer, return_tensors="pt")["input_ids"]
        start = len(tokenizer(question)["input_ids"])
        logits = model(ids).logits[0, start - 1 : -1]
        return torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="none")

    for _ in range(steps):
        drawn = random.Random(1234).sample(train, 3)
        rows = [losses(row["question"], f" {row['choices'][row['label']]}\n\n") for row in drawn]
        gradients = torch.autograd.grad(torch.cat(rows).mean(), [*model.parameters()])
        for param, gradient in zip(model.parameters(), gradients, strict=True):
            param.data -= rate * gradient
    with torch.no_grad():
        return [
            [-float(losses(row["question"], f" {choice}").sum()) for choice in row["choices"]] for row in test
        ]


def test_the_examples_of_a_task_are_learned_before_it_is_scored(folder, llama):
    model = FewShotLM(
        str(llama), "finetune", 3, include_path=str(folder), batch_size=2, inner_steps=2, inner_lr=0.5
    )
    _, found = scored(folder, model, ["choice"])
    numbers = [[float(likelihood) for likelihood, _ in row] for row in found["choice"]]
    for row, expected in zip(numbers, by_hand(llama, folder, 2, 0.5), strict=True):
        assert row == pytest.approx(expected, abs=2e-4)
    assert model.examples("trained") == model.examples("choice")  # of the training split
    before = by_hand(llama, folder, 0, 0.5)
    assert (
        max(
            abs(a - b)
            for one, other in zip(numbers, before, strict=True)
            for a, b in zip(one, other, strict=True)
        )
        > 0.1
    )
    assert scored(folder, model, ["choice"])[1] == found
    untrained = FewShotLM(str(llama), "in_context", include_path=str(folder), batch_size=2)
    assert scored(folder, model, ["perplexity"]) == scored(folder, untrained, ["perplexity"])  # restored


def test_answers_follow_the_requests_and_long_examples_keep_their_ends(folder, llama, monkeypatch):
    """Requests of two tasks, one after the other in turn; a model that reads six tokens."""
    model = FewShotLM(str(llama), "finetune", 3, include_path=str(folder), batch_size=2)
    asked: Any = [SimpleNamespace(task_name=name, number=n) for n in range(2) for name in ("one", "two")]
    monkeypatch.setattr(model, "of_task", lambda name, answer, some, quiet: [(name, r.number) for r in some])
    assert model.by_task(None, asked, True) == [("one", 0), ("two", 0), ("one", 1), ("two", 1)]
    whole = model.examples("choice")
    model._max_length = 6
    for row, cut in zip(whole, model.examples("choice"), strict=True):
        assert len(row.input_ids) > 6
        assert [*cut.input_ids] == [*row.input_ids[-6:]]
        assert [*cut.token_labels] == [*row.token_labels[-6:]]


def test_adapters_learn_each_example_behind_the_others(folder, llama):
    options = {"inner_steps": 2, "inner_lr": 1.0, "lora_r": 2, "lora_target_modules": "q_proj+v_proj"}
    given = {"k_shot": 3, "include_path": str(folder), "batch_size": 2}
    model = FewShotLM(str(llama), **given, **options)
    _, found = scored(folder, model, ["choice", "generation"], 3)
    _, plain = scored(folder, FewShotLM(str(llama), "in_context", **given), ["choice", "generation"], 3)
    assert found["choice"] != plain["choice"]
    lengths = {len(row.input_ids) for row in model.examples("choice")}
    assert max(lengths) < model.learner._longest(model.examples("choice"))  # rows with prompts


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"method": "finetun"}, ["method=finetun is unknown; use finetune, in_context or"]),
        ({"k_shot": 13}, ["tasks=choice with k_shot=13: it has 12 examples; lower k_shot"]),
        ({"task": "no_examples"}, ["tasks=no_examples", "name a fewshot_split"]),
        ({"inner_lr": -1.0}, ["inner_lr=-1"]),
        ({"dtype": "float32"}, ["model_args=dtype is no argument of the model fmmeta", "leave it out"]),
        ({"inner_step": 3}, ["model_args=inner_step is no argument", "inner_steps"]),
    ],
    ids=str,
)
def test_what_cannot_be_learned_is_refused_in_a_line(folder, llama, options, parts):
    task = options.pop("task", "choice") if "task" in options else "choice"
    message = refusal(
        lambda: FewShotLM(
            str(llama), **{"method": "finetune", "include_path": str(folder), **options}
        ).examples(task)
    )
    check_message(message, *parts)


def test_the_command_runs_the_harness_with_the_model(folder, llama, tmp_path):
    words = ["--tasks", "choice", "--include_path", str(folder), "--num_fewshot", "0", "--batch_size", "2"]
    command = ["-m", "fmmeta", "lm-eval", "--model", "fmmeta", *words, "--model_args"]
    ended = python([*command, f"pretrained={llama},method=finetune,inner_steps=1,k_shot=3"], tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "|choice" in ended.stdout
    ended = python([*command, f"pretrained={llama},method=tune"], tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("fmmeta: error: method=tune is unknown; use ")
