"""NCCL's rules for the communicators that are NCCL on GPUs, enforced over gloo.

    nccl_rules.install()     before the first process group: `group`, its subgroups and `cross` are wrapped
    nccl_rules.check()       at the end: raises the first broken rule, even if something caught it

On CPUs gloo is wrapped. On the pretended GPU (pretended_cuda) `nccl` is this wrapper, in every process; it
lends gloo the memory of the device's tensors.

The world communicator, `background` and the connections of elastic groups are gloo on GPUs too, and are not
wrapped. DeepSpeed's collectives are checked too: it uses the default group and its subgroups.

    rule           checked
    thread         one thread issues everything on a communicator; autograd's threads too, which run while
                   that one waits
    order          at the same place all ranks issue the same operation with the same shapes, dtype, reduction
                   and root; a send and its recv; all ranks issue as many
    interleaving   the ranks of a communicator have issued as much on the wider ones before an operation
    dtype          dtypes of tensors; those of reductions
    operation      no bitwise reduction, no recv from any rank, no monitored barrier
    dense          no sparse tensor; contiguous ones, but for send and recv
    host           on the pretended GPU: no tensor in host memory
    abort          nothing is issued after abort, shutdown or an error

Sources. NCCL user guide: "Thread Safety" (never two threads at a time; on GPUs autograd runs the hooks of
DeepSpeed in another thread, while the main thread waits), "Collective Operations" (every rank calls with the
same count and datatype, otherwise hangs, crashes or data corruption), "Point-to-point communication", "Using
multiple NCCL communicators concurrently" (operations are submitted in the same order across ranks), "Error
handling and communicator abort". torch, ProcessGroupNCCL: `ncclDataType` (its dtypes), `getNcclReduceOp` (no
bitwise reductions, no sums of 8-bit floats; a sum of bool is a maximum, while gloo adds bytes),
`check_gpu_single_tensor` ("Tensors must be CUDA and dense", "Tensors must be contiguous"), `recvAnysource`.
Stricter than NCCL: shapes instead of counts; no complex numbers, which torch passes on as pairs.

The side exchange of `order` is a file that the ranks of a communicator map into memory (they share a host). A
rank writes each operation there and compares it with those of the others that have come as far. So it never
waits, and of two ranks that differ the later one raises.
"""

import mmap
import os
import struct
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partialmethod
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support import pretended_cuda

BACKEND = "nccl_rules"  # the name for torch; it must not be gloo's, which DeepSpeed and torch treat apart
REDUCED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
MOVED = (*REDUCED, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
BITWISE = tuple(getattr(dist.ReduceOp, name) for name in ("BAND", "BOR", "BXOR"))
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "gather", "scatter", "barrier"),
    *("all_gather_single", "_allgather_base", "all_gather_single_coalesced"),
    *("allgather_into_tensor_coalesced", "alltoall", "all_to_all_single", "alltoall_base"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
)
MISSING = ("recv_anysource", "allgather_coalesced", "monitored_barrier")
UNEVEN = ("alltoall", "all_to_all_single", "alltoall_base")  # shapes may differ between ranks
WIDTH = {"cross": 0, "group": 1, "subgroup": 2}  # of communicators; the widest first

PRETENDED = pretended_cuda.LIBRARY in os.environ
"""Whether this process has the pretended GPU."""

broken: list[str] = []
"""The broken rules of this process."""


class RuleBroken(AssertionError):
    """A use of a communicator that NCCL does not allow."""


class Ledger:
    """What the ranks of a communicator have issued, in memory that they share.

    A line is a sequence of records, written by one rank: that of its collectives, and one for each other rank
    with which it exchanges tensors. A record: its number + 1 (8 bytes), then its text. Old ones are
    overwritten.
    """

    RECORDS, BYTES = 512, 256  # of a line; of a record

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.numbers = [0] * size  # by line: of collectives at [rank], of exchanges with the other ranks
        length = size * size * self.RECORDS * self.BYTES
        if rank == 0:
            # the folder is removed with the session
            handle, name = tempfile.mkstemp(dir=os.environ.get("FMMETA_TEST_SESSION"))
            os.truncate(handle, length)
            store.set("ledger", name)
        else:
            name = store.get("ledger").decode()
            handle = os.open(name, os.O_RDWR)
        self.memory = mmap.mmap(handle, length)
        os.close(handle)
        if store.add("mapped", 1) == size:
            os.unlink(name)

    def write(self, line: int, text: str) -> tuple[int, str] | None:
        """Add a record to a line; return the rank and the text of one that differs, if another rank has
        written it.
        """
        number, self.numbers[line] = self.numbers[line], self.numbers[line] + 1
        data = text.encode()[: self.BYTES - 8].ljust(self.BYTES - 8, b"\0")
        at = self._at(self.rank, line, number)
        self.memory[at + 8 : at + self.BYTES] = data
        struct.pack_into("<q", self.memory, at, number + 1)
        for other in range(self.size) if line == self.rank else (line,):
            if other != self.rank:
                at = self._at(other, other if line == self.rank else self.rank, number)
                written = struct.unpack_from("<q", self.memory, at)[0] == number + 1
                if written and (found := self.memory[at + 8 : at + self.BYTES]) != data:
                    return other, found.rstrip(b"\0").decode()
        return None

    def _at(self, rank: int, line: int, number: int) -> int:
        return ((rank * self.size + line) * self.RECORDS + number % self.RECORDS) * self.BYTES


