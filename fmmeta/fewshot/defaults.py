"""The inner rates that a model was meta-trained with, read from its folder for another worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fmmeta.config import Config, UsageError
from fmmeta.fewshot.settings import remembered
from fmmeta.meta.rates import RATES_FILE, Rates
from fmmeta.models.files import cached_file
from fmmeta.parallel.worker import Worker


def stored_rates(config: Config, rates: Rates, worker: Worker) -> Rates:
    """The rates in the model's folder; `rates` where it has none. Raises `UsageError` for those of other layers."""
    stored = remembered(config.model_name_or_path).get("inner_rates")
    if stored == RATES_FILE:
        return element_rates(config, rates, worker)
    if not isinstance(stored, dict):
        return rates
    columns = [column_of(stored, name, rates.table.shape[0]) for name in rates.layers.names]
    if any(column is None for column in columns):
        raise UsageError(f"model_name_or_path={config.model_name_or_path}: the inner rates in fmmeta.json are of other layers "
                         f"than lora_r={config.lora_r} trains; leave --lora_r out, or give --inner_lr")  # fmt: skip
    return replace(rates, table=torch.tensor(columns, dtype=torch.float64).T.contiguous())


def column_of(stored: dict[str, Any], layer: str, steps: int) -> list[float] | None:
    """A layer's rates over `steps` inner steps; steps beyond those known take the last one's."""
    found = stored.get(layer.removeprefix("hf."))
    if not isinstance(found, list) or not found or not all(isinstance(rate, (int, float)) for rate in found):
        return None
    return [float(found[min(step, len(found) - 1)]) for step in range(steps)]


def element_rates(config: Config, rates: Rates, worker: Worker) -> Rates:
    from safetensors import SafetensorError, safe_open

    path = cached_file(config.model_name_or_path, RATES_FILE)
    try:
        vector = torch.zeros(worker.params.numel, device=worker.home)
        with safe_open(path, "pt") as file:
            for fragment in worker.params.fragments:
                vector[fragment.here] = fragment.take(file.get_tensor(fragment.name.removeprefix("hf."))).to(vector)
    except (OSError, TypeError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"model_name_or_path={config.model_name_or_path}: {RATES_FILE} does not fit ({error}); give --inner_lr "
                         "to go without it") from None  # fmt: skip
    return Rates(rates.layers, torch.ones_like(rates.table), vector, "no")
