"""Started on every rank by tests: one small situation by name, printing what came of it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from fmmeta.adaptation import many, task_learner
from fmmeta.cli import parse
from fmmeta.common.errors import MachineFault, PeerError, UsageError
from fmmeta.common.progress import Progress, terminal_log
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms import imaml
from fmmeta.meta.hessian import DifferenceHessian
from fmmeta.meta.parameters import MetaGradient
from fmmeta.models.load import load_learner
from fmmeta.parallel import collectives, process_groups
from fmmeta.parallel.layout import Launch, Nodes
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.parallel.workers import create
from fmmeta.parallel.workers.create import check_equal, fingerprint
from fmmeta.reliability.checks import check_replicas, hash_vector
from fmmeta.training import build
from fmmeta.training.callbacks import Callback
from fmmeta.training.episodes import EpisodeReader
from fmmeta.training.finish import read_result
from fmmeta.training.loop import Run, StopAgreement
from fmmeta.training.run_folder import RunStart


def matching_values(world: World) -> None:
    """Errors of one rank are raised on all ranks, whose collectives still match afterwards."""
    rank = world.launch.global_rank
    try:
        with world.comm.raise_on_all("testing"):
            if rank == 1:
                raise UsageError("value=1 is wrong; use 2")
    except UsageError as error:
        print(f"usage {error}")
    try:
        with world.comm.raise_on_all("testing"):
            if rank == 0:
                raise RuntimeError("broken")
    except PeerError as error:
        print(f"peer {error}")
    except RuntimeError as error:
        print(f"own {error}")
    gathered = world.comm.gather_bytes(f"after {rank}".encode() if rank else b"")
    print(gathered)


def kept_moments(world: World) -> None:
    """The second moment that Reptile's inner Adam keeps over outer steps, if gradients are sent in bf16."""
    kept, gradient = torch.zeros(3), torch.full((3,), 1 / 3)
    for _ in range(300):
        into = MetaGradient(gradient, {"exp_avg_sq": kept})
        into.add(gradient, 1.0, {"exp_avg_sq": 0.999 * kept + 0.001})
        mean = into.begin_reduce(world.comm, 2.0, torch.bfloat16)
        assert mean is not None
        kept = mean.finish("exp_avg_sq").clone()
    print("kept", float(kept[0]), "gradient", float(mean.finish("theta")[0]))


def shared_gpu(world: World) -> None:
    """Ranks that have three GPUs, and then two of them the same one."""
    for gpus in ("abc", "aba"):
        try:
            process_groups.refuse_shared_gpus(world.comm, f"GPU-{gpus[world.launch.global_rank]}")
            print("accepted")
        except UsageError as error:
            print(error)


def bytes_of_one_rank(world: World, folder: str) -> None:
    """Ranks receive the bytes of one rank, and the result of a run, without a part for every other rank."""
    rank, comm, largest = world.launch.global_rank, world.comm, 0
    print([comm.broadcast_bytes(f"{rank} {'x' * rank}".encode(), root) for root in range(comm.size)])
    print(comm.broadcast_bytes(b"" if rank == 0 else b"ignored"))
    backend = comm.backend

    class Backend:
        def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
            return sent(backend.broadcast(tensor, root), tensor)

        def allreduce(self, tensors: list[torch.Tensor]) -> Any:
            return sent(backend.allreduce(tensors), *tensors)

    def sent(work: Any, *tensors: torch.Tensor) -> Any:
        nonlocal largest
        largest = max(largest, *(tensor.numel() for tensor in tensors))
        return work

    comm.backend = Backend()
    found = read_result(Path(folder), comm)
    print(f"lines {len(found.log_history)} largest {largest}")


def one_group_leaves(world: World) -> None:
    """Of two groups, one leaves tasks of an outer step; in the next step none does."""
    no_signal, no_save = SimpleNamespace(asked=None), SimpleNamespace(folder=None, done=False, failure=None)
    agreement = StopAgreement(world.split(1, False), cast(Any, no_signal))
    for left in (world.launch.global_rank == 1, False):
        print(agreement.agree_after_tasks(left, cast(Any, no_save)), agreement.requested)


