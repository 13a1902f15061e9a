"""Each operation of each worker gives what the plain worker gives, which gives what plain PyTorch gives.

To add an engine: a line in KINDS (cases.py). To add an operation: a function in exercise.py.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_learner
from tests.support.models import save_bert, save_llama, write_classes, write_pairs
from tests.workers.cases import EXACT, KINDS, Results, engine, launch, relative_error
from tests.workers.exercise import LR, OPERATIONS, QUERY_ROWS, ROWS, examples, made_tensor

MODELS = ("llama", "bert", "decoder")  # tied embeddings; classifiers: with LayerNorms and biases, a decoder
TOLERANCE = {"fp32": 2e-6, "bf16": 5e-2}  # processors round sums of bf16 differently: up to 3.2e-2 was seen
SPLIT_SUMS = 0.1  # bf16: tensor ranks round their parts of a product before they are added; 7.2e-2 was seen


def cases(kind: str) -> list[tuple[str, str]]:
    """Models and precisions that a worker is tried with: BERT has no tensor-parallel plan."""
    models = ("llama", "decoder") if "tensor_parallel_size" in KINDS[kind][1] else ("llama", "bert")
    return [(model, dtype) for model in models for dtype in TOLERANCE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    save_llama(folder / "llama")
    save_bert(folder / "bert")
    save_llama(folder / "decoder")
    write_pairs(folder / "pairs.jsonl")
    write_classes(folder / "classes.jsonl", classes=2 * ROWS)
    return folder


def settings(folder: Path, model: str, dtype: str, stage: int | None = None, **extra: Any) -> dict[str, Any]:
    data = {
        "llama": {"dataset": [str(folder / "pairs.jsonl")], "task_type": "causal_lm"},
        "bert": {"dataset": [str(folder / "classes.jsonl")], "n_way": ROWS, "head_init": "learned"},
    }
    data["decoder"] = {**data["bert"], "pooling": "mean"}
    shared = {"model_name_or_path": str(folder / model), "bf16": dtype == "bf16", "k_shot": 1, "num_query": 1}
    return {**shared, **data[model], **engine(folder, stage), **extra}


@pytest.fixture(scope="module")
def plain(folder) -> dict[str, Results]:
    """The plain worker's results, by model, precision and rank of LoRA."""
    listed = {
        f"{model}-{dtype}-{rank}": settings(folder, model, dtype, **({"lora_r": rank} if rank else {}))
        for model in MODELS
        for dtype in TOLERANCE
        for rank in (0, 2)
    }
    return launch(1, listed)


@pytest.fixture(scope="module")
def results(folder) -> Callable[[str], dict[str, Results]]:
    """Results of a kind of worker by model and precision; each kind is launched once."""

    @cache
    def of(kind: str) -> dict[str, Results]:
        ranks, extra = KINDS[kind]
        listed = {f"{m}-{d}": settings(folder, m, d, **extra) for m, d in cases(kind)}
        return launch(ranks, listed)

    return of


def tolerance(kind: str, dtype: str) -> float:
    return SPLIT_SUMS if dtype == "bf16" and "tensor" in kind else TOLERANCE[dtype]


def combinations() -> list[tuple[str, str, str, str]]:
    """Kind, model, precision, operation.

    No caller needs the logits of a pipeline; second derivatives need ranks that hold the whole model.
    """
    no_complete_model = ("tensor", "tensor with LoRA", "ZeRO 3", "ZeRO 3 with LoRA")
    without = dict.fromkeys(no_complete_model, ("gradient vjp",))
    without |= dict.fromkeys(("pipeline", "pipeline of tensor ranks"), ("logits", "gradient vjp"))
    return [
        (kind, model, dtype, operation)
        for kind in KINDS
        for model, dtype in cases(kind)
        for operation, (_, classification_only) in OPERATIONS.items()
        if not (classification_only and model == "llama") and operation not in without.get(kind, ())
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "model", "dtype", "operation"), combinations())
def test_an_operation_equals_that_of_the_plain_worker(plain, results, kind, model, dtype, operation):
    wanted = plain[f"{model}-{dtype}-{KINDS[kind][1].get('lora_r', 0)}"]
    error = relative_error(results(kind)[f"{model}-{dtype}"], wanted, operation)
    assert error <= (1e-6 if operation in EXACT else tolerance(kind, dtype))


