"""Hydra: every setting of a run as a structured config, overrides by name, and sweeps.

    pip install hydra-core
    python examples/hydra_train.py outer_steps=50 inner_lr=0.1
    python examples/hydra_train.py --multirun inner_lr=0.05,0.1 seed=1,2

Settings that are left open are null in Hydra's file; `Config` chooses their values and refuses what cannot
work. A run writes into Hydra's folder, outputs/... or multirun/..., unless output_dir is given. Hydra's
own launcher trains one run after the other in this process. Several ranks are one run:
`torchrun --nproc_per_node 2 examples/hydra_train.py output_dir=runs/NAME hydra.run.dir=runs/NAME`.
"""

import sys
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import fmmeta


def structured(settings: type) -> type:
    """A dataclass of the same fields for OmegaConf; each may be null, which leaves it open."""
    hints: dict[str, Any] = get_type_hints(settings)
    members: list[Any] = []
    for one in fields(settings):
        unset: Any = {"default": one.default}
        if one.default is MISSING:
            unset = {"default_factory": one.default_factory}
        members.append((one.name, hints[one.name] | None, field(**unset)))
    return make_dataclass("Settings", members)


ConfigStore.instance().store(name="fmmeta", node=structured(fmmeta.Config))


@hydra.main(version_base="1.3", config_path=None, config_name="fmmeta")
def main(given: DictConfig) -> float:
    settings: Any = OmegaConf.to_container(given)
    settings["output_dir"] = settings["output_dir"] or f"{HydraConfig.get().runtime.output_dir}/run"
    try:
        result = fmmeta.MetaTrainer(fmmeta.Config(**settings)).train()
    except fmmeta.UsageError as error:  # one line, as on fmmeta's command line
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    return float(result.log_history[-1]["query_loss"])  # what a sweeper that searches compares


if __name__ == "__main__":
    main()
