"""The function that makes a model's inputs from rows (`Learner.collate`), with checks of what it returns.

    examples of a micro-batch --> collate --> {name: tensor [B, ...], or dictionaries, lists and tuples of
                                            tensors}, and targets

It runs in the process that loads the episode, so it must be importable. Before training all ranks call it
with the same rows and compare the structure of what it returns (training/build.py); from then on a
micro-batch of another structure is an error of its task, so that no rank reaches a forward pass that others
do not reach.

B rows of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.text import shortened
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import Collated, CollateFn, Example


@dataclass(frozen=True)
class Collate:
    """Picklable. name: for messages. structure: kinds of inputs and targets by place; empty while it is not
    known.
    """

    name: str
    function: CollateFn
    structure: dict[str, str] = field(default_factory=dict)

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
        found = structure_of(inputs, targets)
        for path, tensor in leaves_of({**inputs, "targets": targets}):
            if isinstance(tensor, Tensor) and (not tensor.ndim or len(tensor) != len(rows)):
                raise UsageError(
                    f"{self.name} returned {path} of shape {list(tensor.shape)} for {len(rows)}"
                    " rows; give every tensor a first dimension of as many rows"
                )
        if self.structure and found != self.structure:
            raise UsageError(
                f"{self.name} returned {found}, and {self.structure} for the first episode; return"
                " the same keys for all rows"
            )
        return inputs, targets


def leaves_of(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """What nested inputs consist of, each with its place, such as graph.nodes, in the order of the names."""
    if isinstance(value, dict):
        parts = [(str(key), value[key]) for key in sorted(value, key=str)]
    elif isinstance(value, (list, tuple)):
        parts = [(str(place), one) for place, one in enumerate(value)]
    else:
        return [(path, value)]
    return [found for name, one in parts for found in leaves_of(one, f"{path}.{name}".lstrip("."))]


def structure_of(inputs: Any, targets: Any) -> dict[str, str]:
    """The dtype of each tensor by its place; of other values the type."""
    return {
        path: str(one.dtype).removeprefix("torch.") if isinstance(one, Tensor) else type(one).__name__
        for path, one in leaves_of({**inputs, "targets": targets})
    }
