"""The worker's operations over DeepSpeed's pipeline engine: each rank holds some layers of the model.

    group rank    (stage x data ranks + data rank) x tensor ranks + tensor rank      (DeepSpeed's order)
    micro-batch   input ids enter on stage 0, labels and weights on the last stage,
                  which computes the losses and returns the features
    tied weights  are on the first stage (the owner) and the last; DeepSpeed sums their gradients

DeepSpeed's engine runs complete training batches only, so `step` is one `train_batch`. The number of
micro-batches and their lengths change from call to call.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.learners.lazy_weights import LazyModel
from fmmeta.learners.stages import Stage, StagePartition
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.layout import GroupCoordinates
from fmmeta.parallel.param_map import ParamNames
from fmmeta.parallel.process_groups import subgroup
from fmmeta.parallel.tensor_parallel import TensorRanks, split_layers
from fmmeta.parallel.workers.base import CotangentFn, PassStats, SavedForward, Update, VjpInput
from fmmeta.parallel.workers.full_model import nan_gradient_if_nonfinite, vjp_loss
from fmmeta.parallel.workers.zero import EngineWorker, import_deepspeed
from fmmeta.tasks.batching import MicroBatch

StageInputs = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""The tensors of a micro-batch that the first and the last stage load."""


class PipelineWorker(EngineWorker):
    """One stage of a model. The group must be the default process group; `config`: see
    deepspeed_config.complete.
    """

    def __init__(
        self,
        stage: Stage,
        names: ParamNames,
        groups: list[dict[str, Any]],
        partition: StagePartition,
        config: dict[str, Any],
        group: Communicator,
        coordinates: GroupCoordinates,
        width: int,
    ) -> None:
        """`names`, `groups`: of the stage's parameters; `width`: of the hidden states."""
        self.group, self.device, self.coordinates = group, group.device, coordinates
        self.partition, self.stage, self.width = partition, stage, width
        self.counts_rows = stage.last and coordinates.tensor_rank == 0
        self.stats = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.collected: list[Tensor] = []  # features of the micro-batches of a pass so far
        self.want = "loss"  # of the current pass: loss, features or vjp
        self.cotangent: CotangentFn = lambda number, features: features  # of the current vjp
        if coordinates.tensor > 1:
            split_layers(stage.base, TensorRanks.of(group, coordinates).tensor)
        count, last, tied = self._ranks_of_stage, coordinates.stages - 1, partition.tied
        ends = [rank for rank in range(coordinates.group_size) if rank // count in (0, last)]
        self.ends = subgroup(group, ends) if tied else None
        self.tied = next((p for p in stage.body.parameters() if tied and names[id(p)][0] == tied), None)
        not_owned = [tied] if tied and coordinates.stage > 0 else []
        # hidden states are complete on every tensor rank, and are sent so
        config = {**config, "pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}
        self.start_engine(self._module(self.tied), groups, config, names, not_owned)

    def _module(self, tied: nn.Parameter | None) -> Any:
        """A PipelineModule whose layers are complete stages.

        It gets the tied weight and its process groups from here and does not look for them.
        """
        count, last = self._ranks_of_stage, self.coordinates.stages - 1
        pairs = [[rank, last * count + rank] for rank in range(count)] if self.partition.tied else []
        subsets = [subgroup(self.group, pair) for pair in pairs]
        reduced = [(tied, own.backend) for own in subsets if own is not None and tied is not None]

        deepspeed = import_deepspeed()
        topology = deepspeed.runtime.pipe.topology.PipeModelDataParallelTopology(
            last + 1, self.coordinates.tensor, self.coordinates.data
        )

        class Stages(deepspeed.pipe.PipelineModule):
            def _index_tied_modules(self) -> dict[str, Any]:
                return {}

            def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
                return reduced

        layers: list[Any] = [nn.Identity] * (last + 1)  # the stages of other ranks are never built
        layers[self.coordinates.stage] = self.stage
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its plan
            module = Stages(
                layers,
                topology=topology,
                loss_fn=self._loss,
                partition_method="uniform",
                dynamic_shape=True,
            )
        if tied is not None and self.coordinates.stage > 0:
            tied.ds_pipe_replicated = True  # type: ignore[attr-defined]  # counted once in DeepSpeed's norms
        return module

    def write(self, vector: Tensor) -> None:
        """Also makes the copy of a tied weight in `vector` equal to its owner's, since sums over groups may
        round the two differently.
        """
        tied = self.partition.tied
        if self.ends is not None and self.tied is not None and tied is not None:
            value = self.params.assemble(vector, tied, self.tied.shape, self.ends.sum_)
            self.params.put(vector, tied, value)
        super().write(vector)

    def step(
        self,
        batches: Sequence[MicroBatch],
        update: Update,
        skip_nonfinite_everywhere: bool = False,
        saved: SavedForward | None = None,
    ) -> PassStats:
        return self._train(batches, update, skip_nonfinite_everywhere)

    def forward(self, batches: Sequence[MicroBatch]) -> PassStats:
        self._evaluate(batches)
        return PassStats(self.group.sum_(self.stats))

    def features(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        self._evaluate(batches, "features")
        return self.collected or [
            torch.zeros(len(batch.weights), self.width, device=self.device) for batch in batches
        ]

    def vjp(self, parts: Sequence[VjpInput], into: Tensor) -> PassStats:
        def run(update: Update, everywhere: bool) -> PassStats:
            stats = torch.zeros_like(self.stats)
            for part in parts:  # each is a training batch to the engine
                self.cotangent = part.begin()
                stats += self._train(part.batches, update, want="vjp").stats
            return PassStats(stats)

        return self.accumulate(run, into, buffered=True)  # only after the last part is it known to be finite

    def writer_rank(self, name: str) -> int:
        return self.partition.owner[name] * self._ranks_of_stage

    @property
    def _ranks_of_stage(self) -> int:
        return self.coordinates.data * self.coordinates.tensor

    def _train(
        self,
        batches: Sequence[MicroBatch],
        update: Update,
        skip_nonfinite_everywhere: bool = False,
        want: str = "loss",
    ) -> PassStats:
        inputs = self._begin(batches, want)
        self.stats[3] = self.engine_step(
            lambda: self.engine.train_batch(inputs), update, skip_nonfinite_everywhere
        )
        return PassStats(self.group.sum_(self.stats))

    def _evaluate(self, batches: Sequence[MicroBatch], want: str = "loss") -> None:
        self.engine.eval_batch(
            self._begin(batches, want),
            reduce_output=None,
            bcast_loss=False,
            num_micro_batches=len(batches),
        )

    def _begin(self, batches: Sequence[MicroBatch], want: str) -> Iterator[StageInputs]:
        """Start a pass for `want`; returns the tensors of each micro-batch that the end stages load."""
        self.engine.set_train_batch_size(len(batches) * self.coordinates.data)
        self.want = want
        self.engine.total_loss = None  # eval_batch adds to that of the last train_batch
        self.stats = torch.zeros_like(self.stats)
        self.collected = []
        self.stage.input_names, self.target_names = tuple(batches[0].inputs), tuple(batches[0].targets)
        # the loss function is fixed, so everything that losses need is sent with the targets
        return (
            (tuple(b.inputs.values()), (b.weights, *b.targets.values(), *b.inputs.values())) for b in batches
        )

    def _loss(self, outputs: Any, loaded: tuple[Tensor, ...]) -> Tensor:
        """The loss that DeepSpeed requests of the last stage, once per micro-batch in their order."""
        if self.want == "features":
            self.collected.append(outputs[0].float())
            return outputs[0].new_zeros(())
        if self.want == "vjp":
            features, logits = outputs
            seen = features.detach().float()
            loss = vjp_loss(features, logits, self.cotangent(len(self.collected), seen))
            self.collected.append(seen)
            self.stats[0] += loss.detach() * self.counts_rows
            return nan_gradient_if_nonfinite(loss) * self.engine.train_batch_size()
        weights, *tensors = loaded
        named = dict(zip((*self.target_names, *self.stage.input_names), tensors, strict=True))
        targets = {name: named.pop(name) for name in self.target_names}
        rows = self.stage.learner.losses(outputs, MicroBatch(named, targets, weights)).weighted(weights)
        if self.counts_rows:
            self.stats[:3] += rows.sums()
        # undoes DeepSpeed's means over micro-batches and data ranks: we sum
        return nan_gradient_if_nonfinite(rows.loss.sum()) * self.engine.train_batch_size()


def hold_stage(stream: LazyModel, partition: StagePartition, coordinates: GroupCoordinates) -> ParamNames:
    """Load the parameters of this rank's stage and no others; return their names and shapes."""
    learner, stage = stream.learner, coordinates.stage
    shared = (partition.tied, partition.copied) if stage == coordinates.stages - 1 else ()
    names = [name for name, _ in learner.named_parameters()]
    held = [name for name in names if partition.owner[name] == stage or name in shared]
    stream.materialize(held)
    params = {name: learner.get_parameter(name) for name in held}
    return {id(param): (name, tuple(param.shape)) for name, param in params.items()}