def buckets(world: World) -> None:
    """A sum comes bucket by bucket, each whole when it comes, whatever travels; its mean and norm are those
    of the whole.
    """
    collectives.BUCKET = 8
    comm, share = world.comm, world.launch.global_rank + 1.0
    for wire in (None, torch.bfloat16):
        vector, seen = torch.arange(20.0) * share, []
        wanted = torch.arange(20.0) * sum(range(1, comm.size + 1))
        reduction = comm.begin_sum_(vector, wire)
        for number, bucket in enumerate(reduction.buckets):
            reduction.wait(number)
            assert torch.equal(vector[bucket], wanted[bucket])
            seen.append((bucket.start, bucket.stop))
        print(f"{wire} {seen}")
    meta = MetaGradient(torch.zeros(20), {"rates": torch.zeros(2, 2)})
    meta.sum += share
    meta.extra["rates"] += share
    mean = meta.begin_reduce(comm, 3.0)
    assert mean is not None
    rates = mean.finish("rates").tolist()
    for number, bucket in enumerate(mean.reductions["theta"].buckets):
        mean.reductions["theta"].wait(number)
        print(f"mean {meta.sum[bucket].div_(mean.weight).tolist()} {rates}")


def equal_start(world: World) -> None:
    """Replicas that begin with other weights are made equal; frozen tensors that differ are refused."""
    rank = world.launch.global_rank
    config = Config(task_type="causal_lm", dataset=["words"], group_size="1")
    inputs = build.read_inputs(config, world, lambda text: None)
    ranks = world.split(1)
    config.seed += rank  # a broken initialisation: every rank makes its own weights
    plan = inputs.parallel_plan(config, ranks.layout.group_size, "cpu")
    parts = build.build(config, inputs, plan, ranks)
    own = load_learner(config, inputs.description)
    moved = max(
        float((parts.worker.gather_param(parts.meta_params.theta, name, p.shape) - p).abs().max())
        for name, p in own.named_parameters()
        if p.requires_grad
    )
    print(f"hash {hash_vector(parts.meta_params.theta)} moved {moved > 0}")
    parts.meta_params.theta[rank] += rank
    try:
        check_replicas(ranks, parts.meta_params.theta, "although it was broadcast")
    except MachineFault as error:
        print(error)
    try:
        check_equal(ranks, fingerprint([("table", torch.full((3,), float(rank)))]))
    except UsageError as error:
        print(error)


def sharded_while_loading(world: World, model: str, data: str, setting: str, value: str) -> None:
    """Adapters under ZeRO 3 or in stages: no rank loads a complete model, nor keeps more than one tensor that
    it does not need.
    """

    def whole(*_):
        raise AssertionError("a whole model was loaded")

    create.load_learner = whole
    spread = {setting: int(value) if value.isdigit() else value}
    config = Config(
        model_name_or_path=model,
        dataset=[data],
        task_type="causal_lm",
        lora_r=2,
        num_query=3,
        group_size="2",
        **spread,
    )
    inputs = build.read_inputs(config, world, lambda text: None)
    parts = build.build(config, inputs, inputs.parallel_plan(config, 2, "cpu"), world.split(2))
    module = getattr(parts.worker, "model", None) or parts.worker.stage
    held = sum(getattr(p, "ds_tensor", p).numel() for p in module.parameters() if not p.requires_grad)
    ids = torch.ones(1, 5, dtype=torch.long)
    if (
        setting == "deepspeed"
    ):  # the backward pass would hold every gathered weight through its transposed view
        kinds = graph_of(module(input_ids=ids, attention_mask=ids).sum().grad_fn)
        print(
            f"keeps gathered weights {'TBackward0' in kinds} {'LinearFunctionForZeroStage3Backward' in kinds}"
        )
    print(f"holds {held} of the base and {len(parts.frozen)} frozen tensors for export")


def one_stage_refuses(world: World, model: str, data: str, *files: str) -> None:
    """A gradient that is not finite on the first of two stages alone: neither stage adds anything of it."""
    ranks = None
    for file in files:
        config = Config(
            model_name_or_path=model,
            dataset=[data],
            task_type="causal_lm",
            num_query=3,
            group_size="2",
            pipeline_stages=2,
            deepspeed=file,
        )
        inputs = build.read_inputs(config, world, lambda text: None)
        ranks = ranks or world.split(2)
        plan = inputs.parallel_plan(config, ranks.layout.group_size, "cpu")
        parts = build.build(config, inputs, plan, ranks)
        worker, theta = parts.worker, parts.meta_params.theta
        task = build.training_schedule(config, inputs, ranks.layout).meta_batch(0)[0]
        ((_, episode),) = EpisodeReader.of(
            parts.load(inputs.sources.train, None), ranks, config, print
        ).read_same_task(task)
        begin = torch.linspace(-1, 1, worker.params.numel)
        total = begin.clone()
        if ranks.layout.group_rank == 0:
            last = [param for param in cast(Any, worker).stage.parameters() if param.requires_grad][-1]
            hook = last.register_hook(lambda grad: grad * float("nan"))
        refused = worker.gradient(episode.query, total, restore=theta)
        kept = torch.equal(total, begin) and torch.equal(worker.read(), theta)
        if ranks.layout.group_rank == 0:
            hook.remove()
        taken = worker.gradient(episode.query, total, restore=theta)
        moved = bool((total != begin).any()) and torch.equal(worker.read(), theta)
        consensus = cast(Any, worker).shards.nonfinite_consensus
        print(
            f"{consensus}: {refused.finite} kept {kept}, then {taken.finite} moved {moved}",
            flush=True,
        )