class CheckedGroup(dist.ProcessGroup):
    """A process group over gloo that raises `RuleBroken`; see the table.

    inner: of gloo; kind: cross, group or subgroup. Ranks are those of this communicator. group_name: torch's.
    store: of the ledger; None without other ranks.
    """

    group_name = ""  # type: ignore[assignment]
    issued: ClassVar[Counter[str]] = Counter()  # collectives of this process by kind

    def __init__(self, inner: Any, store: Any, kind: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.inner, self.kind, self.ledger = inner, kind, store and Ledger(store, rank, size)
        self.thread: int | None = None
        self.ended = ""  # why it must not be used any more

    def refuse(self, rule: str, text: str) -> NoReturn:
        text = f"NCCL rule broken: {rule}: rank {self.rank()} of {self.kind}: {text}"
        broken.append(text)
        raise RuleBroken(text)

    def collective(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Check and run a collective, a method of `inner` with this name."""
        wider = " ".join(
            f"after {self.issued[kind]} of {kind}" for kind in WIDTH if WIDTH[kind] < WIDTH[self.kind]
        )
        given = (*args, *kwargs.values())
        tensors = tensors_in(given)
        op, root = reduction_and_root(name, given)
        listed = tensors_in(rank_independent(name, given)) if name not in UNEVEN else tensors[:1]
        shown = ", ".join(show(tensor, shape=name not in UNEVEN) for tensor in listed)
        text = " ".join(filter(None, (name, op and op.name, shown, root and f"root {root}", wider)))
        self._check(text, tensors, dense=True)
        if op in BITWISE:
            self.refuse("operation", f"{text}; NCCL has no bitwise reductions")
        if op is not None and (wrong := [each.dtype for each in tensors if each.dtype not in REDUCED]):
            self.refuse("dtype", f"{text}; gloo and NCCL reduce {wrong[0]} differently, or not at all")
        self._record(self.rank(), text)
        self.issued[self.kind] += 1
        if PRETENDED:
            from tests.support.pretended_cuda import events

            has_output = any(word in name for word in ("gather", "scatter", "all_to_all"))
            sent = tensors_in(args[1:2] if has_output else args[:1])
            events.note("collective", f"{name} of {self.kind}", sum(each.nbytes for each in sent))
        if name == "barrier":  # its options name a device
            args, kwargs = (), {}
        return self._run(name, args, kwargs)

    def exchange(self, name: str, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        """Check and run a send or a recv."""
        ends = (self.rank(), peer) if name == "send" else (peer, self.rank())
        shown = ", ".join(map(show, tensors))
        text = f"send {ends[0]} to {ends[1]} {shown} after {self.issued['cross']} of cross"
        self._check(text, tensors, dense=False)
        self._record(peer, text)
        return self._run(name, (tensors, peer, tag), {})

    def missing(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.refuse("operation", f"{name}; NCCL does not have it")

    def _check(self, text: str, tensors: Sequence[Tensor], dense: bool) -> None:
        """The rules that one rank can break alone."""
        self.thread = self.thread or threading.get_ident()
        if self.ended:
            self.refuse("abort", f"{text}; {self.ended}")
        of_autograd = isinstance(threading.current_thread(), threading._DummyThread)
        if self.thread != threading.get_ident() and not (PRETENDED and of_autograd):
            self.refuse("thread", f"{text}; in a second thread")
        for tensor in tensors:
            if tensor.layout != torch.strided:
                self.refuse("dense", f"{text}; the tensor is sparse")
            if dense and not is_contiguous(tensor):
                self.refuse("dense", f"{text}; strides {tensor.stride()}")
            if tensor.dtype not in MOVED:
                self.refuse("dtype", f"{text}; NCCL has no {tensor.dtype}")
            if PRETENDED and not tensor.is_cuda:
                self.refuse("host", f"{text}; the tensor is in host memory")

    def _record(self, line: int, text: str) -> None:
        if self.ledger is None:
            return
        number = self.ledger.numbers[line]
        if (other := self.ledger.write(line, text)) is not None:
            mine, its = (each.partition(" after ")[0] for each in (text, other[1]))
            rule = "order" if mine != its else "interleaving"
            self.refuse(rule, f"operation {number}: {text}; rank {other[0]}: {other[1]}")

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if PRETENDED:
                args, kwargs = lend((args, kwargs))
            return CheckedWork(getattr(self.inner, name)(*args, **kwargs), self)
        except RuntimeError as error:
            self.fail(error)
            raise

    def fail(self, error: Exception) -> None:
        """An operation has failed: the communicator must not be used any more."""
        self.ended = self.ended or f"it has failed before: {error}"

    def abort(self) -> None:
        self.ended = self.ended or "abort was called before"
        self.inner.abort()

    def shutdown(self) -> None:
        """Shut down; compare how much the ranks have issued, unless an error ends the run."""
        if not self.ended:
            self.ended = "shutdown was called before"
            for line in range(self.size()) if sys.exc_info()[0] is None else ():
                self._record(line, "shutdown")
        self.inner.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner._get_backend(device)


for verb, methods in (("collective", COLLECTIVES), ("exchange", ("send", "recv")), ("missing", MISSING)):
    for method in methods:
        setattr(CheckedGroup, method, partialmethod(getattr(CheckedGroup, verb), method))


class CheckedWork(dist.Work):
    """A pending operation; its failure ends the communicator."""

    def __init__(self, work: Any, group: CheckedGroup) -> None:
        super().__init__()
        self.work, self.group = work, group

    def wait(self, *timeout: Any) -> bool:
        try:
            return self.work is None or self.work.wait(*timeout)
        except RuntimeError as error:
            self.group.fail(error)
            raise

    def __getattribute__(self, name: str) -> Any:
        if name in ("work", "group", "wait", "__class__"):
            return super().__getattribute__(name)
        return getattr(self.work, name)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors of nested lists, in their order."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def lend(values: Any) -> Any:
    """The same in nested lists, with tensors of the host over the memory of those of the pretended GPU."""
    return tree_map_only(Tensor, lambda tensor: torch.ops.pretended_cuda.host(tensor.detach()), values)


def rank_independent(name: str, given: Sequence[Any]) -> Sequence[Any]:
    """The arguments that must be alike on all ranks: only the root has the list of a gather or a scatter."""
    return {"gather": given[1:2], "scatter": given[:1]}.get(name, given)


def reduction_and_root(name: str, given: Sequence[Any]) -> tuple[Any, str]:
    """The type of the reduction, None without one; and the root as text. They come by options or alone."""
    reduces, rooted = "reduce" in name, name in ("broadcast", "reduce", "gather", "scatter")
    op, root = dist.ReduceOp.SUM if reduces else None, 0
    for value in given:
        if isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            op = value
        elif isinstance(value, int):
            root = value
        elif not isinstance(value, (Tensor, list, tuple)):
            op, root = getattr(value, "reduceOp", op), getattr(value, "rootRank", root)
    return getattr(op, "op", op) if reduces else None, str(root) if rooted else ""


def show(tensor: Tensor, shape: bool = True) -> str:
    return str(tensor.dtype).removeprefix("torch.") + (str(list(tensor.shape)) if shape else "")


def is_contiguous(tensor: Tensor) -> bool:
    """As `is_contiguous` of the tensor's suggested memory format."""
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


@cache
def install() -> None:
    """Wrap what this process creates from now on. With a GPU it does nothing: NCCL is there, or
    `install_nccl` was called.
    """
    if torch.cuda.is_available():
        return
    from fmmeta.parallel.process_groups import World

    def connect(original: Any, world: World, name: str, rank: int, size: int, device: Any) -> Any:
        found = original(world, name, rank, size, device)
        if found.backend is not None and name.startswith("cross"):
            store = dist.PrefixStore(f"{name}/{BACKEND}", world.store)
            found.backend = CheckedGroup(found.backend, store, "cross", rank, size)
        return found

    stand_for("gloo", "cpu")
    replace(World, "_connect", connect)


def stand_for(backend: str, device: str) -> None:
    """Let the default groups of `backend` be `CheckedGroup`."""

    def begin(original: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(BACKEND if name == backend else name, *args, **kwargs)

    dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=[device])
    replace(dist, "init_process_group", begin)


def replace(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replace a function of a module or a class; `instead` gets the original first."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: instead(original, *args, **kwargs))


def gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group that reduces on the host."""
    inner = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    inner._set_default_backend(kind)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    inner._register_backend(torch.device("cpu"), kind, backend)
    return inner


def create_group(options: Any, _: Any) -> CheckedGroup:
    """The default group of this process, or a subgroup: torch calls it."""
    store, rank, size = options.store, options.group_rank, options.group_size
    kind = "subgroup" if options.global_ranks_in_group else "group"
    found = CheckedGroup(gloo(store, rank, size, options.timeout), store, kind, rank, size)
    found.group_name = options.group_id
    return found


def install_nccl() -> None:
    """Let `nccl` be `CheckedGroup` in a process with the pretended GPU."""

    def connect(store: Any, rank: int, size: int, timeout: timedelta) -> CheckedGroup:
        return CheckedGroup(gloo(store, rank, size, timeout), store, "cross", rank, size)

    stand_for("nccl", "cuda")
    dist.ProcessGroupNCCL = connect  # type: ignore[misc, assignment]
    dist.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 27, 0)


def check() -> None:
    """Raise the first rule that was broken in this process, if any."""
    if broken:
        raise RuleBroken(broken[0])
