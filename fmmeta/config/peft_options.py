"""The options of `--peft_config`: a JSON file in the form of peft's adapter_config.json, or its text.

Settings hold the text, not the name of the file, so that a run resumes and a model is adapted where the file
does not exist. Rank, alpha and target modules become the settings of these names.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of, nearest, shortened
from fmmeta.config.fields import default_of, of_type, shown

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
    "use_rslora": (bool,),
}
MOST = 1 << 20  # bytes of a file
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
    given, options = read_options(config.peft_config)
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
        if now not in (default_of(config.__dataclass_fields__[name]), value):
            raise UsageError(
                f"{name}={shown(now)} contradicts {option} {shown(value)} of peft_config; give one of them"
            )
        setattr(config, name, value)
    if not config.lora_r:
        raise UsageError(f"{given} has no r, the rank of the adapters; add it, or give --lora_r")
    kept = {name: value for name, value in sorted(options.items()) if name in OPTIONS | FLAGS}
    config.peft_config = json.dumps(kept) if kept else None


def read_options(source: str) -> tuple[str, dict[str, Any]]:
    """How messages name a file or text, and the options in it that are set: neither null nor empty."""
    is_text = source.lstrip().startswith("{")
    given = f"peft_config={shortened(source) if is_text else source}"
    if not is_text and Path(source).exists() and not Path(source).is_file():
        raise UsageError(f"{given} is no file; give a JSON file")
    try:
        with nullcontext() if is_text else Path(source).open(encoding="utf-8") as file:
            text = source if file is None else file.read(MOST)
        options = json.loads(text)
    except OSError as error:
        raise UsageError(f"{given} cannot be read ({error.strerror}); give a JSON file") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{given} is not JSON ({error}); fix it") from None
    if not isinstance(options, dict):
        raise UsageError(f'{given} holds no options of peft\'s LoraConfig; write {{"r": 8}}, say')
    return given, {name: value for name, value in options.items() if value not in (None, [], {}, "")}


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
            why = f" ({WHY[name]})" if name in WHY else nearest(name, known)
            yield f"{name} {shortened(value)} is not supported{why}; leave it out"
        if name in OPTIONS and type(value) not in OPTIONS[name]:
            yield f"{name} {shortened(value)} is not what peft's LoraConfig takes; fix it"
