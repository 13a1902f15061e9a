"""Exports theta as a Hugging Face folder: config, safetensors, tokenizer and fmmeta.json.

`from_pretrained` reads it without fmmeta. An encoder with fmmeta's pooling becomes a sentence-transformers
folder. A model is written file by file, each by a rank that holds its tensors, or by the first rank; no rank
holds the whole model. With LoRA the folder holds adapters, which peft loads on their base; one that was
trained too is an ordinary model in base/ inside it. --lora_merge adds an ordinary model in another folder.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fmmeta.common.text import to_json
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config, InnerConfig
from fmmeta.learners.base import HFLearner
from fmmeta.learners.files import (
    BASE_FOLDER,
    GENERATION_FILE,
    HEAD_FILE,
    SENTENCE_PROMPTS,
    SETTINGS_FILE,
    base_model_name,
    cached_file,
    checkpoint_files,
    read_json,
)
from fmmeta.learners.lazy_weights import StoredTensor
from fmmeta.learners.load import (
    Description,
    empty_hf,
    empty_learner,
    generation_settings,
    load_hf,
    stored_tensors,
)
from fmmeta.learners.lora import merge, save_adapter
from fmmeta.learners.parameter_sets import inner_parameters, is_base, trains_base
from fmmeta.learners.text_part import outside, whole_of
from fmmeta.meta.inner_optimizers import FIXED, RATES_FILE, Rates
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.data.encode import end_tokens
from fmmeta.tasks.data.splits import UsedSplits

FILE_BYTES = (2**26, 2**30)  # smallest and largest safetensors file of a model of several files
OTHERS = "model-others-{:05d}.safetensors"
"""Files of the other parts of a checkpoint whose language model was trained, one for each that holds some."""
WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "model-others*.safetensors",
    HEAD_FILE,
    "adapter_model.safetensors",
    "adapter_config.json",
)
ADDED_TOKENS = "added_tokens.json"
CARRIED = (
    GENERATION_FILE,
    ADDED_TOKENS,
    "chat_template.json",
    SENTENCE_PROMPTS,
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files of a checkpoint that its exports hold too, where `save_pretrained` of model and tokenizer writes none
of that name. It writes chat templates (all of them), special and added tokens.
"""
Files = dict[str, tuple[int, list[str]]]
"""By file name, the rank of the group that writes it (`worker.writer_rank`), and the names of its tensors."""


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
    """Write theta as a Hugging Face folder.

    theta: fp32 [S]. frozen: untrained tensors by name, on the ranks that write them. rates: learned inner
    rates. merge_into: folder of the merged model (default: merged/ beside `folder`). trained: splits of the
    data that theta has learned from. Collective: world.
    """
    if not description.labels:  # the head is for no task: names of the model's earlier classes would mislead
        hf_config = description.hf_config
        hf_config.id2label = {number: f"LABEL_{number}" for number in range(hf_config.num_labels)}
        hf_config.label2id = {name: number for number, name in hf_config.id2label.items()}
    skeleton = empty_learner(config, replace(description, classes=0))
    shapes = {name: tuple(param.shape) for name, param in skeleton.named_parameters() if param.requires_grad}
    # a head for the classes of all training tasks is not exported; tasks start with zeros
    heads = {name: torch.zeros(shapes.pop(name)) for name in skeleton.head_names} if config.joint_head else {}
    here = shapes if ranks.layout.group_index == 0 else {}  # the first group writes
    prefix = "hf." if isinstance(skeleton, HFLearner) else ""
    of_peft = ".base_layer" if config.lora_r else ""
    called = {name.removeprefix(prefix).replace(of_peft, ""): name for name in skeleton.state_dict()}
    stored = ModelTensors(theta, worker, shapes, frozen | heads, called)
    model = skeleton.hf if isinstance(skeleton, HFLearner) else skeleton
    if config.lora_r:
        if trains_base(skeleton):
            base = empty_hf(config, replace(description, classes=0))
            write_model(folder / BASE_FOLDER, base, stored, config, description, ranks)
        above = {name: shape for name, shape in here.items() if not is_base(skeleton, name)}
        weights = gather(theta, worker, above, above) | heads
        ranks.world.on_first(
            "exporting the adapters",
            lambda: write_adapters(
                folder, skeleton, weights, config, description, tokenizer, rates, merge_into, trained
            ),
        )
    else:
        own = skeleton.head_names if skeleton.own_head and config.head_init == "learned" else ()
        write_model(folder, model, stored, config, description, ranks, own)
        ranks.world.on_first(
            "exporting the configuration",
            lambda: write_metadata(folder, skeleton, config, description, tokenizer, rates, trained),
        )
    if rates is not None and rates.element is not None:
        named = gather(rates.scale_layers(0, rates.element.clone()), worker, here, here)
        ranks.world.on_first("exporting the inner rates", lambda: save_tensors(named, folder / RATES_FILE))


