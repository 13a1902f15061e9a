"""The options of `--peft_config`: a JSON file in the form of peft's adapter_config.json, or its text.

Settings hold the text, not the name of the file, so that a run resumes and a model is adapted where the file
does not exist. Rank, alpha and target modules become the settings of these names.
"""

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of, nearest, shortened
from fmmeta.config.fields import LARGEST, default_of, shown

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
FORMS = {  # in which patterns are used, by peft and by models/lora.py
    "alpha_pattern": r"(.*\.)?({})$",
    "exclude_modules": "(?:{})",
    "layers_pattern": r"(?:^|.*?\.){}\.",
    "rank_pattern": r"(.*\.)?({})$",
    "target_modules": "{}",
}
MOST = 1 << 20  # bytes of a file
LARGEST_RANK = 1 << 16
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


def with_peft_options(config: Any) -> dict[str, Any]:
    """Values for the settings of a configuration that its `peft_config` decides. Raises `UsageError`."""
    given, options = read_options(config.peft_config)
    if wrong := next(problems(options), None):
        raise UsageError(f"{given}: {wrong}")
    if isinstance(options.get("target_modules"), str) and options["target_modules"] != "all-linear":
        flags = {option: name for option, name in FLAGS.items() if option != "target_modules"}
    else:
        flags = FLAGS
    settings = dict[str, Any]()
    for option, name in flags.items():
        if (value := options.pop(option, None)) is None:
            continue
        value = [value] if option == "target_modules" and isinstance(value, str) else value
        now = getattr(config, name)
        if now not in (default_of(config.__dataclass_fields__[name]), value):
            raise UsageError(
                f"{name}={shown(now)} contradicts {option} {shown(value)} of peft_config; give one of them"
            )
        settings[name] = value
    if not settings.get("lora_r", config.lora_r):
        raise UsageError(f"{given} has no r, the rank of the adapters; add it, or give --lora_r")
    if config.lora_target_modules and "target_modules" in options:
        raise UsageError(
            f"lora_target_modules={shown(config.lora_target_modules)} contradicts target_modules"
            f" {options['target_modules']} of peft_config; give one of them"
        )
    kept = {name: value for name, value in sorted(options.items()) if name in OPTIONS | FLAGS}
    return {**settings, "peft_config": json.dumps(kept) if kept else None}


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
        wanted = {"r": (int,), "lora_alpha": (int, float), "target_modules": (str, list), **OPTIONS}.get(name)
        if wanted and (type(value) not in wanted or not well_formed(name, value)):
            yield f"{name} {shortened(value)} is not what peft's LoraConfig takes; fix it"


def well_formed(option: str, value: Any) -> bool:
    """Whether a value of the right type has the right elements, positive numbers and valid patterns."""
    if option in ("r", "lora_alpha"):
        return in_bounds(option, value)
    if option == "layers_to_transform":
        return all(type(one) is int and one >= 0 for one in ([value] if type(value) is int else value))
    if isinstance(value, list):
        texts = all(isinstance(one, str) and one for one in value)
        return texts and (option != "layers_pattern" or all(is_pattern(option, one) for one in value))
    if isinstance(value, dict):
        numbers = (int,) if option == "rank_pattern" else (int, float)
        return all(
            is_pattern(option, key) and type(one) in numbers and in_bounds(option, one)
            for key, one in value.items()
        )
    return not isinstance(value, str) or is_pattern(option, value)


def in_bounds(option: str, value: float) -> bool:
    return 0 < value <= (LARGEST_RANK if option in ("r", "rank_pattern") else LARGEST)


def is_pattern(option: str, text: str) -> bool:
    """Whether a pattern is a regular expression in the form in which it is used."""
    try:
        re.compile(FORMS.get(option, "{}").replace("{}", text))
    except (re.error, RecursionError, OverflowError):
        return False
    return True
