"""Exports theta as a Hugging Face folder: config, safetensors, tokenizer and fmmeta.json.

`from_pretrained` reads it without fmmeta. An encoder with fmmeta's pooling becomes a sentence-transformers
folder. A model is written file by file, each by the rank that holds its tensors or the first one; no rank
holds all of it. LoRA leaves adapters there, which peft loads on their base, and on request an ordinary model
in another folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.text import to_json
from fmmeta.config.settings import REMEMBERED, Config
from fmmeta.meta.inner_lrs import RATES_FILE, Rates
from fmmeta.models.files import BASE_FOLDER, HEAD_FILE, base_of
from fmmeta.models.learner import PooledClassifier
from fmmeta.models.load import Description, empty_learner, load_hf
from fmmeta.models.lora import merged, save_adapter
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.data.used_splits import UsedSplits

FILE_BYTES = (2**26, 2**30)  # a safetensors file is at least and at most this large, if the model has as much
WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    HEAD_FILE,
    "adapter_model.safetensors",
    "adapter_config.json",
)


def export(
    folder: Path,
    theta: Tensor,
    worker: Worker,
    frozen: dict[str, Tensor],
    config: Config,
    description: Description,
    tokenizer: Any,
    ranks: ProcessGroups,
    rates: Rates | None = None,
    merge_into: Path | None = None,
    trained: Sequence[UsedSplits] = (),
) -> None:
    """Write `folder`. `frozen`: tensors that are not trained, by name, on the ranks that write them; `rates`:
    written if they were learned; `merge_into`: folder of lora_merge's model, merged/ beside `folder` if not
    given; `trained`: the splits of the data that theta has learned from. Collective: world.
    """
    skeleton = empty_learner(config, replace(description, classes=0))
    shapes = {name: tuple(param.shape) for name, param in skeleton.named_parameters() if param.requires_grad}
    # a head over the classes of all training tasks stays behind; a task's starts with zeros
    heads = {name: torch.zeros(shapes.pop(name)) for name in skeleton.head_names} if config.joint_head else {}
    if config.lora_r:
        weights = gather_parameters(theta, worker, shapes, ranks) | heads
        with ranks.world.raise_on_all("exporting the adapters"):
            if ranks.first:
                write_adapters(
                    folder, skeleton, weights, config, description, tokenizer, rates, merge_into, trained
                )
    else:
        with ranks.world.raise_on_all("exporting the configuration"):
            if ranks.first:
                clear(folder)
                save_model(folder, skeleton.hf, description, {})
                write_metadata(folder, skeleton, config, description, tokenizer, rates, trained)
        failure: Exception | None = None
        if ranks.layout.group_index == 0:
            failure = write_weights(folder, theta, worker, frozen | heads, skeleton, config, shapes)
        with ranks.world.raise_on_all("exporting the weights"):
            if failure is not None:
                raise failure
    if rates is not None and rates.element is not None:
        named = gather_parameters(rates.scale_layers(0, rates.element.clone()), worker, shapes, ranks)
        with ranks.world.raise_on_all("exporting the inner rates"):
            if ranks.first:
                save_tensors(
                    {name.removeprefix("hf."): value for name, value in named.items()}, folder / RATES_FILE
                )


def clear(folder: Path, base: str | None = None) -> None:
    """An export folder without the weights of an earlier export: one file is read before several, adapters
    before a whole model. Those of `base` stay, which the new adapters are added to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if base is None or folder.resolve() != Path(base).resolve():
        for pattern in WEIGHTS:
            for file in folder.glob(pattern):
                file.unlink()


def gather_parameters(
    vector: Tensor, worker: Worker, shapes: dict[str, tuple[int, ...]], ranks: ProcessGroups
) -> dict[str, Tensor]:
    """Whole parameters out of a vector, by name, on the first rank; empty elsewhere.

    Collective: first group.
    """
    found = {}
    if ranks.layout.group_index == 0:
        for name, shape in shapes.items():
            whole = worker.gather_param(vector, name, shape)
            if ranks.first:
                found[name] = whole.cpu()
    return found


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in tensors.items()}, file)


def write_adapters(
    folder: Path,
    skeleton: Any,
    weights: dict[str, Tensor],
    config: Config,
    description: Description,
    tokenizer: Any,
    rates: Rates | None,
    merge_into: Path | None,
    trained: Sequence[UsedSplits],
) -> None:
    """Write adapters (whole, by name) as peft does, with --lora_merge an ordinary model too."""
    description = replace(
        description, classes=0
    )  # in merged/ too: the head that is exported is that of the skeleton
    clear(folder, None if config.builtin_model else base_of(config.model_name_or_path))
    save_adapter(folder, skeleton, weights, config)
    if config.builtin_model:
        save_model(folder / BASE_FOLDER, load_hf(config, description), description)
    folders = [folder]
    if config.lora_merge:
        folders.append(merge_into or folder.with_name("merged"))
        whole = merged(load_hf(config, description), folder, config)
        clear(folders[1])
        save_model(folders[1], whole, description)
    for each in folders:
        write_metadata(each, skeleton, config, description, tokenizer, rates, trained)
        if isinstance(skeleton, PooledClassifier) and config.head_init == "learned":
            save_tensors({name: weights[name] for name in skeleton.head_names}, each / HEAD_FILE)