def export_adapters(
    folder: Path,
    weights: dict[str, Tensor],
    config: Config,
    description: Description,
    tokenizer: Any,
    rates: Rates | None,
    element_rates: dict[str, Tensor],
    merge_into: Path,
    trained: Sequence[UsedSplits],
) -> None:
    """Write adapters and head as `export` does, from their complete weights by name. Local."""
    skeleton = empty_learner(config, replace(description, classes=0))
    write_adapters(folder, skeleton, weights, config, description, tokenizer, rates, merge_into, trained)
    if element_rates:
        save_tensors(element_rates, folder / RATES_FILE)


def clear(folder: Path, base: str | None = None) -> None:
    """Create the folder, or remove the weights of an earlier export, which loaders might prefer to the new.

    base: the folder that holds the base of the adapters; its weights stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if base is None or folder.resolve() != Path(base).resolve():
        for pattern in WEIGHTS:
            for file in folder.glob(pattern):
                file.unlink()


@dataclass(frozen=True)
class ModelTensors:
    """Where the tensors of a model are: parameters of `theta` [S], those in `shapes`, and `frozen` ones on
    the ranks that write them, by their names in the worker. called: these, by the names in the model.
    """

    theta: Tensor
    worker: Worker
    shapes: Mapping[str, tuple[int, ...]]
    frozen: Mapping[str, Tensor]
    called: Mapping[str, str]

    def writer(self, name: str) -> int:
        """The rank of the group that writes the tensor `name` of the model."""
        return self.worker.writer_rank(self.called.get(name, name))

    def gather(self, names: Iterable[str], writer: int) -> dict[str, Tensor]:
        """Tensors by name in the model on the rank `writer` of the group; see `gather`. Collective: group."""
        own = {self.called.get(name, name): name for name in names}
        found = gather(self.theta, self.worker, own, self.shapes, self.frozen, writer)
        return {own[name]: value for name, value in found.items()}


def gather(
    vector: Tensor,
    worker: Worker,
    names: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    frozen: Mapping[str, Tensor] = MappingProxyType({}),
    writer: int = 0,
) -> dict[str, Tensor]:
    """Tensors by name on the rank `writer` of the group; none elsewhere. One is complete at a time.

    They are parameters of a vector [S], those in `shapes`, and the `frozen` ones there. Collective: group.
    """
    found = dict[str, Tensor]()
    for name in names:
        whole = worker.gather_param(vector, name, shapes[name]) if name in shapes else frozen.get(name)
        if worker.group.rank == writer and whole is not None:
            found[name] = whole.cpu()
    return found


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write tensors under the names that they have in the HF model."""
    save_file(
        {name.removeprefix("hf."): value.contiguous() for name, value in tensors.items()},
        file,
        {"format": "pt"},
    )


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
    """Write adapters as peft does, and with --lora_merge an ordinary model. weights: parameters by name."""
    description = replace(description, classes=0)  # the exported head is that of the skeleton
    clear(folder, None if config.builtin_model else base_model_name(config.model_source))
    save_adapter(folder, skeleton, weights, config)
    with_base = trains_base(skeleton)
    if config.builtin_model and not with_base:
        save_model(folder / BASE_FOLDER, load_hf(config, description), description)
    folders = [folder]
    if config.lora_merge:
        folders.append(merge_into or folder.with_name("merged"))
        clear(folders[1])
        of_base = {"model_name_or_path": str(folder / BASE_FOLDER)} if with_base else {}
        hf = load_hf(replace(config, **of_base), description)
        merge(hf, folder, config)
        save_model(folders[1], hf, description)
    for each in folders:
        if skeleton.own_head and config.head_init == "learned":
            save_tensors({name: weights[name] for name in skeleton.head_names}, each / HEAD_FILE)
        write_metadata(each, skeleton, config, description, tokenizer, rates, trained)


