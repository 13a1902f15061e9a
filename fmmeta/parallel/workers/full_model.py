"""Workers whose ranks each run the complete model: shared operations, one process, several tasks at a time.

    FullModelWorker   batches --> _call (features, logits) --> loss --> backward --> ... --> apply
                      --> PassStats, over the group; engines differ in `refresh`, `backward` and `apply`
    PlainWorker       one process without DeepSpeed: groups of one, notebooks, `adapt`, `evaluate`
    TaskBatch         adapters and a head of N tasks over a frozen base

TaskBatch. phi: the adapters of N tasks, complete on every rank, fp32, one flat buffer: [N, *shape] per
parameter. A step runs the m-th micro-batches of all tasks in one forward and backward pass, then one sum of
N x P numbers over the group. The worker holds theta throughout: its own adapters are bypassed
(learners/task_axis.py), and no engine runs its backward pass or optimizer. Under ZeRO 3 the base is
gathered once per pass instead of once per pass and task; the gradients of all tasks are reduced as one
tensor. Tasks are independent: a non-finite gradient of one task does not change the others.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fmmeta.common.errors import UsageError, one_line
from fmmeta.learners.base import Learner, RowLosses, at_least_fp32, on_device
from fmmeta.learners.experts import router_names
from fmmeta.learners.frozen_blocks import FrozenBlocks
from fmmeta.learners.task_axis import TaskAxis
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.param_map import build_param_map
from fmmeta.parallel.workers.base import PassStats, SavedForward, Update, VjpInput, Worker
from fmmeta.tasks.batching import MicroBatch, Sets, merge_task_batches, sent


class FullModelWorker(Worker):
    """A worker each of whose ranks runs the model from tokens to logits.

    It builds the operations from two primitives: `backward` of a micro-batch, and `apply` of an update to the
    shards.
    """

    model: nn.Module
    _graph_checked = False
    can_defer_backward = True  # whether a forward pass may be left without its backward pass
    differentiates_twice = True
    prefixes: Any = None  # `Answers` of a language model that is whole in this process
    can_skip_blocks = True  # whether a pass may leave blocks out

    @property
    def learner(self) -> Any:
        """The Learner, inside an engine or not."""
        return getattr(self.model, "module", self.model)

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradient of a micro-batch's loss; `last` of the pass. Collective: group."""

    @abstractmethod
    def apply(self, update: Update, skip_nonfinite_everywhere: bool) -> Tensor:
        """Pass each shard and its gradient, summed over the group, to `update`; refresh the weights.

        Returns whether this rank found a gradient that is not finite or skipped the step, as a 0-d tensor.
        skip_nonfinite_everywhere: see `step`. Collective: group.
        """

    def step(
        self,
        batches: Sequence[MicroBatch],
        update: Update,
        skip_nonfinite_everywhere: bool = False,
        saved: SavedForward | None = None,
    ) -> PassStats:
        stats, outputs = self.begin(), self._take_outputs(saved, batches)
        for index, (batch, given) in enumerate(zip(batches, outputs, strict=True)):
            loss = self._loss(batch, stats, given)
            self.backward(nan_gradient_if_nonfinite(loss), last=index == len(batches) - 1)
        return self._finish(stats, update, skip_nonfinite_everywhere)

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch]) -> PassStats:
        stats = self._stats()
        for batch in batches:
            self._loss(batch, stats)
        return PassStats(self.group.sum_(stats))

    @torch.no_grad()
    def features(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [at_least_fp32(self._call(batch)[0]) for batch in batches]

    @torch.no_grad()
    def logits(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Logits of the rows of each micro-batch of this rank, fp32 [B, C] or [B, T, V].

        Collective: group.
        """
        return [self.learner.logits(self._call(batch, all_outputs=True)) for batch in batches]

    @torch.no_grad()
    def losses(self, batch: MicroBatch) -> RowLosses:
        """The losses of the rows of a micro-batch of this rank, without their weights. Collective: group."""
        return self.learner.losses(self._call(batch), on_device(batch, self.learner, self.device))

    @torch.no_grad()
    def answers(self, batch: MicroBatch) -> list[tuple[list[int], list[int]]]:
        """The answers of a micro-batch of this rank (Learner.answers). Collective: group."""
        return [*self.learner.answers(self._call(batch), on_device(batch, self.learner, self.device))]

    def forward_features(self, batches: Sequence[MicroBatch]) -> SavedForward:
        with torch.set_grad_enabled(self.can_defer_backward):
            outputs = [self._call(batch) for batch in batches]
        return SavedForward(
            [at_least_fp32(features.detach()) for features, _ in outputs],
            outputs if self.can_defer_backward else None,
        )

    def vjp(self, parts: Sequence[VjpInput], into: Tensor) -> PassStats:
        def run(update: Update, everywhere: bool) -> PassStats:
            stats, left = self.begin(), sum(len(part.batches) for part in parts)
            for part in parts:
                cotangent, saved = part.begin(), self._take_outputs(part.saved, part.batches)
                for index, (batch, given) in enumerate(zip(part.batches, saved, strict=True)):
                    features, logits = given or self._call(batch)
                    seen = at_least_fp32(features.detach())
                    product = vjp_loss(features, logits, cotangent(index, seen))
                    stats[0] += product.detach() * self.counts_rows
                    left -= 1
                    self.backward(nan_gradient_if_nonfinite(product), last=left == 0)
            return self._finish(stats, update, everywhere)

        return self.accumulate(run, into)

    def gradient_vjp(
        self, batches: Sequence[MicroBatch], cotangent: Tensor | Callable[[Tensor], Tensor], into: Tensor
    ) -> PassStats:
        """Add (dg/dphi)^T w to `into` [S]; g: the gradient of the mean loss over `batches`.

        cotangent: w [S], or a function from g [S] to w. g is differentiated by autograd (`create_graph`), so
        that the product is exact up to rounding; memory: two to three times the activations of `step`. A
        function of g costs one pass more with several micro-batches. A product that is not finite is added
        too. Raises `UsageError` for an operation that has no second derivative.
        Collective: group.
        """
        stats, trained = self._stats(), self.trained_params
        graph: Sequence[Tensor] | None = None
        with twice_differentiable(self.learner):
            if callable(cotangent):
                gradient = self.zeros()
                if len(batches) == 1:
                    graph = self._gradient_graph(batches[0], stats)
                    self._add_sum([each.detach() for each in graph], gradient)
                else:
                    self.gradient(batches, gradient)
                cotangent = cotangent(gradient)
            w = self.complete_params(cotangent).values()
            total = [torch.zeros_like(each) for each in w]
            for batch in batches:
                graph = self._gradient_graph(batch, stats) if graph is None else graph
                add_products(graph, list(trained.values()), w, total)
                graph = None
        stats[3] = ~torch.isfinite(torch.stack([each.sum() for each in total]).sum())
        self._add_sum(total, into)
        return PassStats(self.group.sum_(stats))

    @cached_property
    def frozen(self) -> FrozenBlocks:
        """Of the learner, which are run once for each micro-batch."""
        return FrozenBlocks(self.learner, self.can_skip_blocks)

    @cached_property
    def trained_params(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, in the order of the modules."""
        return {name: param for name, param in self.learner.named_parameters() if param.requires_grad}

    @cached_property
    def trained_shapes(self) -> dict[str, torch.Size]:
        """The complete shapes of the trained parameters by name; ZeRO 3 empties those of the parameters."""
        return {name: getattr(param, "ds_shape", param.shape) for name, param in self.trained_params.items()}

    def complete_params(self, vector: Tensor) -> dict[str, Tensor]:
        """The complete trained parameters of the group's vectors [S] by name, on the device of the worker.

        One sum over the group. Collective: group.
        """
        shapes = self.trained_shapes
        parts = [
            self.params.assemble(vector, name, shape, lambda part: part).reshape(-1).to(self.device)
            for name, shape in shapes.items()
        ]
        flat = torch.cat(parts)
        if not self.params.replicated:
            self.group.sum_(flat)
        split = flat.split([len(part) for part in parts])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), split, strict=True)}

    def _gradient_graph(self, batch: MicroBatch, stats: Tensor) -> Sequence[Tensor]:
        """The gradient of this rank's share of the mean loss by trained parameter, with its graph."""
        batch = on_device(batch, self.learner, self.device)
        outputs = self.frozen.run(batch, lambda: self.learner(**batch.inputs))
        rows = self.learner.losses(outputs, batch).weighted(batch.weights)
        stats[:3] += rows.sums()
        return self.gradient_graph(
            nan_gradient_if_nonfinite(rows.loss.sum()), [*self.trained_params.values()]
        )

    def gradient_graph(self, loss: Tensor, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradient of a loss with its graph. Raises `UsageError` for a function that has one derivative
        only. Local.
        """
        gradient = torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True)
        if not self._graph_checked:
            refuse_once_differentiable(gradient)
            self._graph_checked = True
        return gradient

    def _add_sum(self, values: Sequence[Tensor], into: Tensor) -> None:
        """Add this rank's slice of the sum over the group of complete parameters to `into` [S].

        Collective: group.
        """
        flat = self.group.sum_(torch.cat([at_least_fp32(value).reshape(-1) for value in values]))
        for name, part in zip(self.trained_params, flat.split([v.numel() for v in values]), strict=True):
            self.params.add(into, name, part)

    def _finish(self, stats: Tensor, update: Update, skip_nonfinite_everywhere: bool) -> PassStats:
        stats[3] = self.apply(update, skip_nonfinite_everywhere)
        return PassStats(self.group.sum_(stats))

    def begin(self) -> Tensor:
        """Start a pass with gradients; its statistics."""
        return self._stats()

    def _stats(self) -> Tensor:
        return torch.zeros(4, dtype=torch.float64, device=self.device)

    @staticmethod
    def _take_outputs(saved: SavedForward | None, batches: Sequence[MicroBatch]) -> Sequence[Any]:
        """The kept outputs of each micro-batch, removed from `saved`: they serve one backward pass."""
        if saved is None or saved.outputs is None:
            return [None] * len(batches)
        outputs, saved.outputs = saved.outputs, None
        return outputs

    def _call(self, batch: MicroBatch, all_outputs: bool = False) -> Any:
        moved = on_device(batch, self.learner, self.device, all_outputs)
        return self.frozen.run(moved, lambda: self.model(**moved.inputs))

    def _loss(self, batch: MicroBatch, stats: Tensor, given: Any = None) -> Tensor:
        """This rank's share of the mean loss; adds to `stats`. given: outputs of the same body, if there are
        any; the head may have changed.
        """
        batch = on_device(batch, self.learner, self.device)
        outputs = self._call(batch) if given is None else self.learner.classify(given[0])
        rows = self.learner.losses(outputs, batch).weighted(batch.weights)
        if self.counts_rows:
            stats[:3] += rows.sums()
        return rows.loss.sum()


NO_SECOND_DERIVATIVE = (
    "second_order=autograd: an operation of the model has no second derivative ({}); use --second_order"
    " differences"
)


def refuse_once_differentiable(gradient: Sequence[Tensor]) -> None:
    """Raise `UsageError` if the graph passes through a function marked `once_differentiable`.

    autograd cuts the graph there and returns a product that is too small, without an error.
    """
    nodes, seen = [each.grad_fn for each in gradient if each.grad_fn is not None], set[Any]()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise UsageError(NO_SECOND_DERIVATIVE.format("it is marked once_differentiable"))
        nodes.extend(before for before, _ in node.next_functions if before is not None)


def add_products(
    graph: Sequence[Tensor], params: Sequence[Tensor], w: Iterable[Tensor], total: list[Tensor]
) -> None:
    """Add (dg/dphi)^T w to `total`, by parameter; graph: g, with its graph, which is freed."""
    pairs = [(g, each.to(g.dtype)) for g, each in zip(graph, w, strict=True) if g.requires_grad]
    if pairs:
        products = torch.autograd.grad(
            [g for g, _ in pairs], params, [each for _, each in pairs], materialize_grads=True
        )
        torch._foreach_add_(total, [product.to(total[0].dtype) for product in products])


@contextmanager
def twice_differentiable(learner: nn.Module) -> Iterator[None]:
    """Run operations that have a second derivative: attention in plain matrix products, dense gradients of
    embeddings.

    Raises `UsageError` if an operation in the block has none.
    """
    sparse = [one for one in learner.modules() if isinstance(one, nn.Embedding) and one.sparse]
    for module in sparse:
        module.sparse = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    except RuntimeError as error:
        if "derivative" not in str(error) and "differentiate twice" not in str(error):
            raise
        raise UsageError(NO_SECOND_DERIVATIVE.format(one_line(error))) from None
    finally:
        for module in sparse:
            module.sparse = True


def nan_gradient_if_nonfinite(loss: Tensor) -> Tensor:
    """The loss, with a NaN gradient where it is not finite; log(0), for example, has a finite gradient."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)


def vjp_loss(features: Tensor, logits: Tensor, cotangent: Tensor) -> Tensor:
    """<features, cotangent> of a micro-batch.

    The logits take part with factor 0, since engines expect a gradient of every parameter.
    """
    features = at_least_fp32(features)
    return (features * cotangent.to(features)).sum() + 0.0 * at_least_fp32(logits).sum()


class PlainWorker(FullModelWorker):
    """Holds the whole model. `groups`: parameter groups as `param_map.param_groups` returns them."""

    def __init__(
        self, model: Learner, groups: list[dict[str, Any]], device: torch.device, bf16: bool = False
    ) -> None:
        self.device, self.storage_device, self.group = device, device, Communicator(None, 0, 1, device)
        params = [param for group in groups for param in group["params"]]
        self.theta = torch.cat([at_least_fp32(param.detach()).reshape(-1).to(device) for param in params])
        self.grad = torch.zeros_like(self.theta)
        self.local_shards = [(self.theta, slice(0, self.theta.numel()))]
        names = {id(param): (name, tuple(param.shape)) for name, param in model.named_parameters()}
        group_names = [group["name"] for group in groups for _ in group["params"]]
        self.params = build_param_map(
            params, [[(p, 0, 0, p.numel())] for p in params], group_names, names, replicated=True
        )
        if bf16:  # before the move to the device: frozen weights need no fp32 copy there
            for name, param in model.named_parameters():  # not buffers: rotary tables would be too coarse
                # adapters are small, and an inner step may change less than bf16 resolves
                if ".lora_" not in name and param.is_floating_point():
                    param.data = param.data.to(torch.bfloat16)
        self.model, self.routers = model.to(device), router_names(model)
        self.outer_only = model.outer_only
        self.prefixes = getattr(model, "prefixes", None)
        # bf16 parameters and their views of the buffer; fp32 parameters are the buffer itself
        self.working: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        sizes = [param.numel() for param in params]
        for param, *flat in zip(params, self.theta.split(sizes), self.grad.split(sizes), strict=True):
            theta, grad = (part.view(param.shape) for part in flat)
            if param.dtype == torch.bfloat16:
                self.working.append((param, theta, grad))
            else:
                param.data, param.grad = theta, grad
        self.all_working = len(self.working) == len(params)
        self.backwards = 0  # backward passes whose gradients are in `grad`
        if device.type == "cpu" and not bf16:
            # Backward passes add only the rows that occur to an embedding's gradient, not those of the whole
            # vocabulary. The sums are the same. CPU only: on GPUs sparse sums have no fixed order.
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    module.sparse = True

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch]) -> PassStats:
        if (found := self.learner.score(batches)) is None:
            return super().forward(batches)
        stats = self._stats()
        weights = sent(torch.cat([batch.weights for batch in batches]), self.device)
        stats[:3] = found.weighted(weights.to(found.loss)).sums()
        return PassStats(stats)

    def refresh(self) -> None:
        if self.working:
            params, thetas, _ = zip(*self.working, strict=True)
            torch._foreach_copy_([param.data for param in params], thetas)

    def begin(self) -> Tensor:
        if self.backwards:  # an error has ended the last pass
            self.grad.zero_()
            for param, _, _ in self.working:
                param.grad = None
        self.backwards = 0
        return super().begin()

    def backward(self, loss: Tensor, last: bool) -> None:
        self.backwards += 1
        loss.backward()
        if self.working:
            used = [(view, param.grad) for param, _, view in self.working if param.grad is not None]
            if self.backwards == 1 and len(used) < len(self.working):
                torch._foreach_zero_([view for param, _, view in self.working if param.grad is None])
            accumulate = torch._foreach_add_ if self.backwards > 1 else torch._foreach_copy_
            accumulate([view for view, _ in used], [grad for _, grad in used])
            for param, _, _ in self.working:
                param.grad = None

    def apply(self, update: Update, skip_nonfinite_everywhere: bool) -> Tensor:
        if not self.backwards:  # no micro-batches, and gradients of an earlier pass may be left
            self.grad.zero_()
        bad = ~torch.isfinite(self.grad.sum())
        # reading `bad` would make the CPU wait for a GPU: there the mask is applied in any case
        if skip_nonfinite_everywhere and (self.device.type != "cpu" or bad):
            self.grad.masked_fill_(bad, 0.0)
        update(self.theta, self.grad, slice(0, self.theta.numel()))
        self.backwards = 0
        if not self.all_working:
            self.grad.zero_()
        self.refresh()
        return bad


