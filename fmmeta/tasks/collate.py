"""The function that makes a model's inputs from rows (`Learner.collate`), with checks of what it returns.

    examples of a micro-batch --> collate --> {name: tensor [B, ...], or dictionaries, lists and tuples of
                                            tensors}, and targets

It runs in the process that loads the episode, so it must be importable. Before training all ranks call it
with the same rows and compare the structure of what it returns (training/build.py); from then on a
micro-batch of another structure is an error of its task, so that no rank reaches a forward pass that others
do not reach.

B rows of a micro-batch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.text import shortened
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import Collated, CollateFn, Example


@dataclass(frozen=True)
class Collate:
    """Picklable. name: for messages. structure: of the inputs, as `structure_of` describes it; "" while it is
    not known.
    """

    name: str
    function: CollateFn
    structure: str = ""

    @classmethod
    def of(cls, config: Config) -> "Collate | None":
        """The function of the kind of task; None where tokens are padded, or images stacked."""
        spec = config.learner
        return None if spec.plain else cls(f"task_type={config.task_type}: collate", spec.kind.collate)

    def __call__(self, rows: Sequence[Example], pad_token_id: int) -> Collated:
        """The inputs and targets of rows. Raises `UsageError` if the function fails or returns another
        structure.
        """
        with usage_errors(f"{self.name} failed", "fix it"):
            inputs, targets = self.function(rows, pad_token_id)
        if not isinstance(inputs, dict) or not all(isinstance(name, str) for name in inputs):
            raise UsageError(
                f"{self.name} returned {shortened(inputs)}; return a dictionary of the model's"
                " arguments by name"
            )
        for path, tensor in tensors_of({**inputs, "targets": targets}):
            if not tensor.ndim or len(tensor) != len(rows):
                raise UsageError(
                    f"{self.name} returned {path} of shape {list(tensor.shape)} for {len(rows)}"
                    " rows; give every tensor a first dimension of as many rows"
                )
        found = json.dumps(structure_of({**inputs, "targets": targets}))
        if self.structure and found != self.structure:
            raise UsageError(
                f"{self.name} returned {found}, and {self.structure} for the first episode; return"
                " the same keys for all rows"
            )
        return inputs, targets


def structure_of(value: Any) -> Any:
    """The keys and types of nested inputs, as JSON, in the order of the names."""
    if isinstance(value, dict):
        return {str(key): structure_of(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [structure_of(one) for one in value]
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__


def tensors_of(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Each tensor of nested inputs, with its place, such as graph.nodes."""
    if isinstance(value, Tensor):
        return [(path, value)]
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    return [found for key, one in parts for found in tensors_of(one, f"{path}.{key}".lstrip("."))]
