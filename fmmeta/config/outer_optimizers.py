"""The outer optimizers: optimizers of torch that act element by element, so that they work on shards."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OuterOptimizerSpec:
    """torch_class: name in `torch.optim`. moments: vectors that it stores per parameter, by torch's names.
    options: arguments of torch, and the settings that give them. fixed: other arguments.
    """

    torch_class: str
    moments: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=lambda: {"eps": "adam_epsilon"})
    fixed: Mapping[str, bool] = field(default_factory=dict)


OUTER_OPTIMIZERS = {
    "adamw": OuterOptimizerSpec("AdamW", ("exp_avg", "exp_avg_sq")),
    "sgd": OuterOptimizerSpec("SGD", options={}),
    "nesterov": OuterOptimizerSpec(
        "SGD", ("momentum_buffer",), {"momentum": "outer_momentum"}, {"nesterov": True}
    ),
    "adagrad": OuterOptimizerSpec("Adagrad", ("sum",)),
    "adamax": OuterOptimizerSpec("Adamax", ("exp_avg", "exp_inf")),
    "nadam": OuterOptimizerSpec("NAdam", ("exp_avg", "exp_avg_sq")),
    "radam": OuterOptimizerSpec("RAdam", ("exp_avg", "exp_avg_sq")),
    "rmsprop": OuterOptimizerSpec("RMSprop", ("square_avg",)),
}
