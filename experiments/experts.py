"""experts.yaml: a mixture of experts with random weights."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.run import Cell, Study, evaluated


def measure(study: Study, cell: Cell) -> dict[str, object]:
    """As the runner measures, from the random weights of a seed."""
    torch.manual_seed(cell.axes["seed"])
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**cell.settings["mixture"])).save_pretrained(
        f"{study.folder}/start {cell.axes['seed']}"
    )
    return evaluated(study, cell)
