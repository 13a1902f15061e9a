"""`fmmeta adapt` and `predict`: the exported folder equals a plain training loop; transformers loads it; all
files that `adapt` reads are answered, and answers appear when they are whole.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers.utils
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tokenizers import normalizers, processors
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

import fmmeta
from fmmeta.adaptation import command, predict
from fmmeta.adaptation import model as models
from fmmeta.adaptation.folder import PARTIAL
from fmmeta.adaptation.model import AdaptedModel, Answer
from fmmeta.adaptation.task_learner import leave_out, read_task
from fmmeta.cli import parse
from fmmeta.common import security
from fmmeta.common.errors import UsageError
from fmmeta.common.security import CONTROL, printable
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import AdaptConfig, EvaluateConfig, PredictConfig, TuneConfig
from fmmeta.learners.classification import NativeClassifier
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.sources.load import load_sources
from fmmeta.training.run_files import lock_folder
from harness.fork_server import shared
from tests.support.exports import run_python
from tests.support.helpers import fast_or_slow, recorded, refusal, write_rows
from tests.support.launch import environment, python
from tests.support.messages import check_message, check_text
from tests.support.models import WORDS, save_bert, with_settings
from tests.support.plain import PlainClassifier, batch
from tests.support.short_runs import until

PAIRS = [(f"{word} {other}", f"class {word}") for word in WORDS[:3] for other in WORDS[5:9]]
TEXTS = [f"{word} {WORDS[10]}" for word in WORDS[:3]]


NAMES = sorted({label for _, label in PAIRS})
LEARNED = batch([text for text, _ in PAIRS]), torch.tensor([NAMES.index(label) for _, label in PAIRS])
ONE_STEP = {"inner_steps": 1, "early_stopping": False}
MIXED = [(text, f"class {place % 3}") for place, (text, _) in enumerate(PAIRS)]  # not what the words tell


def rows_of(pairs):
    return [{"text": text, "label": label} for text, label in pairs]


def lines_with(part, capsys):
    return [line for line in "".join(capsys.readouterr()).splitlines() if part in line]


def labels_of(answers):
    return [one.output for one in answers]


def scores_of(answers):
    return [one.score for one in answers]


def stored_in(folder):
    return json.loads((folder / "fmmeta.json").read_text())


def encoder(family, request, tmp_path):
    """The folder of a shared model, or of one of another family."""
    return save_bert(tmp_path / family, family) if family == "roberta" else request.getfixturevalue(family)


def one_of_each(fast, *factors):
    """Parameters for all combinations; those that are not among `fast` are slow."""
    return fast_or_slow([*itertools.product(*factors)], lambda one: one in fast, "-".join)


def test_adapted_folder_equals_a_plain_training_loop(bert, tmp_path):
    out, flags = tmp_path / "out", {"inner_steps": 4, "inner_lr": 0.5, "early_stopping": False}
    adapted = fmmeta.adapt(bert, PAIRS, output_dir=out, **flags)
    assert (adapted.inner_steps, adapted.left_out, adapted.accuracy) == (4, None, None)
    model = PlainClassifier(bert, 3)
    model.learn(*LEARNED, [0.5] * 4)
    folder = AutoModelForSequenceClassification.from_pretrained(out).eval()
    ours, theirs = folder(**batch(TEXTS)).logits.detach(), model(batch(TEXTS)).detach()
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert folder.config.id2label == dict(enumerate(NAMES))
    answers = adapted.predict(TEXTS)
    assert labels_of(answers) == [NAMES[i] for i in theirs.argmax(1)]
    assert scores_of(answers) == pytest.approx(theirs.softmax(1).amax(1).tolist(), abs=1e-5)
    card = (out / "README.md").read_text()
    check_text(
        card,
        f"| base model | `{bert.name}` |",
        "| support | given in Python: 12 examples of 3 classes |",
        "library_name: transformers\npipeline_tag: text-classification\n",
        "- `class lantern`",
    )
    assert str(bert) not in card
    assert "model-index" not in card  # nothing was measured


@pytest.mark.parametrize(
    "case",
    one_of_each(
        [("bert", "model"), ("llama", "model"), ("roberta", "mean"), ("llama", "cls")],
        ["bert", "roberta", "llama"],
        ["model", "mean", "cls"],
    ),
)
def test_a_pipeline_of_transformers_gives_our_answers_or_none(case, request, tmp_path):
    """Not those of a random head, nor under the names of another task."""
    (family, pooling), out = case, tmp_path / "out"
    source = shutil.copytree(encoder(family, request, tmp_path), tmp_path / "base")
    config = json.loads((source / "config.json").read_text())
    config["id2label"] = {0: "NEGATIVE", 1: "POSITIVE", 2: "NEUTRAL"}
    config["problem_type"] = "multi_label_classification"
    (source / "config.json").write_text(json.dumps(config))
    lora = {"lora_r": 2, "lora_merge": True} if pooling == "mean" else {}
    flags = {"inner_steps": 3, "inner_lr": 0.5, "early_stopping": False, "pooling": pooling, **lora}
    answers = fmmeta.adapt(source, PAIRS, output_dir=out, **flags).predict(TEXTS)
    folder, name = (out / "merged", "out (merged)") if lora else (out, "out")
    pipe, card = pipeline("text-classification", str(folder)), (folder / "README.md").read_text()
    if pooling == "model":
        for found, wanted in zip(pipe(TEXTS), answers, strict=True):
            assert found == {"label": wanted.output, "score": pytest.approx(wanted.score, abs=1e-5)}
    else:
        assert pipe(TEXTS, top_k=None) == [[], [], []]
        with pytest.raises(ValueError, match="empty sequence"):
            pipe(TEXTS)
        assert (folder / "head.safetensors").is_file()
    assert fmmeta.load(folder).predict(TEXTS) == answers or lora  # merged weights are rounded
    for part, owner in (
        ("pipeline_tag", True),
        ("library_name: fmmeta\n", False),
        ("`fmmeta predict` ", False),
    ):
        assert (part in card) == (owner == (pooling == "model"))
    assert f"\n# {name}\n" in card.replace("\\", "")
    texts = [path.read_text() for path in out.rglob("*") if path.suffix in (".md", ".json")]
    assert not any("partial" in text for text in texts)


@pytest.mark.parametrize("family", fast_or_slow(["bert", "roberta", "llama"], lambda one: one == "bert"))
def test_a_pipeline_of_transformers_refuses_adapters_of_a_pooled_encoder(family, request, tmp_path):
    """It would put a random head on them, here under the names of the base's classes."""
    source, base, out = encoder(family, request, tmp_path), tmp_path / "base", tmp_path / "out"
    AutoModelForSequenceClassification.from_pretrained(
        source, id2label={0: "NO", 1: "YES"}, ignore_mismatched_sizes=True
    ).save_pretrained(base)
    AutoTokenizer.from_pretrained(source).save_pretrained(base)
    flags = {"inner_steps": 2, "inner_lr": 0.5, "pooling": "mean", "lora_r": 2, "early_stopping": False}
    fmmeta.adapt(base, PAIRS, output_dir=out, **flags)
    with pytest.raises(ValueError, match=r"modules were excluded|No modules were targeted"):
        pipeline("text-classification", str(out))
    adapters = AutoModel.from_pretrained(out).state_dict()
    assert any(value.any() for name, value in adapters.items() if ".lora_B." in name)
    fmmeta.adapt(out, PAIRS, **{**flags, "peft_config": str(out / "adapter_config.json")})