def graph_of(node: Any) -> set[str]:
    """Names of the operations that a backward pass will go through."""
    seen, todo = {node}, [node]
    while todo:
        for below, _ in todo.pop().next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
    return {each.name() for each in seen}


def gathers(world: World, model: str, data: str, kind: str) -> None:
    """An outer step of 8 tasks under ZeRO 3 on 2 ranks, one by one and all in one pass: the elements that are
    gathered, and where theta ends.
    """
    ends, ranks = {}, world.split(2)
    settings = {
        "adapters": {"task_type": "causal_lm", "lora_r": 2},
        "heads": {"algorithm": "anil", "n_way": 2},
    }[kind]
    for at_once in ("1", "8"):
        config = Config(
            model_name_or_path=model,
            dataset=[data],
            **settings,
            num_query=2,
            k_shot=2,
            group_size="2",
            deepspeed="ds_configs/zero3.json",
            meta_batch_size=8,
            tasks_per_pass=at_once,
            outer_steps=2,
            inner_steps=2,
            inner_lr=0.3,
            outer_optimizer="sgd",
            outer_lr=0.5,
            eval_episodes=0,
            save_steps=0,
            num_workers="0",
        )
        inputs = build.read_inputs(config, world, lambda text: None)
        inputs.deepspeed.file["zero_optimization"]["stage3_param_persistence_threshold"] = (
            0  # nothing stays gathered
        )
        plan = inputs.parallel_plan(config, ranks.layout.group_size, "cpu")
        parts = build.build(config, inputs, plan, ranks)
        began = parts.meta_params.theta.clone()
        run = Run(
            config,
            inputs,
            ranks,
            parts,
            RunStart(Path(tempfile.mkdtemp()), None, False),
            Progress(enabled=False),
        )
        run.resume()
        ends[at_once] = run.theta, began, counted_steps(run)
    (alone, began, counts), (together, _, fewer) = ends.values()
    square = ranks.group.sum_(
        torch.stack([(alone - together).double().square().sum(), (alone - began).double().square().sum()])
    )
    print(f"gathers {counts[1]} {fewer[1]} apart {float((square[0] / square[1]).sqrt()):.2e}")


def adapts(world: World, tokens_per_pass: str, *flags: str) -> None:
    """`fmmeta adapt` of a directory under ZeRO 3, where nothing stays gathered: all-gathered elements."""
    file = Path(tempfile.mkdtemp()) / "zero3.json"
    file.write_text('{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}')
    words = [*flags, f"--deepspeed={file}", f"--tokens_per_pass={tokens_per_pass}"]
    settings, progress = parse(words, "adapt"), Progress(enabled=False)
    output = Path(settings.output_dir)
    output.mkdir(exist_ok=True)
    tasks = many.find_tasks(settings, None, output, progress.notice)
    learn, counts = task_learner.TaskLearner.learn, list[int]()

    def counted(*arguments: Any) -> Any:
        with counted_gathers() as asked:
            found = list(learn(*arguments))
        counts.append(asked[0])
        return found

    task_learner.TaskLearner.learn = counted  # type: ignore[method-assign]
    failed = many.learn_all(settings, tasks, output, world, progress)
    print(f"gathers {sum(counts)} failed {len(failed)}")


def elements(tensors: Any) -> int:
    """Elements of a tensor, or of lists of tensors."""
    return tensors.numel() if torch.is_tensor(tensors) else sum(map(elements, tensors))


@contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """A list of one number: the elements that were all-gathered inside the block so far."""
    group = torch._C._distributed_c10d.ProcessGroup
    verbs = [
        name for name in vars(group) if name.replace("_", "").startswith("allgather")
    ]  # torch renames them
    kept, asked = {name: vars(group)[name] for name in verbs}, [0]

    def counting(name: str) -> Any:
        original = getattr(group, name)

        def call(*arguments: Any, **named: Any) -> Any:
            asked[0] += elements(arguments[1])  # the output; DeepSpeed gathers several parameters at a time
            return original(*arguments, **named)

        return call

    for name in kept:
        setattr(group, name, counting(name))
    try:
        yield asked
    finally:
        for name, verb in kept.items():
            setattr(group, name, verb)


