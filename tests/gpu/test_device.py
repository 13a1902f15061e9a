"""The pretended GPU refuses what a GPU refuses, counts what makes the host wait, and is built once."""

import io
import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from tests.support import pretended_cuda
from tests.support.launch import ROOT, environment
from tests.support.ranks import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("pretended"),
]
D, H = torch.device("cuda", 0), torch.device("cpu")


def x(*shape, device=D, **options):
    return torch.ones(*shape, device=device, **options)


REFUSED = {  # what a GPU refuses, and the words of the error
    "a host tensor in a sum": (lambda: x(3) + x(3, device=H), "same device"),
    "a target on the host": (
        lambda: F.cross_entropy(x(2, 3), torch.zeros(2, dtype=torch.long)),
        "same device",
    ),
    "a host input of a layer": (lambda: F.linear(x(2, 3, device=H), x(4, 3), x(4)), "same device"),
    "host indices of an embedding": (lambda: F.embedding(torch.tensor([1]), x(4, 3)), "same device"),
    "a mask on the host": (lambda: x(3).masked_fill(x(3, device=H) > 0, 0.0), "same device"),
    "a number of the host in a product of matrices": (
        lambda: torch.addmv(x((), device=H), x(2, 3), x(3)),
        "same device",
    ),
    "a device tensor into a host one": (lambda: x(3, device=H).add_(x(3)), "same device"),
    "a list of tensors": (lambda: torch._foreach_add_([x(3)], [x(3, device=H)]), "same device"),
    "two devices": (lambda: x(3) + x(3, device="cuda:1"), "same device"),
    "a concatenation": (lambda: torch.cat([x(3), x(3, device=H)]), "same device"),
    "a generator of the host": (lambda: torch.rand(3, device=D, generator=torch.Generator()), "generator"),
    "a device that is not there": (lambda: x(3, device="cuda:99"), "invalid device ordinal"),
    "the memory of a device tensor for numpy": (lambda: x(3).numpy(), "can't convert cuda"),
}
CANNOT = {  # what a GPU does and the pretended one does not, and the call that stops it
    "a sparse tensor": (lambda: x(2, 2).to_sparse(), "Cannot access storage of SparseTensorImpl"),
    "random numbers of the device's own": (lambda: torch.Generator("cuda"), "Cannot get CUDA generator"),
    "a file that is loaded to the device": (lambda: loaded(x(3)), "torch.UntypedStorage(): Storage device"),
}
WAIT = "copy to {} {}".format
COUNTED = {  # what makes the host wait, or does not
    "item": (lambda: x(()).item(), {"item": 1}),
    "a condition": (lambda: bool((x(3) > 0).all()), {"item": 1}),
    "a float": (lambda: float(x(())), {"item": 1}),
    "nonzero": (lambda: x(3).nonzero(), {"aten::nonzero": 1}),
    "a mask as index": (lambda: x(3)[x(3) > 0], {"aten::nonzero": 1}),
    "numbers where a mask is": (
        lambda: x(3).__setitem__(x(3) > 0, x(3)),
        {"aten::_index_put_impl_": 1},
    ),
    "a number where a mask is": (lambda: x(3).__setitem__(x(3) > 0, 0.0), {}),
    "repeats on the device": (
        lambda: x(3).repeat_interleave(x(3, dtype=torch.long)),
        {"aten::repeat_interleave.Tensor": 1},
    ),
    "equality": (lambda: torch.equal(x(3), x(3)), {"aten::equal": 1}),
    "a blocking copy of pageable memory": (
        lambda: x(3, device=H).to(D),
        {WAIT("device", "pageable blocking"): 1},
    ),
    "a copy of pageable memory that is meant not to block": (
        lambda: x(3, device=H).to(D, non_blocking=True),
        {WAIT("device", "pageable"): 1},
    ),
    "a blocking copy of pinned memory": (
        lambda: x(3, device=H).pin_memory().to(D),
        {WAIT("device", "pinned blocking"): 1},
    ),
    "a copy of pinned memory": (lambda: x(3, device=H).pin_memory().to(D, non_blocking=True), {}),
    "a part of pinned memory": (lambda: x(9, device=H).pin_memory()[2:5].to(D, non_blocking=True), {}),
    "a tensor from numbers": (
        lambda: torch.tensor([1.0, 2.0], device=D),
        {WAIT("device", "pageable blocking"): 1},
    ),
    "a tensor filled on the device": (lambda: torch.full((2,), 3.0, device=D), {}),
    "host indices": (lambda: x(3)[torch.tensor([0, 1])], {WAIT("device", "pageable blocking"): 1}),
    "a list for the host": (lambda: x(3).tolist(), {WAIT("host", "pageable blocking"): 1}),
    "a number of the host in arithmetic": (lambda: x(3) * torch.tensor(2.0), {}),
    "synchronize": (lambda: torch.cuda.synchronize(), {"synchronize": 1}),
    "an event": (lambda: torch.cuda.Event().synchronize(), {"event.synchronize": 1}),
    "a norm that is clipped": (lambda: torch.nn.utils.clip_grad_norm_([parameter()], 1.0), {}),
}


def loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, map_location="cuda")


def parameter():
    made = x(3).requires_grad_()
    made.sum().backward()
    return made


@on_ranks(1)
def tried(world):
    """The error of each call of REFUSED, the waits of each of COUNTED, and some numbers."""
    from tests.support.pretended_cuda.events import count

    errors, waits = {}, {}
    for name, (call, _) in {**REFUSED, **CANNOT}.items():
        try:
            call()
        except (RuntimeError, TypeError) as error:
            errors[name] = str(error)
    for name, (call, _) in COUNTED.items():
        with count() as counted:
            call()
        waits[name] = dict(counted.waits)
    return errors, waits


@pytest.fixture(scope="module")
def outcome():
    return tried()[0]


@pytest.mark.parametrize("name", [*REFUSED, *CANNOT])
def test_what_a_gpu_refuses_and_what_the_pretended_one_lacks_raises(name, outcome):
    assert {**REFUSED, **CANNOT}[name][1] in outcome[0].get(name, "nothing was raised")


@pytest.mark.parametrize("name", COUNTED)
def test_waits_are_counted_with_their_origin(name, outcome):
    found = Counter()
    for text, times in outcome[1][name].items():
        what, _, where = text.partition(" < ")
        assert where.startswith("tests/gpu/test_device.py:")
        found[what] += times
    assert found == COUNTED[name][1]


@on_ranks(1)
def compared(world):
    """Whether operators and their gradients are the CPU's bit for bit, and what they leave in memory."""
    torch.manual_seed(0)
    layers = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    rows, mask = torch.randn(3, 5, 16), torch.ones(5, 5, dtype=torch.bool).tril()
    query = torch.randn(2, 2, 5, 8, requires_grad=True)
    found = {}
    for device in (H, D):
        model = layers.to(device)
        model.zero_grad()
        model(rows.to(device)).square().sum().backward()
        q = query.detach().to(device).requires_grad_()
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask.to(device)).square().sum().backward()
        values, order = rows.to(device).sort(dim=-1)
        empty = torch.empty(0, device=device)
        torch.mul(rows.to(device), 3, out=empty)
        made = [*(p.grad for p in model.parameters()), q.grad, values, order, empty, rows.to(device)[1].T[2:]]
        assert all(each.device.type == device.type for each in made)
        found[device.type] = [each.cpu().clone() for each in made]
    used = [torch.cuda.memory_allocated()]
    held = x(1000)
    used.append(torch.cuda.memory_allocated())
    held = held[10:]
    used.append(torch.cuda.memory_allocated())
    del held
    used.append(torch.cuda.memory_allocated())
    return list(map(torch.equal, found["cpu"], found["cuda"])), [each - used[0] for each in used]


def test_results_are_the_cpus_and_memory_is_counted():
    ((equal, used),) = compared()
    assert len(equal) > 15
    assert all(equal)
    assert used == [0, 4096, 4096, 0]  # 4,000 bytes, in pieces of 512


def test_processes_that_build_at_once_build_once(tmp_path):
    code = "from tests.support.pretended_cuda import build; print(build())"
    env = {**environment(), "XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    names = {process.communicate()[0].strip() for process in started}
    assert len(names) == 1
    assert [str(file) for file in tmp_path.rglob("*.so")] == list(names)


def test_without_a_compiler_the_tests_are_skipped_but_in_ci_they_fail(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = pretended_cuda.unavailable.__wrapped__()
    assert "g++" in reason
    for required, outcome in (("", pytest.skip.Exception), ("1", pytest.fail.Exception)):
        monkeypatch.setenv("FMMETA_REQUIRE_CUDA", required)
        with pytest.raises(outcome, match="not on PATH"):
            pretended_cuda.skip(reason)
    assert "export FMMETA_REQUIRE_CUDA=1" in (ROOT / ".ci" / "run").read_text()