def test_early_stopping_chooses_steps_by_cross_validation(bert):
    """An independent loop over the left out examples finds the same number of steps, of 1 to 2K."""
    adapted = fmmeta.adapt(bert, PAIRS, pooling="mean", inner_steps=3, inner_lr=2.0)
    losses, right = torch.zeros(7), torch.zeros(7)
    inputs, labels = LEARNED
    for fold in range(2):
        held = torch.tensor([place % 4 == fold for place in range(12)])
        kept, asked = ({name: one[rows] for name, one in inputs.items()} for rows in (~held, held))
        model = PlainClassifier(bert, 3, "mean")
        for step in range(7):
            model.learn(kept, labels[~held], [2.0] if step else [])
            logits = model(asked).detach()
            losses[step] += F.cross_entropy(logits, labels[held])
            right[step] += (logits.argmax(1) == labels[held]).float().mean() / 2
    assert adapted.inner_steps == 1 + int(losses[1:].argmin())
    assert adapted.left_out == pytest.approx(float(right[adapted.inner_steps]))


@pytest.mark.parametrize(("labels", "folds"), [("xxy", []), ("xyxyy", [[0, 1], [2, 3]])])
def test_a_class_with_one_example_gives_no_folds(labels, folds):
    task = read_task("support", [*zip("abcde"[: len(labels)], labels, strict=True)], Config(), print)
    assert leave_out(task, ["x", "y"]) == folds


def test_names_of_classes_are_learned_as_examples_and_never_left_out(bert):
    settings = {"inner_steps": 4, "inner_lr": 0.5, "early_stopping": False}
    named, as_rows, plain = (
        scores_of(fmmeta.adapt(bert, pairs, **settings, **more).predict(TEXTS))
        for pairs, more in (
            (PAIRS, {"label_names": "names"}),
            ([*PAIRS, *zip(NAMES, NAMES, strict=True)], {}),
            (PAIRS, {}),
        )
    )
    assert named == pytest.approx(as_rows, abs=1e-6)
    assert named != pytest.approx(plain, abs=1e-4)
    assert fmmeta.adapt(bert, PAIRS[::4], label_names="names", inner_steps=2).left_out is None


def test_lora_adaptation_exports_adapters_and_a_merged_model_in_their_folder(bert, tmp_path):
    """Also into a folder whose own name is that of merged weights."""
    flags = {"lora_r": 4, "lora_merge": True, "inner_lr": 0.5, "inner_steps": 3, "early_stopping": False}
    out = tmp_path / "merged"
    wanted = fmmeta.adapt(bert, PAIRS, output_dir=out, **flags).predict(TEXTS)
    found = fmmeta.load(out).predict(TEXTS)
    assert found == [replace(one, score=pytest.approx(one.score, abs=1e-5)) for one in wanted]
    card = (out / "README.md").read_text()
    assert "library_name: peft\n" in card
    assert "pipeline_tag" not in card
    plain = run_python(card, out)["model"]  # the base has 15 classes, and the adapters 3
    for model in (plain, AutoModelForSequenceClassification.from_pretrained(out / "merged")):
        shares = model.eval()(**batch(TEXTS)).logits.detach().softmax(1)
        assert [model.config.id2label[i] for i in shares.argmax(1).tolist()] == labels_of(wanted)
        assert shares.amax(1).tolist() == pytest.approx(scores_of(wanted), abs=1e-5)
    assert {*(path.name for path in out.iterdir())} & {"adapter_config.json", "model.safetensors"} == {
        "adapter_config.json"
    }
    assert [*tmp_path.iterdir()] == [out]


def test_exports_carry_the_files_of_their_checkpoint(llama, tmp_path):
    """All chat templates too; from adapters that are adapted again; not the tokens of another tokenizer."""
    model, tokenizer = shutil.copytree(llama, tmp_path / "model"), byte_tokenizer()
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    tokenizer.add_tokens(["<eot>"])
    tokenizer.save_pretrained(model)
    hf = AutoModelForCausalLM.from_pretrained(model)
    hf.resize_token_embeddings(len(tokenizer) + 1)
    hf.save_pretrained(model)
    carried = {
        "added_tokens.json": {"<eot>": len(tokenizer) - 1},
        "chat_template.json": {},
        "preprocessor_config.json": {"a": 1},
        "processor_config.json": {},
        "config_sentence_transformers.json": {"prompts": {"query": "q: "}},
    }
    for name, content in carried.items():
        (model / name).write_text(json.dumps(content))
    flags = {"task_type": "causal_lm", "lora_r": 2, "lora_merge": True, **ONE_STEP}
    learn = partial(fmmeta.adapt, support=[("a", "b"), ("c", "d")], **flags)
    for source, out in ((model, tmp_path / "one"), (tmp_path / "one", tmp_path / "two")):
        learn(source, output_dir=out)
        for folder in (out, out / "merged"):
            assert {one: json.loads((folder / one).read_text()) for one in carried} == carried
            loaded = AutoTokenizer.from_pretrained(folder)
            for fact in ("chat_template", "added_tokens_decoder"):
                assert getattr(loaded, fact) == getattr(tokenizer, fact)
    (model / "added_tokens.json").write_text('{"<other>": 5}')
    learn(model, output_dir=tmp_path / "three")
    assert not (tmp_path / "three" / "added_tokens.json").exists()


@pytest.mark.parametrize("lora_r", [0, 4])
def test_the_head_of_an_adapted_folder_is_for_its_own_classes_alone(lora_r, bert, classes, tmp_path, capsys):
    """Other classes begin with zeros, as many as they are; the same ones with the learned head."""
    one, line = tmp_path / "one", "the model's head is for the classes class"
    flags = {"pooling": "mean", "lora_r": lora_r, "inner_steps": 3, "inner_lr": 0.5}
    own = scores_of(fmmeta.adapt(bert, PAIRS, output_dir=one, **flags).predict(TEXTS))
    tasks = {"same": PAIRS[::-1], "renamed": [(text, f"z{label[-5:]}") for text, label in PAIRS]}
    many = fmmeta.adapt_many(one, tasks, output_dir=tmp_path / "many", inner_steps=0)
    for name, wanted in (("same", own), ("renamed", [1 / 3] * 3)):
        alone = fmmeta.adapt(one, tasks[name], inner_steps=0, quiet=False)
        assert bool(lines_with(line, capsys)) == (name == "renamed")
        for model in (alone, many[name]):
            assert scores_of(model.predict(TEXTS)) == pytest.approx(wanted, abs=1e-5)
    few = {"n_way": 3, "k_shot": 1, "num_query": 2, "episodes": 2, "inner_steps": 0}
    assert fmmeta.evaluate(one, classes, **few, quiet=False)["loss"] == pytest.approx(math.log(3))
    assert lines_with(line, capsys)


