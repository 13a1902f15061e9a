"""Inner learning rates of meta-training, read from a model folder for another worker."""

from dataclasses import replace
from typing import Any

import torch

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import FewShotConfig
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.inner_optimizers import HEAD, RATES_FILE, Rates
from fmmeta.models.files import cached_file
from fmmeta.models.stored_settings import remembered
from fmmeta.parallel.workers.base import Worker


def with_stored_rates(settings: FewShotConfig, config: Config, inner: InnerLoop, worker: Worker) -> InnerLoop:
    """The inner loop with the learned rates of the model, unless the user sets rates or the model has none.

    Raises `UsageError` for rates that do not fit. Collective: group.
    """
    if settings.sets_inner_lr:
        return inner
    with worker.group.raise_on_all("reading the inner rates"):
        return replace(inner, rates=stored_rates(config, inner.rates, worker))


def stored_rates(config: Config, rates: Rates, worker: Worker) -> Rates:
    """The rates in the model's folder; `rates` if it has none.

    Raises `UsageError` for rates of other layers, and for a head of zeros that no rate would move.
    """
    memory = remembered(config.model_name_or_path)
    stored = memory.get("inner_rates")
    if stored == RATES_FILE:
        return element_rates(config, rates, worker, float(memory.get("inner_rates_scale", 1.0)))
    if not isinstance(stored, dict):
        return rates
    columns = {name: column_of(stored, name, len(rates.table)) for name in rates.layers.names}
    if None in columns.values():
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path}: the inner rates in fmmeta.json are of other"
            f" layers than lora_r={config.lora_r} trains; leave --lora_r out, or give --inner_lr"
        )
    if config.head_init == "zero" and HEAD in columns and not any(columns[HEAD] or ()):
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path} does not train its head, which was learned for"
            f" {memory.get('classes', memory.get('n_way'))} classes, and a head of zeros would stay zero;"
            " give tasks of as many classes, --head_init prototype, or --inner_lr"
        )
    return replace(rates, table=torch.tensor([*columns.values()], dtype=torch.float64).T.contiguous())


def column_of(stored: dict[str, Any], layer: str, steps: int) -> list[float] | None:
    """The rates of a layer over `steps` inner steps; steps beyond the stored ones take the last rate."""
    column = stored.get(layer.removeprefix("hf."))
    if (
        not isinstance(column, list)
        or not column
        or not all(isinstance(rate, (int, float)) for rate in column)
    ):
        return None
    return [float(column[min(step, len(column) - 1)]) for step in range(steps)]


def element_rates(config: Config, rates: Rates, worker: Worker, scale: float) -> Rates:
    """Rates of single elements: this rank's slices of RATES_FILE, times `scale`. Raises `UsageError`."""
    from safetensors import SafetensorError, safe_open

    path = cached_file(config.model_name_or_path, RATES_FILE)
    try:
        vector = torch.zeros(worker.params.numel, device=worker.storage_device)
        with safe_open(path, "pt") as file:
            for fragment in worker.params.fragments:
                whole = file.get_tensor(fragment.name.removeprefix("hf."))
                vector[fragment.here] = fragment.take(whole).to(vector)
    except (OSError, TypeError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path}: {RATES_FILE} does not fit ({error}); give"
            " --inner_lr to go without it"
        ) from None
    return Rates(rates.layers, torch.full_like(rates.table, scale), vector, "no")
