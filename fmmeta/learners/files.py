"""Files of a folder or hub id, online or offline, and the settings in a model's fmmeta.json.

Without a network no call waits for the hub.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from huggingface_hub.constants import HF_HOME
from safetensors import SafetensorError

from fmmeta.common.errors import UsageError, one_line, usage_errors
from fmmeta.common.security import publishing
from fmmeta.common.text import any_of
from fmmeta.config import learners
from fmmeta.config.fields import of_type, refuse_first
from fmmeta.config.settings import REMEMBERED, Config
from fmmeta.tasks.data.hub import hub_answers
from fmmeta.tasks.data.splits import UsedSplits, read_used_splits

BUILTIN = "tiny"
BASE_FOLDER = (
    "base"  # base model of adapters of the built-in model, in their folder: it is stored nowhere else
)
HEAD_FILE = "head.safetensors"  # the head of an encoder with fmmeta's pooling
ADAPTER_FILE = "adapter_model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
SETTINGS_FILE = "fmmeta.json"
GENERATION_FILE = "generation_config.json"
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    SafetensorError,
)
SENTENCE_FILES = [  # settings of the encoder of a sentence-transformers folder
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
OWN = re.compile(r"^sentence_transformers\.(\w+\.)*")  # before the kind of a module
SENTENCE_PROMPTS = "config_sentence_transformers.json"
T = TypeVar("T")


def split_source(source: str) -> dict[str, str]:
    """The arguments of transformers for `name` or `name@revision` (Config.model_source)."""
    name, _, revision = source.partition("@")
    if not revision or is_path(source) or Path(source).exists():
        return {"pretrained_model_name_or_path": source}
    return {"pretrained_model_name_or_path": name, "revision": revision}


def encoder_source(source: str) -> dict[str, Any]:
    """`split_source`, whether to use local files only, and the subfolder in which a sentence-transformers
    folder has its encoder, if any.

    Raises `UsageError` for a broken modules.json.
    """
    folder = encoder_folder(source)
    found = {**split_source(source), "local_files_only": not reachable(source)}
    return found | ({"subfolder": folder} if folder else {})


def encoder_folder(source: str) -> str:
    """The subfolder of the encoder: that of the first module; "" where the model is in no subfolder."""
    return next((path for _, path in sentence_modules(source)), "")


def beside_encoder(source: str, name: str) -> str:
    """The path of a file beside the configuration of the model, in its folder or repository."""
    return str(PurePosixPath(encoder_folder(source), name))


def encoder_file(source: str, name: str) -> str | None:
    """`cached_file` beside the configuration of the model."""
    return cached_file(source, beside_encoder(source, name))


def sentence_modules(source: str) -> list[tuple[str, str]]:
    """Kind and folder of each module of a sentence-transformers folder, in their order; empty for others.

    The kind of a module of another package begins with the package. Raises `UsageError`.
    """

    def parse(modules: Any) -> list[tuple[str, str]]:
        found = [(OWN.sub("", one["type"]), one.get("path") or "") for one in modules]
        if any(Path(path).is_absolute() or ".." in Path(path).parts for _, path in found):
            raise ValueError("a path leads out of the folder")
        return found

    return read_json(source, "modules.json", parse) or []


def sentence_settings(source: str) -> dict[str, Any]:
    """The settings of a sentence-transformers folder for the texts of its encoder: max_seq_length,
    which may be in those of its tokenizer alone, and do_lower_case; empty for others. Raises `UsageError`.
    """
    found = (read_json(source, beside_encoder(source, name), dict) for name in SENTENCE_FILES)
    settings = next(filter(None, found), {})
    if sentence_modules(source) and settings.get("max_seq_length") is None:
        stored = read_json(source, beside_encoder(source, "tokenizer_config.json"), dict) or {}
        settings = {**settings, "max_seq_length": stored.get("model_max_length")}
    return settings


def cached_file(model_name_or_path: str, name: str) -> str | None:
    """Path of one file of a folder or hub id; None if there is no such file, as for the built-in model."""
    from transformers.utils import cached_file as find

    if model_name_or_path == BUILTIN:
        return None
    where = split_source(model_name_or_path)
    try:
        return find(
            where.pop("pretrained_model_name_or_path"),
            name,
            **where,
            local_files_only=not reachable(model_name_or_path),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except (OSError, ValueError):
        return None


def reading(model_name_or_path: str, name: str) -> AbstractContextManager[None]:
    """Raise a `UsageError` that names the file or part `name` of a model if the block cannot read or use
    it.
    """
    return usage_errors(
        f"model_name_or_path={model_name_or_path}: {name} cannot be read", "fix or replace it"
    )


def read_stored(model_name_or_path: str, name: str, read: Callable[[str], T]) -> T | None:
    """`read(path)` of a file of a folder or hub id; None if there is no such file. Raises `UsageError`."""
    path = cached_file(model_name_or_path, name)
    if path is None:
        return None
    with reading(model_name_or_path, name):
        return read(path)


def read_json(model_name_or_path: str, name: str, parse: Callable[[Any], T]) -> T | None:
    """`parse` of the content of a JSON file of a folder or hub id; None if there is no such file.

    Raises `UsageError` for a broken file and for content that `parse` refuses.
    """
    return read_stored(
        model_name_or_path, name, lambda path: parse(json.loads(Path(path).read_text(encoding="utf-8")))
    )


def reachable(model_name_or_path: str) -> bool:
    """Whether the files of a folder or hub id can be listed without waiting for an unreachable hub."""
    return is_path(model_name_or_path) or Path(model_name_or_path).is_dir() or hub_answers()


def is_path(model_name_or_path: str) -> bool:
    """Whether a name cannot be a hub id."""
    name = model_name_or_path.partition("@")[0]  # a revision may have slashes
    return name.startswith((".", "/")) or name.count("/") > 1


def base_model_name(model_name_or_path: str) -> str:
    """The base model of an adapter folder, with `@revision` where one is stored; any other name unchanged.

    Raises `UsageError` for a broken folder.
    """
    path = cached_file(model_name_or_path, "adapter_config.json")
    if path is not None and (Path(path).parent / BASE_FOLDER / "config.json").is_file():
        return str(Path(path).parent / BASE_FOLDER)  # also after the folder was moved

    def base(settings: Any) -> str:
        name = settings["base_model_name_or_path"]
        if not isinstance(name, str):
            raise ValueError("it names no base model")
        revision = settings.get("revision")
        of_hub = not is_path(name) and not Path(name).exists()
        return f"{name}@{revision}" if isinstance(revision, str) and revision and of_hub else name

    return read_json(model_name_or_path, "adapter_config.json", base) or model_name_or_path


def adapter_folder(model_name_or_path: str) -> Path:
    """The local folder of an adapter in safetensors; peft itself would query the hub and read a pickle.

    Raises `UsageError`.
    """
    paths = [cached_file(model_name_or_path, name) for name in ("adapter_config.json", ADAPTER_FILE)]
    if None in paths:
        raise UsageError(
            f"model_name_or_path={model_name_or_path} holds no {ADAPTER_FILE}; convert its"
            " adapters to safetensors"
        )
    return Path(str(paths[0])).parent


def checkpoint_files(name: str) -> list[str]:
    """Paths of the safetensors files of the checkpoint; those of a hub id are downloaded."""
    if base_model_name(name) != name:
        raise UsageError(
            f"model_name_or_path={name} holds adapters, which are read together with a whole model; give a"
            " merged/ folder that --lora_merge wrote, or use ZeRO 0 to 2"
        )
    single = encoder_file(name, "model.safetensors")
    if single:
        return [single]
    files = read_json(
        name, beside_encoder(name, WEIGHTS_INDEX), lambda found: sorted(set(found["weight_map"].values()))
    )
    if files is None:
        raise UsageError(
            f"model_name_or_path={name} has no model.safetensors; convert its weights to safetensors"
        )
    paths = {file: encoder_file(name, file) for file in files}
    for missing in [file for file, path in paths.items() if path is None]:
        raise UsageError(f"model_name_or_path={name} lacks {missing}, which its index names; fetch it again")
    return list(map(str, paths.values()))


def store_model(model: Any) -> str:
    """Write a model of transformers to the cache, once for its content; return the folder.

    Raises `UsageError` for a model that cannot be meta-trained or written.
    """
    check_given_model(model)
    folder = Path(HF_HOME) / "fmmeta" / "models" / model_digest(model)
    if folder.is_dir():
        return str(folder)
    try:
        with publishing(folder) as temporary:
            model.save_pretrained(temporary)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error}); set HF_HOME to a folder with room") from None
    except ValueError as error:
        raise UsageError(
            f"model={type(model).__name__} cannot be saved by transformers ({one_line(error)}); correct its"
            " config or generation_config"
        ) from None
    return str(folder)


def check_given_model(model: Any) -> None:
    """Raise `UsageError` for an object that is no model of transformers with full-precision weights."""
    from transformers import PreTrainedModel

    name = f"model={type(model).__name__}"
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"{name} is no PreTrainedModel of transformers; give the model itself, before a wrapper of"
            " DeepSpeed, accelerate or torch, adapters by Config(lora_r=...), and a SentenceTransformer by"
            " the folder that it saves"
        )
    parameters = list(model.parameters())
    quantised = getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None)
    reasons = (
        (quantised, "is quantised, and its weights cannot be trained; give the full one"),
        (
            any(hasattr(one, "ds_id") for one in parameters),
            "is already sharded by DeepSpeed; load it without a DeepSpeed configuration",
        ),
        (any(one.is_meta for one in parameters), "has no weights (device meta); load them first"),
        (
            getattr(model, "_hf_peft_config_loaded", False),
            "has adapters; give the model without them, and Config(lora_r=...)",
        ),
    )
    refuse_first((holds, f"{name} {why}") for holds, why in reasons)


def check_given_tokenizer(tokenizer: Any) -> None:
    """Raise `UsageError` for an object that is no tokenizer of transformers."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UsageError(
            f"tokenizer={type(tokenizer).__name__} is no tokenizer of transformers; give one, such as"
            " PreTrainedTokenizerFast(tokenizer_object=...)"
        )