@pytest.mark.parametrize(
    ("stored", "row"),
    [
        ({"head_init": "zero", "inner_lr": 0.1}, "none"),  # as `fmmeta tune` leaves a plain model
        ({"algorithm": "fomaml", "k_shot": 2}, "fomaml, 2-shot"),
    ],
)
def test_a_stored_inner_loop_is_used_and_the_card_names_the_meta_training(bert, tmp_path, stored, row):
    base = with_settings(bert, tmp_path / "base", **stored, inner_steps=1)
    fmmeta.adapt(base, PAIRS, output_dir=tmp_path / "out")
    assert f"| meta-training | {row} |" in (tmp_path / "out" / "README.md").read_text()
    assert stored_in(tmp_path / "out")["inner_steps"] == 1


MARKS = [
    "<script>alert(1)</script>",
    "[x](javascript:alert)",
    "![](http://a.test/x)",
    "a | b",
    "`tick` ``two``",
    "*bold* _it_",
    "line\n\n# heading\n\n---\n",
    "http://a.test",
    "\x1b[31mred\u202e",
    "&lt;",
    "\\`",
    "- item",
]


def test_names_in_the_model_card_are_escaped(bert, tmp_path):
    """Labels, file names and stored settings become neither Markdown, nor HTML, nor YAML."""
    markdown = pytest.importorskip("markdown_it")
    stored = {"algorithm": "<b>|x", "k_shot": "](y)", "inner_steps": 1}
    base = with_settings(bert, tmp_path / "a`b|<i>\U0001f600", **stored)
    run = {"settings": {"dataset": ["<img src=x>|`"], "outer_steps": "<u>", "meta_batch_size": "*4*"}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    rows = rows_of([(f"{label} {i}", label) for label in MARKS for i in (1, 2)])
    support, folder = write_rows(tmp_path / "s`<s>|t.jsonl", rows), tmp_path / "<h1>"
    fmmeta.adapt(base, str(support), query=str(support), output_dir=folder, early_stopping=False)
    assert not CONTROL.search((folder / "README.md").read_text(encoding="utf-8").replace("\n", ""))
    card = ModelCard.load(folder / "README.md")
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_args) == (support.name, {"examples": 2 * len(MARKS)})
    assert "base_model" not in card.data.to_dict()
    tokens = markdown.MarkdownIt("commonmark").enable("table").parse(card.text)
    inner = [child for token in tokens for child in token.children or []]
    kinds = {token.type for token in (*tokens, *inner)}
    assert not kinds & {"html_block", "hr", "html_inline", "link_open", "image", "em_open", "strong_open"}
    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h1", "h2", "h2", "h2"]
    codes = [child.content for child in inner if child.type == "code_inline"]
    shown = [printable(" ".join(label.split())) for label in sorted(MARKS)]
    assert [code for code in codes if code in shown] == shown
    assert {base.name, support.name, "<img src=x>|`"} <= set(codes)
    texts = "".join(child.content for child in inner if child.type == "text")
    assert "<b>|x, ](y)-shot, on , <u> outer steps of *4* tasks" in texts
    count = Counter(token.type for token in tokens)
    assert count["td_open"] + count["th_open"] == 2 * count["tr_open"]


def test_builtin_model_needs_no_hub_and_its_adapters_can_be_moved(tmp_path, monkeypatch):
    requested = recorded(monkeypatch, transformers.utils, "cached_file")
    flags = {"head_init": "learned", "lora_r": 4, **ONE_STEP}
    wanted = fmmeta.adapt("tiny", PAIRS, output_dir=tmp_path / "out", **flags).predict(TEXTS)
    assert all(str(tmp_path) in call.args[0] for call in requested)  # its own folder, for the card
    (tmp_path / "out").rename(tmp_path / "moved")
    assert labels_of(fmmeta.load(tmp_path / "moved").predict(TEXTS)) == labels_of(wanted)


def test_language_model_learns_pairs_and_generates_answers(llama, tmp_path):
    pairs = {word: word[0] for word in WORDS[:3]}
    flags = {"task_type": "causal_lm", "inner_steps": 60, "inner_lr": 0.3, "early_stopping": False}
    adapted = fmmeta.adapt(llama, [*pairs.items()], output_dir=tmp_path / "out", **flags)
    answers = adapted.predict([*pairs], max_new_tokens=4)
    assert labels_of(answers) == [*pairs.values()]
    single = fmmeta.load(tmp_path / "out")
    assert single.loaded.config.task_type == "causal_lm"
    assert single.predict([*pairs], 4) == answers


def test_adapt_and_predict_commands(bert, tmp_path):
    """Every query row is predicted, and repeated support rows are dropped."""
    support = write_rows(tmp_path / "support.jsonl", rows_of([*PAIRS, *PAIRS[:2]]))
    asked = rows_of([(f"{word} harbor", f"class {word}") for word in (*WORDS[:3], WORDS[0])])
    query, out = write_rows(tmp_path / "query.csv", asked), tmp_path / "out"

    def run(code, *words, stdin=""):
        ended = python(["-m", "fmmeta", *words], tmp_path, stdin=stdin)
        assert ended.returncode == code, ended.stderr
        return ended.stdout, ended.stderr.strip()

    data = ["adapt", f"--model_name_or_path={bert}", f"--support={support}", f"--output_dir={out}"]
    said, _ = run(0, *data, f"--query={query}", "--inner_lr=0.5", "--inner_steps=10")
    predictions = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert rows_of((one["text"], one["truth"]) for one in predictions) == asked
    accuracy = sum(one["label"] == one["truth"] for one in predictions) / 4
    check_text(
        said, f"accuracy on {query}: {100 * accuracy:.1f} % of 4", "right of examples that were left out"
    )
    (line,) = [line for line in said.splitlines() if "repeat" in line]
    check_message(line, f"fmmeta: {support}: 2 of 14 rows", "left out")
    lines = f'{predictions[0]["text"]}\n\n{{"sentence": "{predictions[1]["text"]}"}}\n{{"words": "x"}}\n'
    said, error = run(2, "predict", f"--model_name_or_path={out}", stdin=lines)
    assert [json.loads(line)["label"] for line in said.splitlines()] == [
        one["label"] for one in predictions[:2]
    ]
    check_message(error, "fmmeta: error: input line 4", "name one with --text_column")
    check_message(run(2, *data)[1], f"fmmeta: error: output_dir={out} is not empty", "choose another")