def write_weights(
    folder: Path,
    theta: Tensor,
    worker: Worker,
    frozen: dict[str, Tensor],
    skeleton: Any,
    config: Config,
    trained: dict[str, tuple[int, ...]],
) -> Exception | None:
    """Write the safetensors files one after another, each by the rank that `worker.writer` names.

    A rank holds one file and one further parameter at a time. Returns what went wrong, since the other ranks
    wait for this one. Collective: group.
    """
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    files = plan_files(skeleton.hf, worker)
    failures: list[Exception] = []
    if isinstance(skeleton, PooledClassifier) and config.head_init == "learned":
        head = {name: worker.gather_param(theta, name, trained[name]).cpu() for name in skeleton.head_names}
        if worker.group.rank == 0:
            with collect_errors(failures):
                save_tensors(head, folder / HEAD_FILE)
    for path, (writer, names) in files.items():
        held: dict[str, Tensor] = {}
        for name in names:
            value = worker.gather_param(theta, name, trained[name]) if name in trained else frozen.get(name)
            if worker.group.rank == writer and value is not None:
                held[name.removeprefix("hf.")] = value.cpu().contiguous()
        if worker.group.rank == writer:
            with collect_errors(failures):
                save_file(
                    revert_weight_conversion(skeleton.hf, held), folder / path, metadata={"format": "pt"}
                )
    if worker.group.rank == 0 and len(files) > 1:
        with collect_errors(failures):
            write_index(folder, skeleton.hf, files)
    return failures[0] if failures else None


@contextmanager
def collect_errors(failures: list[Exception]) -> Iterator[None]:
    """What goes wrong in the block, for later."""
    try:
        yield
    except Exception as error:
        failures.append(error)


def write_index(folder: Path, hf: Any, files: dict[str, tuple[int, list[str]]]) -> None:
    """Which file holds which tensor."""
    from transformers.core_model_loading import revert_weight_conversion

    state = hf.state_dict()
    meta = {path: {name[3:]: state[name[3:]] for name in names} for path, (_, names) in files.items()}
    keys = {key: path for path, tensors in meta.items() for key in revert_weight_conversion(hf, tensors)}
    size = sum(value.numel() * 4 for tensors in meta.values() for value in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(keys.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def plan_files(hf: Any, worker: Worker) -> dict[str, tuple[int, list[str]]]:
    """File names, and for each the rank of the group that writes it and the tensors in it; tied ones are
    written once.
    """
    once = {name for name, _ in hf.named_parameters()} | {name for name, _ in hf.named_buffers()}
    ignored = set(hf._keys_to_ignore_on_save or ())
    tensors = {
        f"hf.{key}": value.numel() * 4 for key, value in hf.state_dict().items() if key in once - ignored
    }
    limit = min(FILE_BYTES[1], max(FILE_BYTES[0], sum(tensors.values()) // worker.group.size))
    files: list[tuple[int, list[str]]] = []
    full = 0
    for writer, name in sorted(
        ((worker.writer_rank(name), name) for name in tensors), key=lambda item: item[0]
    ):  # keeps the order
        if not files or files[-1][0] != writer or full + tensors[name] > limit:
            files.append((writer, []))
            full = 0
        files[-1][1].append(name)
        full += tensors[name]
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": file for number, file in enumerate(files, 1)
    }


def save_model(
    folder: Path, hf: Any, description: Description, weights: dict[str, Tensor] | None = None
) -> None:
    """An HF model in fp32, its dropouts as in the checkpoint. `weights`: in place of the stored ones."""
    for key, value in description.dropouts.items():
        setattr(hf.config, key, value)
    hf.config.dtype = torch.float32
    hf.save_pretrained(folder, state_dict=weights)


def write_metadata(
    folder: Path,
    skeleton: Any,
    config: Config,
    description: Description,
    tokenizer: Any,
    rates: Rates | None,
    trained: Sequence[UsedSplits],
) -> None:
    """Files beside the weights: tokenizer, pooling, fmmeta.json."""
    tokenizer.save_pretrained(folder)
    if isinstance(skeleton, PooledClassifier):
        sentence_transformers(folder, config, description)
    facts = {
        "algorithm": config.algorithm,
        "pooling": description.pooling,
        "n_way": config.n_way,
        "classes": config.most_classes,
        "k_shot": config.k_shot,
    }
    facts |= {name: getattr(config, name) for name in REMEMBERED} | {"inner_rates": rates_of(rates)}
    if description.labels:
        facts["labels"] = list(description.labels)
    if trained:
        facts["datasets"] = [
            json.loads(one) for one in dict.fromkeys(json.dumps(one.as_dict()) for one in trained)
        ]
    (folder / "fmmeta.json").write_text(to_json(facts, indent=1) + "\n", encoding="utf-8")


def rates_of(rates: Rates | None) -> Any:
    """How far a task's inner steps go: {layer: [rate of each step]}, or the file that has them element by
    element.
    """
    if rates is None:
        return None
    if rates.element is not None:
        return RATES_FILE
    columns = rates.table.T.tolist()
    return {
        name.removeprefix("hf."): column for name, column in zip(rates.layers.names, columns, strict=True)
    }


def sentence_transformers(folder: Path, config: Config, description: Description) -> None:
    """The files by which sentence-transformers knows the pooling; a Normalize module is kept if the source
    had one.
    """
    package = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if description.normalizes:
        modules.append(("2_Normalize", "Normalize"))
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"{package}.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
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