def model_digest(model: Any) -> str:
    """A digest of a model's class, configuration, generation settings and weights."""
    import torch

    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    generation = getattr(model, "generation_config", None)
    facts = [type(model).__name__, config, generation and generation.to_dict()]
    seen = hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode())
    for name, tensor in model.state_dict().items():
        seen.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        seen.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return seen.hexdigest()[:32]


def weights_state(folder: str) -> dict[str, list[int]]:
    """Size and time of change of each file of weights in a folder, by name; empty for a hub id."""
    files = sorted(Path(folder, encoder_folder(folder)).glob("*.safetensors"))
    states = {one.name: one.stat() for one in files}
    return {name: [one.st_size, one.st_mtime_ns] for name, one in states.items()}


def trained_with(models: Sequence[str]) -> list[UsedSplits]:
    """The splits that these models were trained with. Raises `UsageError`."""
    return [one for model in models for one in read_used_splits(remembered(model))]


def remembered(model_name_or_path: str) -> dict[str, Any]:
    """The settings and facts in a model's fmmeta.json. Raises `UsageError` for a broken one."""
    return read_json(model_name_or_path, SETTINGS_FILE, checked) or {}


def checked(facts: Any) -> dict[str, Any]:
    """The content of an fmmeta.json without its nulls and NaNs. Raises `ValueError` for wrong content.

    Facts that are checked where they are used are returned as they are.
    """
    if not isinstance(facts, dict):
        raise ValueError("it holds no settings")
    facts = {name: value for name, value in facts.items() if value is not None and value == value}
    for name in {*REMEMBERED, "n_way"} & set(facts):
        facts[name] = of_type(Config, name, facts[name])
    # no code is imported from here
    known = (*learners.BUILT_IN, learners.OWN.name)
    if facts.get("task_type", learners.CLASSIFICATION.name) not in known:
        raise ValueError(f"task_type is none of {any_of(known)}")
    if not facts.get("peft_config", "{").startswith("{"):
        raise ValueError("peft_config names a file")
    labels = facts.get("labels", [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ValueError("labels is not a list of texts")
    if not isinstance(facts.get("classes", 0), int):
        raise ValueError("classes is not a whole number")
    adapted = facts.get("adapted", {})
    if not isinstance(adapted, dict) or not all(
        isinstance(adapted.get(name) or 0, (int, float)) for name in ("inner_steps", "left_out")
    ):
        raise ValueError("adapted is not an object with numbers")
    for memory in (facts, facts.get("tuned", {})):
        read_used_splits(memory)
    return facts
