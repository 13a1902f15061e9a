"""Train, evaluate and adapt warn once of an inner loop that raises the loss, and suggest chat prompts."""

import shutil
from types import SimpleNamespace
from typing import Any, cast

import pytest

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.reliability.checks import SupportLosses
from fmmeta.tasks.batching import SupportSet
from tests.support.messages import check_message
from tests.support.models import write_pairs
from tests.support.short_runs import QUICK, same

TEMPLATE = (
    "{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(llama, tmp_path_factory):
    """A Llama whose tokenizer has a chat template."""
    folder = shutil.copytree(llama, tmp_path_factory.mktemp("chat") / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


def run(command, model, data, folder, **settings):
    """A short call of `command` on pairs of texts."""
    causal = {"task_type": "causal_lm", "max_length": 48, "inner_steps": 2, **settings}
    if command == "train":
        short = {**QUICK, "n_way": 5, "meta_batch_size": 1, "outer_steps": 2, "num_workers": "0", **causal}
        MetaTrainer(
            Config(**short, model_name_or_path=str(model), dataset=[str(data)], output_dir=str(folder))
        ).train()
    elif command == "evaluate":
        fmmeta.evaluate(model, data, quiet=False, num_query=2, k_shot=2, episodes=6, **causal)
    else:
        fmmeta.adapt(model, [("a b", "x"), ("c d", "y")], quiet=False, early_stopping=False, **causal)


@pytest.mark.parametrize("command", ["train", "evaluate", "adapt"])
def test_a_rising_support_loss_and_a_chat_template_are_one_line_each(
    command, chat_model, llama, pairs, tmp_path, capsys
):
    """The former suggests a lower rate, the latter --prompt_template chat, unless it is given."""
    for number, (model, template, rate, sampled) in enumerate(
        ((llama, "plain", 30.0, 0), (chat_model, "plain", 0.01, 0), (chat_model, "chat", 30.0, 1))
    ):
        settings = {"prompt_template": template, "inner_lr": rate, "support_batch_size": sampled}
        run(command, model, pairs, tmp_path / str(number), **settings)
        lines = capsys.readouterr().out.splitlines()
        warned = [line for line in lines if "loss on the support set" in line]
        assert len(warned) == (rate == 30)
        for line in warned:
            check_message(line.replace(str(model), "MODEL"), "inner_lr=30", "try --inner_lr 3")
        suggested = [line for line in lines if "--prompt_template chat" in line]
        assert len(suggested) == (model == chat_model and template == "plain")


def test_a_sampled_support_set_is_compared_on_the_rows_of_its_first_step():
    """Other rows may have a higher loss from the start."""
    first, other = object(), object()
    support: Any = SupportSet([first, other], [[first], [other]])  # type: ignore[list-item]
    worker: Any = SimpleNamespace(forward=lambda rows: SimpleNamespace(loss=1.0 if rows == [first] else 9.0))
    losses = SupportLosses(Config())
    losses.add(worker, cast(Any, SimpleNamespace(passes=[SimpleNamespace(loss=2.0)])), support)
    assert losses.pairs == [(2.0, 1.0)]
    assert losses.warning() == ""


def test_the_check_of_the_inner_loop_changes_no_weights(llama, pairs, tmp_path, monkeypatch):
    run("train", llama, pairs, tmp_path / "checked", inner_lr=0.1)
    monkeypatch.setattr("fmmeta.training.run.Run.check_inner_loop", lambda self, support: None)
    run("train", llama, pairs, tmp_path / "unchecked", inner_lr=0.1)
    assert same(tmp_path / "checked", tmp_path / "unchecked")
