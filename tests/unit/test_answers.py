"""Losses of answers behind shared prefixes, against plain transformers: complete rows, no cache."""

from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

import fmmeta
from fmmeta.adaptation.model import Answer, LoadedModel, load_model
from fmmeta.common.progress import Progress
from fmmeta.config.learners import CAUSAL_LM
from fmmeta.config.settings import Config
from fmmeta.evaluation.command import episodes_of
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.learners import shared_prefix
from fmmeta.learners.base import loss_of
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.load import fitted, max_positions
from fmmeta.learners.shared_prefix import AnswerRow, Answers
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.meta.algorithms.baselines import prompted
from fmmeta.metrics.language import LanguageMetrics, generate
from fmmeta.tasks.batching import IGNORE, Example, collate
from tests.support.helpers import refusal, write_rows
from tests.support.messages import check_message
from tests.support.models import save_family, write_pairs


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """From a family to the folder of a small model, made once."""
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda family: save_family(folder / family, family))


def model_of(folder: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def plain_losses(model: Any, rows: list[AnswerRow]) -> tuple[list[float], list[bool]]:
    """Summed losses, and whether all label tokens are the likeliest, row by row."""
    losses, right = [], []
    for row in rows:
        logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0][row.positions]
        targets = torch.tensor(row.targets)
        losses.append(float(F.cross_entropy(logits, targets, reduction="sum")))
        right.append(bool((logits.argmax(-1) == targets).all()))
    return losses, right


@torch.no_grad()
def plain_greedy(model: Any, prompt: list[int], tokens: int, end: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + tokens and (len(ids) == len(prompt) or ids[-1] != end):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def some_rows() -> list[AnswerRow]:
    """Four prompts behind 30 common tokens, each with three answers of different lengths."""
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 259, (count,), generator=draw).tolist()

    prefix, rows = tokens(30), []
    for query in range(4):
        prompt = prefix + tokens(8 + query)
        for length in (1, 4, 2):
            answer = tokens(length)
            rows.append(AnswerRow.of(prompt + answer, [IGNORE] * len(prompt) + answer))
    return rows[::2] + rows[1::2]


@contextmanager
def counted(model: Any):
    """Counts the tokens that enter the model, and the positions whose logits it computes."""
    seen = {"tokens": 0, "logits": 0}

    def of_tokens(_: Any, args: Any, __: Any) -> None:
        seen["tokens"] += args[0].numel()

    def of_logits(_: Any, args: Any, __: Any) -> None:
        seen["logits"] += args[0].shape[:-1].numel()

    hooks = [
        model.get_input_embeddings().register_forward_hook(of_tokens),
        model.get_output_embeddings().register_forward_hook(of_logits),
    ]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "mistral", "qwen2"])
@pytest.mark.parametrize("least_saved", [0, 60, 10**6])
def test_losses_behind_shared_prefixes_are_those_of_complete_rows(families, family, least_saved, monkeypatch):
    model, rows = model_of(families(family)), some_rows()
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", {"cpu": least_saved})
    found = Answers(CausalLearner(model))
    shares = found.can_share and least_saved < 10**6
    assert found.can_share == (family not in ("mistral", "qwen2"))  # these see a window of 8 tokens
    with counted(model) as seen:
        losses, right = found.losses(rows, 5)
    expected, exact = plain_losses(model, rows)
    assert losses.tolist() == pytest.approx(expected, abs=1e-5, rel=1e-6)
    assert right.tolist() == exact
    complete, labels = sum(len(row.ids) for row in rows), sum(len(row.targets) for row in rows)
    assert seen["logits"] == labels
    if not shares:
        assert seen["tokens"] >= complete
    else:
        assert seen["tokens"] < (0.25 if least_saved == 0 else 0.5) * complete


def test_a_limit_of_tokens_holds_for_the_padded_rows_of_each_pass(families, monkeypatch):
    model, rows = model_of(families("llama")), some_rows()
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", {"cpu": 10**6})
    found, sizes = Answers(CausalLearner(model)), list[int]()
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: sizes.append(args[0].numel())
    )
    losses, _ = found.losses(rows, 32, 100)
    hook.remove()
    assert max(sizes) <= 100
    assert len(sizes) == 6  # two rows of 39 to 45 tokens each
    assert losses.tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-5)


