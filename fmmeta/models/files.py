"""Files of a folder or hub id, online or offline; without a network no call waits for the hub."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.common.security import one_line
from fmmeta.config.settings import Config

BASE_FOLDER = "base"  # in the folder of adapters of the built-in model, which is nowhere else
HEAD_FILE = "head.safetensors"  # the head of an encoder with fmmeta's pooling


def cached_file(model_name_or_path: str, name: str) -> str | None:
    """Path of one file of a folder or hub id; None where it has no such file."""
    from transformers.utils import cached_file as find

    try:
        return find(
            model_name_or_path,
            name,
            local_files_only=not reachable(model_name_or_path),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except (OSError, ValueError):
        return None


def reachable(model_name_or_path: str) -> bool:
    """Whether the files of a folder or hub id can be listed without waiting for an unreachable hub."""
    return is_path(model_name_or_path) or Path(model_name_or_path).is_dir() or hub_answers()


def is_path(model_name_or_path: str) -> bool:
    """Whether a name can be no hub id."""
    return model_name_or_path.startswith((".", "/")) or model_name_or_path.count("/") > 1


@cache
def hub_answers() -> bool:
    """Asked once per process: the hub's own client asks six times for every file, which takes minutes without
    a network.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    for wait_s in (1.0, 2.0, 0.0):  # a network may stumble
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return True
        except Exception:  # no connection, by whichever client the hub uses
            time.sleep(wait_s)
    return False


def base_of(model_name_or_path: str) -> str:
    """The model that an adapter folder was made for; any other name as it is.

    Raises `UsageError` for a broken folder.
    """
    path = cached_file(model_name_or_path, "adapter_config.json")
    if path is None:
        return model_name_or_path
    inside = Path(path).parent / BASE_FOLDER
    if (inside / "config.json").is_file():
        return str(inside)  # wherever the folder has been moved to
    try:
        base = json.loads(Path(path).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"model_name_or_path={model_name_or_path}: adapter_config.json cannot be read ({error}); fix it"
        ) from None
    if not isinstance(base, str):
        raise UsageError(
            f"model_name_or_path={model_name_or_path}: adapter_config.json names no base model; fix it"
        )
    return base


def adapter_folder(model_name_or_path: str) -> Path:
    """The local folder of an adapter: peft itself would ask the hub for them, and
    take a pickle too. Raises `UsageError`.
    """
    settings, weights = (
        cached_file(model_name_or_path, f"adapter_{name}") for name in ("config.json", "model.safetensors")
    )
    if settings is None or weights is None:
        raise UsageError(
            f"model_name_or_path={model_name_or_path} holds no adapter_model.safetensors; convert its"
            " adapters to safetensors"
        )
    return Path(settings).parent


def adapters_in(config: Config) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """peft's settings and the tensors of an adapter folder; None for a whole model. Raises `UsageError`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    name = config.model_name_or_path
    if config.builtin_model or base_of(name) == name:
        return None
    folder = adapter_folder(name)
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return settings, load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"model_name_or_path={name}: its adapters cannot be read ({one_line(error)}); fetch them again"
        ) from None
