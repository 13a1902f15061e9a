"""Losses of answers behind shared prefixes, and generated answers, against plain transformers: complete rows,
no cache.
"""

import json
import shutil
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import fmmeta
from fmmeta.adaptation.model import Answer, LoadedModel, load_model
from fmmeta.common.progress import Progress
from fmmeta.common.text import rouge_l
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
from tests.support.helpers import CASES, needs_cases, refusal, write_rows
from tests.support.launch import python, train_flags
from tests.support.messages import check_message
from tests.support.models import save_family, tiny, write_pairs


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """From a family to the folder of a small model, made once."""
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda family: save_family(folder / family, family))


def model_of(folder: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def plain_losses(model: Any, rows: list[AnswerRow]) -> tuple[list[float], list[bool]]:
    """Summed losses, and whether all label tokens are the likeliest, row by row."""
    losses, right = [], []
    for row in rows:
        logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0][row.positions].detach()
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
    """Counts the tokens that enter the model in each pass, and the positions whose logits it computes."""
    seen = SimpleNamespace(tokens=[], logits=0)

    def of_logits(_: Any, args: Any, __: Any) -> None:
        seen.logits += args[0].shape[:-1].numel()

    hooks = [
        model.get_input_embeddings().register_forward_pre_hook(
            lambda _, args: seen.tokens.append(args[0].numel())
        ),
        model.get_output_embeddings().register_forward_hook(of_logits),
    ]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.fixture
def least_saved(monkeypatch):
    """Sets the number of tokens from which on a prefix is shared; at first every prefix is."""

    def choose(tokens: int) -> None:
        monkeypatch.setattr(shared_prefix, "LEAST_SAVED", {"cpu": tokens})

    choose(0)
    return choose


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "mistral", "qwen2"])
@pytest.mark.parametrize("least", [0, 60, 10**6])
def test_losses_behind_shared_prefixes_are_those_of_complete_rows(families, family, least, least_saved):
    model, rows = model_of(families(family)), some_rows()
    least_saved(least)
    found = Answers(CausalLearner(model))
    assert found.can_share == (family not in ("mistral", "qwen2"))  # these see a window of 8 tokens
    with counted(model) as seen:
        losses, right = found.losses(rows, 5)
    expected, exact = plain_losses(model, rows)
    assert losses.tolist() == pytest.approx(expected, abs=1e-5, rel=1e-6)
    assert right.tolist() == exact
    assert seen.logits == sum(len(row.targets) for row in rows)
    share = sum(seen.tokens) / sum(len(row.ids) for row in rows)
    if found.can_share and least < 10**6:
        assert share < (0.25 if least == 0 else 0.5)
    else:
        assert share >= 1


def test_a_limit_of_tokens_holds_for_the_padded_rows_of_each_pass(families, least_saved):
    model, rows = model_of(families("llama")), some_rows()
    least_saved(10**6)
    with counted(model) as seen:
        losses, _ = Answers(CausalLearner(model)).losses(rows, 32, 100)
    assert max(seen.tokens) <= 100
    assert len(seen.tokens) == 6  # two rows of 39 to 45 tokens each
    assert losses.tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-5)


def test_rows_without_a_common_token_and_equal_rows_are_scored(families, least_saved):
    model = model_of(families("gpt2"))
    rows = [AnswerRow.of([5, 6, 7], [IGNORE, 6, 7]), AnswerRow.of([9, 6, 7, 8], [IGNORE] * 3 + [8])]
    rows += [rows[0], AnswerRow.of([5, 6, 7, 7], [IGNORE] * 3 + [7])]
    losses, _ = Answers(CausalLearner(model)).losses(rows, 32)
    assert losses.tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-5)


def test_a_loss_that_is_nan_is_no_right_answer(families, least_saved):
    model = model_of(families("llama"))
    model.get_output_embeddings().weight.data.fill_(torch.nan)
    losses, right = Answers(CausalLearner(model)).losses(some_rows(), 32)
    assert losses.isnan().all()
    assert not right.any()