def counted_steps(run: Run) -> list[int]:
    """Elements that are all-gathered in each outer step of a run."""
    counts = list[int]()
    with counted_gathers() as asked:

        class Counting(Callback):
            def on_step_end(self, run: Run, outcome: Any) -> None:
                counts.append(asked[0])
                asked[0] = 0

        run.callbacks.built_in = [Counting(), *run.callbacks.built_in]
        run.loop()
    return counts


def odd_replicas(world: World) -> None:
    """Three groups of one; the weights of one of them lose a bit."""
    ranks = world.split(1)
    theta = torch.arange(10.0)
    check_replicas(ranks, theta, "after outer step 6")
    print("equal before")
    if ranks.layout.group_index == 1:
        theta.view(torch.int32)[3] ^= 1
    try:
        check_replicas(ranks, theta, "after outer step 7")
    except MachineFault as fault:
        print(f"fault {fault}")


class Rounded(DifferenceHessian):
    """Products that are zero on the first rank, and of the size of a rounding error on the others."""

    def times(self, phi: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        super().times(phi, d)
        return d.roll(1) * (1e-4 * self.worker.group.rank)


def cg_rounding(world: World) -> None:
    """A ZeRO 0 group of two whose copies differ by rounding: conjugate gradients end after one step by those
    of rank 0, and after more by those of rank 1.
    """
    config = Config(algorithm="imaml", group_size="2", num_workers="0")
    inputs = build.read_inputs(config, world, lambda text: None)
    ranks = world.split(2)
    plan = inputs.parallel_plan(config, ranks.layout.group_size, "cpu")
    parts = build.build(config, inputs, plan, ranks)
    worker, rule = parts.worker, imaml.rule(parts.setup, 0)
    task = build.training_schedule(config, inputs, ranks.layout).meta_batch(0)[0]
    ((_, episode),) = EpisodeReader.of(
        parts.load(inputs.sources.train, None), ranks, config, print
    ).read_same_task(task)
    b = worker.zeros()
    worker.gradient(episode.query, b)
    assert isinstance(rule, imaml.Imaml)
    hessian = Rounded(rule.hvp, worker, episode.support)
    _, numbers = rule._solve(worker, hessian, parts.meta_params.theta, b)
    print(
        f"solved in {len(hessian.passes)} passes, |b|^2 {worker.dot(b, b * (1 + 1e-6 * ranks.group.rank))}, "
        f"residual {numbers['cg_residual']}",
        flush=True,
    )


def refusals(world: World, file: str) -> None:
    """Every list of flags in `file` is refused on all ranks with one text; the ranks stay together from one
    to the next.
    """
    for flags in json.loads(Path(file).read_text()):
        try:
            config = parse(flags)
            inputs = build.read_inputs(config, world, lambda text: None)
            plan = build.plan_parallel(config, inputs, world, lambda text: None)
            world.split(plan.group_size, plan.engine == "deepspeed")
            print("accepted")
        except UsageError as error:
            print(error)


def prepare_once(world: World, folder: str) -> None:
    """One rank of a node works first; all ranks raise its error; a rank that waits too long names it."""
    process_groups.LOG_S = 0.3
    file = Path(folder) / "prepared"

    def read() -> str:
        if world.launch.local_rank == 0:
            time.sleep(1)
            file.write_text(f"what rank {world.launch.global_rank} left")
            return "nothing"
        return file.read_text()

    def broken() -> str:
        assert world.launch.local_rank == 0, "the others have nothing to do"
        raise UsageError("dataset=x is broken; fix it")

    print("found", world.run_on_first_rank_of_node("reading the data", read, 60), flush=True)
    try:
        world.run_on_first_rank_of_node("reading", broken, 60)
    except UsageError as error:
        print(error, flush=True)
    if world.launch.local_rank == 0:
        time.sleep(2)  # it never comes
        return
    try:
        world.run_on_first_rank_of_node("reading slowly", lambda: None, 0.5)
    except UsageError as error:
        print(f"raised: {error}", flush=True)
    world.store = None
    os._exit(0)  # as a launcher would end it: rank 0 does not answer


def slow_node(world: World) -> None:
    """Two nodes of one rank each, and the second prepares for longer than communicators wait otherwise."""
    world.nodes = Nodes((0, 1), ("a", "b"))
    world.comm.set_timeout(2)
    seconds = 6 * world.launch.global_rank
    world.run_on_first_rank_of_node("reading the data", lambda: time.sleep(seconds), 3600)
    print("read", flush=True)


if __name__ == "__main__":
    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    with terminal_log():
        globals()[sys.argv[1]](world, *sys.argv[2:])
    world.close()
