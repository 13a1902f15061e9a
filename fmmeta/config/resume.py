"""Which settings of a run may change when it resumes."""

from typing import Any

from fmmeta.config import conflicts
from fmmeta.config.fields import default_of, names_where
from fmmeta.config.settings import Config

FREE_ON_RESUME = {*names_where(Config, lambda rule: rule.resume != "fixed")}
"""Settings that may change on resume, because they do not change theta."""
HIDDEN_ON_RESUME = {*names_where(Config, lambda rule: rule.resume == "hidden")}
"""Settings of FREE_ON_RESUME that differ at every start."""
NOT_IN_0_1_0 = {
    "base_meta_batch_size",
    "class_weights",
    "collate_fn",
    "drop_stale",
    "image_column",
    "label_names",
    "loss_on_support",
    "max_staleness",
    "peft_config",
    "scale_outer_lr",
    "second_order",
    "stratify_by",
    "support_batch_size",
    "truncate_steps",
}
"""Settings that change theta and that runs of 0.1.0 do not store."""


def changed_settings(before: dict[str, Any], now: dict[str, Any], free: bool = False) -> dict[str, str]:
    """Settings that may not change on resume and did, by name, as `name: before -> now`; with `free`, those
    that may and did.

    RESOLVED settings are compared only if both sides have them; runs of 0.1.0 do not. A setting that a run of
    an earlier version does not store had what is now its default.
    """
    if not free:
        defaults = {name: default_of(Config.__dataclass_fields__[name]) for name in NOT_IN_0_1_0 & set(now)}
        before = {**defaults, **before}
    known = {name for name in conflicts.RESOLVED if name in before and name in now}
    unbound = FREE_ON_RESUME | {"deepspeed_layout"} | ({"bf16"} if "precision" in known else set())
    keys = (unbound - HIDDEN_ON_RESUME) & set(before) if free else (set(before) | set(now)) - unbound
    keys -= set(conflicts.RESOLVED) - known
    return {
        key: f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(keys)
        if before.get(key) != now.get(key)
    }