def test_a_model_that_ignores_the_positions_behind_a_cache_computes_complete_rows(
    families, monkeypatch, least_saved
):
    """Its cache is of the usual kind, and its results with it are wrong."""
    model = model_of(families("gpt2"))
    forward = model.transformer.forward

    def from_zero(input_ids, **named):
        return forward(input_ids, **{**named, "position_ids": torch.arange(input_ids.shape[1])[None]})

    monkeypatch.setattr(model.transformer, "forward", from_zero)
    found, rows = Answers(CausalLearner(model)), some_rows()
    assert not found.can_share
    assert found.losses(rows, 5)[0].tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-5)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_prompts_end_below_the_length_at_which_the_rotary_table_changes(kind, least_saved):
    """Beyond it a shared prefix and the other rows of a pass would change the results of a row."""
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
        sizes = {"rope_scaling": {"type": kind, **factors}, "original_max_position_embeddings": 32}
        model = tiny("phi3", num_key_value_heads=4, initializer_range=0.5, **sizes).eval()
    else:
        sizes = {"rope_scaling": {"type": kind, "factor": 4.0}, "max_position_embeddings": 32}
        model = tiny("llama", num_key_value_heads=4, initializer_range=0.5, **sizes).eval()
    pairs = [Example(row.ids[-8:], [IGNORE] * 4 + row.ids[-4:]) for row in some_rows()[:3]]
    query = [
        Example(row.ids[:length], [IGNORE] * (length - 2) + row.ids[length - 2 : length])
        for row, length in zip(some_rows(), (3, 9, 20, 30), strict=False)
    ]
    prompts = prompted(pairs, query, None, max_positions(model.config))
    rows = [AnswerRow.of(row.input_ids, row.token_labels) for row in prompts]
    assert max(len(row.ids) for row in rows) > 24
    losses, _ = Answers(CausalLearner(model)).losses(rows, 5)
    assert losses.tolist() == pytest.approx(plain_losses(model, rows)[0], abs=1e-4)
    message = refusal(fitted, Config(max_length=64), model.config)
    check_message(message, "max_length=64", "32 positions", "use 32 or less")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])  # all of 128 positions
