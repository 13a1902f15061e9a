"""From theta to an ordinary HF folder: config, safetensors, tokenizer, and fmmeta.json with what adaptation needs.

`from_pretrained` reads it without fmmeta. An encoder with fmmeta's pooling becomes a sentence-transformers folder.
LoRA leaves the adapters there, which peft loads on their base, and on request an ordinary model in merged/ beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta.config import Config
from fmmeta.meta.rates import Rates
from fmmeta.models.learner import PooledClassifier
from fmmeta.models.load import Description, cached_file, empty_learner, load_hf
from fmmeta.models.lora import merged, save_adapter
from fmmeta.parallel.communicator import Ranks
from fmmeta.parallel.worker import Worker

RATES = "inner_lr.safetensors"


def export(folder: Path, theta: Tensor, worker: Worker, frozen: dict[str, Tensor], config: Config, description: Description,
           tokenizer: Any, ranks: Ranks, rates: Rates | None = None) -> None:  # fmt: skip
    """Write `folder`. `frozen`: tensors that are not trained, by name; `rates`: written if they were learned. One parameter is
    gathered at a time, on the first group only. Collective: world.
    """
    skeleton = empty_learner(config, description)
    shapes = {name: tuple(param.shape) for name, param in skeleton.named_parameters() if param.requires_grad}
    weights = dict(frozen)
    if ranks.layout.group_index == 0:
        for name, shape in shapes.items():
            whole = worker.whole(theta, name, shape)
            if ranks.first:
                weights[name] = whole.cpu()
    with ranks.world.together("exporting the model"):
        if ranks.first:
            write(folder, skeleton, weights, config, description, tokenizer, rates)
    if rates is not None and rates.element is not None:
        export_rates(folder / RATES, rates.element, worker, shapes, ranks)


def export_rates(file: Path, element: Tensor, worker: Worker, shapes: dict[str, tuple[int, ...]], ranks: Ranks) -> None:
    """Write learned rates per element under the names of the parameters in the folder. Collective: world."""
    from safetensors.torch import save_file

    named = {}
    if ranks.layout.group_index == 0:
        for name, shape in shapes.items():
            whole = worker.whole(element, name, shape)
            if ranks.first:
                named[name.removeprefix("hf.")] = whole.cpu()
    with ranks.world.together("exporting the inner rates"):
        if ranks.first:
            save_file(named, file)


def write(
    folder: Path, skeleton: Any, weights: dict[str, Tensor], config: Config, description: Description, tokenizer: Any,
    rates: Rates | None = None,
) -> None:  # fmt: skip
    """Write `folder` from whole weights by name; with --lora_merge merged/ beside it too."""
    folder.mkdir(parents=True, exist_ok=True)
    if not config.lora_r:
        inside = {name.removeprefix("hf."): value.contiguous() for name, value in weights.items() if name.startswith("hf.")}
        save_model(folder, skeleton.hf, description, inside)
    else:
        save_adapter(folder, skeleton, weights, config)
        if config.builtin_model:
            save_model(folder / "base", load_hf(config, description), description)
    accompany(folder, skeleton, weights, config, description, tokenizer, rates)
    if config.lora_merge:
        beside = folder.with_name("merged")
        save_model(beside, merged(load_hf(config, description), folder, config), description)
        accompany(beside, skeleton, weights, config, description, tokenizer, rates)


def save_model(folder: Path, hf: Any, description: Description, weights: dict[str, Tensor] | None = None) -> None:
    """An HF model in fp32, its dropouts as the checkpoint had them. `weights`: in place of its own."""
    for key, value in description.dropouts.items():
        setattr(hf.config, key, value)
    hf.config.dtype = torch.float32
    hf.save_pretrained(folder, state_dict=weights)


def accompany(
    folder: Path, skeleton: Any, weights: dict[str, Tensor], config: Config, description: Description, tokenizer: Any,
    rates: Rates | None = None,
) -> None:  # fmt: skip
    """What lies beside the weights: tokenizer, pooling, a learned head, fmmeta.json."""
    from safetensors.torch import save_file

    tokenizer.save_pretrained(folder)
    if isinstance(skeleton, PooledClassifier):
        sentence_transformers(folder, config, description)
        if config.head_init == "learned":
            save_file({name: weights[name].contiguous() for name in skeleton.head_names}, folder / "head.safetensors")
    defaults = {"task_type": config.task_type, "pooling": description.pooling, "head_init": config.head_init,
                "algorithm": config.algorithm, "n_way": config.n_way, "k_shot": config.k_shot, "inner_steps": config.inner_steps,
                "inner_lr": config.inner_lr, "max_length": config.max_length, "inner_optimizer": config.inner_optimizer,
                "inner_rates": rates_of(rates)}  # fmt: skip
    if config.task_type == "causal_lm":
        defaults["prompt_template"] = config.prompt_template
    (folder / "fmmeta.json").write_text(json.dumps(defaults, indent=1) + "\n", encoding="utf-8")


def rates_of(rates: Rates | None) -> Any:
    """How far a task's inner steps go: {layer: [rate of each step]}, or the file that has them element by element."""
    if rates is None:
        return None
    if rates.element is not None:
        return RATES
    columns = rates.table.T.tolist()
    return {name.removeprefix("hf."): column for name, column in zip(rates.layers.names, columns, strict=True)}


def sentence_transformers(folder: Path, config: Config, description: Description) -> None:
    """The files by which sentence-transformers knows the pooling; a Normalize module is kept if the source had one."""
    package = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    source = None if config.builtin_model else cached_file(config, "modules.json")
    if source and any("Normalize" in module["type"] for module in json.loads(Path(source).read_text(encoding="utf-8"))):
        modules.append(("2_Normalize", "Normalize"))
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"{package}.{kind}"} for i, (path, kind) in enumerate(modules)]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    files: dict[str, Any] = {
        "modules.json": listed,
        "1_Pooling/config.json": {
            "word_embedding_dimension": description.hf_config.hidden_size,
            "pooling_mode_cls_token": description.pooling == "cls",
            "pooling_mode_mean_tokens": description.pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
        "sentence_bert_config.json": {"max_seq_length": config.max_length, "do_lower_case": False},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
