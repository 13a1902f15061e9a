"""`@on_ranks(n)`: the body of a function of a test module runs on n ranks of a launch, over gloo.

    @on_ranks(2)
    def test_the_sum_of_two(world):
        assert float(world.comm.sum_(torch.ones(1))) == 2

    @on_ranks(2)
    def multiplied(world, factor):
        return world.launch.global_rank * factor      # multiplied(3) is [0, 3]

The first parameter is the rank's `World`, which callers do not give; arguments and values are pickled. If a
rank fails, the test fails with its traceback.
"""

import inspect
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fmmeta.common.progress import terminal_log
from fmmeta.config.settings import Config
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import ProcessGroups, World, pick_device
from fmmeta.training import build
from fmmeta.training.episodes import EpisodeReader
from tests.support import nccl_rules
from tests.support.launch import start_ranks


def on_ranks(
    count: int, timeout_s: float = 100, rules: bool = False, **launch: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """rules: under those of NCCL (nccl_rules.py). launch: further arguments of `start_ranks`."""

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(body)
        def run(*given: Any, **named: Any) -> list[Any] | None:
            values = begin(body, count, *given, timeout_s=timeout_s, rules=rules, named=named, **launch)()
            return None if values == [None] * count else values  # as a test

        signature = inspect.signature(body)
        parameters = list(signature.parameters.values())[1:]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def begin(
    body: Callable[..., Any],
    count: int,
    *given: Any,
    timeout_s: float = 100,
    rules: bool = False,
    named: dict[str, Any] | None = None,
    **launch: Any,
) -> Callable[[], list[Any]]:
    """Start `body` on ranks; what comes back waits for the end, and returns the values by rank."""
    folder = tempfile.TemporaryDirectory()
    Path(folder.name, "given").write_bytes(pickle.dumps((given, named or {}, rules)))
    words = ["-m", "tests.support.ranks", body.__module__, body.__name__, folder.name]
    running = start_ranks(words, count, **launch)

    def end() -> list[Any]:
        with folder:
            running.end(timeout_s).ok()
            return [pickle.loads(Path(folder.name, str(rank)).read_bytes()) for rank in range(count)]

    return end


def main(module: str, name: str, folder: str) -> None:
    given, named, rules = pickle.loads(Path(folder, "given").read_bytes())
    if rules and os.environ.get("FMMETA_NCCL_RULES") != "0":
        nccl_rules.install()
    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    body = inspect.unwrap(getattr(import_module(module), name))
    with terminal_log():
        value = body(world, *given, **named)
    Path(folder, str(launch.global_rank)).write_bytes(pickle.dumps(value))
    world.close()
    if rules:
        nccl_rules.check()


def built(
    world: World, config: Config, ranks: ProcessGroups | None = None
) -> tuple[build.RunInputs, ProcessGroups, build.Runtime]:
    """What a run has before its first step; `ranks` if there are groups already. Collective: world."""
    inputs = build.read_inputs(config, world, lambda text: None)
    ranks = ranks or world.split(int(config.group_size))
    plan = inputs.parallel_plan(config, ranks.layout.group_size, world.device.type)
    return inputs, ranks, build.build(config, inputs, plan, ranks)


def first_episode(config: Config, inputs: build.RunInputs, ranks: ProcessGroups, parts: build.Runtime) -> Any:
    """The batches of the first task, as all ranks of the group have them. Collective: group."""
    task = build.training_schedule(config, inputs, ranks.layout).meta_batch(0)[0]
    load = parts.load(inputs.sources.train, reading=inputs.reading)
    reader = EpisodeReader.of(load, ranks, config, print)
    ((_, episode),) = reader.read_same_task(task)
    return episode


def leave_at_once(world: World) -> None:
    """End the process after the body, as a launcher would: operations are pending."""
    world.close = partial(os._exit, 0)  # type: ignore[method-assign]


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


if __name__ == "__main__":
    main(*sys.argv[1:])
