"""A text is never longer than the positions of the model: a length given by a flag is refused, the default
is lowered.
"""

import json
from types import SimpleNamespace

import pytest

import fmmeta
from fmmeta.adaptation import predict
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import PredictConfig
from fmmeta.learners.load import describe, fitted, max_positions
from fmmeta.train import train
from tests.support.helpers import write_rows
from tests.support.messages import check_message, refusal
from tests.support.models import WORDS, byte_tokenizer, tiny

LONG = " ".join(WORDS * 4)
PAIRS = [(f"{word} {place} {LONG}", f"class {word}") for word in WORDS[:6] for place in range(6)]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Models of 64 positions: BERT; RoBERTa, which keeps one for padding; GPT-2, with other names."""
    folders = {family: tmp_path_factory.mktemp(family) for family in ("bert", "roberta", "gpt2")}
    for family, folder in folders.items():
        tiny(family, num_hidden_layers=1, max_position_embeddings=64).save_pretrained(folder)
        byte_tokenizer(512).save_pretrained(folder)
    return folders


@pytest.mark.parametrize(
    ("family", "task_type", "most"),
    [("bert", "classification", 64), ("roberta", "classification", 63), ("gpt2", "causal_lm", 64)],
)
def test_every_command_stays_within_the_positions(short, tmp_path, family, task_type, most):
    folder, out, rows = short[family], tmp_path / "out", tmp_path / "rows.jsonl"
    names = ("input", "output", "task") if task_type == "causal_lm" else ("text", "label", "group")
    write_rows(rows, [dict(zip(names, (*pair, pair[1]), strict=True)) for pair in PAIRS])
    adapted = fmmeta.adapt(
        folder, PAIRS[:12], output_dir=out, task_type=task_type, inner_steps=1, early_stopping=False
    )
    assert len(adapted.predict([LONG], max_new_tokens=1)) == 1
    assert json.loads((out / "fmmeta.json").read_text())["max_length"] == most
    assert predict.load(PredictConfig(str(out))).predict([LONG])
    shots = {"k_shot": 1, "num_query": 1, "episodes": 1, "inner_steps": 1}
    assert fmmeta.evaluate(
        folder,
        rows,
        eval_split="train",
        task_type=task_type,
        n_way=5 if task_type == "causal_lm" else 2,
        **shots,
    )
    for call in (
        lambda **of: fmmeta.adapt(folder, PAIRS[:12], task_type=task_type, **of),
        lambda **of: fmmeta.evaluate(folder, rows, task_type=task_type, **of),
        lambda **of: predict.load(PredictConfig(str(out), **of)),
        lambda **of: train(
            Config(model_name_or_path=str(folder), task_type=task_type, dataset=[str(rows)], **of)
        ),
    ):
        message = refusal(call, max_length=100)
        check_message(message, "max_length=100", f"{most}")
        assert message.endswith(f"; use {most} or less")


def test_a_run_lowers_the_default_and_stores_it_with_the_model(short, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": text, "label": label} for text, label in PAIRS])
    config = Config(
        model_name_or_path=str(short["bert"]),
        dataset=[str(rows)],
        n_way=2,
        k_shot=1,
        num_query=1,
        outer_steps=1,
        meta_batch_size=1,
        inner_steps=1,
        eval_episodes=0,
        save_steps=0,
        output_dir=str(tmp_path / "run"),
    )
    result = train(config)
    assert json.loads((result.output_dir / "model" / "fmmeta.json").read_text())["max_length"] == 64
    assert f"fmmeta: max_length 64: {short['bert']} " in capsys.readouterr().out


def test_a_length_that_fits_and_a_model_without_a_limit_are_unchanged(short):
    config = Config(model_name_or_path=str(short["bert"]), max_length=20)
    assert fitted(config, describe(config).hf_config) is config
    for unlimited in (None, -1):
        assert max_positions(SimpleNamespace(max_position_embeddings=unlimited, model_type="xlnet")) is None