def test_generated_answers_are_the_greedy_ones_of_single_prompts(families, family, least_saved):
    """Behind a shared prefix, and of prompts of unequal length up to the last position."""
    least_saved(1)
    settings = Config(model_name_or_path=str(families(family)), task_type="causal_lm", algorithm="none")
    single, model = load_model(settings, Progress(False)), model_of(families(family))
    answer, hf = partial(generate, single.worker, single.reader), single.worker.model.hf
    shared, text = [row.ids for row in some_rows()[:5]], single.tokenizer("river " * 30)["input_ids"]
    long = [text[:length] for length in (125, 7, 127, 120, 1)]
    with counted(hf) as seen:
        found = answer(shared, 6, 3)
    assert (sum(seen.tokens) < sum(map(len, shared))) == (family != "mistral")
    found += answer(long, 6, 4)
    for prompt, text in zip([*shared, *long], found, strict=True):
        ids = plain_greedy(model, prompt, min(6, 128 - len(prompt)), single.tokenizer.eos_token_id)
        assert text == single.tokenizer.decode(ids, skip_special_tokens=True).strip()
    hf.generation_config.repetition_penalty = 5.0
    assert answer(long, 6, 4) == found[5:]
    assert hf.generation_config.repetition_penalty == 5.0
    message = refusal(answer, [[5] * 128], 6, 4)
    check_message(message, "max_new_tokens=6", "128 tokens", "128 positions", "lower --max_length")
    assert answer([], 6, 4) == []


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "finetune"), *((family, "in_context") for family in ("llama", "gpt2", "mistral"))],
)
def test_scores_and_metrics_are_those_of_plain_text(families, family, method, tmp_path, least_saved):
    """After a gradient step on the support set, and behind it in the prompt."""
    least_saved(1)
    folder, data = str(families(family)), write_pairs(tmp_path / "pairs.jsonl")
    shots, loop = (2, {"inner_lr": 0.1, "inner_steps": 1}) if method == "finetune" else (1, {})
    flags: dict[str, Any] = {
        "task_type": "causal_lm",
        "method": [method],
        "num_query": 3,
        "episodes": 2,
        "metrics": ["exact_match", "rank", "options", "rouge_l"],
        "max_new_tokens": 3,
        "max_length": 60,  # no row is cut, and two fit into the model's 128 positions
    }
    results = fmmeta.evaluate(folder, data, k_shot=shots, **flags, **loop)
    settings = EvaluateConfig(model_name_or_path=folder, dataset=[str(data)], k_shot=[shots], **flags)
    tokenizer = byte_tokenizer()
    tokens = partial(tokenizer, add_special_tokens=False)
    draws = episodes_of(settings, shots, tokenizer).draws()
    for score, draw in zip(results["cells"][0]["scores"], draws, strict=True):
        model, text = model_of(folder), draw.store.text
        prefix = [tokenizer.bos_token_id]

        def prompt_of(row, text=text, prefix=prefix):
            return [*prefix, *tokens(f"Input: {text('input', row)}\nOutput:").input_ids]

        def answer_ids(answer):
            return [*tokens(f" {answer}").input_ids, tokenizer.eos_token_id]

        def nats(row, answer, model=model, prompt_of=prompt_of):
            prompt, ids = prompt_of(row), answer_ids(answer)
            logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            return F.cross_entropy(logits, torch.tensor(ids), reduction="sum")

        def mean_loss(rows, text=text, nats=nats):
            answers = [text("target", row) for row, _ in rows]
            total = sum(nats(row, answer) for (row, _), answer in zip(rows, answers, strict=True))
            return total / sum(len(answer_ids(answer)) for answer in answers)

        if method == "finetune":
            params = [*model.parameters()]
            for param, grad in zip(params, torch.autograd.grad(mean_loss(draw.support), params), strict=True):
                param.data -= 0.1 * grad
        else:
            for row, _ in draw.support:
                prefix[:] = [*prompt_of(row), *answer_ids(text("target", row))]
        wanted = dict.fromkeys(flags["metrics"], 0.0)
        for row, _ in draw.query:
            right = text("target", row)
            generated = plain_greedy(model, prompt_of(row), 3, tokenizer.eos_token_id)
            answer = tokenizer.decode(generated, skip_special_tokens=True).strip()
            known = {text("target", one) for one, _ in (*draw.support, *draw.query)}
            losses = {one: nats(row, one).item() for one in known}
            wanted["exact_match"] += (answer == right.strip()) / 3
            wanted["rouge_l"] += rouge_l(answer, right) / 3
            wanted["rank"] += (1 + sum(loss < losses[right] for loss in losses.values())) / 3
            wanted["options"] += (losses[right] == min(losses.values())) / 3
        assert score["loss"] == pytest.approx(mean_loss(draw.query).item(), rel=1e-4)
        assert score["metrics"] == pytest.approx(wanted)
    options = [score["metrics"]["options"] for score in results["cells"][0]["scores"]]
    assert results["options"]["mean"] == pytest.approx(sum(options) / 2)


