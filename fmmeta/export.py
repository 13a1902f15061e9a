"""From theta to an ordinary HF folder: config, safetensors, tokenizer, and fmmeta.json with what adaptation needs.

`from_pretrained` reads it without fmmeta. An encoder with fmmeta's pooling becomes a sentence-transformers folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta.config import Config
from fmmeta.models.learner import PooledClassifier
from fmmeta.models.load import Description, cached_file, empty_learner
from fmmeta.parallel.communicator import Ranks
from fmmeta.parallel.worker import Worker

FILE_BYTES = (2**26, 2**30)  # a safetensors file is at least and at most this large, if the model has as much


def export(folder: Path, theta: Tensor, worker: Worker, frozen: dict[str, Tensor], config: Config, description: Description,
           tokenizer: Any, ranks: Ranks) -> None:  # fmt: skip
    """Write `folder`. `frozen`: tensors that are not trained, by name, on the ranks that write them. Collective: world."""
    skeleton = empty_learner(config, description)
    with ranks.world.together("exporting the configuration"):
        if ranks.first:
            for key, value in description.dropouts.items():
                setattr(skeleton.hf.config, key, value)
            skeleton.hf.config.dtype = torch.float32
            skeleton.hf.save_pretrained(folder, state_dict={})
            tokenizer.save_pretrained(folder)
            describe_learner(folder, skeleton, config, description)
    failure: Exception | None = None
    if ranks.layout.group_index == 0:
        failure = write_weights(folder, theta, worker, frozen, skeleton, config)
    with ranks.world.together("exporting the weights"):
        if failure is not None:
            raise failure


def write_weights(folder: Path, theta: Tensor, worker: Worker, frozen: dict[str, Tensor], skeleton: Any,
                  config: Config) -> Exception | None:  # fmt: skip
    """Write the safetensors files one after another, each by the rank that `worker.writer` names. A rank holds one file and
    one further parameter at a time. Returns what went wrong, since the other ranks wait for this one. Collective: group.
    """
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    trained = {name: tuple(param.shape) for name, param in skeleton.named_parameters() if param.requires_grad}
    files = plan_files(skeleton.hf, worker)
    failure: Exception | None = None
    if isinstance(skeleton, PooledClassifier) and config.head_init == "learned":
        head = {name: worker.whole(theta, name, trained[name]).cpu().contiguous() for name in skeleton.head_names}
        if worker.group.rank == 0:
            save_file(head, folder / "head.safetensors")
    for path, (writer, names) in files.items():
        held: dict[str, Tensor] = {}
        for name in names:
            value = worker.whole(theta, name, trained[name]) if name in trained else frozen.get(name)
            if worker.group.rank == writer and value is not None:
                held[name.removeprefix("hf.")] = value.cpu().contiguous()
        if worker.group.rank == writer:
            try:
                save_file(revert_weight_conversion(skeleton.hf, held), folder / path, metadata={"format": "pt"})
            except Exception as error:
                failure = error
    if worker.group.rank == 0 and len(files) > 1:
        state = skeleton.hf.state_dict()
        meta = {path: {name[3:]: state[name[3:]] for name in names} for path, (_, names) in files.items()}
        keys = {key: path for path, tensors in meta.items() for key in revert_weight_conversion(skeleton.hf, tensors)}
        size = sum(value.numel() * 4 for tensors in meta.values() for value in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(keys.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return failure


def plan_files(hf: Any, worker: Worker) -> dict[str, tuple[int, list[str]]]:
    """File names, and for each the rank of the group that writes it and the tensors in it; tied ones are written once."""
    once = {name for name, _ in hf.named_parameters()} | {name for name, _ in hf.named_buffers()}
    ignored = set(hf._keys_to_ignore_on_save or ())
    tensors = {f"hf.{key}": value.numel() * 4 for key, value in hf.state_dict().items() if key in once - ignored}
    limit = min(FILE_BYTES[1], max(FILE_BYTES[0], sum(tensors.values()) // worker.group.size))
    files: list[tuple[int, list[str]]] = []
    full = 0
    for writer, name in sorted(((worker.writer(name), name) for name in tensors), key=lambda item: item[0]):  # keeps the order
        if not files or files[-1][0] != writer or full + tensors[name] > limit:
            files.append((writer, []))
            full = 0
        files[-1][1].append(name)
        full += tensors[name]
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": file for number, file in enumerate(files, 1)}


def describe_learner(folder: Path, skeleton: Any, config: Config, description: Description) -> None:
    """fmmeta.json, and the files by which sentence-transformers knows a pooling that is not the model's own."""
    if isinstance(skeleton, PooledClassifier):
        sentence_transformers(folder, config, description)
    defaults = {"task_type": config.task_type, "pooling": description.pooling, "head_init": config.head_init,
                "algorithm": config.algorithm, "n_way": config.n_way, "k_shot": config.k_shot, "inner_steps": config.inner_steps,
                "inner_lr": config.inner_lr, "max_length": config.max_length}  # fmt: skip
    (folder / "fmmeta.json").write_text(json.dumps(defaults, indent=1) + "\n", encoding="utf-8")


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
