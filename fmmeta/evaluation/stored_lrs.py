"""Inner learning rates of meta-training, read from a model folder for another worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.meta.inner_lrs import HEAD, RATES_FILE, Rates
from fmmeta.models.files import cached_file
from fmmeta.models.stored_settings import remembered
from fmmeta.parallel.workers.base import Worker


def stored_rates(config: Config, rates: Rates, worker: Worker) -> Rates:
    """The rates in the model's folder; `rates` where it has none.

    Raises `UsageError` for those of other layers, and for a head that begins with zeros and stays there.
    Collective: group.
    """
    with worker.group.raise_on_all("reading the inner rates"):
        return _stored(config, rates, worker)


def _stored(config: Config, rates: Rates, worker: Worker) -> Rates:
    memory = remembered(config.model_name_or_path)
    stored = memory.get("inner_rates")
    if stored == RATES_FILE:
        return element_rates(config, rates, worker, float(memory.get("inner_rates_scale", 1.0)))
    if not isinstance(stored, dict):
        return rates
    columns = [column_of(stored, name, rates.table.shape[0]) for name in rates.layers.names]
    if any(column is None for column in columns):
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path}: the inner rates in fmmeta.json are of other"
            f" layers than lora_r={config.lora_r} trains; leave --lora_r out, or give --inner_lr"
        )
    if (
        config.head_init == "zero"
        and HEAD in rates.layers.names
        and not any(columns[rates.layers.names.index(HEAD)] or ())
    ):
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path} keeps its head as it learned it, for"
            f" {memory.get('classes', memory.get('n_way'))} classes, and nothing moves under a head of zeros;"
            " give tasks of as many classes, --head_init prototype, or --inner_lr"
        )
    return replace(rates, table=torch.tensor(columns, dtype=torch.float64).T.contiguous())


def column_of(stored: dict[str, Any], layer: str, steps: int) -> list[float] | None:
    """A layer's rates over `steps` inner steps; steps beyond those known take the last one's."""
    found = stored.get(layer.removeprefix("hf."))
    if not isinstance(found, list) or not found or not all(isinstance(rate, (int, float)) for rate in found):
        return None
    return [float(found[min(step, len(found) - 1)]) for step in range(steps)]


def element_rates(config: Config, rates: Rates, worker: Worker, scale: float) -> Rates:
    from safetensors import SafetensorError, safe_open

    path = cached_file(config.model_name_or_path, RATES_FILE)
    try:
        vector = torch.zeros(worker.params.numel, device=worker.storage_device)
        with safe_open(path, "pt") as file:
            for fragment in worker.params.fragments:
                vector[fragment.here] = fragment.take(file.get_tensor(fragment.name.removeprefix("hf."))).to(
                    vector
                )
    except (OSError, TypeError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path}: {RATES_FILE} does not fit ({error}); give"
            " --inner_lr to go without it"
        ) from None
    return Rates(rates.layers, torch.full_like(rates.table, scale), vector, "no")