def test_bad_files_are_refused(tmp_path):
    query = write_rows(tmp_path / "query.jsonl", [{"text": "a", "label": "z"}])
    none, support = tmp_path / "none.jsonl", tmp_path / "support.jsonl"
    support.write_text('{"text": "a", "label": "x"}\n{"text": "b\\ud800", "label": "y"}\n')
    for given, parts in (
        ({"support": PAIRS, "query": query}, (f"query={query}", "add some")),
        ({"support": none}, (f"support={none}", "give a .jsonl, .json, .csv, .tsv, .parquet file")),
        ({"support": support}, (f"{support}:2", "\\ud800", "fix the row")),
    ):
        check_message(refusal(fmmeta.adapt, "tiny", **given, output_dir=tmp_path / "out"), *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "setting"), [("notes.txt", "query"), ("notes.rst", "support")])
def test_a_text_without_columns_is_refused(name, setting, tmp_path):
    (tmp_path / name).write_text("{}")
    check_message(
        refusal(AdaptConfig, **{setting: str(tmp_path / name)}),
        f"{setting}={tmp_path / name}",
        "convert it to one of them",
    )


ENDINGS = "change the ending", "output=b."


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (partial(command.run, AdaptConfig(output_dir="out")), ("support is missing", "give --support")),
        (PredictConfig, ("model_name_or_path is missing", "give the folder that fmmeta adapt wrote")),
        (partial(PredictConfig, "x", input="nowhere"), ("input=nowhere", "or - for standard input")),
        # an ending that promises another format
        *(
            (partial(PredictConfig, "x", output=name), (".jsonl, .json or .csv is written", *ENDINGS))
            for name in ("b.tsv", "b.jsonl.gz")
        ),
        *(
            (partial(kind, "x", output=name, dataset=["letters"]), (".json is written", *ENDINGS))
            for kind, name in ((EvaluateConfig, "b.csv"), (TuneConfig, "b.yaml"))
        ),
        *(
            (partial(parse, ["--model_name_or_path", "x", *flag.split()], "predict"), ("is not a flag",))
            for flag in ("--lora_r 4", "--head_init zero", "--gradient_checkpointing true")
        ),
    ],
)
def test_commands_that_cannot_be_meant_are_refused(call, parts):
    check_message(refusal(call), *parts)


def test_diverging_inner_loop_leaves_no_folder_that_was_not_there(bert, tmp_path):
    """The loss before the only step is finite, the loss after it is not."""
    (tmp_path / "there").mkdir()
    for name, stops, steps in (
        ("new/out", True, "examples left out is not finite after any of 2 "),
        ("there", False, "the support set is not finite after 1 "),
    ):
        flags = {"inner_lr": 3e38, "inner_steps": 1, "early_stopping": stops}
        check_message(
            refusal(fmmeta.adapt, bert, PAIRS, output_dir=tmp_path / name, **flags),
            "inner_lr=3e+38",
            steps,
            "lower --inner_lr",
        )
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_rising_support_loss_is_logged(bert, capsys):
    fmmeta.adapt(bert, MIXED, inner_lr=100.0, inner_steps=2, early_stopping=False, quiet=False)
    (line,) = lines_with("rises", capsys)
    assert line.startswith("fmmeta: inner_lr=100: ")
    assert "rises from 1.1 to " in line  # ln 3
    assert line.endswith("(2 steps of sgd); try --inner_lr 10")


@pytest.mark.parametrize("pairs", [PAIRS, MIXED], ids=["learned", "not learned"])
def test_the_support_loss_and_examples_that_were_not_learned_are_logged(bert, tmp_path, capsys, pairs):
    flags = {"inner_lr": 0.1, "inner_steps": 5, "early_stopping": False, "quiet": False}
    adapted = fmmeta.adapt(bert, pairs, **flags)
    fmmeta.adapt_many(bert, {"one": pairs}, output_dir=tmp_path, lora_r=2, **flags)
    fmmeta.adapt(bert, PAIRS, head_init="prototype", inner_steps=0, early_stopping=False, quiet=False)
    answers = labels_of(adapted.predict([text for text, _ in pairs]))
    right = sum(one == label for one, (_, label) in zip(answers, pairs, strict=True))
    assert (right > 8) == (pairs is PAIRS)
    first, *lines, means = lines_with(" right", capsys)
    log = rf"fmmeta: support set: loss 1\.1 before, [0-9.e-]+ after 5 inner steps; {right} of 12 right"
    assert re.fullmatch(log, first)
    assert re.fullmatch(r"fmmeta: support set: loss [0-9.e-]+; \d+ of 12 right", means)
    warned = [] if pairs is PAIRS else ["fmmeta: the examples were not", "fmmeta: one: the examples were not"]
    assert [line.split(" learned: ")[0] for line in lines] == warned
    advice = "; try more --inner_steps than 5, or another --inner_lr than 0.1"
    assert all(line.endswith(advice) for line in lines)


