"""Which settings of a run may change when it resumes."""

from typing import Any

from fmmeta.config.fields import names_where
from fmmeta.config.settings import Config

FREE_ON_RESUME = {*names_where(Config, lambda rule: rule.resume != "fixed")}
"""Settings that may change on resume, because they do not change theta."""
HIDDEN_ON_RESUME = {*names_where(Config, lambda rule: rule.resume == "hidden")}
"""Settings of FREE_ON_RESUME that differ at every start."""


def changed_settings(before: dict[str, Any], now: dict[str, Any], free: bool = False) -> dict[str, str]:
    """Settings that may not change on resume and did, by name, as `name: before -> now`; with `free`, those
    that may and did. `precision` is compared in place of `bf16`. A schedule of the user's may change theta.
    """
    unbound = FREE_ON_RESUME | {"deepspeed_layout", "bf16"}
    if any(":" in str(one.get("task_schedule")) for one in (before, now)):
        unbound = unbound - {"task_schedule"}
    keys = unbound - HIDDEN_ON_RESUME if free else (set(before) | set(now)) - unbound
    return {
        key: f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(keys)
        if before.get(key) != now.get(key)
    }
