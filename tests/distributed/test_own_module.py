"""A module that is no model of transformers, with its rows from a function: layouts and rules end where plain
PyTorch ends, and weights go in and out as safetensors.
"""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

import fmmeta
from examples.own_module import Sine, draw, tasks
from fmmeta.config.learners import find
from fmmeta.config.settings import Config
from fmmeta.tasks.schedule.meta_batches import Item, Items, Schedule
from tests.support.launch import train
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


def schedule():
    """The tasks of training: one stratum, in the order of the seed."""
    items = Items.of(Item(f"{RUN['dataset']}/{number}", "all", 1) for number in range(tasks.train))
    return Schedule(items, RUN["meta_batch_size"], Config.seed)


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

    for step in range(RUN["outer_steps"]):
        total = [torch.zeros_like(one) for one in theta]
        for task in schedule().meta_batch(step):
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
    wanted = {name: one.detach() for name, one in wanted.items()}
    off = sum(float((weights[name] - one).double().square().sum()) for name, one in wanted.items())
    return (off / sum(float(one.double().square().sum()) for one in wanted.values())) ** 0.5


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("algorithm", "ranks", "group_size", "stage"),
    [
        ("fomaml", 1, 1, 0),
        ("maml", 1, 1, 0),
        ("reptile", 2, 1, 0),
        ("maml", 2, 2, 0),
        ("fomaml", 2, 2, 1),
        ("maml", 2, 2, 2),
        ("fomaml", 2, 2, 3),
        ("maml", 2, 2, 3),
        ("fomaml", 4, 2, 2),
        ("fomaml-tasks", 1, 1, 0),
        ("fomaml-tasks", 4, 2, 2),
        ("maml-tasks", 1, 1, 0),
        ("maml-tasks", 4, 2, 2),
    ],
)
def test_ends_where_plain_pytorch_ends(algorithm, ranks, group_size, stage, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    run = {**RUN, "algorithm": algorithm, "group_size": group_size, "deepspeed": file}
    algorithm, _, several = algorithm.partition("-")
    if several:
        run |= {"algorithm": algorithm, "tasks_per_pass": 2}
    exact = algorithm != "maml" or stage < 3  # differences have kinks of ReLU between their points
    train(tmp_path / "run", ranks, **run).ok()
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert distance(weights, oracle(algorithm)) < (2e-6 if exact else 1e-2)


def config_of(folder, **changes):
    run = {**RUN, "dataset": [RUN["dataset"]], "output_dir": str(folder), **changes}
    return Config(**{**run, "eval_episodes": 0})


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
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({name: value + 1 for name, value in stored.items()}, folder / "model.safetensors")
    config = config_of(tmp_path / "again", algorithm="none", model_name_or_path=str(folder))
    fmmeta.MetaTrainer(config).train()
    again = load_file(tmp_path / "again" / "model" / "model.safetensors")
    assert distance(again, {name: value + 1 for name, value in stored.items()}) == 0
    facts = json.loads((tmp_path / "again" / "model" / "fmmeta.json").read_text())
    assert (facts["task_type"], facts["own_task_type"]) == ("own", RUN["task_type"])


def test_what_does_not_go_with_a_module_is_refused(tmp_path):
    for name, value in {"lora_r": 4, "pipeline_stages": 2}.items():
        text = refusal(partial(config_of, tmp_path, **{name: value}))
        check_message(text, f"{name}={value}", "leave it out")
    for name, value in {"k_shot": 3, "num_query": 2}.items():
        run = fmmeta.MetaTrainer(config_of(tmp_path, **{name: value}))
        check_message(refusal(run.train), f"{name}={value}", "examples.own_module:tasks", "leave it out")
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    run = fmmeta.MetaTrainer(config_of(tmp_path / "run", model_name_or_path=str(tmp_path)))
    check_message(refusal(run.train), f"model_name_or_path={tmp_path}", "model.safetensors")
    broken = fmmeta.Tasks(lambda seed: 1 / 0, train=3)
    run = fmmeta.MetaTrainer(config_of(tmp_path / "b").but(dataset=Config().dataset), dataset=broken)
    check_message(refusal(run.train), "draw(", "ZeroDivisionError")
    pairs = [(f"text {number}", f"class {number}") for number in range(3)]
    given = config_of(tmp_path / "n").but(dataset=Config().dataset, task_type=Config.task_type, n_way=2)
    run = fmmeta.MetaTrainer(given, dataset=fmmeta.Tasks(lambda seed: (pairs, pairs), train=3))
    check_message(refusal(run.train), "n_way=2 is the number of outputs", "raise --n_way")
    refused = refusal(fmmeta.MetaTrainer(Config(), learner=torch.nn.Linear(1, 1)).train)
    check_message(refused, "learner=Linear is no fmmeta.Learner")


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
