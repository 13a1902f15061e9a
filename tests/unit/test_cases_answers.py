"""Cases of public reports on the end of an answer, in ../shared/cases beside the checkout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.helpers import CASES, needs_cases
from tests.support.launch import python

pytestmark = needs_cases
FLAGS = [
    *("--task_type", "causal_lm", "--max_length", "48", "--max_new_tokens", "12", "--no_early_stopping"),
    *("--inner_optimizer", "adamw", "--inner_lr", "0.005", "--inner_steps", "150"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """M and M-control of the case end-of-turn."""
    folder = tmp_path_factory.mktemp("cases")
    made = python([str(CASES / "end-of-turn" / "make.py"), str(folder / "M")], folder)
    assert made.returncode == 0, made.stderr
    return folder


def adapt(model: Path, folder: Path, template: str, *flags: str) -> Path:
    """What the case's run.sh does; returns the folder of the adapted model."""
    pairs, out = str(CASES / "answers.jsonl"), folder / "adapted"
    given = ["--model_name_or_path", str(model), "--support", pairs, "--query", pairs]
    named = ["--prompt_template", template, "--output_dir", str(out)]
    done = python(["-m", "fmmeta", "adapt", *given, *FLAGS, *named, *flags], folder)
    assert done.returncode == 0, done.stderr
    assert "100.0 % of 5" in done.stdout + done.stderr
    return out


@pytest.mark.parametrize("name", ["M", "M-control"])
@pytest.mark.parametrize("template", ["chat", "plain"])
def test_answers_end_where_the_template_or_the_tokenizer_ends_them(name, template, models, tmp_path):
    """The same weights, and another end of the turn than the tokenizer's end of text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = adapt(models / name, tmp_path, template)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1, 5]
    if template == "chat":
        model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": "pin"}], add_generation_prompt=True, return_dict=False
        )
        found = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
        assert tokenizer.decode(found) == "code<eot>"


def test_exports_keep_the_generation_config(models, tmp_path):
    """Settings that transformers loads and refuses to save."""
    model = shutil.copytree(models / "M", tmp_path / "M")
    file = model / "generation_config.json"
    stored = {**json.loads(file.read_text()), "eos_token_id": 1, "temperature": 0.6, "do_sample": False}
    file.write_text(
        json.dumps({**stored, "repetition_penalty": 5.0, "stop_strings": ["o"], "min_length": 30})
    )
    out = adapt(model, tmp_path, "chat", "--lora_r", "8", "--lora_merge")
    data = ["--dataset", str(CASES / "pairs.jsonl"), "--task_type", "causal_lm", "--prompt_template", "chat"]
    few = ["--k_shot", "2", "--num_query", "2", "--outer_steps", "1", "--max_length", "64"]
    run = [*data, *few, "--save_steps", "0", "--output_dir", str(tmp_path / "run")]
    words = ["-m", "fmmeta", "train", "--model_name_or_path", str(model), *run]
    done = python([*words, "--eval_episodes", "0"], tmp_path)
    assert done.returncode == 0, done.stderr
    for folder in (out, out / "merged", tmp_path / "run" / "model"):
        found = json.loads((folder / "generation_config.json").read_text())
        kept = json.loads(file.read_text()) | {"eos_token_id": [1, 5]}
        kept.pop("_from_model_config", None)
        assert found == kept