def test_python_api_accepts_rows_and_pairs_and_lists_of_texts(bert):
    query = PAIRS[:2] * 2
    adapted = fmmeta.adapt(bert, rows_of(PAIRS), query=query, **ONE_STEP)
    assert [(one.input, one.truth) for one in adapted.predictions] == query
    assert adapted.predict(TEXTS) == fmmeta.adapt(bert, tuple(PAIRS), **ONE_STEP).predict(TEXTS)
    assert adapted.predict([]) == []
    for texts, parts in (
        ("hello", ("texts='hello'", "give a list of texts")),
        (None, ("texts=None is no list", "give a list of texts")),
        ([None], ("texts[0] has text=None", "which is no text", "fix the row")),
        (["a", "\ud800"], ("texts[1]", "\\ud800", "fix the row")),
        (["a", ""], ("texts[1] has text=''", "fix the row")),
    ):
        check_message(refusal(adapted.predict, texts), *parts)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"support": []}, ("support=[] holds no rows", "give pairs")),
        ({"support": ""}, ("support=''", "give one, or pairs of text and class")),
        ({"support": None}, ("support=None", "give one, or pairs of text and class")),
        ({"support": 5}, ("support=5 holds no rows", "give pairs")),
        ({"support": [("a",)]}, ("support[0]=('a',)", "give (text, label) or {'text': ...")),
        ({"support": ["ab", "cd"]}, ("support[0]='ab'", "give (text, label) or {'text': ...")),
        ({"support": [("a", "x"), ("b", None)]}, ("support[1] has label=None", "fix the row")),
        ({"support": [("a", "x"), ("b", float("nan"))]}, ("support[1] has label=nan", "fix the row")),
        ({"support": [("a", "x"), ("\ud800b", "y")]}, ("support[1]", "\\ud800", "fix the row")),
        (
            {"support": [{"words": "a", "label": "x"}]},
            ("support: the data has none", "it has label, words", "--text_column"),
        ),
        ({"support": [("a", "x"), ("b", "x")]}, ("support has one", "give examples of two or more")),
        ({"query": ["ab"]}, ("query[0]='ab'", "give (text, label) or {'text': ...")),
        ({"query": []}, ("query=[] holds no rows", "give pairs")),
        ({"query": [("a", "z")]}, ("query: the query set has the class", "add some")),
        (
            {"query": [{"words": "a", "class": "b"}]},
            ("query: the data has none of the columns", "name one with --text_column"),
        ),
        ({"inner_step": 3}, ("inner_step=3", "did you mean inner_steps?")),
        ({"quite_else": 3}, ("quite_else=3", "leave it out")),
        ({"inner_steps": "3"}, ("inner_steps='3'", "give one")),
        ({"inner_steps": 1.5}, ("inner_steps=1.5", "give one")),
        ({"inner_steps": True}, ("inner_steps=True", "give one")),
        ({"inner_lr": "0.1"}, ("inner_lr='0.1'", "give one")),
        ({"early_stopping": "false"}, ("early_stopping='false'", "give one")),
        ({"micro_batch_size": None}, ("micro_batch_size=None", "give one")),
        ({"text_column": ["a"]}, ("text_column=['a']", "give one")),
        ({"micro_batch_size": 0}, ("micro_batch_size=0", "use 1 or more")),
        # of a classifier
        ({"max_new_tokens": 7}, ("max_new_tokens=7", "a classifier gives classes", "leave it out")),
        ({"group_size": "2"}, ("group_size=2", "leave them out")),
    ],
)
def test_bad_data_and_settings_from_python_are_refused(given, parts):
    check_message(refusal(fmmeta.adapt, "tiny", **{"support": PAIRS, **given}), *parts)


@pytest.mark.parametrize("name", ["support", "query"])
def test_missing_columns_are_of_the_file_that_lacks_them(name, tmp_path):
    file = write_rows(tmp_path / "rows.csv", [{"words": "a", "class": "b"}])
    for more, parts in (
        ({}, (f"{name}={file}: the data has none of the columns", "name one with --text_column")),
        ({"text_column": "title"}, ("text_column=title", f"{name}={file}")),
    ):
        sets = {"support": PAIRS, "query": PAIRS, name: file}
        check_message(refusal(fmmeta.adapt, "tiny", **sets, **more), *parts)


def test_reprs_are_one_line(bert, tmp_path):
    flags = {"output_dir": tmp_path / "out", "inner_steps": 2, "early_stopping": False}
    adapted = fmmeta.adapt(bert, PAIRS, query=PAIRS[:3], **flags)
    assert (
        repr(adapted) == f"AdaptedModel(base={str(bert)!r}, task_type='classification',"
        f" labels={adapted.labels}, inner_steps=2, left_out=None, accuracy={adapted.accuracy:.4f},"
        f" output_dir={str(tmp_path / 'out')!r})"
    )
    results = fmmeta.evaluate(bert, "letters", method=["prototype", "knn"], k_shot=[1], episodes=3)
    first, second = (
        f"{cell['method']} {cell['k_shot']}-shot accuracy {100 * cell['accuracy']:.2f} ±"
        f" {100 * cell['ci95']:.2f} %"
        for cell in results["cells"]
    )
    assert (
        repr(results) == f"EvaluationResults({str(bert)!r}, 3 episodes of the test split: {first}, {second})"
    )
    assert json.loads(json.dumps(results)) == results
    config = Config(dataset=["letters"])
    train = load_sources(config, byte_tokenizer(), print).train
    assert repr(train) == "ClassSource(140 items, 7 strata)"
    assert repr(fmmeta.MetaTrainer(config)) == f"MetaTrainer({config!r})"


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        ("", KeyboardInterrupt, None),
        ("of another process", KeyboardInterrupt, None),
        ("of another process", UsageError, "out is not empty.*; choose"),
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_unfinished_folder_is_removed(tmp_path, monkeypatch, there, other, error, text):
    """But files of another process, which appear while the task is learned, stay as they are."""
    out = tmp_path / "out"

    def write_card(*_):  # after the weights
        if other:
            (out / other).write_text("")
        if error is KeyboardInterrupt:
            raise error

    monkeypatch.setattr("fmmeta.adaptation.folder.write_card", write_card)
    if there:
        out.mkdir()
    with pytest.raises(error, match=text):
        fmmeta.adapt("tiny", PAIRS, output_dir=out, **ONE_STEP)
    left = [out, out / other] if other else [out] if there else []
    assert [*tmp_path.rglob("*")] == left


def test_what_a_killed_command_left_is_removed(tmp_path):
    """As of one of several tasks; nothing else is."""
    out, other = tmp_path / "out", tmp_path / "out" / ".partial"
    (out / f".out{PARTIAL}" / "out").mkdir(parents=True)
    other.mkdir()
    learn = partial(fmmeta.adapt, "tiny", PAIRS, output_dir=out, **ONE_STEP)
    check_message(refusal(learn), "is not empty (.partial)", "choose another")
    other.rmdir()
    learn()
    assert (out / "config.json").is_file()
    assert not [*out.glob(".*")]


def test_a_folder_in_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "monotonic", itertools.count(0, 6).__next__)  # the lock is waited for
    with closing(lock_folder(tmp_path / "out")):
        message = refusal(fmmeta.adapt, "tiny", PAIRS, output_dir=tmp_path / "out")
    message = re.sub(r"process \d+ on \S+;", "process 1;", message)
    check_message(message, f"output_dir={tmp_path / 'out'} is in use by process 1", "choose another")


def test_sigterm_during_adaptation_leaves_no_folder(bert, tmp_path):
    support = write_rows(tmp_path / "rows.jsonl", rows_of([*PAIRS, PAIRS[0]]))
    flags = {"model_name_or_path": bert, "support": support, "inner_steps": 10**6}
    flags["output_dir"] = tmp_path / "out"
    words = ["-m", "fmmeta", "adapt", *(f"--{key}={value}" for key, value in flags.items())]
    process = shared().start(words, tmp_path / "log", environment())
    until(lambda: "repeat another one" in process.text or shared().poll(), 200)  # the data are read
    assert (tmp_path / "out").is_dir()
    shared().signal(process, signal.SIGTERM)
    assert shared().wait([process], 60) == [75]
    check_message(process.text.splitlines()[-1], "SIGTERM", "not finished are removed")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("template", ["plain", "Q: {input}\\nA:"])