def test_every_right_answer_of_a_row_counts(tmp_path, llama, monkeypatch):
    """In generated answers, among options, and of a query set; the first one is learned."""
    options, metrics = ["first", "second", "third"], ["exact_match", "rouge_l", "rank", "options"]
    monkeypatch.setattr(LanguageMetrics, "greedy_answers", lambda self, draw: ["second"] * len(draw.query))
    monkeypatch.setattr(LanguageMetrics, "log_likelihoods", lambda *_: [-3.0, -1.0, -2.0] * 2)
    monkeypatch.setattr(LoadedModel, "answer", lambda _, inputs, *__: [Answer("q", "second") for _ in inputs])
    few = {"k_shot": 1, "num_query": 2, "episodes": 1, "eval_split": "train", "method": "zero_shot"}
    for right, wanted in ((["first"], (0, 0, 3, 0, 0)), (["first", "second"], (1, 1, 1, 1, 1))):
        rows = [{"task": "t", "input": f"q{i}", "output": right, "options": options} for i in range(6)]
        data = write_rows(tmp_path / f"{len(right)}.jsonl", rows)
        found = fmmeta.evaluate(llama, data, task_type="causal_lm", metrics=metrics, **few)
        adapted = fmmeta.adapt(llama, rows[:3], query=rows[3:], task_type="causal_lm", inner_steps=1)
        assert (*(found[name]["mean"] for name in metrics), adapted.accuracy) == wanted


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


CASE_FLAGS = [
    *("--task_type", "causal_lm", "--max_length", "48", "--max_new_tokens", "12", "--no_early_stopping"),
    *("--inner_optimizer", "adamw", "--inner_lr", "0.005", "--inner_steps", "150"),
]


@pytest.fixture(scope="module")
def case_models(tmp_path_factory) -> Path:
    """M and M-control of the case end-of-turn (../shared/cases)."""
    folder = tmp_path_factory.mktemp("cases")
    made = python([str(CASES / "end-of-turn" / "make.py"), str(folder / "M")], folder)
    assert made.returncode == 0, made.stderr
    return folder


def adapt_as_in_the_case(model: Path, folder: Path, template: str, *flags: str) -> Path:
    """What the case's run.sh does; returns the folder of the adapted model."""
    pairs, out = str(CASES / "answers.jsonl"), folder / "adapted"
    given = ["--model_name_or_path", str(model), "--support", pairs, "--query", pairs]
    named = ["--prompt_template", template, "--output_dir", str(out)]
    done = python(["-m", "fmmeta", "adapt", *given, *CASE_FLAGS, *named, *flags], folder)
    assert done.returncode == 0, done.stderr
    assert "100.0 % of 5" in done.stdout + done.stderr
    return out


@needs_cases
@pytest.mark.parametrize("name", ["M", "M-control"])
@pytest.mark.parametrize("template", ["chat", "plain"])
def test_answers_end_where_the_template_or_the_tokenizer_ends_them(name, template, case_models, tmp_path):
    """The same weights, and another end of the turn than the tokenizer's end of text."""
    out = adapt_as_in_the_case(case_models / name, tmp_path, template)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1, 5]
    if template == "chat":
        model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
        asked = [{"role": "user", "content": "pin"}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        found = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
        assert tokenizer.decode(found) == "code<eot>"


@needs_cases
def test_exports_keep_the_generation_config(case_models, tmp_path):
    """Settings that transformers loads and refuses to save."""
    model = shutil.copytree(case_models / "M", tmp_path / "M")
    file = model / "generation_config.json"
    settings = {"eos_token_id": 1, "temperature": 0.6, "do_sample": False, "repetition_penalty": 5.0}
    settings |= {"stop_strings": ["o"], "min_length": 30}
    stored = json.loads(file.read_text()) | settings
    file.write_text(json.dumps(stored))
    out = adapt_as_in_the_case(model, tmp_path, "chat", "--lora_r", "8", "--lora_merge")
    run = {"model_name_or_path": model, "dataset": CASES / "pairs.jsonl", "task_type": "causal_lm"}
    run |= {"prompt_template": "chat", "k_shot": 2, "num_query": 2, "outer_steps": 1, "max_length": 64}
    words = train_flags(tmp_path / "run", **run)
    done = python(["-m", "fmmeta", "train", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    stored.pop("_from_model_config", None)
    for folder in (out, out / "merged", tmp_path / "run" / "model"):
        found = json.loads((folder / "generation_config.json").read_text())
        assert found == stored | {"eos_token_id": [1, 5]}
