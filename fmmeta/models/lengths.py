"""The longest text that a model accepts: the positions of its configuration without the reserved ones."""

from dataclasses import replace
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config

DEFAULT = Config.max_length
AFTER_PADDING = {
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "camembert",
    "longformer",
    "mpnet",
    "esm",
    "data2vec-text",
    "ibert",
    "xmod",
    "luke",
    "layoutlmv3",
}
"""Model types that count positions from pad_token_id + 1."""


def max_positions(hf_config: Any) -> int | None:
    """Largest number of tokens of a text; None if the configuration sets no limit."""
    most = getattr(hf_config, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return None
    return most - (hf_config.pad_token_id + 1 if hf_config.model_type in AFTER_PADDING else 0)


def fitted(config: Config, hf_config: Any) -> Config:
    """The settings with the default max_length lowered to the model's positions.

    Raises `UsageError` if a given max_length is larger.
    """
    most = max_positions(hf_config)
    if most is None or config.max_length <= most:
        return config
    if config.max_length != DEFAULT:
        raise UsageError(
            f"max_length={config.max_length} is above the {most} positions of model_name_or_path="
            f"{config.model_name_or_path}; use {most} or less"
        )
    return replace(config, max_length=most)