class PlainPyTorch:
    """The same model and rows with autograd, in fp64, without a line of fmmeta/parallel."""

    def __init__(self, folder: Path, model: str, rank: int) -> None:
        config = Config(**settings(folder, model, "fp32", lora_r=rank))
        self.causal = config.task_type == "causal_lm"
        self.learner = load_learner(config, describe(config)).double()
        self.names = [name for name, param in self.learner.named_parameters() if param.requires_grad]
        self.rows = {ROWS: examples(ROWS, self.causal, 0), QUERY_ROWS: examples(QUERY_ROWS, self.causal, 1)}

    def call(self, count: int) -> tuple[Any, Tensor]:
        """Outputs for a set of rows in their order, padded to the longest, and their labels."""
        rows = self.rows[count]
        length = max(len(row.input_ids) for row in rows)
        ids, labels = torch.zeros(count, length, dtype=torch.long), torch.full((count, length), -100)
        mask = torch.zeros(count, length, dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, : len(row.input_ids)] = torch.tensor(row.input_ids)
            mask[number, : len(row.input_ids)] = 1
            if self.causal:
                labels[number, : len(row.labels)] = torch.tensor(row.labels)
        wanted = labels if self.causal else torch.arange(count)
        return self.learner(input_ids=ids, attention_mask=mask), wanted

    def loss(self, count: int) -> Tensor:
        outputs, labels = self.call(count)
        if self.causal:
            return F.cross_entropy(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return F.cross_entropy(outputs[1], labels)

    def gradient_vjp(
        self, count: int, w: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            gradient = self.gradient(self.loss(count), create_graph=True)
            along = w({name: value.detach() for name, value in gradient.items()})
            return self.gradient(torch.stack([(gradient[name] * along[name]).sum() for name in along]).sum())

    def gradient(self, value: Tensor, create_graph: bool = False) -> dict[str, Tensor]:
        params = [self.learner.get_parameter(name) for name in self.names]
        found = torch.autograd.grad(value, params, allow_unused=True, create_graph=create_graph)
        return {
            name: torch.zeros_like(param) if grad is None else grad
            for name, param, grad in zip(self.names, params, found, strict=True)
        }

    @torch.no_grad()
    def step(self) -> None:
        with torch.enable_grad():
            gradient = self.gradient(self.loss(ROWS))
        for name, grad in gradient.items():
            self.learner.get_parameter(name).sub_(LR * grad)

    def theta(self) -> dict[str, Tensor]:
        return {name: self.learner.get_parameter(name).detach().clone() for name in self.names}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("model", MODELS)
def test_the_plain_worker_equals_plain_pytorch(folder, plain, model, rank):
    found, torch_model = plain[f"{model}-fp32-{rank}"], PlainPyTorch(folder, model, rank)

    def check(operation: str, wanted: dict[str, Tensor]) -> None:
        off = sum(
            float((found[f"{operation}/{name}"] - value).square().sum()) for name, value in wanted.items()
        )
        assert (off / sum(float(value.square().sum()) for value in wanted.values())) ** 0.5 < 2e-6, operation

    begin = torch_model.theta()
    made = {name: made_tensor("sum" + name, tuple(value.shape)) for name, value in begin.items()}
    check("gradient", torch_model.gradient(torch_model.loss(QUERY_ROWS)))
    assert float(found["forward/stats"][0]) == pytest.approx(torch_model.loss(QUERY_ROWS).item(), rel=1e-5)
    w = {name: made_tensor("w" + name, tuple(value.shape)) for name, value in begin.items()}
    of_query = torch_model.gradient_vjp(QUERY_ROWS, lambda g: w)
    of_support = torch_model.gradient_vjp(ROWS, lambda g: {name: w[name] + g[name] for name in w})
    check("gradient vjp", {name: made[name] + of_query[name] + of_support[name] for name in made})
    check("nonfinite gradient", made)
    check("nonfinite step, theta", begin)
    if model == "bert":
        (features, logits), _ = torch_model.call(QUERY_ROWS)
        check("features", {"rows": features})
        check("logits", {"rows": logits})
        (other, _), _ = torch_model.call(ROWS)
        check("means of classes", {"rows": other})  # of one row each
        pulled = (features * made_tensor("of query rows", (ROWS, features.shape[1]))[:QUERY_ROWS]).sum()
        pulled = pulled + (other * made_tensor("of support rows", tuple(other.shape))).sum()
        gradient = torch_model.gradient(pulled)
        check("vjp", {name: made[name] + gradient[name] for name in made})
    torch_model.step()
    phi = torch_model.theta()
    check("displacement", {name: made[name] + begin[name] - phi[name] for name in made})
    gradient = torch_model.gradient(torch_model.loss(QUERY_ROWS))
    check("weighted gradient that restores", {name: made[name] + 0.25 * gradient[name] for name in made})
    check("weighted gradient that restores, theta", begin)
    torch_model.step()
    check("two steps, theta", torch_model.theta())