def test_an_answer_that_is_longer_than_max_length_is_refused(template, llama, tmp_path):
    """The longest answer that fits is learned; one with a token more would lose its end."""
    settings = {"task_type": "causal_lm", "max_length": 32, "prompt_template": template, **ONE_STEP}
    fits = [("a", "b" * 29), ("c", "d")]  # with a space before it and the end of the text: 31 tokens
    fmmeta.adapt(llama, fits, **settings)
    empty = write_rows(tmp_path / "support.jsonl", [{"input": "a", "output": ""}])
    cut = "support=pairs", "32 tokens", "max_length=32 has room for 31", "raise --max_length"
    for support, parts in (
        ([("a", "b" * 30), ("c", "d")], cut),
        (str(empty), (f"{empty}:1 has output=''", "fix")),
    ):
        check_message(refusal(fmmeta.adapt, llama, support, **settings), *parts)


def test_adapt_takes_inner_steps_on_samples_of_the_support_set(bert):
    """Samples give other weights than the whole set, the same ones every time, and the task is learned."""
    rows = [(f"{word} {other}", word) for word in WORDS[:3] for other in WORDS[3:13]]
    settings = {"inner_steps": 12, "early_stopping": False}
    whole, sampled, again, all_rows = (
        scores_of(fmmeta.adapt(bert, rows, query=rows, **settings, **more).predictions)
        for more in ({}, {"support_batch_size": 4}, {"support_batch_size": 4}, {"support_batch_size": 30})
    )
    assert whole == all_rows != sampled == again
    adapted = fmmeta.adapt(bert, rows, query=rows, support_batch_size=4, inner_steps=12)
    assert adapted.accuracy == 1.0


def test_a_generated_answer_is_right_apart_from_spaces_around_it():
    """What `generate` returns has none; a class is right if its name is the same."""
    found = [Answer("a", "x", None, "x "), Answer("b", "y", None, "z"), Answer("c", "x ", 0.9, "x ")]
    assert AdaptedModel((), 1, None, None, found).accuracy == pytest.approx(2 / 3)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def adapted(bert, tmp_path_factory):
    """A folder that `adapt` wrote, and its answers to TEXTS."""
    folder = tmp_path_factory.mktemp("adapted") / "out"
    flags = {"inner_steps": 4, "inner_lr": 0.5, "early_stopping": False}
    model, loaded = fmmeta.adapt(bert, PAIRS, output_dir=folder, **flags), fmmeta.load(folder)
    assert (loaded.output_dir, loaded.inner_steps, loaded.left_out) == (str(folder), 4, None)
    assert loaded.labels == model.labels == tuple(NAMES)
    return folder, [one.as_dict() for one in model.predict(TEXTS)]


def answers(folder, source, tmp_path, output="answers.jsonl", **settings):
    target = tmp_path / output
    predict.run(PredictConfig(str(folder), input=str(source), output=str(target), **settings))
    return [json.loads(line) for line in target.read_text().splitlines()]


def same(found, expected):
    assert found == [{**one, "score": pytest.approx(one["score"], abs=1e-4)} for one in expected]


def lines_of_text(*texts):
    return "\n".join(texts).encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *((f"a{ending}", None) for ending in (".jsonl", ".csv", ".parquet", ".csv.gz", ".parquet.gz")),
        ("a.txt", lines_of_text(*TEXTS)),
        # a byte order mark, before text and before JSON
        ("a.txt", b"\xef\xbb\xbf" + lines_of_text(*TEXTS).replace(b"\n", b"\r\n")),
        ("a.jsonl", b"\xef\xbb\xbf" + lines_of_text(*(json.dumps({"text": text}) for text in TEXTS))),
        ("a.txt.gz", gzip.compress(lines_of_text(*TEXTS), mtime=0)),
    ],
)
def test_predict_reads_the_files_that_adapt_reads_and_lines_of_text(adapted, tmp_path, name, data):
    folder, expected = adapted
    if data is None:
        write_rows(tmp_path / name, [{"Label": "not read", "Text": text} for text in TEXTS])
    else:
        (tmp_path / name).write_bytes(data)
    same(answers(folder, tmp_path / name, tmp_path), expected)


def test_numbers_are_texts_as_they_are_in_data(adapted, tmp_path):
    rows = write_rows(tmp_path / "a.jsonl", [{"text": 7, "label": 0}, {"text": 2.5}])
    words = write_rows(tmp_path / "b.jsonl", [{"text": "7"}, {"text": "2.5"}])
    found = answers(adapted[0], rows, tmp_path)
    assert found == answers(adapted[0], words, tmp_path)
    same([one.as_dict() for one in fmmeta.load(adapted[0]).predict([7, 2.5])], found)
    missing = write_rows(tmp_path / "c.jsonl", [{"text": None}])
    check_message(refusal(answers, adapted[0], missing, tmp_path), "1 has text=None", "fix the row")


def test_standard_streams_are_utf_8_in_every_locale(adapted, monkeypatch):
    out, text = io.BytesIO(), "größe 雪"

    def run(given):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="latin-1"))
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
        predict.run(PredictConfig(str(adapted[0])))

    for given in (text, "\ufeff" + json.dumps({"text": text}, ensure_ascii=False)):  # a byte order mark
        run(given.encode())
    found = [json.loads(line)["text"] for line in out.getvalue().decode().splitlines()]
    assert found == [text, text]
    check_message(refusal(run, b"a\n\xff\n"), "input is not UTF-8", "convert it")


@pytest.mark.parametrize("use", [fmmeta.load, lambda folder: predict.run(PredictConfig(str(folder)))])
def test_load_and_predict_refuse_a_folder_without_a_model(tmp_path, use):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name, parts in (
        ("none", (f"{tmp_path}/none is no folder", "fmmeta adapt wrote")),
        ("file", (f"{tmp_path}/file is no folder",)),
        ("", ("holds neither config.json nor adapter_config.json", "adapt writes")),
        ("run", ("holds neither", f"fmmeta adapt on {tmp_path}/run/model")),
    ):
        check_message(refusal(use, tmp_path / name), *parts)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("equal_classes", True, "leave it out"),
        ("input", "a.csv", "leave it out"),
        ("text_column", "words", "leave it out"),
        ("max_new_tokens", 3, "leave it out"),
        ("pooled", "mean", "did you mean pooling?"),
    ],
)
def test_load_refuses_settings_that_it_does_not_use(adapted, name, value, remedy):
    check_message(refusal(fmmeta.load, adapted[0], **{name: value}), f"{name}={value!r}", remedy)


@pytest.mark.parametrize(
    ("texts", "settings", "parts"),
    [
        *((["a"], {"max_new_tokens": count}, (f"max_new_tokens={count}",)) for count in (0, -1, 1.5)),
        (["a"] * 2, {"equal_classes": True}, ("equal_classes=True", "2 inputs", "3 classes")),
    ],
)
def test_a_loaded_model_refuses_what_it_cannot_answer(adapted, texts, settings, parts):
    check_message(refusal(fmmeta.load(adapted[0]).predict, texts, **settings), *parts)