class TaskBatch:
    """N tasks that start from `theta`, which the worker holds. Collective: group.

    phi, grad: the adapters of all tasks and their gradients, fp32, flat; blocks: views of phi by name,
    [N, *shape].
    """

    def __init__(self, worker: FullModelWorker, axis: TaskAxis, theta: Tensor, tasks: int) -> None:
        self.worker, self.axis, self.tasks, self.storage_device = worker, axis, tasks, worker.device
        shapes = worker.trained_shapes
        self.shapes = {name: shapes[name] for name in axis.names}
        self.phi = self.spread(theta)
        self.grad = torch.zeros_like(self.phi)
        self.blocks = self._blocks(self.phi)
        self.dtype = worker.learner.get_parameter(axis.names[0]).dtype
        self.merged = list[tuple[Sets, list[MicroBatch]]]()  # sets that were given, on the device
        for name, grad in self._blocks(self.grad).items():
            self.blocks[name].requires_grad_().grad = grad

    def spread(self, vector: Tensor) -> Tensor:
        """The adapters in `vector` [S], once for each task, in the order of `phi`. Collective: group."""
        complete = self.worker.complete_params(vector)
        return torch.cat([complete[name].reshape(-1).repeat(self.tasks) for name in self.shapes])

    def set(self, name: str, task: int, value: Tensor) -> None:
        """Change the initial value of one parameter of a task."""
        with torch.no_grad():
            self.blocks[name][task] = value

    def zeros(self) -> Tensor:
        """Zeros like `phi`, to accumulate into."""
        return torch.zeros_like(self.phi)

    def read(self) -> Tensor:
        """A copy of `phi`."""
        return self.phi.clone()

    def write(self, flat: Tensor) -> None:
        """Replace `phi`."""
        self.phi.copy_(flat)

    def step(self, sets: Sets, update: Update) -> list[PassStats]:
        """One step of every task on the mean loss over its own set. Collective: group."""
        stats = self.gradient(sets)
        with torch.no_grad():
            update(self.phi, self.grad, slice(0, self.phi.numel()))
        return stats

    def gradient(self, sets: Sets) -> list[PassStats]:
        """Set `grad` to the gradient of every task's mean loss. Collective: group."""
        self.grad.zero_()
        stats = self._stats()
        for merged in self._merged(sets):
            with self.axis.of(self._values()):
                self._loss(merged, stats).backward()
        return self._stats_of_tasks(stats, self.worker.group.sum_(self.grad))

    @torch.no_grad()
    def forward(self, sets: Sets) -> list[PassStats]:
        """Loss and accuracy of every task. Collective: group."""
        stats = self._stats()
        with self.axis.of(self._values()):
            for merged in self._merged(sets):
                self._loss(merged, stats)
        return [PassStats(row) for row in self.worker.group.sum_(stats)]

    def gradient_vjp(
        self, sets: Sets, cotangent: Tensor | Callable[[Tensor], Tensor], into: Tensor
    ) -> list[PassStats]:
        """Add (dg_t/dphi_t)^T w_t of every task to `into`; as `FullModelWorker.gradient_vjp`, of which this
        is the form for vectors like `phi`. Changes `grad`. Collective: group.
        """
        if callable(cotangent):
            self.gradient(sets)
            cotangent = cotangent(self.grad.clone())
        stats, total, leaves = self._stats(), torch.zeros_like(self.phi), [*self.blocks.values()]
        parts, w = [*self._blocks(total).values()], [*self._blocks(cotangent).values()]
        with twice_differentiable(self.worker.learner):
            for merged in self._merged(sets):
                with self.axis.of(self._values()):
                    graph = self.worker.gradient_graph(self._loss(merged, stats), leaves)
                    add_products(graph, leaves, w, parts)
        into += self.worker.group.sum_(total)
        return self._stats_of_tasks(stats, total)

    def weights(self, task: int) -> dict[str, Tensor]:
        """A copy of one task's adapters by name, fp32, in host memory."""
        return {name: block[task].detach().cpu().clone() for name, block in self.blocks.items()}

    def vector(self, flat: Tensor, task: int) -> Tensor:
        """One task's part of `flat` (phi or grad) as this rank's vector, fp32 [S]."""
        vector = self.worker.zeros()
        for name, block in self._blocks(flat).items():
            self.worker.params.put(vector, name, block[task].reshape(-1))
        return vector

    def _stats_of_tasks(self, stats: Tensor, gradient: Tensor) -> list[PassStats]:
        """The statistics of each task, whose gradients are summed over the group. Collective: group."""
        self.worker.group.sum_(stats)
        sums = [part.reshape(self.tasks, -1).sum(1) for part in self._blocks(gradient).values()]
        stats[:, 3] = ~torch.isfinite(torch.stack(sums).sum(0))
        return [PassStats(row) for row in stats]

    def _merged(self, sets: Sets) -> list[MicroBatch]:
        """The micro-batches of all tasks on the device, once for all steps that are given the same sets."""
        if (known := next((found for given, found in self.merged if given is sets), None)) is None:
            learner, device = self.worker.learner, self.worker.device
            batches = merge_task_batches(sets)
            if device.type == "cuda":  # so that the host need not wait for the copies
                batches = [batch.pin_memory() for batch in batches]
            known = [on_device(batch, learner, device, self.axis.needs_all_outputs) for batch in batches]
            self.merged.append((sets, known))
        return known

    def _loss(self, batch: MicroBatch, stats: Tensor) -> Tensor:
        learner = self.worker.learner
        rows = learner.losses(self.worker.frozen.run(batch, lambda: learner(**batch.inputs)), batch)
        sums = [each.reshape(self.tasks, -1).sum(1) for each in rows.weighted(batch.weights)]
        stats[:, :3] += torch.stack([each.detach().double() for each in sums], 1)
        return sums[0].sum()

    def _values(self) -> dict[str, Tensor]:
        """The adapters in the precision that the model computes with."""
        return {name: block.to(self.dtype) for name, block in self.blocks.items()}

    def _stats(self) -> Tensor:
        """PassStats of each task: [N, 4]."""
        return torch.zeros(self.tasks, 4, dtype=torch.float64, device=self.worker.device)

    def _blocks(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([self.tasks * shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(self.tasks, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