def test_rows_without_a_common_token_and_equal_rows_are_scored(families, monkeypatch):
    model = model_of(families("gpt2"))
    rows = [AnswerRow.of([5, 6, 7], [IGNORE, 6, 7]), AnswerRow.of([9, 6, 7, 8], [IGNORE] * 3 + [8])]
    rows += [rows[0], AnswerRow.of([5, 6, 7, 7], [IGNORE] * 3 + [7])]
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", {"cpu": 0})
    losses, _ = Answers(CausalLearner(model)).losses(rows, 32)
    assert losses.tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-5)


def test_a_loss_that_is_nan_is_no_right_answer(families, monkeypatch):
    model = model_of(families("llama"))
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", {"cpu": 0})
    losses, right = Answers(CausalLearner(model)).losses(some_rows(), 32)
    assert losses.isnan().all()
    assert not right.any()


def test_a_model_that_ignores_the_positions_behind_a_cache_computes_complete_rows(families, monkeypatch):
    """Its cache is of the usual kind, and its results with it are wrong."""
    model = model_of(families("gpt2"))
    forward = model.transformer.forward

    def from_zero(input_ids, **named):
        return forward(input_ids, **{**named, "position_ids": torch.arange(input_ids.shape[1])[None]})

    monkeypatch.setattr(model.transformer, "forward", from_zero)
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", {"cpu": 0})
    found, rows = Answers(CausalLearner(model)), some_rows()
    assert not found.can_share
    assert found.losses(rows, 5)[0].tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-5)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_prompts_end_below_the_length_at_which_the_rotary_table_changes(kind, monkeypatch):
    """Beyond it a shared prefix and the other rows of a pass would change the results of a row."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        **{"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.5, "pad_token_id": 0},
    }
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
        scaling = {"rope_scaling": {"type": kind, **factors}, "original_max_position_embeddings": 32}
        config: Any = Phi3Config(max_position_embeddings=128, **scaling, **sizes)
    else:
        scaling = {"rope_scaling": {"type": kind, "factor": 4.0}}
        config = LlamaConfig(max_position_embeddings=32, **scaling, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    pairs = [Example(row.ids[-8:], [IGNORE] * 4 + row.ids[-4:]) for row in some_rows()[:3]]
    query = [
        Example(row.ids[:length], [IGNORE] * (length - 2) + row.ids[length - 2 : length])
        for row, length in zip(some_rows(), (3, 9, 20, 30), strict=False)
    ]
    prompts = prompted(pairs, query, None, max_positions(config))
    rows = [AnswerRow.of(row.input_ids, row.token_labels) for row in prompts]
    assert max(len(row.ids) for row in rows) > 24
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", {"cpu": 0})
    losses, _ = Answers(CausalLearner(model)).losses(rows, 5)
    assert losses.tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-4)
    message = refusal(fitted, Config(max_length=64), config)
    check_message(message, "max_length=64", "32 positions", "use 32 or less")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_generated_answers_behind_a_shared_prefix_are_those_of_single_prompts(families, family, monkeypatch):
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", {"cpu": 1})
    settings = Config(model_name_or_path=str(families(family)), task_type="causal_lm", algorithm="none")
    single, model = load_model(settings, Progress(False)), model_of(families(family))
    prompts = [row.ids for row in some_rows()[:5]]
    with counted(single.worker.model.hf) as seen:
        texts = generate(single.worker, single.reader, prompts, 6, 3)
    for prompt, text in zip(prompts, texts, strict=True):
        answer = plain_greedy(model, prompt, 6, single.tokenizer.eos_token_id)
        assert text == single.tokenizer.decode(answer, skip_special_tokens=True).strip()
    assert (seen["tokens"] < sum(map(len, prompts))) == (family != "mistral")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_in_context_scores_and_metrics_are_those_of_the_concatenated_text(
    families, family, tmp_path, monkeypatch
):
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", {"cpu": 1})
    data = write_pairs(tmp_path / "pairs.jsonl")
    flags: dict[str, Any] = {
        "task_type": "causal_lm",
        "method": ["in_context"],
        "num_query": 3,
        "episodes": 2,
        "metrics": ["exact_match", "rank"],
        "max_new_tokens": 3,
        "max_length": 60,  # no row is cut, and two fit into the model's 128 positions
    }
    results = fmmeta.evaluate(str(families(family)), str(data), k_shot=1, **flags)
    model, tokenizer = model_of(families(family)), byte_tokenizer()
    settings = EvaluateConfig(
        model_name_or_path=str(families(family)), dataset=[str(data)], k_shot=[1], **flags
    )
    for score, draw in zip(
        results["cells"][0]["scores"], episodes_of(settings, 1, tokenizer).draws(), strict=True
    ):
        store = draw.store
        begin = [tokenizer.bos_token_id]
        support = [token for row, _ in draw.support for token in store.input_ids(row)[1:]]
        known = {store.text("target", row) for row, _ in (*draw.support, *draw.query)}
        total, count, exact, ranks = 0.0, 0, 0, []
        for row, _ in draw.query:
            ids, labels = list(store.input_ids(row)), list(store.labels(row))
            prompt = begin + support + ids[1 : labels.count(IGNORE)]
            right = store.text("target", row)

            def nats(answer: list[int], prompt: list[int] = prompt) -> float:
                one = AnswerRow.of(prompt + answer, [IGNORE] * len(prompt) + answer)
                return plain_losses(model, [one])[0][0]

            total, count = total + nats(ids[labels.count(IGNORE) :]), count + len(ids) - labels.count(IGNORE)
            answer = plain_greedy(model, prompt, 3, tokenizer.eos_token_id)
            exact += tokenizer.decode(answer, skip_special_tokens=True).strip() == right.strip()
            losses = {
                text: nats(
                    tokenizer(f" {text}", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
                )
                for text in known
            }
            ranks.append(1 + sum(loss < losses[right] for loss in losses.values()))
        assert score["loss"] == pytest.approx(total / count, abs=1e-5)
        assert score["metrics"] == {"exact_match": exact / 3, "rank": pytest.approx(sum(ranks) / 3)}


def test_every_right_answer_of_a_row_counts(tmp_path, llama, monkeypatch):
    """In generated answers, among options, and of a query set; the first one is learned."""
    options = ["first", "second", "third"]
    monkeypatch.setattr(LanguageMetrics, "greedy_answers", lambda self, draw: ["second"] * len(draw.query))
    monkeypatch.setattr(LanguageMetrics, "log_likelihoods", lambda *_: [-3.0, -1.0, -2.0] * 2)
    monkeypatch.setattr(LoadedModel, "answer", lambda _, inputs, *__: [Answer("q", "second") for _ in inputs])
    found = {}
    for right in (["first"], ["first", "second"]):
        rows = [{"task": "t", "input": f"q{i}", "output": right, "options": options} for i in range(6)]
        data = str(write_rows(tmp_path / f"{len(right)}.jsonl", rows))
        scores = fmmeta.evaluate(
            str(llama),
            data,
            task_type="causal_lm",
            method=["zero_shot"],
            k_shot=1,
            num_query=2,
            episodes=1,
            eval_split="train",
            metrics=["exact_match", "rouge_l", "rank", "options"],
        )["cells"][0]["scores"]
        adapted = fmmeta.adapt(str(llama), rows[:3], query=rows[3:], task_type="causal_lm", inner_steps=1)
        found[len(right)] = (*scores[0]["metrics"].values(), adapted.accuracy)
    assert found == {1: (0, 0, 3, 0, 0), 2: (1, 1, 1, 1, 1)}


def test_losses_of_large_vocabularies_are_exact_to_single_precision():
    """The loss of a micro-batch agrees with one in double precision: 50,000 logits per token."""
    logits = 4 * torch.randn(2, 6, 50_000, generator=torch.Generator().manual_seed(0))
    rows = [Example([1] * 6, [IGNORE] * 3 + [7, 8, 9]), Example([1] * 5, [IGNORE, 3, 4, 5, 6])]
    batch = collate(rows, 1.0, 0)
    no_model: Any = SimpleNamespace(loss=loss_of(CAUSAL_LM))
    losses = CausalLearner.losses(no_model, logits, batch).loss
    for line, row in enumerate(rows):
        one = AnswerRow.of(row.input_ids, row.labels)  # type: ignore[arg-type]
        exact = F.cross_entropy(
            logits[line, one.positions].double(), torch.tensor(one.targets), reduction="sum"
        )
        assert float(losses[line]) == pytest.approx(float(exact), rel=1e-6)
