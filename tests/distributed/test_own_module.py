"""A module that is no model of transformers, with its rows from a function: layouts and rules end where plain
PyTorch ends, and weights go in and out as safetensors.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import fmmeta
from examples.own_module import Sine, draw, tasks
from fmmeta.config.learners import find
from fmmeta.config.settings import Config
from fmmeta.tasks.schedule.meta_batches import Item, Items, Schedule
from tests.support.helpers import fast_or_slow
from tests.support.launch import train
from tests.support.learners import norm
from tests.support.messages import check_message, refusal

RUN = {
    "task_type": "examples.own_module:Sine",
    "dataset": "examples.own_module:tasks",
    "outer_optimizer": "sgd",
    "outer_lr": 0.01,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "weight_decay": 0,
    "warmup_steps": 0,
    "inner_lr": 0.01,
    "inner_steps": 3,
    "outer_steps": 3,
    "meta_batch_size": 4,
    "test_episodes": 0,
    "num_workers": "0",
}


def oracle(algorithm):
    """theta after the run, by a hand-written loop: SGD on the mean meta-gradient, fp32."""
    torch.manual_seed(Config.seed)
    model = Sine()
    names = [name for name, _ in model.named_parameters()]
    theta = [param.detach().clone() for param in model.parameters()]

    def loss(params, rows):
        x, y = torch.tensor(rows).split(1, 1)
        outputs = torch.func.functional_call(model, dict(zip(names, params, strict=True)), (x,))
        return (outputs - y).square().mean()

    items = Items.of(Item(f"{RUN['dataset']}/{number}", "all", 1) for number in range(tasks.train))
    schedule = Schedule(items, RUN["meta_batch_size"], Config.seed)
    for step in range(RUN["outer_steps"]):
        total = [torch.zeros_like(one) for one in theta]
        for task in schedule.meta_batch(step):
            support, query = draw(task.item)
            begin = [one.clone().requires_grad_() for one in theta]
            phi = begin
            for _ in range(RUN["inner_steps"]):
                grads = torch.autograd.grad(loss(phi, support), phi, create_graph=algorithm == "maml")
                phi = [one - RUN["inner_lr"] * grad for one, grad in zip(phi, grads, strict=True)]
            if algorithm == "reptile":
                grads = [a - b for a, b in zip(begin, phi, strict=True)]
            else:
                wrt = begin if algorithm == "maml" else phi
                grads = torch.autograd.grad(loss(phi, query), wrt)
            total = [one + grad.detach() for one, grad in zip(total, grads, strict=True)]
        step_size = RUN["outer_lr"] / RUN["meta_batch_size"]
        theta = [one - step_size * grad for one, grad in zip(theta, total, strict=True)]
    return dict(zip(names, theta, strict=True))


def distance(weights, wanted):
    assert weights.keys() == wanted.keys()
    off = {name: weights[name] - one.detach() for name, one in wanted.items()}
    return norm(off) / norm(wanted)


FAST = [  # algorithm, ranks, ranks of a group, ZeRO stage; tasks: two of them in a pass
    ("reptile", 2, 1, 0),
    ("fomaml", 2, 2, 1),
    ("maml", 2, 2, 2),
    ("fomaml", 2, 2, 3),
    ("maml-tasks", 1, 1, 0),
]
SLOW = [
    ("fomaml", 1, 1, 0),
    ("maml", 1, 1, 0),
    ("maml", 2, 2, 0),
    ("maml", 2, 2, 3),
    ("fomaml", 4, 2, 2),
    ("fomaml-tasks", 1, 1, 0),
    ("fomaml-tasks", 4, 2, 2),
    ("maml-tasks", 4, 2, 2),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", fast_or_slow([*FAST, *SLOW], FAST.__contains__, str))
def test_ends_where_plain_pytorch_ends(case, tmp_path):
    named, ranks, group_size, stage = case
    algorithm, _, several = named.partition("-")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    layout = {"group_size": group_size, "deepspeed": file, **({"tasks_per_pass": 2} if several else {})}
    train(tmp_path / "run", ranks, **RUN, algorithm=algorithm, **layout).ok()
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    exact = algorithm != "maml" or stage < 3  # differences have kinks of ReLU between their points
    assert distance(weights, oracle(algorithm)) < (2e-6 if exact else 1e-2)


def config_of(folder, **changes):
    run = {**RUN, "dataset": [RUN["dataset"]], "output_dir": str(folder), "eval_episodes": 0, **changes}
    return Config(**run)


def test_a_module_and_tasks_are_given_in_python_and_weights_go_in_and_out(tmp_path):
    """theta_0 is the module's; a stopped run resumes; evaluate reads the folder by the same name."""
    torch.manual_seed(7)
    module = Sine()
    config = config_of(tmp_path / "run", algorithm="none", test_episodes=4)
    config = config.but(task_type=Config.task_type, dataset=Config().dataset)
    result = fmmeta.MetaTrainer(config, learner=module, dataset=tasks).train()
    stored = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert distance(stored, dict(module.named_parameters())) == 0
    assert result.held_out["episodes"] == 4
    assert find(RUN["task_type"]).make is Sine  # the module was for that run alone
    moved = {name: value + 1 for name, value in stored.items()}
    save_file(moved, tmp_path / "model.safetensors")
    config = config_of(tmp_path / "again", algorithm="none", model_name_or_path=str(tmp_path))
    fmmeta.MetaTrainer(config).train()
    again = load_file(tmp_path / "again" / "model" / "model.safetensors")
    assert distance(again, moved) == 0
    facts = json.loads((tmp_path / "again" / "model" / "fmmeta.json").read_text())
    assert (facts["task_type"], facts["own_task_type"]) == ("own", RUN["task_type"])