@pytest.mark.parametrize(
    ("name", "data", "parts"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "\\ud800"}\n',
            ["2 has half of a surrogate pair", "fix the row"],
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": [5]}\n',
            ["2 has text=[5], which is no text", "fix the row"],
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text": ""}\n', ["2 has text=''", "fix the row"]),
        ("a.csv", b"text,label\na,x\n,y\n", ["3 has text=''", "fix the row"]),
        (
            "a.csv",
            b"Words,label\nx,y\n",
            ["2 has none of the columns text, sentence, utterance", "name one with --text_column"],
        ),
        ("a.csv", b"text,label\nx\n", ["2 has another number of fields", "fix the line"]),
        ("a.txt", b"x\n\xff\n", ["a.txt is not UTF-8 at line"]),
        ("a.jsonl", b'{"text": "a"}\n[1, 2]\n', ["2 is no JSON object", "write"]),
        ("a.jsonl", b"", ["is empty", "fill it"]),
        ("a.csv", b"text,label\n", ["is empty", "fill it"]),
        ("a.txt.gz", b"plain", ["'pl'", "cannot be read", "fix it, or give another file"]),
    ],
)
def test_unreadable_input_leaves_earlier_answers_unchanged(adapted, tmp_path, name, data, parts):
    source, target = tmp_path / name, tmp_path / "answers.jsonl"
    source.write_bytes(data)
    target.write_text("of before")
    check_message(refusal(answers, adapted[0], source, tmp_path, micro_batch_size=1), *parts)
    assert target.read_text() == "of before"
    assert {path.name for path in tmp_path.iterdir()} == {name, "answers.jsonl"}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.parquet", "a.txt.gz"])
def test_a_file_beyond_the_bound_of_commands_without_max_file_gib(bert, adapted, tmp_path, monkeypatch, name):
    monkeypatch.setattr(security, "MOST_GIB", 2e-8)  # 21 bytes
    path = tmp_path / name
    rows = [{"text": text, "label": label} for text, label in PAIRS]
    if name == "a.txt.gz":
        path.write_bytes(gzip.compress("\n".join(TEXTS).encode()))
    else:
        check_message(
            refusal(fmmeta.adapt, bert, write_rows(path, rows)), "more than 2e-08 GiB", "split the file"
        )
    check_message(refusal(answers, adapted[0], path, tmp_path), "more than 2e-08 GiB", "split the file")


def test_answers_never_replace_the_input(tmp_path):
    path, link = write_rows(tmp_path / "same.jsonl", [{"text": "a"}]), tmp_path / "link.jsonl"
    link.symlink_to(path)
    for other in (path, link):
        check_message(
            refusal(PredictConfig, "x", input=str(path), output=str(other)),
            f"output={other}",
            "give another file",
        )


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_rows_are_read_as_they_are_answered(name, adapted, tmp_path):
    source = write_rows(tmp_path / name, [{"text": "first"}])
    with source.open("a") as file:
        file.write('second,"')
    found = predict.inputs_of(PredictConfig("x", input=str(source)), fmmeta.load(adapted[0]).loaded)
    assert next(found).text == "first"
    check_message(refusal(next, found), f"{source}:", "fix the line")


