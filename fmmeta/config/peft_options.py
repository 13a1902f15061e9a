"""The options of `--peft_config`: a JSON file in the form of peft's adapter_config.json, or its text.

Settings hold the text, not the name of the file, so that a run resumes and a model is adapted where the file
does not exist. Rank, alpha and target modules become the settings of these names.
"""

import json
from collections.abc import Iterator
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of, nearest, shortened
from fmmeta.config.fields import default_of, of_type, shown
from fmmeta.config.json_files import PEFT_EXAMPLE, read_object

FLAGS = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
OPTIONS: dict[str, tuple[type, ...]] = {  # beside FLAGS
    "alpha_pattern": (dict,),
    "exclude_modules": (str, list),
    "fan_in_fan_out": (bool,),
    "init_lora_weights": (bool, str),
    "layers_pattern": (str, list),
    "layers_to_transform": (int, list),
    "modules_to_save": (list,),
    "rank_pattern": (dict,),
    "target_parameters": (list,),
    "use_rslora": (bool,),
}
MOST = 1 << 16  # rank or alpha of a layer
STARTS = (True, False, "gaussian", "orthogonal")  # of init_lora_weights, that leave the base as it is
WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
)
WHY = {
    "bias": "the biases of the base stay frozen",
    "lora_dropout": "adapters have no dropout, as the rest of the model in meta-training",
    "use_dora": "its magnitudes are not linear in the adapters",
}


def apply_peft_options(config: Any) -> None:
    """Set the fields of a configuration that its `peft_config` decides. Raises `UsageError`."""
    given, found = read_object("peft_config", config.peft_config, PEFT_EXAMPLE)
    options = {name: value for name, value in found.items() if value not in (None, [], {}, "")}
    if wrong := next(problems(options), None):
        raise UsageError(f"{given}: {wrong}")
    targets, given_targets = options.get("target_modules"), config.lora_target_modules
    is_pattern = isinstance(targets, str) and targets != "all-linear"
    if is_pattern and given_targets:
        raise UsageError(
            f"lora_target_modules={shown(given_targets)} contradicts target_modules {targets} of peft_config;"
            " give one of them"
        )
    for option, name in FLAGS.items():
        if option not in options or (option == "target_modules" and is_pattern):
            continue
        try:
            value = of_type(type(config), name, options.pop(option))
        except UsageError as error:
            raise UsageError(f"{given}: {error}") from None
        now = getattr(config, name)
        if now not in (None, default_of(config.__dataclass_fields__[name]), value):
            raise UsageError(
                f"{name}={shown(now)} contradicts {option} {shown(value)} of peft_config; give one of them"
            )
        setattr(config, name, value)
    if not config.lora_r:
        raise UsageError(f"{given} has no r, the rank of the adapters; add it, or give --lora_r")
    kept = {name: value for name, value in sorted(options.items()) if name in OPTIONS | FLAGS}
    config.peft_config = json.dumps(kept) if kept else None


def problems(options: dict[str, Any]) -> Iterator[str]:
    """What is wrong with them, as messages end."""
    known = (*FLAGS, *OPTIONS, *WITHOUT_EFFECT)
    if options.get("peft_type", "LORA") != "LORA":
        yield f"peft_type {shortened(options['peft_type'])} is not supported; use LORA"
    if options.get("init_lora_weights", True) not in STARTS:
        yield (
            f"init_lora_weights {shortened(options['init_lora_weights'])} changes the base or needs data; use"
            f" true, false, {any_of(STARTS[2:])}"
        )
    for name, value in options.items():
        if name not in known and name != "peft_type" and value not in (False, 0, "none"):
            why = f" ({WHY[name]}); leave it out" if name in WHY else nearest(name, known, "; leave it out")
            yield f"{name} {shortened(value)} is not supported{why}"
        if name in OPTIONS and type(value) not in OPTIONS[name]:
            yield f"{name} {shortened(value)} is not what peft's LoraConfig takes; fix it"
        elif isinstance(value, dict) and not all(map(is_rank_or_alpha, value.values())):
            yield f"{name} {shortened(value)} has values that are not numbers above 0, up to {MOST}; fix it"


def is_rank_or_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= MOST
