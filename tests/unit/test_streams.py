"""Documents as tasks: their rows, and meta-gradients of losses before each step."""

import copy
import csv
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import fmmeta
from fmmeta import MetaTrainer, Tasks
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.evaluation.streams import bits_and_bytes, stream_score
from fmmeta.learners.base import Learner
from fmmeta.learners.load import describe, load_tokenizer
from fmmeta.learners.lora import inject
from fmmeta.learners.stream import StreamLearner
from fmmeta.meta.inner_loop import InnerResult
from fmmeta.meta.reference import set_loss
from fmmeta.metrics.scores import mean_ci95
from fmmeta.parallel.costs import passes
from fmmeta.parallel.workers.base import PassStats
from fmmeta.reliability.checks import SupportLosses
from fmmeta.tasks.batching import IGNORE, Batcher, Example
from fmmeta.tasks.data.encode import plain_tokens
from fmmeta.tasks.schedule.meta_batches import Schedule, Task
from fmmeta.tasks.sources.base import EpisodeRows
from fmmeta.tasks.sources.load import load_sources
from fmmeta.tasks.sources.stream import Stretch, chunked
from fmmeta.tasks.suites import tables
from harness.fork_server import ROOT, environment
from tests.support.learners import (
    RuleOn,
    by_name,
    cosine_and_error,
    llama,
    oracle_gradient,
    setup_of,
    task_gradient,
    worker_of,
)
from tests.support.messages import check_message, check_text, exit_code, refusal

CHUNKS = 4
CLIP = 4.0  # a norm that the gradients of some steps exceed


def stream_learner(adapters: bool) -> Learner:
    learner = StreamLearner(llama().hf)
    if adapters:
        inject(learner, config_of(lora_r=2, lora_target_modules=["all-linear"]))
        draw = torch.Generator().manual_seed(3)
        for name, param in learner.named_parameters():
            if "lora_B" in name:
                param.data.copy_(0.3 * torch.randn(param.shape, generator=draw))
    return learner


def config_of(**settings):
    given = {"algorithm": "ttt", "chunk": 5, "context": 3, "chunks": CHUNKS, "inner_lr": 0.1, **settings}
    return Config(task_type="stream", **{"dataset": ["ciphers"], **given})


def episode() -> EpisodeRows:
    """Chunks of 5 tokens with 3 before them."""
    ids = torch.randint(3, 40, (3 + 5 * CHUNKS,), generator=torch.Generator().manual_seed(7)).tolist()
    rows = [Example(ids[b : b + 8], [IGNORE] * 3 + ids[b + 3 : b + 8]) for b in range(0, 5 * CHUNKS, 5)]
    return EpisodeRows(Task(0, "t", "s", 1, (0,)), rows, rows, samples=tuple([row] for row in rows))


def found_by(learner, config):
    """What the rule adds, and the worker."""
    worker = worker_of(learner, config)
    batches = Batcher(0).episode(episode())
    return task_gradient(
        RuleOn(find(config.algorithm).rule, setup_of(worker, config)), worker, batches
    ), worker


@pytest.fixture
def fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "all weights"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"inner_lr_learned": "layer"},
        {"inner_lr_learned": "element"},
        {"truncate_steps": 2},
        {"truncate_steps": 2, "inner_lr_learned": "layer"},
        {"first_order_steps": 1},
        {"first_order_steps": 1, "inner_lr_learned": "layer"},
        {"inner_parameters": ["except", "*.mlp.*"]},
        {"inner_parameters": ["except", "*.mlp.*"], "inner_lr_learned": "layer"},
        {"inner_parameters": ["except", "*.mlp.*"], "inner_lr_learned": "element"},
        {"inner_parameters": ["adapters"], "outer_parameters": ["body"]},
        {"inner_parameters": ["adapters"], "outer_parameters": ["body"], "inner_lr_learned": "layer"},
        {"inner_max_grad_norm": CLIP},
        {"inner_max_grad_norm": CLIP, "inner_parameters": ["except", "*.mlp.*"]},
        {"inner_max_grad_norm": CLIP, "truncate_steps": 2},
        {"inner_max_grad_norm": CLIP, "inner_lr_learned": "layer"},
        {"inner_max_grad_norm": CLIP, "first_order_steps": 1},
    ],
    ids=str,
)
def test_in_fp64_the_recursion_is_autograd_through_the_whole_stream(fp64, settings, lora):
    if not lora and "adapters" in settings.get("inner_parameters", ()):
        settings = {"inner_parameters": ["norms"], "outer_parameters": ["*.self_attn.*"]}
    learner = stream_learner(lora).double()
    config = config_of(**settings, second_order="autograd", **({"lora_r": 2} if lora else {}))
    found, worker = found_by(learner, config)
    assert found.finite
    wanted, of_rates = oracle_gradient(learner, config, episode())
    mine = by_name(worker, found.gradient)
    flat = [torch.cat([of[name].reshape(-1) for name in wanted]) for of in (mine, wanted)]
    assert cosine_and_error(*flat)[1] < 1e-9
    if config.inner_lr_learned == "layer":
        by_rate = {id(rate): rate for rate in of_rates.values()}  # each once
        torch.testing.assert_close(found.extra["rates"].sum(), torch.stack([*by_rate.values()]).sum())
    if config.inner_lr_learned == "element":
        rates = by_name(worker, found.extra["rates"])
        flat = [torch.cat([of[name].reshape(-1) for name in of_rates]) for of in (rates, of_rates)]
        assert cosine_and_error(*flat)[1] < 1e-9


