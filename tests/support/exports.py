"""Exported models: theta of a loaded model is changed and written as a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fmmeta.checkpoint.hf_export import export
from fmmeta.checkpoint.model_card import PLACEHOLDER
from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_learner, load_tokenizer
from fmmeta.parallel.param_map import param_groups
from fmmeta.parallel.workers.create import frozen_tensors
from fmmeta.parallel.workers.full_model import PlainWorker
from tests.support.helpers import one_rank
from tests.support.models import WORDS


def exported(
    source: Path | str, folder: Path, notice: Callable[[str], Any] = pytest.fail, **settings
) -> tuple[Config, PlainWorker]:
    """Load a model, change theta and export it."""
    config = Config(model_name_or_path=str(source), n_way=3, **settings)
    description = describe(config)
    tokenizer = load_tokenizer(config, description, notice)
    learner = load_learner(config, description)
    frozen = frozen_tensors(learner)
    per_task = learner.head_names if config.head_init != "learned" else ()
    worker = PlainWorker(learner, param_groups(learner, per_task, True), torch.device("cpu"))
    theta = worker.read()
    theta += 0.05 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(2))
    worker.write(theta)
    export(folder, theta, worker, frozen, config, description, tokenizer, one_rank())
    return config, worker


def run_python(card: str, folder: Path, block: int = -1) -> dict[str, Any]:
    """Run a Python block of a model card, the last one, for the model in `folder`; its variables."""
    found: dict[str, Any] = {}
    exec(card.split("```python\n")[block].split("```")[0].replace(PLACEHOLDER, str(folder)), found)
    return found


def inputs(folder: Path) -> dict[str, Tensor]:
    from transformers import AutoTokenizer

    batch = AutoTokenizer.from_pretrained(folder)(
        [WORDS[0], " ".join(WORDS[:3])], padding=True, return_tensors="pt"
    )
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def assert_same_logits(found: Tensor, wanted: Tensor, mask: Tensor) -> None:
    """Compare logits up to rounding; those per token only where the mask is 1."""
    if found.ndim == 3:
        found, wanted = found[mask.bool()], wanted[mask.bool()]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert float(wanted.std()) > 1e-3
