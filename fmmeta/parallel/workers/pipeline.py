"""The worker's operations over DeepSpeed's pipeline engine: each rank holds some layers of the model.

    group rank    stage x data ranks + data rank      (DeepSpeed's order)
    micro-batch   input ids enter on stage 0, labels and weights on the last stage,
                  which computes the losses and returns the features
    tied weights  are on the first stage (the owner) and the last; DeepSpeed sums their gradients

DeepSpeed's engine runs whole training batches only, so `step` is one `train_batch` with the tap as the
optimizer. The number of micro-batches and their lengths change from call to call.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.models.lazy_weights import LazyModel
from fmmeta.models.losses import objective
from fmmeta.models.pipeline_split import Stage, StagePartition
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.layout import GroupCoordinates
from fmmeta.parallel.process_groups import subgroup
from fmmeta.parallel.workers.base import CotangentFn, PassStats, SavedForward, Update, VjpInput
from fmmeta.parallel.workers.full_model import nan_gradient_if_nonfinite, vjp_loss
from fmmeta.parallel.workers.zero import EngineWorker, Names, ShardOptimizer, import_deepspeed
from fmmeta.tasks.batching import MicroBatch

Fed = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # what the first and the last stage load of a micro-batch


class PipelineWorker(EngineWorker):
    """One stage of a model. The group must be the default process group; `config`: see
    deepspeed_config.complete.
    """

    def __init__(
        self,
        stage: Stage,
        names: Names,
        groups: list[dict[str, Any]],
        cut: StagePartition,
        config: dict[str, Any],
        group: Communicator,
        place: GroupCoordinates,
        width: int,
    ) -> None:
        """`names`, `groups`: of the stage's parameters; `width`: of the hidden states."""
        deepspeed = import_deepspeed()
        self.group, self.device, self.place, self.cut, self.stage, self.width = (
            group,
            group.device,
            place,
            cut,
            stage,
            width,
        )
        self.counts_rows = stage.last
        self.scale = 1.0  # undoes DeepSpeed's means over micro-batches and data ranks: we sum
        self.stats = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.found: list[Tensor] = []  # features of the micro-batches of a pass
        self.answer: CotangentFn = lambda number, features: features  # of the pull under way
        self.judged = 0  # micro-batches of it
        ends = [rank for rank in range(place.group_size) if self._stage_of(rank) in (0, place.stages - 1)]
        self.ends = subgroup(group, ends) if cut.tied else None
        self.tap = ShardOptimizer(groups)
        tied = next((p for p in stage.body.parameters() if cut.tied and names[id(p)][0] == cut.tied), None)
        self.tied_shape = () if tied is None else tuple(tied.shape)
        module = self._module(deepspeed, tied)
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=self.tap, config=config, dist_init_required=False
        )
        if (
            place.data == 1 and engine.optimizer is self.tap
        ):  # its reduction over one rank would copy all gradients
            engine.pipeline_enable_backward_allreduce = False
        mine = {name for name, _ in names.values()}
        whole = config["zero_optimization"]["stage"] == 0 and not config["bf16"]["enabled"]
        copies = mine if whole and place.data_rank > 0 else {cut.tied} & mine if place.stage > 0 else set()
        self.attach(engine, place.data_rank, names, [name for name in copies if name], replicated=False)

    def _stage_of(self, rank: int) -> int:
        return rank // self.place.data

    def _module(self, deepspeed: Any, tied: nn.Parameter | None) -> Any:
        """A PipelineModule whose layers are whole stages; we make the groups of tied weights, and know what
        is tied.
        """
        data = self.place.data
        pairs = (
            [[rank, (self.place.stages - 1) * data + rank] for rank in range(data)] if self.cut.tied else []
        )
        made = [(subgroup(self.group, pair), pair) for pair in pairs]
        reduced = [(tied, made_of.backend) for made_of, _ in made if made_of is not None and tied is not None]

        class Stages(deepspeed.pipe.PipelineModule):
            def _index_tied_modules(self) -> dict[str, Any]:
                return {}

            def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
                return reduced

        layers: list[Any] = [nn.Identity] * self.place.stages  # those of other ranks are never built
        layers[self.place.stage] = self.stage
        os.environ.setdefault("LOCAL_RANK", "0")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its plan
            module = Stages(
                layers,
                num_stages=self.place.stages,
                loss_fn=self._judge,
                partition_method="uniform",
                dynamic_shape=True,
            )
        if tied is not None and self.place.stage > 0:
            tied.ds_pipe_replicated = True  # type: ignore[attr-defined]  # counted once in DeepSpeed's norms
        return module

    def write(self, vector: Tensor) -> None:
        """Also makes the copy of a tied weight in `vector` equal to its owner's: sums over groups may round
        them apart.
        """
        if self.ends is not None and self.cut.tied is not None:
            self.params.put(
                vector,
                self.cut.tied,
                self.params.whole(vector, self.cut.tied, self.tied_shape, self.ends.sum_),
            )
        super().write(vector)

    def step(
        self,
        batches: Sequence[MicroBatch],
        update: Update,
        agreed: bool = False,
        ahead: SavedForward | None = None,
    ) -> PassStats:
        return self._train(self._feed(batches), len(batches), update, agreed)

    def forward(self, batches: Sequence[MicroBatch]) -> PassStats:
        self._evaluate(batches)
        return PassStats(self.group.sum_(self.stats))

    def features(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        with self._wanting("features"):
            self._evaluate(batches)
        return self.found or [torch.zeros(len(b.weights), self.width, device=self.device) for b in batches]

    def vjp(self, parts: Sequence[VjpInput], total: Tensor | None = None) -> tuple[Tensor | None, PassStats]:
        captured, stats = torch.zeros(self.params.numel, device=self.home), torch.zeros_like(self.stats)
        for part in parts:  # each is a training batch to the engine
            self.answer = part.begin()
            with self._wanting("both"):
                stats += self._train(
                    self._feed(part.batches), len(part.batches), partial(add_to, captured)
                ).stats
        result = PassStats(stats)
        if total is None:
            return captured, result
        if result.finite:
            total.add_(captured.to(total.device))
        return None, result

    def writer(self, name: str) -> int:
        return self.cut.owner[name] * self.place.data

    @contextlib.contextmanager
    def _wanting(self, want: str) -> Iterator[None]:
        """The last stage gives `want` (see Learner) in place of logits."""
        self.stage.want = want
        try:
            yield
        finally:
            self.stage.want = "logits"

    def _train(self, fed: Iterable[Fed], count: int, update: Update, agreed: bool = False) -> PassStats:
        self._begin(count)
        self.prepare(update, agreed)
        self.engine.train_batch(fed)
        self.tap.update = None
        self.stats[3] = self.refused()
        return PassStats(self.group.sum_(self.stats))

    def _evaluate(self, batches: Sequence[MicroBatch]) -> None:
        self._begin(len(batches))
        self.engine.eval_batch(
            self._feed(batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches)
        )

    def _begin(self, micro_batches: int) -> None:
        count = micro_batches * self.place.data
        self.engine.set_train_batch_size(count)
        self.scale = float(count)
        self.engine.total_loss = None  # eval_batch adds to that of the last train_batch
        self.stats = torch.zeros_like(self.stats)
        self.found, self.judged = [], 0

    def _feed(self, batches: Sequence[MicroBatch]) -> Iterable[Fed]:
        """What the ends load. The loss function is fixed, so whatever an objective needs travels with the
        labels.
        """
        self.stage.input_names = tuple(batches[0].inputs)
        return iter(
            [
                (tuple(b.inputs.values()), (b.labels, b.weights, torch.tensor(b.classes), *b.inputs.values()))
                for b in batches
            ]
        )

    def _judge(self, outputs: Any, loaded: tuple[Tensor, ...]) -> Tensor:
        """The loss that DeepSpeed asks the last stage for, once per micro-batch and in their order."""
        if self.stage.want == "features":
            self.found.append(outputs.float())
            return outputs.new_zeros(())
        if self.stage.want == "both":
            features, logits = outputs
            loss = vjp_loss(features, logits, self.answer(self.judged, features.detach().float()))
            self.judged += 1
            self.stats[0] += loss.detach()
            return nan_gradient_if_nonfinite(loss) * self.scale
        labels, weights, classes, *inputs = loaded
        named = dict(zip(self.stage.input_names, inputs, strict=True))
        loss, right, rows = objective(outputs, MicroBatch(named, labels, weights, int(classes)))
        self.stats[:3] += torch.stack([loss.detach().double(), right.double(), rows.double()])
        return nan_gradient_if_nonfinite(loss) * self.scale


def add_to(vector: Tensor, shard: Tensor, grad: Tensor, where: slice) -> None:
    """An `Update` that changes nothing but `vector`."""
    vector[where] += grad


def hold_stage(stream: LazyModel, cut: StagePartition, place: GroupCoordinates) -> Names:
    """Read the parameters of this rank's stage and nothing else; return what they are called."""
    learner, last = stream.learner, place.stage == place.stages - 1
    names = [name for name, _ in learner.named_parameters()]
    held = [
        name for name in names if cut.owner[name] == place.stage or (last and name in (cut.tied, cut.copied))
    ]
    stream.materialize(held)
    params = {name: learner.get_parameter(name) for name in held}
    return {id(param): (name, tuple(param.shape)) for name, param in params.items()}