def write_model(
    folder: Path,
    model: Any,
    stored: ModelTensors,
    config: Config,
    description: Description,
    ranks: ProcessGroups,
    head: Sequence[str] = (),
) -> None:
    """Write configuration and weights of a model of transformers, or a user's module, on the meta device.

    head: names of a learned head, which gets a separate file. Collective: world.
    """
    with ranks.world.raise_on_all("exporting the configuration"):
        if ranks.first:
            clear(folder)
            if isinstance(model, PreTrainedModel):
                save_model(folder, model, description, {})
    files = plan_files(model, stored)
    failures = write_weights(folder, model, stored, files, head) if ranks.layout.group_index == 0 else []
    with ranks.world.raise_on_all("exporting the weights"):
        for failure in failures:
            raise failure
        if ranks.first and "model.safetensors" not in files:
            others = {} if description.whole is None else write_others(folder, model, config)
            write_index(folder, model, files, others)


def write_weights(
    folder: Path, model: Any, stored: ModelTensors, files: Files, head: Sequence[str]
) -> list[Exception]:
    """Write `files` one after another, and a learned head beside them.

    A rank holds one file and one further parameter at a time. Returns this rank's errors instead of raising
    one, since the other ranks of the group continue with the next parameter. Collective: group.
    """
    failures: list[Exception] = []
    if head:
        files = {HEAD_FILE: (0, [*head]), **files}
    for path, (writer, names) in files.items():
        tensors = stored.gather(names, writer)
        if stored.worker.group.rank == writer:
            try:
                save_tensors(tensors if path == HEAD_FILE else as_stored(model, tensors), folder / path)
            except Exception as error:
                failures.append(error)
    return failures


def as_stored(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a checkpoint of transformers has them; of a user's module as they are."""
    if not isinstance(model, PreTrainedModel):
        return tensors
    named = {outside(model, name): tensor for name, tensor in tensors.items()}
    return revert_weight_conversion(whole_of(model), named)


def write_others(folder: Path, hf: Any, config: Config) -> dict[str, str]:
    """Copy the tensors of the checkpoint outside its language model `hf`, from one of its files at a time;
    return their new file by name.
    """
    base, inside, files = base_model_name(config.model_source), hf.state_dict(), dict[str, str]()
    stored = stored_tensors(hf, base, checkpoint_files(base))
    others = ((path, key) for path, key, name, *_ in stored if name not in inside)
    for number, (path, found) in enumerate(groupby(others, key=itemgetter(0)), 1):
        file, keys = OTHERS.format(number), [key for _, key in found]
        save_file({key: StoredTensor(path, key).read() for key in keys}, folder / file, {"format": "pt"})
        files |= dict.fromkeys(keys, file)
    return files


def write_index(folder: Path, model: Any, files: Files, others: Mapping[str, str]) -> None:
    """Write the file that maps each tensor to its file. others: of tensors outside the model."""
    state = model.state_dict()
    meta = {path: {name: state[name] for name in names} for path, (_, names) in files.items()}
    keys = {key: path for path, tensors in meta.items() for key in as_stored(model, tensors)}
    size = sum(value.numel() * 4 for tensors in meta.values() for value in tensors.values())
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": dict(sorted([*keys.items(), *others.items()]))},
        indent=2,
    )


