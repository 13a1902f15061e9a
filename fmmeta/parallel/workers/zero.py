"""The worker's operations over a DeepSpeed engine (ZeRO 0 to 3, with or without CPU offload).

The optimizer handed to DeepSpeed is a tap: it holds no state, communicates nothing and applies the update of
the day to the tensors that DeepSpeed shows it. DeepSpeed calls it once per step, per parameter group or per
sub-group, and not at all when it finds a non-finite gradient, so everything is keyed by tensor and nothing
relies on the call.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.models.lazy_weights import LazyModel
from fmmeta.parallel import deepspeed_shards
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.layout import GroupCoordinates
from fmmeta.parallel.workers.base import PassStats, Update, Worker
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.parallel.workers.tensor_parallel import Cut, cut_of

Names = Mapping[int, tuple[str, tuple[int, ...]]]
"""Id of a parameter -> its name and whole shape."""


class ShardOptimizer(torch.optim.Optimizer):
    """Applies `self.update` to whatever fp32 tensors DeepSpeed presents; see `Update`.

    `veto`: a refused gradient is shown as zeros; whether it is refused, the ranks find out by it.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.update: Update | None = None
        self.reject_nonfinite: Callable[[Tensor], Tensor] | None = None
        self.where: dict[int, slice] = {}  # address of a shard -> its place in the vector
        self.bad: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient; store whether one of them was not finite.

        Without an update it does nothing: FP16_UnfusedOptimizer takes a step on zeros when it is made.
        """
        if self.update is None:
            return
        shown = [
            (param, param.grad.reshape(-1).float())
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for _, grad in shown:
            bad = ~torch.isfinite(grad.sum())
            self.bad = bad if self.bad is None else self.bad | bad
        refused = (
            None
            if self.reject_nonfinite is None
            else self.reject_nonfinite(torch.zeros((), dtype=torch.bool) if self.bad is None else self.bad)
        )
        for param, grad in shown:
            if refused is not None:
                grad.masked_fill_(refused.to(grad.device), 0.0)
            self.update(param.data.view(-1), grad, self.where[param.data_ptr()])


class EngineWorker(Worker):
    """What workers over an engine share: the tap, the shards, reading and writing them."""

    engine: Any
    tap: ShardOptimizer
    place: GroupCoordinates

    def attach(
        self,
        engine: Any,
        shard_rank: int,
        names: Names,
        copies: Collection[str] = (),
        replicated: bool | None = None,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        """Find the shards of `engine`, whose optimizer is the tap; see deepspeed_shards.param_map for the
        rest.
        """
        self.engine, self.data_ranks = engine, self.place.data
        self.shards = deepspeed_shards.of_engine(engine, shard_rank)
        self.params = self.shards.param_map(names, copies, replicated, cuts)
        self.home = self.shards.tensors[0].device
        begin = 0
        for tensor, gaps in zip(self.shards.tensors, self.shards.gaps(), strict=True):
            self.tap.where[tensor.data_ptr()] = slice(begin, begin + tensor.numel())
            for gap in gaps:
                tensor[gap] = 0
            begin += tensor.numel()
        self.places = list(self.tap.where.values())

    def set_exactly(self, exact: Iterable[tuple[str, Tensor]]) -> None:
        """Put whole fp32 parameters into the shards: DeepSpeed makes those from weights that it has rounded
        to bf16.
        """
        theta = self.read()
        for name, value in exact:
            self.params.put(theta, name, value)
        self.write(theta)

    def read(self) -> Tensor:
        return torch.cat(self.shards.tensors)

    def write(self, vector: Tensor) -> None:
        torch._foreach_copy_(self.shards.tensors, [vector[place] for place in self.places])
        self.shards.refresh()

    def held(self) -> list[tuple[Tensor, slice]]:
        return list(zip(self.shards.tensors, self.places, strict=True))

    def prepare(self, update: Update | None, agreed: bool = False) -> None:
        """Say what the next step of the engine is to do.

        Where DeepSpeed does not agree on what is finite, the tap does.
        """
        self.tap.update, self.tap.bad, self.tap.reject_nonfinite = update, None, None
        if agreed and self.shards.agreement == "tap":
            self.tap.reject_nonfinite = lambda bad: self.group.sum_(bad.to(self.device, torch.float32)) > 0

    def _add(
        self,
        step: Callable[[Update, bool], PassStats],
        total: Tensor,
        weight: float,
        restore: Tensor | None = None,
    ) -> PassStats:
        if self.shards.agreement != "none" and self.place.tensor == 1:
            return super()._add(step, total, weight, restore)
        captured, result = self._capture(
            lambda update: step(update, False), restore
        )  # it takes a vector: only now they know
        if result.finite:
            total.add_(captured.to(total.device), alpha=weight)
        return result

    def refused(self) -> Tensor:
        """Whether the last step was skipped or met a non-finite gradient on this rank."""
        skipped = not self.engine.was_step_applied()
        if skipped or self.tap.bad is None:
            return torch.tensor(skipped, device=self.device)
        return self.tap.bad.to(self.device)


class DeepSpeedWorker(EngineWorker, FullModelWorker):
    """One engine over the ranks of `group`, which must be the default process group. `config`: see
    deepspeed_config.complete.

    With tensor parallelism the ranks of a tensor set run the same rows, and the first of them owns what all
    of them hold.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        config: dict[str, Any],
        group: Communicator,
        place: GroupCoordinates,
        exact: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        """exact: complete fp32 parameters by name, if `model` was sharded while loading (ZeRO 3)."""
        deepspeed = import_deepspeed()
        self.group, self.device, self.place = group, group.device, place
        self.counts_rows = place.tensor_rank == 0
        # ZeRO 3 empties the shapes
        names = {
            id(p): (name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in model.named_parameters()
        }
        # ZeRO 3 follows the order of modules, forward and back; of tensor ranks it is not tested
        self.can_defer_backward = place.tensor == 1 and config["zero_optimization"]["stage"] < 3
        bf16 = config["bf16"]["enabled"]
        if bf16 and exact is None:
            exact = [(name, p.detach().clone()) for name, p in model.named_parameters() if p.requires_grad]
        self.tap = ShardOptimizer(groups)
        self.model, *_ = deepspeed.initialize(
            model=model, optimizer=self.tap, config=config, dist_init_required=False
        )
        if place.tensor == 1:
            self.attach(self.model, group.rank, names)
        else:
            held = [
                (name, shape, tuple(p.shape)) for p in model.parameters() for name, shape in [names[id(p)]]
            ]
            cuts = {
                name: cut for name, shape, part in held if (cut := cut_of(shape, part, place.tensor_rank))
            }
            apart = config["zero_optimization"]["stage"] > 0  # data ranks hold different shards
            copies = [
                name
                for name, *_ in held
                if (place.data_rank and not apart) or (place.tensor_rank and name not in cuts)
            ]
            self.attach(self.model, place.data_rank, names, copies, False, cuts)
        if bf16 and exact is not None:
            self.set_exactly(exact)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(
            loss * self.place.data, scale_wrt_gas=False
        )  # DeepSpeed averages over data ranks; we sum

    def apply(self, update: Update, agreed: bool) -> Tensor:
        self.prepare(update, agreed)
        self.engine.step()
        self.tap.update = None
        return self.refused()


def shard_while_loading(stream: LazyModel, config: dict[str, Any]) -> None:
    """Read every parameter of a stream and cut it over the group before the next is read (ZeRO 3).

    Collective: group.
    """
    deepspeed = import_deepspeed()
    # Its context is for constructors, and here the module exists already. With a module it also gives torch a
    # linear layer that does not keep the gathered weight for the backward pass: without that all layers would
    # be whole on every rank by then.
    cutter = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=config)

    def cut(param: nn.Parameter) -> None:
        if config["bf16"]["enabled"]:
            param.data = param.data.bfloat16()
        cutter._convert_to_zero_parameters([param])

    stream.materialize([name for name, _ in stream.learner.named_parameters()], cut)


def import_deepspeed() -> Any:
    """Import DeepSpeed quietly and without its CPU shared-memory op, which would start a compiler at first
    use.
    """
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(
        logging.ERROR
    )  # it warns of a client optimizer and of each skipped step
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed"
    )  # names DeepSpeed still calls
    if deepspeed.ops.__compatible_ops__.get("deepspeed_shm_comm"):
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    return deepspeed
