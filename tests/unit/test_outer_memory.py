"""--offload_outer stores idle vectors in host memory and loads them in pieces; results are unchanged."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmmeta import Config, MetaTrainer
from fmmeta.config.algorithms import find
from fmmeta.meta.algorithms.setup import setup
from fmmeta.meta.outer_step import OuterOptimizer
from fmmeta.meta.parameters import MetaGradient, MetaParameters, PendingMean, StateDict
from fmmeta.parallel import memory, param_map
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.param_map import OuterMemory
from fmmeta.parallel.process_groups import World
from fmmeta.parallel.workers.full_model import PlainWorker
from fmmeta.training import build
from tests.support import learners
from tests.support.helpers import fast_or_slow
from tests.support.learners import CPU, RuleOn, batches_of, config_of, episode_of, worker_over
from tests.support.memory import SIZES, world_of
from tests.support.messages import check_message, refusal
from tests.support.short_runs import same

GPU = torch.device("meta")  # in place of a GPU: an operation on tensors of both devices raises


class OnGpu(PlainWorker):
    """A worker whose model is on that device; with `offload` its shards are in host memory."""

    def __init__(self, learner, offload: bool) -> None:
        super().__init__(learner, param_map.param_groups(learner, (), weight_decay=True), GPU)
        if offload:
            self.storage_device = CPU
            self.local_shards = [(torch.zeros(self.params.numel), slice(0, self.params.numel))]

    def dot(self, a, b) -> float:
        super().dot(a, b)
        return 1.0

    def apply(self, update, skip_nonfinite_everywhere):
        ((shard, where),) = self.local_shards
        update(shard, torch.zeros_like(shard), where)
        return torch.zeros((), device=GPU)


class CopiesToHost(TorchDispatchMode):
    """Copies of tensors of that device, which have no values, are zeros."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.name()
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        if name == "aten::_to_copy" and args[0].is_meta and kwargs.get("device", GPU).type == "cpu":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name == "aten::copy_" and args[1].is_meta and not args[0].is_meta:
            return args[0].zero_()
        return func(*args, **kwargs)


ADAMW = {"inner_optimizer": "adamw"}


RULES = [
    {"algorithm": "fomaml", **ADAMW},
    {"algorithm": "fomaml", "inner_optimizer": "momentum", "inner_lr_learned": "element"},
    {"algorithm": "fomaml", "inner_lr_learned": "layer", "multi_step_loss_steps": 2},
    {"algorithm": "reptile", **ADAMW},
    {"algorithm": "maml"},
    {"algorithm": "maml", "second_order": "autograd", **ADAMW, "trajectory_memory_gib": 0},
    {"algorithm": "maml", "head_init": "prototype", "prototype_gradient": True},
    {"algorithm": "imaml"},
    {"algorithm": "joint"},
]
PLACES = [*itertools.product(("host", "device"), (False, True))]  # of theta; whether the shards are offloaded
FAST = [(rule, *PLACES[number % 4]) for number, rule in enumerate(RULES)]
CASES = [(rule, *place) for rule in RULES for place in PLACES]


@pytest.mark.parametrize("case", fast_or_slow(CASES, FAST.__contains__, str))
def test_a_task_runs_wherever_theta_and_the_shards_are(case):
    """theta is in host memory with --offload_outer, in the table at the end and in other evaluations."""
    settings, outer, offload = case
    with GPU:
        learner = learners.bert("mean")
    config, episode = config_of(learner, inner_steps=2, **settings), batches_of(episode_of(learner))
    worker = OnGpu(learner, offload)
    parts = setup(config, worker, learner.head_names, 3, False)
    memory = OuterMemory(worker.storage_device, outer == "host")
    theta = torch.zeros(worker.params.numel) if outer == "host" else memory.store(worker.read())
    meta = MetaParameters.of(theta, parts.inner)
    with CopiesToHost():
        into = MetaGradient(theta, meta.extra)
        on = RuleOn(find(config.algorithm).rule, parts)
        on.rule(on.task(worker, episode, into, meta))
        assert into.weight == 1
        before, after = parts.evaluation_method(meta.rates).score(worker, meta.theta.cpu(), episode)
    assert before.stats.device == after.stats.device == GPU


def outer_of(worker: PlainWorker, offload: bool, **settings) -> OuterOptimizer:
    config = Config(outer_lr=0.01, weight_decay=0.1, offload_outer=offload, **settings)
    return OuterOptimizer(MetaParameters(OuterMemory(CPU, offload).store(worker.read())), worker, config)