def plan_files(model: Any, stored: ModelTensors) -> Files:
    """The files of a model; tied tensors are in one of them, once."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    saved = {*dict(model.named_parameters()), *dict(model.named_buffers())} - {*ignored}
    tensors = {key: value.numel() * 4 for key, value in model.state_dict().items() if key in saved}
    limit = min(FILE_BYTES[1], max(FILE_BYTES[0], sum(tensors.values()) // stored.worker.group.size))
    files, full = list[tuple[int, list[str]]](), 0
    for name in sorted(tensors, key=stored.writer):  # by rank, and in the order of the model
        writer = stored.writer(name)
        if not files or files[-1][0] != writer or full + tensors[name] > limit:
            files.append((writer, []))
            full = 0
        files[-1][1].append(name)
        full += tensors[name]
    if len(files) == 1 and whole_of(model) is model:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": file for number, file in enumerate(files, 1)
    }


def save_model(
    folder: Path, hf: Any, description: Description, weights: dict[str, Tensor] | None = None
) -> None:
    """Save an HF model in fp32, with the settings of its checkpoint. weights: in place of the model's."""
    hf.config.update(description.restored)
    hf = whole_of(hf)
    hf.config.dtype = torch.float32
    # `carry_files` writes the checkpoint's; transformers refuses to save some that it loads
    hf.generation_config = GenerationConfig(eos_token_id=[*description.ends] or None)
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
    """Write the files beside the weights: tokenizer or image processor, pooling, fmmeta.json, and files of
    the checkpoint. Users who can read fmmeta.json can then read the weights: safetensors 0.8 gives them to
    their owner alone, and a server often runs as another user.
    """
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        carry_files(folder, config, description, tokenizer)
    if skeleton.own_head and not description.images:
        sentence_transformers(folder, config, description)
    spec = find(config.algorithm)
    unused = InnerConfig.__dataclass_fields__ if spec.evaluation else ()
    stored: dict[str, Any] = {
        "algorithm": config.algorithm,
        "pooling": description.pooling,
        "n_way": config.n_way,
        "classes": config.most_classes,
        "k_shot": config.k_shot,
        **{name: value for name, value in config.to_remember().items() if name not in unused},
        "inner_rates": None,
    }
    if spec.evaluation:
        stored["method"], rates = spec.method, None
    else:  # its default depends on the algorithm
        stored["inner_parameters"] = inner_parameters(config, skeleton)
    if rates is not None and rates.element is not None:
        stored["inner_rates"] = RATES_FILE
    elif rates is not None:  # by layer, the rate of each step
        stored["inner_rates"] = {
            name.removeprefix("hf."): column
            for name, column in zip(rates.layers.names, rates.table.T.tolist(), strict=True)
            if name != FIXED
        }
    if description.labels:
        stored["labels"] = list(description.labels)
    if trained:
        stored["datasets"] = list({json.dumps(one.as_dict()): one.as_dict() for one in trained}.values())
    write_json(folder / SETTINGS_FILE, stored)
    for file in folder.rglob("*.safetensors"):
        file.chmod((folder / SETTINGS_FILE).stat().st_mode)


def carry_files(folder: Path, config: Config, description: Description, tokenizer: Any) -> None:
    """Copy the files in `CARRIED` that the checkpoint has and the export lacks, without a default prompt: it
    is trained without. Of a language model, write generation_config.json with all tokens that end an answer
    (`end_tokens`).
    """
    places = [*dict.fromkeys((config.model_source, base_model_name(config.model_source)))]
    for name in CARRIED:
        path = next(filter(None, (cached_file(place, name) for place in places)), None)
        if path is not None and not (folder / name).exists():
            shutil.copyfile(path, folder / name)
    prompts = read_json(str(folder), SENTENCE_PROMPTS, dict) or {}
    if prompts.pop("default_prompt_name", None):
        write_json(folder / SENTENCE_PROMPTS, prompts, indent=2)
    added = read_json(str(folder), ADDED_TOKENS, dict) or {}
    if added and not description.images and not added.items() <= tokenizer.get_vocab().items():
        (folder / ADDED_TOKENS).unlink()  # of another tokenizer than the one that was given in Python
    if config.learner.writes:
        stored = generation_settings(config, description.hf_config)
        ends = end_tokens(tokenizer, config.prompt_template, description.ends)
        stored["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        stored.pop("_from_model_config", None)  # older versions of transformers then read config.json
        write_json(folder / GENERATION_FILE, stored, indent=2)


def write_json(file: Path, value: Any, indent: int = 1) -> None:
    file.write_text(to_json(value, indent=indent) + "\n", encoding="utf-8")


def sentence_transformers(folder: Path, config: Config, description: Description) -> None:
    """Write the files in which sentence-transformers finds the pooling; keeps a Normalize module."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    if description.normalizes:
        kinds["2_Normalize"] = "Normalize"
    files = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds.items())
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": description.hf_config.hidden_size,
            "pooling_mode_cls_token": description.pooling == "cls",
            "pooling_mode_mean_tokens": description.pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
        "sentence_bert_config.json": {"max_seq_length": config.max_length, "do_lower_case": False},
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, value in files.items():
        write_json(folder / name, value)