def run_of(given, **settings):
    fmmeta.MetaTrainer(config_of("run", **settings), **given).train()


BROKEN = fmmeta.Tasks(lambda seed: 1 / 0, train=3)
PAIRS = [(f"text {number}", f"class {number}") for number in range(3)]
OF_TEXTS = fmmeta.Tasks(lambda seed: (PAIRS, PAIRS), train=3)


@pytest.mark.parametrize(
    ("settings", "given", "parts"),
    [
        ({"lora_r": 4}, {}, ("lora_r=4", "leave it out")),
        ({"pipeline_stages": 2}, {}, ("pipeline_stages=2", "leave it out")),
        ({"k_shot": 3}, {}, ("k_shot=3", "examples.own_module:tasks", "leave it out")),
        ({"num_query": 2}, {}, ("num_query=2", "examples.own_module:tasks", "leave it out")),
        ({"model_name_or_path": "."}, {}, ("model_name_or_path=.", "model.safetensors")),
        ({"dataset": Config().dataset}, {"dataset": BROKEN}, ("draw(", "ZeroDivisionError")),
        (
            {"dataset": Config().dataset, "task_type": Config.task_type, "n_way": 2},
            {"dataset": OF_TEXTS},
            ("n_way=2 is the number of outputs", "raise --n_way"),
        ),
        (
            {"dataset": Config().dataset, "task_type": Config.task_type},
            {"learner": torch.nn.Linear(1, 1)},
            ("learner=Linear is no fmmeta.Learner",),
        ),
    ],
)
def test_what_does_not_go_with_a_module_is_refused(settings, given, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    check_message(refusal(run_of, given, **settings), *parts)


class Contrast(Sine):
    """A loss of rows that depend on each other: distances to the mean of the set."""

    rows_are_independent = False

    def losses(self, outputs, batch):
        middle = (outputs - outputs.mean(0)) - (batch.targets["y"] - batch.targets["y"].mean(0))
        return fmmeta.RowLosses.of(middle.square().sum(-1))


def test_losses_that_depend_on_each_other_keep_a_set_together(tmp_path):
    config = config_of(tmp_path / "a", task_type="tests.distributed.test_own_module:Contrast")
    fmmeta.MetaTrainer(config).train()
    small = config.but(micro_batch_size=4, output_dir=str(tmp_path / "b"))
    check_message(refusal(fmmeta.MetaTrainer(small).train), "micro_batch_size=4", "10 rows", "raise them")
    by_tokens = config.but(max_tokens_per_micro_batch=5, output_dir=str(tmp_path / "t"))
    text = refusal(fmmeta.MetaTrainer(by_tokens).train)
    check_message(text, "max_tokens_per_micro_batch=5", "10 rows")
    check_message(refusal(lambda: config.but(tasks_per_pass="2")), "tasks_per_pass=2", "depend on each other")
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    run = {**RUN, "task_type": config.task_type, "group_size": 2, "deepspeed": file}
    ended = train(tmp_path / "c", 2, **run)
    assert ended.codes == [2, 2]
    assert "group_size=2 shares the rows of a set" in ended.output[0]