@pytest.mark.parametrize("clip", [0.0, CLIP])
def test_differences_of_gradients_give_the_same(clip):
    learner = stream_learner(False)
    one, other = (
        found_by(learner, config_of(second_order=by, inner_max_grad_norm=clip))[0].gradient
        for by in ("autograd", "differences")
    )
    assert cosine_and_error(other.double(), one.double())[1] < 1e-3


def test_a_clipped_step_moves_as_far_as_its_rate_says():
    """The norm is that of what the step moves."""
    learner = stream_learner(False)
    for moved in ([], ["except", "*.mlp.*"]):
        config = config_of(chunks=1, inner_max_grad_norm=0.5, inner_parameters=moved)
        worker, rows = worker_of(learner, config), episode()
        theta = worker.read()
        setup_of(worker, config).inner.adapt(worker, theta, Batcher(0).episode(rows).support)
        assert float((worker.read() - theta).norm()) == pytest.approx(0.1 * 0.5, rel=1e-5)


def test_first_order_is_reptile_with_an_ordered_support_set():
    learner = stream_learner(False)
    config = config_of(first_order_steps=1)
    of_reptile = config.but(algorithm="reptile", first_order_steps=0)
    first, reptile = (found_by(learner, each)[0].gradient for each in (config, of_reptile))
    assert cosine_and_error(first.double() * config.inner_lr * CHUNKS, reptile.double())[1] < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"first_order_steps": 1, "outer_steps": 1},
        {"second_order": "autograd"},
        {"second_order": "autograd", "truncate_steps": 2},
        {"second_order": "differences"},
        {"second_order": "differences", "truncate_steps": 2},
        {"algorithm": "joint"},
    ],
    ids=str,
)
def test_both_sets_of_a_stretch_take_the_passes_of_one(settings, monkeypatch):
    config = config_of(**settings)
    worker, counted = worker_of(stream_learner(False), config), []
    for name in ("_call", "gradient_vjp"):
        call = getattr(worker, name)
        monkeypatch.setattr(worker, name, lambda *a, call=call, **k: counted.append(1) or call(*a, **k))
    rule = RuleOn(find(config.algorithm).rule, setup_of(worker, config))
    task_gradient(rule, worker, Batcher(0, micro_batch_size=1).episode(episode()))
    cost = passes(config, twice=config.second_order == "autograd")
    assert len(counted) == cost.support + cost.query + cost.second_order
    assert (cost.query, cost.query_forwards) == (CHUNKS if config.algorithm == "joint" else 0, 0)


def test_evaluation_scores_each_chunk_before_its_step():
    learner, config = stream_learner(False), config_of()
    worker, rows = worker_of(learner, config), episode()
    setup = setup_of(worker, config)
    scored = setup.evaluation_method().score(worker, worker.read(), Batcher(0).episode(rows))
    model = copy.deepcopy(learner)
    weights = {name: param.detach() for name, param in model.named_parameters()}
    frozen = [float(set_loss(model, weights, [row], False)) for row in rows.support]
    online = []
    for row in rows.support:
        leaves = {name: one.requires_grad_() for name, one in weights.items()}
        loss = set_loss(model, leaves, [row], False)
        online.append(float(loss.detach()))
        gradient = torch.autograd.grad(loss, [*leaves.values()])
        steps = zip(leaves.items(), gradient, strict=True)
        weights = {name: (one - config.inner_lr * g).detach() for (name, one), g in steps}
    assert scored[0].loss == pytest.approx(np.mean(frozen), rel=1e-5)
    assert scored[1].loss == pytest.approx(np.mean(online), rel=1e-5)
    assert abs(np.mean(online) - np.mean(frozen)) > 1e-3
    assert scored[1].numbers[2] == 5 * CHUNKS  # each token is an answer
    more = setup.inner.variant(steps=2 * CHUNKS)
    assert (more.steps, setup.inner.variant(steps=0).steps) == (CHUNKS, 0)


def sources_of(dataset, notices=None, **settings):
    config = replace(config_of(**settings), dataset=[str(dataset)])
    notice = (lambda text: None) if notices is None else (lambda text: notices.append(str(text)))
    return load_sources(config, load_tokenizer(config, describe(config), notice), notice)


