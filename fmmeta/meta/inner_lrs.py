"""Inner learning rates by step, layer or element, fixed or learned as meta-parameters.

    alpha_k[i] = table[k, layer of i] * element[i]          k inner step, i element of this rank's vector

`table` has K rows (inner steps) and L columns (layers, the same on every rank); `element` is a vector [S] or
absent. Fixed rates, inner schedules and rates per layer are values of the table. Learned: the table (LSLR:
Antoniou, Edwards, Storkey, "How to train your MAML", 2019, arXiv 1810.09502, section 4) or the vector
(Meta-SGD: Li, Zhou, Chen, Li 2017, arXiv 1707.09835). Both are changed in place by the outer step alone.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fmmeta.parallel.workers.base import Worker

HEAD = "head"
RATES_FILE = "inner_lr.safetensors"  # rates element by element, in an exported folder, named as its tensors


def layer_of(name: str, head_names: Sequence[str]) -> str:
    """`hf.encoder.layer.3.attention.weight` -> `hf.encoder.layer.3`; outside numbered layers the module; the
    head is `head`.
    """
    if name in head_names:
        return HEAD
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


@dataclass(frozen=True)
class Layers:
    """Names of all layers of the model, the same on every rank, and which stretch of this rank's vector
    belongs to which.
    """

    names: tuple[str, ...]
    segments: tuple[tuple[int, int, int], ...]  # begin, end, index of the layer; ascending, no overlaps

    @classmethod
    def of(cls, worker: Worker, head_names: Sequence[str]) -> "Layers":
        """Collective: group."""
        found = [(f.here.start, f.here.stop, layer_of(f.name, head_names)) for f in worker.params.fragments]
        gathered = worker.group.gather_bytes(json.dumps([name for _, _, name in found]).encode())
        names = sorted({name for text in gathered for name in json.loads(text)}, key=natural)
        merged: list[tuple[int, int, int]] = []
        for begin, end, name in sorted(found):
            index = names.index(name)
            if merged and merged[-1][1:] == (begin, index):
                merged[-1] = (merged[-1][0], end, index)
            else:
                merged.append((begin, end, index))
        return cls(tuple(names), tuple(merged))

    def inside(self, where: slice) -> Iterator[tuple[slice, slice, int]]:
        """The parts of `where` by layer: slice of the vector, slice within `where`, index of the layer."""
        first = bisect_right(self.segments, where.start, key=lambda segment: segment[1])
        for begin, end, index in self.segments[first:]:
            if begin >= where.stop:
                break
            low, high = max(begin, where.start), min(end, where.stop)
            yield slice(low, high), slice(low - where.start, high - where.start), index


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key: layer.2 before layer.10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


@dataclass(frozen=True)
class Rates:
    """See the module. `learned`: no, layer (the table is a meta-parameter) or element (the vector is)."""

    layers: Layers
    table: Tensor  # float64 [K, L], in host memory
    element: Tensor | None = None  # fp32 [S]
    learned: str = "no"

    @property
    def only_head(self) -> bool:
        """Whether nothing but a classifier head moves."""
        away = [column for column, name in enumerate(self.layers.names) if name != HEAD]
        return (
            self.element is None
            and self.learned == "no"
            and HEAD in self.layers.names
            and not self.table[:, away].any()
        )

    def of_head(self, numel: int) -> "Rates":
        """The rates of the head alone, as a separate vector."""
        column = self.layers.names.index(HEAD)
        return Rates(Layers((HEAD,), ((0, numel, 0),)), self.table[:, [column]])

    @property
    def meta_parameter(self) -> Tensor | None:
        return {"no": None, "layer": self.table, "element": self.element}[self.learned]

    def variant(self, learned: Tensor | None = None, scale: float = 1.0, steps: int | None = None) -> "Rates":
        """A copy with other `learned` values (where rates are learned), times `scale`; more `steps` repeat
        the last row.
        """
        table = learned if learned is not None and self.learned == "layer" else self.table
        more = max(0, (steps or 0) - len(table))
        element = self.element
        if learned is not None and element is not None:
            element = learned.to(element.device)
        return replace(self, table=torch.cat([table, table[-1:].expand(more, -1)]) * scale, element=element)

    def scale_(self, k: int, tensor: Tensor, where: slice) -> Tensor:
        """Multiply a stretch of a vector by alpha_k in place."""
        row = self.table[k]
        if bool((row == row[0]).all()):
            tensor.mul_(float(row[0]))
        else:
            for _, here, layer in self.layers.inside(where):
                tensor[here].mul_(float(row[layer]))
        return tensor if self.element is None else tensor.mul_(self.element[where])

    def uniform(self, k: int) -> float | None:
        """alpha_k where it is one number, else None."""
        row = self.table[k]
        return float(row[0]) if self.element is None and bool((row == row[0]).all()) else None

    def add_gradient_(self, into: Tensor, worker: Worker, k: int, v: Tensor, u: Tensor) -> None:
        """Add dL/dalpha of phi_{k+1} = phi_k - alpha_k u to `into`, v = dL/dphi_{k+1}.

        Collective: group (table only).
        """
        if self.learned == "element":
            into.sub_(self.scale_layers(k, v * u))
        else:
            weighted = u if self.element is None else u * self.element
            into[k] -= worker.dot_by_layer(v, weighted, self.layers.segments, len(self.layers.names))

    def scale_layers(self, k: int, vector: Tensor) -> Tensor:
        """Multiply `vector` [S] by the table alone, in place."""
        return replace(self, element=None).scale_(k, vector, slice(0, vector.numel()))
