"""Inner optimizers and their rates: phi <- phi - alpha_k * u, element by element, with state per task.

    sgd       u = g
    momentum  m <- mu m + g;  u = m                          (Sutskever et al. 2013, torch's SGD)
    adamw     m <- b1 m + (1-b1) g;  s <- b2 s + (1-b2) g^2  (Kingma, Ba 2015; Loshchilov, Hutter 2019)
              u = (m / (1-b1^t)) / (sqrt(s / (1-b2^t)) + eps) + decay * phi

    alpha_k[i] = table[k, layer of i] * element[i]           k inner step, i element of this rank's vector

An optimizer gets one shard, its gradient and its slice of the vector; it never communicates. With
`inner_max_grad_norm` it gets clip_k g, clip_k = min(1, most / |g|) (`Rates.clip`).

The backward recursion of exact meta-gradients (algorithms/unrolled.py) differentiates u by autograd. Elements
with s = 0 (all gradients so far were zero, as those of LoRA's A while B = 0) have u = 0 before decay, and its
derivative is taken as 0: that of the formula, of the order of 1 / eps, belongs to no step that was made.

`table` has K rows (inner steps) and L columns (layers, the same on every rank); `element` is a vector [S] or
absent. Fixed rates, inner schedules and rates per layer are values of the table. Learned: the table (LSLR:
Antoniou, Edwards, Storkey, "How to train your MAML", 2019, arXiv 1810.09502, section 4) or the vector
(Meta-SGD: Li, Zhou, Chen, Li 2017, arXiv 1707.09835). Both are changed in place by the outer step alone.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fmmeta.config.algorithms import find_inner
from fmmeta.config.settings import Config
from fmmeta.parallel.param_map import pieces
from fmmeta.parallel.workers.base import Update, Worker

HEAD = "head"
FIXED = "fixed"  # the layer of the parameters that the inner loop does not change; its rate is 0
RATES_FILE = "inner_lr.safetensors"  # rates element by element, in an exported folder, named as its tensors


def layer_of(name: str, head_names: Sequence[str], outer_only: Collection[str]) -> str:
    """`hf.encoder.layer.3.attention.weight` -> `hf.encoder.layer.3`; outside numbered layers the module; the
    head is `head`; what the inner loop does not change is FIXED.
    """
    if name in outer_only:
        return FIXED
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
        found = [
            (f.here.start, f.here.stop, layer_of(f.name, head_names, worker.outer_only))
            for f in worker.params.fragments
        ]
        gathered = worker.group.gather([name for _, _, name in found])
        names = sorted({name for listed in gathered for name in listed}, key=natural)
        merged: list[tuple[int, int, int]] = []
        for begin, end, name in sorted(found):
            index = names.index(name)
            if merged and merged[-1][1:] == (begin, index):
                begin = merged.pop()[0]
            merged.append((begin, end, index))
        return cls(tuple(names), tuple(merged))

    @property
    def moving(self) -> Tensor:
        """1 for each layer that the inner loop changes, 0 for FIXED; float64 [L]."""
        return torch.tensor([float(name != FIXED) for name in self.names], dtype=torch.float64)

    def inside(self, where: slice) -> Iterator[tuple[slice, slice, int]]:
        """The parts of `where` by layer: slice of the vector, slice within `where`, index of the layer."""
        for begin, end, index in self.segments[
            bisect_right(self.segments, where.start, key=lambda segment: segment[1]) :
        ]:
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
        fixed, names = self.element is None and self.learned == "no", self.layers.names
        return fixed and HEAD in names and not self.table[:, [name != HEAD for name in names]].any()

    @property
    def meta_parameter(self) -> Tensor | None:
        return {"no": None, "layer": self.table, "element": self.element}[self.learned]

    def variant(self, learned: Tensor | None = None, scale: float = 1.0, steps: int | None = None) -> "Rates":
        """A copy with other `learned` values (where rates are learned), times `scale`; more `steps` repeat
        the last row.
        """
        table = learned if learned is not None and self.learned == "layer" else self.table
        more = max(0, (steps or 0) - len(table))
        element = self.element if learned is None or self.element is None else learned.to(self.element.device)
        return replace(self, table=torch.cat([table, table[-1:].expand(more, -1)]) * scale, element=element)

    def with_factor(self, k: int, factor: float) -> "Rates":
        """A copy with row k times `factor`; rows after the last repeat it."""
        rates = self.variant(steps=k + 1)
        rates.table[k] *= factor
        return rates

    def scale_(self, k: int, tensor: Tensor, where: slice) -> Tensor:
        """Multiply a stretch of a vector by alpha_k in place."""
        alpha = self.uniform(k)
        if alpha is not None:
            tensor.mul_(alpha)
        else:
            for _, here, layer in self.layers.inside(where):
                tensor[here].mul_(float(self.table[k, layer]))
        return tensor if self.element is None else tensor.mul_(self.element[where])

    def uniform(self, k: int) -> float | None:
        """The number of row k of the table where it is the same for all layers, else None."""
        row = self.table[k]
        return float(row[0]) if bool((row == row[0]).all()) else None

    def add_gradient_(self, into: Tensor, worker: Worker, k: int, v: Tensor, u: Tensor) -> None:
        """Add dL/dalpha of phi_{k+1} = phi_k - alpha_k u to `into`, v = dL/dphi_{k+1}.

        Collective: group (table only).
        """
        if self.learned == "element":
            into.sub_(self.scale_layers(k, v * u))
        else:
            into[k] -= self.layers.moving * worker.dot_by_layer(
                v, u, self.layers.segments, len(self.layers.names)
            )

    def clip(self, k: int, worker: Worker, g: Tensor, most: float) -> float:
        """The factor that clips a gradient [S] to the norm `most`, over the layers that step k moves.

        Collective: group.
        """
        squares = worker.dot_by_layer(g, g, self.layers.segments, len(self.layers.names))
        norm = math.sqrt(squares[self.table[k] != 0].sum())
        return min(1.0, most / norm) if norm else 1.0

    def through_clip(
        self, k: int, worker: Worker, bar: Tensor, g: Tensor, clip: float, most: float
    ) -> Tensor:
        """dL/dg from `bar` = dL/d(clip g), where clip = most / |g|: clip (bar - g (g bar) / |g|^2), g the
        gradient of what step k moves, of which alone `bar` is not 0. Collective: group.
        """
        moved = replace(self, table=(self.table != 0).double())
        share = worker.dot(g, bar) * (clip / most) ** 2
        return moved.scale_(k, g.clone(), slice(0, g.numel())).mul_(-share).add_(bar).mul_(clip)

    def scale_layers(self, k: int, vector: Tensor) -> Tensor:
        """Multiply `vector` [S] by the table alone, in place."""
        return replace(self, element=None).scale_(k, vector, slice(0, vector.numel()))


@dataclass
class InnerState:
    """Vectors [S] by name, and the number of steps taken."""

    vectors: dict[str, Tensor]
    count: int = 0


Differentiable = Callable[[Tensor, Tensor, Mapping[str, Tensor], int], tuple[Tensor, dict[str, Tensor]]]
"""(g, phi, state, step number from 1) -> u and the state after the step: new tensors, differentiable."""


@dataclass(frozen=True)
class InnerOptimizer:
    """One of the optimizers above, or the user's: `--inner_optimizer module:name`.

    Rules of second order need `differentiable`.

    state_names: of the vectors that it stores. direction: (g, phi, state vectors, step number from 1) -> u,
    element by element, on stretches of a vector; the state is changed in place, g and phi are not.
    differentiable: the same direction for meta-gradients of second order; None: there are none.
    is_linear: u is momentum u + g, whose derivative needs neither g nor the state.
    """

    state_names: tuple[str, ...]
    direction: Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]
    momentum: float = 0.0
    differentiable: Differentiable | None = None
    is_linear: bool = False

    def zero_state(self, numel: int, device: torch.device) -> InnerState:
        """What a task starts with; also the derivatives by it at the end of the inner loop."""
        return InnerState({name: torch.zeros(numel, device=device) for name in self.state_names})

    def new_state(
        self, g: Tensor, phi: Tensor, state: Mapping[str, Tensor], count: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """u, and the state after the step: new tensors in the dtype of `state`, differentiable where the
        optimizer is.
        """
        if self.differentiable is not None:
            return self.differentiable(g, phi, state, count)
        after = {name: vector.clone() for name, vector in state.items()}
        return self.direction(g, phi, after, count), after

    def pull(
        self,
        phi: Tensor,
        before: Mapping[str, Tensor],
        count: int,
        bar_u: Tensor,
        bars: dict[str, Tensor],
        v: Tensor,
        g: Tensor,
    ) -> Tensor:
        """The derivative of a loss by g [S], from those by u (`bar_u`) and by the state after the step
        (`bars`).

        before: the state before the step. `bars` become the derivatives by it, and that by phi is added to
        `v`, in place. Local.
        """
        assert self.differentiable is not None
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in (g, phi, *before.values())]
            state = dict(zip(before, leaves[2:], strict=True))
            u, after = self.differentiable(leaves[0], leaves[1], state, count)
            bar_g, bar_phi, *of_state = torch.autograd.grad(
                [u, *after.values()], leaves, [bar_u, *bars.values()], materialize_grads=True
            )
        bars.update(zip(bars, of_state, strict=True))
        v += bar_phi
        return bar_g

    def update(
        self,
        k: int,
        state: InnerState,
        rates: Rates,
        record: Tensor | None = None,
        anchor: Tensor | None = None,
        proximal: float = 0.0,
    ) -> Update:
        """The update of inner step k, counted from 0; `record` [S] receives u.

        With an `anchor` [S], `proximal` / 2 |phi - anchor|^2 is part of the loss.
        """
        state.count += 1
        alpha = rates.uniform(k) if rates.element is None else None

        def apply(shard: Tensor, grad: Tensor, where: slice) -> None:
            if anchor is not None:
                grad = grad + proximal * (shard - anchor[where])
            vectors = {name: vector[where] for name, vector in state.vectors.items()}
            u = self.direction(grad, shard, vectors, state.count)
            if record is not None:
                record[where] = u
            if alpha is not None:
                shard.sub_(u, alpha=alpha)
            else:
                shard.sub_(rates.scale_(k, u.clone(), where))

        def in_pieces(shard: Tensor, grad: Tensor, where: slice) -> None:
            begin = where.start
            for part, of_grad in pieces(shard.device, shard, grad):
                apply(part, of_grad, slice(begin, begin := begin + part.numel()))

        # a state, a proximal term or different rates need temporary tensors, which are small for small pieces
        return apply if alpha is not None and anchor is None and not state.vectors else in_pieces


def inner_optimizer(config: Config) -> InnerOptimizer:
    """The optimizer of the settings inner_optimizer, inner_momentum, inner_epsilon, ..."""
    if config.inner_optimizer == "sgd":
        return InnerOptimizer(
            (),
            lambda grad, shard, state, count: grad,
            differentiable=lambda g, phi, state, count: (g, {}),
            is_linear=True,
        )
    if config.inner_optimizer == "momentum":
        mu = config.inner_momentum

        def momentum(
            g: Tensor, phi: Tensor, state: Mapping[str, Tensor], count: int
        ) -> tuple[Tensor, dict[str, Tensor]]:
            u = mu * state["momentum"] + g
            return u, {"momentum": u}

        return InnerOptimizer(
            ("momentum",),
            lambda g, _, s, __: s["momentum"].mul_(mu).add_(g),
            momentum=mu,
            differentiable=momentum,
            is_linear=True,
        )
    if config.inner_optimizer != "adamw":
        return find_inner(config.inner_optimizer)
    b1, b2, decay = 0.9, 0.999, config.inner_weight_decay

    def adamw(grad: Tensor, shard: Tensor, state: dict[str, Tensor], count: int) -> Tensor:
        first = state["exp_avg"].mul_(b1).add_(grad, alpha=1 - b1)
        second = state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        u = first / (1 - b1**count)
        u.div_((second / (1 - b2**count)).sqrt_().add_(config.inner_epsilon))
        return u.add_(shard, alpha=decay) if decay else u

    def differentiable(
        g: Tensor, phi: Tensor, state: Mapping[str, Tensor], count: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        first, second = b1 * state["exp_avg"] + (1 - b1) * g, b2 * state["exp_avg_sq"] + (1 - b2) * g * g
        seen = second > 0
        root = (torch.where(seen, second, 1.0) / (1 - b2**count)).sqrt()
        u = torch.where(seen, first / (1 - b1**count) / (root + config.inner_epsilon), 0.0)
        return u + decay * phi, {"exp_avg": first, "exp_avg_sq": second}

    return InnerOptimizer(("exp_avg", "exp_avg_sq"), adamw, differentiable=differentiable)