def state_of(outer: OuterOptimizer) -> StateDict:
    state = StateDict()
    outer.add_state(state)
    return state


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("chunk", [64, 1000, 2**24])
def test_offloaded_steps_equal_steps_on_the_device(monkeypatch, optimizer, chunk):
    """The steps are equal for pieces of any size, after a resume, and those of the whole vector."""
    worker = worker_over(learners.bert("mean"), "zero")
    whole = outer_of(worker, False, outer_optimizer=optimizer)
    monkeypatch.setattr(param_map, "chunk", lambda device: chunk)
    here, away = (outer_of(worker, offload, outer_optimizer=optimizer) for offload in (False, True))
    assert chunk == 2**24 or len(here.pieces) > len(whole.pieces)
    pieces = list(away.memory.pieces(slice(7, 3007)))
    assert [a.stop for a in pieces[:-1]] == [b.start for b in pieces[1:]]
    assert (pieces[0].start, pieces[-1].stop, len(pieces)) == (7, 3007, -(-3000 // chunk))
    for step in range(4):
        grad = torch.randn(here.meta_params.theta.shape, generator=torch.Generator().manual_seed(step))
        moved = [outer.step(PendingMean({"theta": grad.clone()}), step) for outer in (whole, here, away)]
        assert all(one.applied for one in moved)
        if step == 1:
            resumed = OuterOptimizer(away.meta_params, worker, away.config)
            resumed.load_state(state_of(away))
            away = resumed
    assert torch.equal(away.meta_params.theta, here.meta_params.theta)
    torch.testing.assert_close(here.meta_params.theta, whole.meta_params.theta, rtol=1e-6, atol=1e-9)
    assert away.meta_params.theta.ne(worker.read()).any()
    torch.testing.assert_close(state_of(away).vectors, state_of(here).vectors, rtol=0, atol=0)


def test_offloaded_pieces_are_copied_and_written_back():
    vector = torch.arange(6.0)
    away, here = OuterMemory(CPU, True), OuterMemory(CPU, False)
    part = away.load(vector[2:4])
    part.mul_(10)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5]
    away.write_back(vector[2:4], part)
    assert vector.tolist() == [0, 1, 20, 30, 4, 5]
    assert away.store(vector).data_ptr() != vector.data_ptr()
    assert here.store(vector) is vector
    assert here.load(vector[2:4]).data_ptr() == vector[2:4].data_ptr()  # in place: not a byte more


def test_offloaded_run_gives_the_same_model(bert, classes, tmp_path, capsys):
    short = {"k_shot": 1, "num_query": 2, "outer_steps": 3, "save_steps": 2, "eval_episodes": 2}
    inputs = {"model_name_or_path": str(bert), "dataset": [str(classes)], **short}
    for offloaded in (False, True):
        config = Config(**inputs, offload_outer=offloaded, output_dir=str(tmp_path / f"{offloaded}"))
        assert MetaTrainer(config).train().held_out["episodes"] == 2
        assert ("offload_outer changes nothing on CPUs" in capsys.readouterr().out) == offloaded
    assert same(tmp_path / "False", tmp_path / "True")


@pytest.mark.parametrize(
    ("stage", "group_size", "meta", "host"), [(0, 4, 4000, 4 * 4096), (1, 4, 1000, 4096), (3, 1, 4000, 16384)]
)
def test_estimate_moves_outer_state_to_the_host(stage, group_size, meta, host):
    sizes = memory.Sizes(**{**vars(SIZES), "offload_outer": True})
    found, without = (
        memory.estimate(s, DeepSpeedSettings(stage, True, False), group_size) for s in (sizes, SIZES)
    )
    assert (found.meta, found.host) == (meta, host)
    assert without.total - found.total == 4 * meta
    assert (without.meta, without.host) == (5 * meta, 0)


def test_auto_group_size_needs_host_memory_too(monkeypatch):
    few = {"layers": 0, "hidden": 0, "heads": 0, "vocab": 0, "rows": 1, "tokens": 1}
    sizes, settings = (
        memory.Sizes(params=2**30, **few, offload_outer=True),
        DeepSpeedSettings(1, False, False),
    )
    monkeypatch.setattr(memory, "host_bytes", lambda local: 2**33)
    four = world_of(monkeypatch, 4, 4, 2**35)
    size, why = memory.choose_group_size(four, lambda data: sizes, settings)
    assert size == 4  # 16 and 8 GiB of outer state would not fit into 8
    assert "(and 4 in host memory)" in why
    two = world_of(monkeypatch, 2, 2, 2**35)
    message = refusal(memory.choose_group_size, two, lambda data: sizes, settings)
    parts = ("32 GiB are free (and 8 in host memory)", "use a higher")
    check_message(message, "13.9 GiB (and 8 in host memory) each", *parts)


def test_outer_vectors_are_on_the_device_of_the_shards(bert, classes, monkeypatch):
    """As DeepSpeed's offload from a GPU to host memory, the other way round."""
    config = Config(model_name_or_path=str(bert), dataset=[str(classes)], k_shot=1, num_query=2)
    world, create = World(Launch(), CPU), build.create_worker
    inputs = build.read_inputs(config, world, lambda text: None)

    def elsewhere(*given):
        worker, *others = create(*given)
        worker.storage_device = GPU
        return worker, *others

    monkeypatch.setattr(build, "create_worker", elsewhere)
    plan, ranks = inputs.parallel_plan(config, 1, "cpu"), world.split(1, default_group=False)
    parts = build.build(config, inputs, plan, ranks)
    assert parts.meta_params.theta.device == GPU
    assert OuterOptimizer(parts.meta_params, parts.worker, config).memory.device == GPU


def test_received_state_moves_to_the_device_of_theta():
    """`meta` replaces a GPU: an outer step with tensors on two devices raises an error."""
    outer = outer_of(worker_over(learners.bert("mean"), "zero"), False, outer_optimizer="adamw")
    vector = torch.zeros(outer.meta_params.theta.shape, device=GPU)
    meta_params = outer.meta_params = MetaParameters(vector, vector.clone())
    outer.memory = OuterMemory(GPU, False)
    names = ("theta", "exp_avg", "rates", "rates.exp_avg")
    state = StateDict({name: torch.zeros(vector.shape) for name in names}, {}, {"numbers": {"step": 1.0}})
    meta_params.load_state(state)
    outer.load_state(state)
    found = [one.device for vectors in (outer.moments, outer.rate_moments) for one in vectors.values()]
    assert found == [GPU] * 2