def test_some_inputs_at_a_time_are_encoded(adapted, monkeypatch):
    texts = [f"{text} {n}" for n in range(12) for text in TEXTS]
    loaded = fmmeta.load(adapted[0], micro_batch_size=2)
    wanted = loaded.predict(texts)
    calls = recorded(monkeypatch, NativeClassifier, "encode")
    monkeypatch.setattr(models, "PASSES", 2)
    found = loaded.predict(texts)
    assert [len(one.args[2]) for one in calls] == [4] * (len(texts) // 4)
    same([one.as_dict() for one in found], [one.as_dict() for one in wanted])


def test_an_output_that_cannot_be_written_is_refused_first(adapted, tmp_path, monkeypatch):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    assert len(answers(adapted[0], source, tmp_path, "new/folder/answers.jsonl")) == 1
    monkeypatch.setattr(predict, "load", lambda *_: pytest.fail("loaded before the check"))
    for target, reason in (("", "is a folder"), ("a.jsonl/b", "is no folder")):
        check_message(
            refusal(answers, adapted[0], source, tmp_path, target),
            f"output={tmp_path / target}",
            reason,
            "give a",
        )


def test_an_untrained_head_is_refused(bert, tmp_path):
    """The built-in model, an encoder without a head, a head beside the model's own, and what a meta-trained
    run leaves.
    """
    run = with_settings(bert, tmp_path / "run", algorithm="fomaml", head_init="zero", n_way=5)
    plain = shutil.copytree(bert, tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    for name, pooling in (("tiny", "auto"), (plain, "auto"), (bert, "mean"), (run, "auto")):
        check_message(
            refusal(predict.load, PredictConfig(str(name), pooling=pooling)),
            f"model_name_or_path={name}",
            "run fmmeta adapt first",
        )


def test_a_head_trained_with_other_pooling_or_another_length_of_features_is_refused(bert, adapted, tmp_path):
    """A folder is read with the settings that it was adapted with, and its head must be there."""
    mean = tmp_path / "mean"
    settings = {"pooling": "mean", "feature_norm": 3.0, "inner_steps": 1, "early_stopping": False}
    fmmeta.adapt(bert, PAIRS, output_dir=mean, **settings)

    def load(folder, **settings):
        return predict.load(PredictConfig(str(folder), **settings)).loaded

    for folder, own, others in ((adapted[0], "model", ("mean", "cls")), (mean, "mean", ("model", "cls"))):
        for other in others:
            check_message(
                refusal(load, folder, pooling=other),
                f"pooling={other}",
                f"={folder}",
                f"{own}",
                f"use --pooling {own}",
            )
        assert load(folder, pooling=own).description.pooling == own
    check_message(
        refusal(load, mean, feature_norm=30.0),
        "feature_norm=30.0 does not fit",
        "was trained with 3.0",
        "leave it out",
    )
    assert load(mean, feature_norm=3.0).config.feature_norm == 3
    (mean / "head.safetensors").unlink()
    check_message(refusal(load, mean), f"model_name_or_path={mean}", "fetch it again")


def test_a_classifier_not_made_by_fmmeta_answers(bert):
    model = AutoModelForSequenceClassification.from_pretrained(bert).eval()
    logits = model(**byte_tokenizer()(TEXTS, padding=True, return_tensors="pt")).logits
    found = predict.load(PredictConfig(str(bert))).predict(TEXTS)
    assert [one.output for one in found] == [f"LABEL_{place}" for place in logits.argmax(1).tolist()]


def test_equal_classes_spreads_inputs_evenly(adapted, tmp_path):
    """Sinkhorn by hand, in numpy, from the model's probabilities; from Python the same."""
    texts = [f"{word} {other}" for word in WORDS[:2] for other in WORDS[10:16]]
    model, source = fmmeta.load(adapted[0]), write_rows(tmp_path / "a.csv", [{"text": one} for one in texts])
    found = model.loaded.respond(model.loaded.encode([{"text": text} for text in texts], {}), 1, 2)
    shares = torch.stack([logits for logits, _ in found]).double().softmax(1).numpy()
    scores = shares.max(1)
    for _ in range(10):
        shares /= shares.sum(0)
        shares /= shares.sum(1, keepdims=True)
    assert scores != pytest.approx(shares.max(1), abs=1e-2)
    even = answers(adapted[0], source, tmp_path, equal_classes=True, micro_batch_size=5)
    wanted = [
        {"text": text, "label": model.labels[row.argmax()], "score": row.max()}
        for text, row in zip(texts, shares, strict=True)
    ]
    same(even, wanted)
    same([one.as_dict() for one in model.predict(texts, equal_classes=True)], wanted)


def test_equal_classes_needs_classes(llama):
    language = fmmeta.load(llama, task_type="causal_lm")
    check_message(
        refusal(language.predict, ["a"], equal_classes=True),
        "equal_classes=True",
        "language model",
        "leave it out",
    )


ADAPTERS, A_MODEL = {"adapters": str(Path(__file__).parent)}, {"model_name_or_path": "x"}


@pytest.mark.parametrize(
    ("name", "value", "of", "other"),
    [
        ("task_type", "causal_lm", ADAPTERS, A_MODEL),
        ("pooling", "mean", ADAPTERS, A_MODEL),
        ("feature_norm", 0.0, ADAPTERS, A_MODEL),
        ("max_length", 64, ADAPTERS, A_MODEL),
        ("prompt_template", "plain", ADAPTERS, A_MODEL),
        ("equal_classes", True, ADAPTERS, A_MODEL),
        ("adapter_column", "customer", A_MODEL, ADAPTERS),
        ("adapters_in_memory", 2, A_MODEL, ADAPTERS),
        ("max_length", 0, A_MODEL, {}),
    ],
)
def test_settings_of_a_model_and_of_adapters_exclude_each_other(name, value, of, other):
    """Adapters store those of their model."""
    message = refusal(PredictConfig, **of, **{name: value})
    check_message(message, f"{name}={value}", "leave it out" if other else "use 4 or more")
    if other:
        assert next(iter(of)) in message
        PredictConfig(**other, **{name: value})


@pytest.mark.parametrize("equal_classes", [False, True])
def test_nonfinite_scores_are_refused(bert, tmp_path, equal_classes):
    broken = shutil.copytree(bert, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["classifier.bias"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    model = predict.load(PredictConfig(str(broken)))
    check_message(
        refusal(model.predict, ["a"] * 15, equal_classes=equal_classes),
        f"model_name_or_path={broken}",
        "'a'",
        "adapt it with a lower --inner_lr",
    )


def test_a_text_without_tokens_is_refused(bert, tmp_path):
    """A tokenizer that adds no special tokens and drops blanks."""
    folder, tokenizer = shutil.copytree(bert, tmp_path / "plain"), byte_tokenizer(128)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    tokenizer.save_pretrained(folder)
    single = predict.load(PredictConfig(str(folder)))
    assert len(single.predict(["a"])) == 1
    check_message(
        refusal(single.predict, ["a", " "]), "text='", f"model_name_or_path={folder}", "fix or remove it"
    )


def test_answers_are_a_table_in_a_csv_file(adapted, tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": 'say "river,\nstone"'}, {"text": "stone"}])
    wanted, table = answers(adapted[0], source, tmp_path), tmp_path / "b.CSV"
    predict.run(PredictConfig(str(adapted[0]), input=str(source), output=str(table)))
    with table.open(newline="") as file:
        found = [{**row, "score": float(row["score"])} for row in csv.DictReader(file)]
    assert found == wanted
    assert list(found[0]) == ["text", "label", "score"]


@pytest.mark.parametrize("task_type", ["classification", "causal_lm"])
def test_predict_reads_the_column_that_adapt_reads(bert, llama, adapted, tmp_path, task_type):
    """Of rows with columns of both kinds of task."""
    folder, column = (llama, "input") if task_type == "causal_lm" else (adapted[0], "text")
    row = {"question": "0", "prompt": "a", "input": "b", "sentence": "c", "text": "d"}
    source = write_rows(tmp_path / "a.csv", [{**row, "label": "x"}])
    config = Config(model_name_or_path=str(bert), task_type=task_type)
    table = read_task("support", str(source), config, print)
    for settings, wanted in (({}, table.input), ({"text_column": "question"}, ["0"])):
        found = answers(folder, source, tmp_path, task_type=task_type, max_new_tokens=2, **settings)
        assert [one[column] for one in found] == wanted


def restore_sigint() -> None:
    """What a shell starts in the background ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def started(adapted, tmp_path):
    """Starts the command on a pipe: its process, the pipe, and the file of its errors."""
    given, errors = fifo(tmp_path / "given"), tmp_path / "errors"
    words = ["-m", "fmmeta", "predict", f"--model_name_or_path={adapted[0]}"]

    def start(out, *more, **how):
        process = shared().start([*words, *more], out, environment(), errors=errors, stdin=given, **how)
        return process, given.open("w", buffering=1), errors

    return start


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("leave", "code", "error"), [("closed", 141, ""), ("interrupted", 130, "fmmeta: interrupted")]
)
def test_a_closed_pipe_and_ctrl_c_end_predict_without_traceback(started, tmp_path, leave, code, error):
    """As `fmmeta predict | head -1` does, and Ctrl-C while standard input is waited for."""
    out = fifo(tmp_path / "out")
    process, stdin, errors = started(out, before=f"{__name__}:{restore_sigint.__name__}")
    with stdin, out.open() as stdout:
        stdin.write("first\n")
        assert json.loads(stdout.readline())["text"] == "first"
        if leave == "closed":
            stdout.close()
            stdin.write("second\n")
        else:
            shared().signal(process, signal.SIGINT)
        assert shared().wait([process], 60) == [code]
    assert errors.read_text().strip() == error


def test_a_stop_removes_incomplete_answers(started, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    file = folder / "answers.jsonl"
    file.write_text("earlier\n")
    process, stdin, errors = started(tmp_path / "log", f"--output={file}")
    with stdin:
        stdin.write("first\n")
        until(lambda: any(one.stat().st_size for one in folder.glob(".answers*.tmp")) or shared().poll(), 200)
        shared().signal(process, signal.SIGTERM)
        assert shared().wait([process], 60) == [75]
    said = errors.read_text().strip()
    check_message(said, "fmmeta: stopped by SIGTERM", "outputs that were not finished are")
    assert [one.name for one in folder.iterdir()] == ["answers.jsonl"]
    assert file.read_text() == "earlier\n"