def long_text(seed: int, words: int = 80) -> str:
    rng = np.random.default_rng(seed)
    lines = ["".join(map(chr, rng.integers(97, 123, 30))) for _ in range(words // 8)]
    return "\n".join(lines)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_a_chunk_is_a_row_with_the_tokens_before_it(folder):
    text = long_text(0)
    (folder / "rows.jsonl").write_text(json.dumps({"text": text}))
    source = sources_of(folder / "rows.jsonl").train
    begins = set()
    for task in Schedule(source.items, 20, 0, 0).meta_batch(0):
        rows = source.draw(task).episode()
        again = source.draw(task).episode()
        assert [row.input_ids for row in again.support] == [row.input_ids for row in rows.support]
        assert rows.query == rows.support == [one for (one,) in rows.samples]
        chunks = [[token for token in row.labels if token != IGNORE] for row in rows.support]
        for row, before in zip(rows.support[1:], chunks, strict=False):
            assert (row.labels[:3], row.input_ids[3:]) == ([IGNORE] * 3, row.labels[3:])
            assert row.input_ids[:3] == before[-3:]
        whole = source.store.input_ids(0)
        stretch = [token for chunk in chunks for token in chunk]
        begin = next(b for b in range(len(whole)) if whole[b : b + len(stretch)] == stretch)
        assert len(stretch) == 5 * CHUNKS - (begin == 1)  # nothing precedes the first token of a document
        begins.add(begin)
    assert len(begins) > 10


def test_files_rows_and_parts_are_documents(folder):
    (folder / "de").mkdir()
    for number in range(4):
        (folder / ("de" if number % 2 else "") / f"{number}.md").write_text(long_text(number))
    (folder / "short.txt").write_text("too short")
    (folder / "twin.txt").write_text(long_text(3) + "\nand one more line, longer than twenty letters")
    notices = list[str]()
    items = [item for one in sources_of(folder, notices).of_split.values() for item in one.items]
    strata = {item.name: item.stratum for item in items}
    assert strata == {"0.md": "all", "2.md": "all", "de/1.md": "de", "de/3.md": "de"}
    text = "\n".join(notices)
    assert "1 document whose lines are mostly in earlier ones" in text
    assert "1 of 5 documents have fewer than chunks * chunk = 20 tokens" in text
    rows = [{"text": long_text(number, 16), "document": f"d{number // 2}"} for number in range(8)]
    (folder / "parts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sources = sources_of(folder / "parts.jsonl")
    names = [name for one in sources.of_split.values() for name in one.items.names]
    assert sorted(names) == ["d0", "d1", "d2", "d3"]
    assert {length for one in sources.of_split.values() for length in one.lengths} == {2 * 61}


def test_rows_have_a_document_a_name_or_a_hash(folder):
    """Parts may be equal; whole documents may not, and an empty one is none."""
    twice = [long_text(number) for number in (0, 1, 2, 2)]
    rows = [{"text": text, "document": None} for text in twice]
    rows += [{"text": "again and again", "document": "parts", "task": "code"}] * 3
    rows += [{"text": "", "document": None}, {"text": "word " * 9, "document": None}]
    rows += [{"text": "word " * 9, "document": None}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    notices = list[str]()
    sources = sources_of(folder / "rows.jsonl", notices)
    lengths = {
        name: length
        for one in sources.of_split.values()
        for name, length in zip(one.items.names, one.lengths, strict=True)
    }
    assert lengths["parts"] == 3 * len("again and again")
    assert len(lengths) == 5
    text = "\n".join(notices)
    check_text(text, "2 documents whose lines are mostly in earlier ones", "1 document without a text")
    assert "are not read" not in text


def test_a_document_in_two_strata_is_refused(folder):
    rows = [{"text": long_text(n, 16), "document": f"d{n // 2}", "stratum": f"s{n % 2}"} for n in range(4)]
    (folder / "parts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = refusal(sources_of, folder / "parts.jsonl")
    check_message(text, "2 documents (d0, d1) have parts in several strata", "--stratum_column")


def test_known_documents_are_named(folder, tmp_path, capsys):
    """A run stores what it has learned from; evaluate and adapt tell where it comes again by another name."""
    (folder / "more").mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(long_text(number))
    run = {"outer_steps": 1, "eval_episodes": 0, "meta_batch_size": 1, "output_dir": str(tmp_path / "run")}
    config = config_of(**run).but(dataset=[str(folder)])
    MetaTrainer(config).train()
    model = tmp_path / "run" / "model"
    (used,) = json.loads((model / "fmmeta.json").read_text())["datasets"]
    for number, name in enumerate(used["splits"]["train"]):
        (folder / name).rename(folder / "more" / f"{number}.txt")
    words = ["--model_name_or_path", str(model), "--dataset", str(folder / "more"), "--episodes", "1"]
    assert exit_code(["evaluate", *words]) == 0
    check_text(capsys.readouterr().out, "1 of 1 row", "test split", "the model was trained on")
    words = ["--model_name_or_path", str(model), "--support", str(folder / "more" / "0.txt")]
    assert exit_code(["adapt", *words, "--output_dir", str(tmp_path / "adapted")]) == 0
    text = capsys.readouterr().out
    check_text(text, "1 of 1 row are rows that the model was trained on")


def written(folder, texts) -> list[str]:
    """Files of these texts by name; the notices of reading the folder."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    notices = list[str]()
    sources_of(folder, notices)
    return notices


def names_of_documents(folder) -> dict[str, str]:
    sources = sources_of(folder)
    return {item.name: item.stratum for one in sources.of_split.values() for item in one.items}


def test_the_same_bytes_in_files_of_other_names_are_other_documents(folder):
    """Stores of tokens are shared by content, of which names and boundaries of files are a part."""
    texts = [long_text(number) for number in range(4)]
    written(folder, {f"{number}.txt": text for number, text in enumerate(texts)})
    assert names_of_documents(folder) == {f"{number}.txt": "all" for number in range(4)}
    (folder / "de").mkdir()
    for number in range(4):
        (folder / f"{number}.txt").rename(folder / "de" / f"{number}.txt")
    assert names_of_documents(folder) == {f"de/{number}.txt": "de" for number in range(4)}
    for number in (1, 3):
        (folder / "de" / f"{number}.txt").unlink()
    for number in (0, 2):
        (folder / "de" / f"{number}.txt").write_text("".join(texts[number : number + 2]))
    assert len(names_of_documents(folder)) == 2
    for name in ("one.txt", "another.txt"):
        (folder.parent / name).write_text(texts[0])
        assert [*names_of_documents(folder.parent / name)] == [name]


def test_what_is_left_out_is_told_whenever_the_store_is_opened(folder):
    twins = {"0.txt": long_text(0), "1.txt": long_text(0), "2.txt": long_text(1), "empty.txt": ""}
    for notices in (written(folder, twins), written(folder, {})):
        check_text("\n".join(notices), "1 document whose lines are mostly", "1 document without a text")


def test_rows_win_over_texts_beside_them_and_the_log_says_so(folder):
    rows = "\n".join(json.dumps({"text": long_text(number)}) for number in range(4))
    notices = written(folder, {"rows.jsonl": rows, "README.md": long_text(5)})
    assert len(names_of_documents(folder)) == 4
    assert "beside them" not in "\n".join(notices)
    notices = written(folder, {"more/a.txt": long_text(6)})
    check_text("\n".join(notices), "rows of rows.jsonl are read, and 1 .txt or .md file (more/a.txt)")
    (folder / "linked").symlink_to(folder.parent)  # of no interest where rows are read
    assert len(names_of_documents(folder)) == 4


def test_endings_in_capitals_are_read_and_hidden_folders_are_not(folder):
    written(folder, {"a.TXT": long_text(0), "b.Md": long_text(1), ".hidden/c.txt": long_text(2)})
    assert [*names_of_documents(folder)] == ["a.TXT", "b.Md"]


def test_links_that_are_not_followed_are_refused(folder, tmp_path):
    written(folder, {"a.txt": long_text(0)})
    (tmp_path / "elsewhere").mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    check_message(refusal(sources_of, folder), "linked is a link to a folder", "remove the link")
    (folder / "linked").unlink()
    (folder / "gone.txt").symlink_to(tmp_path / "gone.txt")
    check_message(refusal(sources_of, folder), "gone.txt is a link to nothing", "remove the link")


def test_folders_without_a_document_and_names_that_are_no_text_are_refused(folder):
    (folder / "a.txt").write_text("")
    check_message(refusal(sources_of, folder), "no row that can be used", "1 document without a text")
    name = os.fsencode(folder) + b"/caf\xe9.txt"
    with open(name, "w") as file:
        file.write(long_text(0))
    check_message(refusal(sources_of, folder), "caf\\udce9.txt", "is no UTF-8", "rename it")


def test_a_row_without_a_text_is_a_bad_row(folder):
    rows = [{"text": long_text(number)} for number in range(4)]
    lines = [*rows, {"title": "of no text"}, {"text": None}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = refusal(sources_of, folder / "rows.jsonl")
    check_message(text, "rows.jsonl:5: the data has none of the columns text", "--text_column")
    notices, config = list[str](), config_of(on_bad_task="skip", max_bad_fraction=0.5)
    config = config.but(dataset=[str(folder / "rows.jsonl")])
    sources = load_sources(config, load_tokenizer(config, describe(config), print), notices.append)
    assert sum(len(one.items) for one in sources.of_split.values()) == 4
    check_text("\n".join(notices), "2 of 6 rows cannot be used", "left out")


def test_a_column_of_names_that_does_not_exist_is_refused(folder):
    rows = [{"text": long_text(number, 16), "book": f"b{number // 2}"} for number in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def read(column, data="rows.jsonl"):
        config = config_of(task_column=column).but(dataset=[str(folder / data)])
        return load_sources(config, load_tokenizer(config, describe(config), print), lambda text: None)

    assert {name for one in read("book").of_split.values() for name in one.items.names} == {
        f"b{number}" for number in range(4)
    }
    check_message(refusal(read, "boook"), "task_column=boook is no column of the data", "book")
    (folder / "rows.jsonl").rename(folder.parent / "rows.jsonl")
    (folder / "a.txt").write_text(long_text(0))
    check_message(refusal(read, "book", ""), "task_column=book is a column", "leave it out")


@pytest.mark.parametrize("chunk", [2, 3, 16, 1000])
def test_bytes_of_chunks_add_up_where_they_cut_characters(chunk):
    """A token is a byte in the built-in vocabulary."""
    text = "naïve 東京 🙂🙂 и так далее " * 3
    config = config_of(chunk=chunk, context=2)
    tokenizer = load_tokenizer(config, describe(config), print)
    ids = plain_tokens(tokenizer, text)
    rows = chunked(ids, config, 0, len(ids))
    passes = [PassStats(torch.tensor([math.log(2), 0.0, 1.0, 0.0])) for _ in rows]
    bits, sizes = zip(*bits_and_bytes(rows, passes, tokenizer), strict=True)
    assert sum(sizes) == len(text[1:].encode())
    assert min(sizes) >= 0
    assert sum(bits) == pytest.approx(len(ids) - 1)


def test_a_first_chunk_that_is_forgotten_is_no_warning():
    learned = InnerResult(None, [PassStats(torch.tensor([x, 0.0, 1.0, 0.0])) for x in (5.0, 4.0, 3.0)])
    for losses, warns in ((learned.passes, False), (learned.passes[::-1], True)):
        found = SupportLosses(config_of())
        found.add(None, InnerResult(None, losses), [])
        assert bool(found.warning()) is warns


def test_positions_are_those_of_chunks():
    """The first token of a document has no loss, and the second chunk begins at its place all the same."""
    config = config_of(chunk=256, context=16, chunks=2)
    stats = [torch.tensor([loss, 0.0, 1.0, 0.0], dtype=torch.float64) for loss in (2.0, 1.0)]
    store = SimpleNamespace(input_ids=lambda row: [65 + 3] * 512)
    draw = Stretch(episode().task, [(0, 0)], [], store=store, begin=0, config=config)
    tokenizer = SimpleNamespace(decode=lambda tokens: "a" * len(tokens))
    score = stream_score(0, draw.task, draw, [PassStats(one) for one in stats], tokenizer, 2.0, 100.0)
    assert score.metrics["bits_per_byte_from_0"] == pytest.approx(2 / np.log(2))
    assert score.metrics["bits_per_byte_from_256"] == pytest.approx(1 / np.log(2))
    assert score.loss == 1.5
    assert score.metrics["tokens_per_second"] == 511 / 2
    assert score.metrics["state_bytes"] == 100 + 8 * 16


def test_documents_are_given_in_python(folder, tmp_path):
    texts = [{"text": long_text(number)} for number in range(5)]
    run = {"outer_steps": 1, "eval_episodes": 0, "meta_batch_size": 1, "output_dir": str(tmp_path / "run")}
    settings = {"task_type": "stream", "chunk": 5, "context": 3, "chunks": CHUNKS, **run}
    assert MetaTrainer(Config(**settings), dataset=texts).train().outer_steps == 1
    adapted = fmmeta.adapt(tmp_path / "run" / "model", texts[:1], output_dir=tmp_path / "adapted")
    assert adapted.inner_steps == -(-len(texts[0]["text"]) // 5)
    check_message(refusal(adapted.predict, ["text"]), "documents have no answers", "fmmeta predict")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    check_text(card, "--support document.txt", "AutoModelForCausalLM.from_pretrained")
    assert "support.jsonl" not in card
    drawn = Tasks(lambda number: ([("a", "b")], [("a", "b")]), train=2)
    text = refusal(MetaTrainer(Config(**settings), dataset=drawn).train)
    check_message(text, "draws rows, and task_type=stream reads documents", "--task_type causal_lm")


def test_a_file_that_is_no_text_and_documents_that_are_all_too_short_are_refused(folder):
    (folder / "a.txt").write_bytes(b"\xff\xfe\x00")
    check_message(refusal(sources_of, folder), "a.txt cannot be read as UTF-8", "fix or remove the file")
    (folder / "a.txt").write_text("short")
    check_message(refusal(sources_of, folder), "lower chunks=4 or chunk=5")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"algorithm": "fomaml"},
            ["algorithm=fomaml with task_type=stream", "use ttt, reptile, joint or none"],
        ),
        ({"inner_optimizer": "adamw"}, ["inner_optimizer=adamw with algorithm=ttt", "leave it out"]),
        ({"max_staleness": 1}, ["max_staleness=1 with algorithm=ttt", "use --algorithm reptile, or leave"]),
        ({"k_shot": 3}, ["k_shot=3 with task_type=stream", "leave it out"]),
        ({"num_query": 2}, ["num_query=2 with task_type=stream", "leave it out"]),
        ({"inner_steps": 3}, ["inner_steps=3 with chunks=4", "leave inner_steps out"]),
        ({"max_length": 64}, ["max_length=64", "context=3 and chunk=5"]),
        ({"prompt_template": "chat"}, ["prompt_template=chat means nothing for task_type=stream"]),
        ({"support_batch_size": 2}, ["support_batch_size=2"]),
        (
            {"inner_max_grad_norm": 1.0, "inner_lr_learned": "element"},
            ["inner_max_grad_norm=1.0 with inner_lr_learned=element", "leave one out"],
        ),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_for_streams_are_refused(settings, parts):
    check_message(refusal(config_of, **settings), *parts)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"chunk": 8}, ["chunk=8 means nothing for task_type=causal_lm"]),
        ({"inner_max_grad_norm": 1.0}, ["inner_max_grad_norm=1.0 means nothing for task_type=causal_lm"]),
        ({"algorithm": "ttt"}, ["task_type=causal_lm does not go with algorithm=ttt", "streams"]),
    ],
    ids=str,
)
def test_what_is_of_streams_is_refused_elsewhere(settings, parts):
    check_message(refusal(Config, task_type="causal_lm", dataset=["words"], **settings), *parts)


def test_suites_and_kinds_of_task_that_do_not_fit_are_refused():
    check_message(refusal(sources_of, "words"), "dataset=words with task_type=stream")
    config = Config(dataset=["ciphers"])
    tokenizer = load_tokenizer(config, describe(config), print)
    check_message(refusal(load_sources, config, tokenizer, print), "dataset=ciphers", "task_type=stream")


def test_a_window_above_the_positions_is_refused(tmp_path):
    from fmmeta.learners.load import fitted

    config = config_of(chunk=400, context=200)
    hf_config = describe(config_of()).hf_config
    hf_config.max_position_embeddings = 512
    check_message(refusal(fitted, config, hf_config), "context + chunk=600 is above the 512 positions")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two outer steps, and a document."""
    folder = tmp_path_factory.mktemp("stream")
    settings = {"eval_episodes": 2, "outer_steps": 2, "meta_batch_size": 2, "output_dir": str(folder / "run")}
    MetaTrainer(config_of(chunk=16, context=8, second_order="autograd", **settings)).train()
    (folder / "a.txt").write_text("every chunk of a document is learned after it was scored " * 4)
    return folder


def test_evaluation_tells_bits_per_byte_by_position(trained, capsys):
    words = [
        "--model_name_or_path",
        str(trained / "run" / "model"),
        "--dataset",
        "ciphers",
        "--episodes",
        "2",
    ]
    found = {}
    for method in ("finetune", "zero_shot"):
        assert (
            exit_code(["evaluate", *words, "--method", method, "--output", str(trained / f"{method}.json")])
            == 0
        )
        found[method] = cell = json.loads((trained / f"{method}.json").read_text())
        assert cell["bits_per_byte"] == cell["bits_per_byte_from_0"]
        assert cell["bits_per_byte"]["mean"] == pytest.approx(cell["loss"] / np.log(2), rel=0.02)
        assert cell["tokens_per_second"]["mean"] > 0
        text = capsys.readouterr().out
        check_text(text, "tokens_per_second", "state_bytes", f"4-chunk {method}")
        assert "shot" not in text.replace("zero_shot", "")
    assert found["zero_shot"]["state_bytes"]["mean"] == 8 * 8
    weights = AutoModelForCausalLM.from_pretrained(trained / "run" / "model").num_parameters()
    assert 0.5 * 4 * weights < found["finetune"]["state_bytes"]["mean"] - 8 * 8 <= 4 * weights
    assert found["finetune"]["loss"] != found["zero_shot"]["loss"]


def test_adapt_turns_a_document_into_a_folder(trained, capsys):
    model = str(trained / "run" / "model")
    out = trained / "adapted"
    words = ["--model_name_or_path", model, "--support", str(trained / "a.txt"), "--output_dir", str(out)]
    assert exit_code(["adapt", *words]) == 0
    text = capsys.readouterr().out
    check_text(text, "loss", "of 15 chunks, each before its step")
    config = Config(
        **{"model_name_or_path": model, "task_type": "stream", "dataset": ["ciphers"]}, chunk=16, context=8
    )
    tokenizer = load_tokenizer(config, describe(config), print)
    ids = tokenizer((trained / "a.txt").read_text(), add_special_tokens=False)["input_ids"]
    adapted, began = (AutoModelForCausalLM.from_pretrained(one) for one in (out, model))
    weights = {name: one.detach() for name, one in began.named_parameters()}
    for row in chunked(ids, config, 0, len(ids)):
        leaves = {name: one.requires_grad_() for name, one in weights.items()}
        batch = torch.tensor([list(row.input_ids)])
        logits = torch.func.functional_call(began, leaves, (batch,)).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(row.labels)[1:], ignore_index=IGNORE)
        steps = zip(leaves.items(), torch.autograd.grad(loss, [*leaves.values()]), strict=True)
        weights = {name: (one - 0.1 * g).detach() for (name, one), g in steps}
    for name, one in adapted.named_parameters():
        torch.testing.assert_close(one.detach(), weights[name], atol=1e-5, rtol=1e-4)


def test_a_folder_of_documents_is_adapted_to_one_by_one(trained, tmp_path):
    model = str(trained / "run" / "model")
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"a document {name} with its words " * 3)
    words = ["--model_name_or_path", model, "--support", str(tmp_path / "texts"), "--lora_r", "2"]
    assert exit_code(["adapt", *words, "--output_dir", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"a", "b"}


def test_predict_continues_a_document_with_what_it_has_learned(trained, tmp_path, capsys):
    """The continuation is that of an adapted model, and parts of a document are learned as one."""
    words = ["predict", "--model_name_or_path", str(trained / "run" / "model"), "--max_new_tokens", "9"]
    assert exit_code([*words, "--input", str(trained / "a.txt")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [*answer] == ["document", "tokens", "bits_per_byte", "zero_shot_bits_per_byte", "output"]
    text = (trained / "a.txt").read_text()
    assert answer["document"].endswith("a.txt")
    assert answer["tokens"] == len(text) - 1
    assert answer["bits_per_byte"] < answer["zero_shot_bits_per_byte"] - 1
    by_hand = fmmeta.adapt(trained / "run" / "model", str(trained / "a.txt"), output_dir=tmp_path / "a")
    ids = torch.tensor([plain_tokens(by_hand.loaded.tokenizer, text)[-8:]])
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    for _ in range(9):
        ids = torch.cat([ids, hf(ids).logits[0, -1].argmax().view(1, 1)], 1)
    assert answer["output"] == by_hand.loaded.tokenizer.decode(ids[0, 8:], skip_special_tokens=True)
    rows = [{"text": part, "document": name} for name in "xy" for part in (text[:90], text[90:])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = tmp_path / "out.csv"
    assert exit_code([*words, "--input", str(tmp_path / "rows.jsonl"), "--output", str(table)]) == 0
    found = [*csv.DictReader(table.open())]
    assert [one["document"] for one in found] == ["x", "y"]
    for one in found:
        assert float(one["bits_per_byte"]) == answer["bits_per_byte"]
        assert one["output"] == answer["output"]


def test_predict_begins_at_adapted_weights(trained, tmp_path, capsys, monkeypatch):
    model, texts = str(trained / "run" / "model"), str(trained / "a.txt")
    learned = ["--model_name_or_path", model, "--support", texts, "--lora_r", "2", "--inner_lr", "1"]
    assert exit_code(["adapt", *learned, "--output_dir", str(tmp_path / "adapted")]) == 0
    found = []
    for folder in (model, tmp_path / "adapted"):
        monkeypatch.setattr("sys.stdin", io.StringIO((trained / "a.txt").read_text()))
        capsys.readouterr()
        assert exit_code(["predict", "--model_name_or_path", str(folder), "--max_new_tokens", "1"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["zero_shot_bits_per_byte"] < found[0]["zero_shot_bits_per_byte"] - 0.1
    assert found[1]["bits_per_byte"] < found[1]["zero_shot_bits_per_byte"]
    assert exit_code(["predict", "--adapters", str(tmp_path)]) == 2
    check_message(capsys.readouterr().err, "have no answers", "fmmeta predict --model_name_or_path")


def test_other_stretches_are_not_compared(trained, tmp_path, capsys):
    """Results of the same stretches are, also of other weights."""
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(long_text(number, 80))
    words = ["evaluate", "--model_name_or_path", str(trained / "run" / "model"), "--episodes", "2"]
    words += ["--dataset", str(tmp_path / "texts"), "--eval_split", "train"]
    results = str(tmp_path / "r.json")
    assert exit_code([*words, "--output", results]) == 0
    assert exit_code([*words, "--compare", results]) == 0
    for more in (["--chunks", "2"], ["--seed", "7"], ["--context", "9"]):
        capsys.readouterr()
        assert exit_code([*words, *more, "--compare", results]) == 2
        check_message(capsys.readouterr().err, "are of other episodes", "--seed")
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(long_text(number + 20, 80))
    assert exit_code([*words, "--compare", results]) == 2


def test_the_state_of_an_inner_optimizer_goes_from_chunk_to_chunk(trained, tmp_path):
    words = ["evaluate", "--model_name_or_path", str(trained / "run" / "model"), "--dataset", "ciphers"]
    sizes = list[float]()
    for optimizer in ("sgd", "adamw"):
        more = ["--episodes", "1", "--inner_optimizer", optimizer, "--inner_lr", "0.01"]
        assert exit_code([*words, *more, "--output", str(tmp_path / "r.json")]) == 0
        sizes.append(json.loads((tmp_path / "r.json").read_text())["state_bytes"]["mean"] - 8 * 8)
    assert 2.5 * sizes[0] < sizes[1] < 3.5 * sizes[0]


def test_names_of_documents_are_those_of_training(trained, tmp_path, capsys):
    """0 is a name, parts may be apart, and a column `task` names documents too; what has no name is one."""
    model, rows = ["--model_name_or_path", str(trained / "run" / "model")], tmp_path / "rows.jsonl"
    text = (trained / "a.txt").read_text()

    def documents(column, names):
        parts = [{"text": text[:40], **({column: name} if column else {})} for name in names]
        rows.write_text("\n".join(map(json.dumps, parts)))
        capsys.readouterr()
        assert exit_code(["predict", *model, "--input", str(rows), "--max_new_tokens", "1"]) == 0
        found = map(json.loads, capsys.readouterr().out.splitlines())
        return {one["document"]: one["tokens"] for one in found}

    assert documents("document", [0, 0, 1]) == {"0": 79, "1": 39}
    assert documents("task", ["a", "b", "a"]) == {"a": 79, "b": 39}
    assert [*documents("", range(2)).values()] == [39, 39]
    adapt = ["adapt", *model, "--support", str(rows), "--output_dir", str(tmp_path / "o")]
    assert exit_code(adapt) == 2
    check_message(capsys.readouterr().err, "it has 2 documents", "column `document`")


def test_the_card_of_an_adapted_model_has_no_shots(trained, tmp_path):
    words = ["adapt", "--model_name_or_path", str(trained / "run" / "model"), "--support"]
    assert exit_code([*words, str(trained / "a.txt"), "--output_dir", str(tmp_path / "out")]) == 0
    assert "shot" not in (tmp_path / "out" / "README.md").read_text().replace("few-shot", "")


def test_a_stored_number_of_steps_follows_the_chunks(trained, tmp_path):
    model = str(trained / "run" / "model")
    words = ["--model_name_or_path", model, "--dataset", "ciphers", "--episodes", "1", "--chunks", "6"]
    assert exit_code(["evaluate", *words, "--context", "12", "--output", str(tmp_path / "r.json")]) == 0


def test_commands_for_rows_refuse_documents_in_one_line(trained, tmp_path, capsys):
    model = str(trained / "run" / "model")
    words = ["adapt", "--model_name_or_path", model]
    adapt = [*words, "--output_dir", str(tmp_path / "o"), "--support"]
    (trained / "short.txt").write_text("x")
    rows = [{"text": "a b c d e", "document": name} for name in "ab"]
    (trained / "two.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for given, part in (
        (["predict", *words[1:], "--input", str(trained / "a.txt"), "--equal_classes"], "equal_classes=True"),
        (["predict", *words[1:], "--input", str(trained / "short.txt")], "give a longer document"),
        (["tune", "--model_name_or_path", model, "--dataset", "ciphers"], "each chunk once"),
        (["inspect", "--task_type", "stream", "--dataset", "ciphers"], "no rows to show"),
        (
            ["adapt", "--support", str(trained / "a.txt"), "--output_dir", str(tmp_path / "o")],
            "is a document",
        ),
        ([*adapt, str(trained / "a.txt"), "--query", str(trained / "two.jsonl")], "has no answers"),
        ([*adapt, str(trained / "two.jsonl")], "it has 2 documents"),
        ([*adapt, str(trained / "short.txt")], "give a longer document"),
        (["evaluate", *words[1:], "--dataset", "ciphers", "--inner_steps", "0"], "inner_steps=0 with chunks"),
        (["evaluate", *words[1:], "--dataset", "ciphers", "--n_way", "all"], "n_way=all means nothing"),
        (["evaluate", *words[1:], "--dataset", "ciphers", "--n_way", "3"], "n_way=3 means nothing"),
    ):
        assert exit_code(given) == 2
        check_message(capsys.readouterr().err, part)


FROZEN = ["*embed*", "*self_attn*", "*norm*", "*layers.0.*", "*gate_proj*", "*up_proj*"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_fast_weights_carry_a_cipher_that_the_window_does_not_show(tmp_path):
    """A window of 24 of 26 letters: joint training stays near the loss of a guess, 16 steps go far below."""
    shared = {
        "chunk": 16,
        "context": 8,
        "chunks": 16,
        "outer_steps": 60,
        "outer_lr": 4e-3,
        "eval_episodes": 20,
    }
    rules = {
        "joint": {"algorithm": "joint"},
        "ttt": {"inner_parameters": ["except", *FROZEN], "inner_lr": 30.0, "second_order": "autograd"},
    }
    losses = {}
    for name, settings in rules.items():
        MetaTrainer(config_of(**shared, **settings, output_dir=str(tmp_path / name))).train()
        line = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        losses[name] = line
    assert losses["joint"]["query_loss"] > 2.8, losses
    assert losses["ttt"]["query_loss"] < 1.5, losses


def asked(folder, rate):
    """Loss of the letters that end each test document of `tables`, after a step on its first chunk."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    gains = model.get_parameter("model.norm.weight")
    start = gains.detach().clone()
    for text in (row.values["text"] for row in tables()[0] if row.values["task"].startswith("test")):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        gains.data.copy_(start)
        loss = cross_entropy(model(ids[:, :16]).logits[0, :-1], ids[0, 1:16])
        gains.data -= rate * torch.autograd.grad(loss, gains)[0]
        with torch.no_grad():
            losses = cross_entropy(model(ids[:, 14:]).logits[0, :-1], ids[0, 15:], reduction="none")
        found.append(float(losses[-3::2].mean()))
    return np.array(found)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_only_exact_meta_gradients_write_a_table_into_few_fast_weights(tmp_path):
    """A step changes 64 gains, which all letters of a table share; first order does not learn to choose."""
    few = {"inner_parameters": ["model.norm.weight"], "inner_lr": 100.0, "second_order": "autograd"}
    rules = {
        "exact": few,
        "first order": {**few, "first_order_steps": 500},
        "joint": {"algorithm": "joint"},
    }
    shared = {"chunk": 16, "context": 2, "chunks": 2, "outer_steps": 500, "meta_batch_size": 16}
    shared |= {"outer_lr": 8e-3, "adam_epsilon": 1e-6, "eval_episodes": 0}
    for name, settings in rules.items():
        run = {**shared, **settings, "dataset": ["tables"], "output_dir": str(tmp_path / name)}
        MetaTrainer(config_of(**run)).train()
    exact, first, before = (
        asked(tmp_path / name / "model", rate)
        for name, rate in (("exact", 100.0), ("first order", 100.0), ("joint", 0.0))
    )
    fall, half = mean_ci95([*(first - exact)])
    assert fall - half > 0.3, (fall, half)
    for rate in (1.0, 10.0, 100.0):
        gain, half = mean_ci95([*(before - asked(tmp_path / "joint" / "model", rate))])
        assert gain + half < 0.1, (rate, gain, half)
    assert before.mean() > np.log(8 * 7) / 2 - 0.05  # as without the table


PEAK = """
import resource, sys
import torch
from fmmeta.learners.lora import inject
from fmmeta.learners.stream import StreamLearner
from fmmeta.tasks.batching import IGNORE, Batcher, Example
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeRows
from tests.support.learners import RuleOn, setup_of, task_gradient, worker_over
from tests.support.models import tiny
from fmmeta import Config
from fmmeta.config.algorithms import find

chunks = int(sys.argv[1])
sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 16000}
learner = StreamLearner(tiny("llama", 2, **sizes, max_position_embeddings=256))
options = {"lora_r": 4, "lora_target_modules": ["layers.6.mlp.down_proj", "layers.7.mlp.down_proj"]}
config = Config(task_type="stream", dataset=["ciphers"], chunk=64, context=64, chunks=chunks, **options)
inject(learner, config)
ids = torch.randint(3, 16000, (64 * (chunks + 1),)).tolist()
rows = [Example(ids[b : b + 128], [IGNORE] * 64 + ids[b + 64 : b + 128]) for b in range(0, 64 * chunks, 64)]
episode = EpisodeRows(Task(0, "t", "s", 1, (0,)), rows, rows[:1], samples=tuple([row] for row in rows))
worker = worker_over(learner)
task_gradient(RuleOn(find("ttt").rule, setup_of(worker, config)), worker, Batcher(0, 1).episode(episode))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_document():
    """Exact meta-gradients of adapters through 64 chunks take at most 1.15 times the memory of one chunk."""
    one, many = (
        int(subprocess.check_output([sys.executable, "-c", PEAK, str(n)], cwd=ROOT, env=environment()))
        for n in (1, 64)
    )
    assert many <= 1.15 * one, f"{many} KiB against {one}"
