"""`fmmeta adapt` and `predict`: the exported folder equals a plain training loop; transformers loads it."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import closing
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

import fmmeta
from fmmeta.adaptation import command
from fmmeta.adaptation.folder import PARTIAL
from fmmeta.adaptation.model import AdaptedModel, Answer
from fmmeta.adaptation.task_learner import leave_out, read_task
from fmmeta.common.errors import UsageError
from fmmeta.common.security import CONTROL, printable
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import AdaptConfig, PredictConfig
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.sources.load import load_sources
from fmmeta.training.run_files import lock_folder
from harness.fork_server import shared
from tests.support.exports import run_python
from tests.support.helpers import fast_or_slow, refusal, write_rows
from tests.support.launch import environment, python
from tests.support.messages import check_message
from tests.support.models import WORDS, save_bert, with_settings
from tests.support.short_runs import until

PAIRS = [(f"{word} {other}", f"class {word}") for word in WORDS[:3] for other in WORDS[5:9]]
TEXTS = [f"{word} {WORDS[10]}" for word in WORDS[:3]]
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


def batch(texts):
    return byte_tokenizer()(texts, padding=True, return_tensors="pt")


def test_adapted_folder_equals_a_plain_training_loop(bert, tmp_path):
    out, flags = tmp_path / "out", {"inner_steps": 4, "inner_lr": 0.5, "early_stopping": False}
    adapted = fmmeta.adapt(bert, PAIRS, output_dir=out, **flags)
    assert (adapted.inner_steps, adapted.left_out, adapted.accuracy) == (4, None, None)
    model = AutoModelForSequenceClassification.from_pretrained(
        bert, num_labels=3, ignore_mismatched_sizes=True
    ).eval()
    for param in model.classifier.parameters():
        param.data.zero_()
    names = sorted({label for _, label in PAIRS})
    labels = torch.tensor([names.index(label) for _, label in PAIRS])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(**batch([text for text, _ in PAIRS])).logits, labels).backward()
        optimizer.step()
    folder = AutoModelForSequenceClassification.from_pretrained(out).eval()
    with torch.no_grad():
        ours, theirs = folder(**batch(TEXTS)).logits, model(**batch(TEXTS)).logits
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert folder.config.id2label == dict(enumerate(names))
    answers = adapted.predict(TEXTS)
    assert labels_of(answers) == [names[i] for i in theirs.argmax(1)]
    assert scores_of(answers) == pytest.approx(theirs.softmax(1).amax(1).tolist(), abs=1e-5)
    card = (out / "README.md").read_text()
    for part in (
        f"| base model | `{bert.name}` |",
        "| support | given in Python: 12 examples of 3 classes |",
        "library_name: transformers\npipeline_tag: text-classification\n",
        "- `class lantern`",
    ):
        assert part in card
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
    family, pooling = case
    source = shutil.copytree(encoder(family, request, tmp_path), tmp_path / "base")
    config = json.loads((source / "config.json").read_text())
    config["id2label"] = {0: "NEGATIVE", 1: "POSITIVE", 2: "NEUTRAL"}
    config["problem_type"] = "multi_label_classification"
    (source / "config.json").write_text(json.dumps(config))
    lora = {"lora_r": 2, "lora_merge": True} if pooling == "mean" else {}
    flags = {"inner_steps": 3, "inner_lr": 0.5, "early_stopping": False, "pooling": pooling, **lora}
    adapted = fmmeta.adapt(source, PAIRS, output_dir=tmp_path / "out", **flags)
    folder = tmp_path / "out" / "merged" if lora else tmp_path / "out"
    answers, pipe = adapted.predict(TEXTS), pipeline("text-classification", str(folder))
    card = (folder / "README.md").read_text()
    if pooling == "model":
        found = pipe(TEXTS)
        assert [one["label"] for one in found] == labels_of(answers)
        assert [one["score"] for one in found] == pytest.approx(scores_of(answers), abs=1e-5)
        assert "pipeline_tag" in card
    else:
        assert pipe(TEXTS, top_k=None) == [[], [], []]
        with pytest.raises(ValueError, match="empty sequence"):
            pipe(TEXTS)
        assert (folder / "head.safetensors").is_file()
        assert "pipeline_tag" not in card
    assert fmmeta.load(folder).predict(TEXTS) == answers or lora  # merged weights are rounded
    for part in ("library_name: fmmeta\n", "`fmmeta predict` loads them"):
        assert (part in card) == (pooling != "model")
    assert f"\n# {'out (merged)' if lora else 'out'}\n" in card.replace("\\", "")
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.suffix in (".md", ".json")]
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
    names = sorted({label for _, label in PAIRS})
    losses, right = torch.zeros(7), torch.zeros(7)
    for fold in range(2):
        held = [4 * c + fold for c in range(3)]
        kept = [i for i in range(12) if i not in held]
        model, head = AutoModel.from_pretrained(bert).eval(), torch.nn.Linear(32, 3)
        for param in head.parameters():
            param.data.zero_()
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=2.0)

        def loss_of(places, model=model, head=head):
            inputs = batch([PAIRS[i][0] for i in places])
            mask = inputs["attention_mask"][..., None]
            logits = head((model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1))
            labels = torch.tensor([names.index(PAIRS[i][1]) for i in places])
            return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()

        for step in range(7):
            if step:
                optimizer.zero_grad()
                loss_of(kept)[0].backward()
                optimizer.step()
            loss, accuracy = loss_of(held)
            losses[step] += loss.detach()
            right[step] += accuracy / 2
    assert adapted.inner_steps == 1 + int(losses[1:].argmin())
    assert adapted.left_out == pytest.approx(float(right[adapted.inner_steps]))


@pytest.mark.parametrize(("labels", "folds"), [("xxy", []), ("xyxyy", [[0, 1], [2, 3]])])
def test_a_class_with_one_example_gives_no_folds(labels, folds):
    task = read_task("support", [*zip("abcde"[: len(labels)], labels, strict=True)], Config(), print)
    assert leave_out(task, ["x", "y"]) == folds


def test_names_of_classes_are_learned_as_examples_and_never_left_out(bert):
    names = sorted({label for _, label in PAIRS})
    settings = {"inner_steps": 4, "inner_lr": 0.5, "early_stopping": False}
    named, as_rows, plain = (
        scores_of(fmmeta.adapt(bert, pairs, **settings, **more).predict(TEXTS))
        for pairs, more in (
            (PAIRS, {"label_names": "names"}),
            ([*PAIRS, *zip(names, names, strict=True)], {}),
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
    theirs, ours = fmmeta.adapt(bert, PAIRS, output_dir=out, **flags).predict(TEXTS), fmmeta.load(out)
    labels, scores = labels_of(theirs), scores_of(theirs)
    assert labels_of(ours.predict(TEXTS)) == labels
    assert scores_of(ours.predict(TEXTS)) == pytest.approx(scores, abs=1e-5)
    card = (out / "README.md").read_text()
    assert "library_name: peft\n" in card
    assert "pipeline_tag" not in card
    plain = run_python(card, out)["model"]  # the base has 15 classes, and the adapters 3
    for model in (plain, AutoModelForSequenceClassification.from_pretrained(out / "merged")):
        shares = model.eval()(**batch(TEXTS)).logits.detach().softmax(1)
        assert [model.config.id2label[i] for i in shares.argmax(1).tolist()] == labels
        assert shares.amax(1).tolist() == pytest.approx(scores, abs=1e-5)
    assert (out / "adapter_config.json").is_file()
    assert not (out / "model.safetensors").exists()
    assert [*tmp_path.iterdir()] == [out]


def test_exports_carry_the_files_of_their_checkpoint(llama, tmp_path):
    """All chat templates too; from adapters that are adapted again; not the tokens of another tokenizer."""
    model = shutil.copytree(llama, tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    tokenizer.add_tokens(["<eot>"])
    tokenizer.save_pretrained(model)
    hf = AutoModelForCausalLM.from_pretrained(model)
    hf.resize_token_embeddings(len(tokenizer) + 1)
    hf.save_pretrained(model)
    carried = {"added_tokens.json": {"<eot>": len(tokenizer) - 1}, "chat_template.json": {}}
    carried |= {"preprocessor_config.json": {"a": 1}, "processor_config.json": {}}
    carried |= {"config_sentence_transformers.json": {"prompts": {"query": "q: "}}}
    for name, content in carried.items():
        (model / name).write_text(json.dumps(content))
    flags = {"task_type": "causal_lm", "lora_r": 2, "lora_merge": True, "inner_steps": 1}
    for source, name in ((model, "one"), (tmp_path / "one", "two")):
        pairs = [("a", "b"), ("c", "d")]
        fmmeta.adapt(source, pairs, output_dir=tmp_path / name, early_stopping=False, **flags)
        for folder in (tmp_path / name, tmp_path / name / "merged"):
            assert {one: json.loads((folder / one).read_text()) for one in carried} == carried
            loaded = AutoTokenizer.from_pretrained(folder)
            assert loaded.chat_template == tokenizer.chat_template
            assert loaded.added_tokens_decoder == tokenizer.added_tokens_decoder
    (model / "added_tokens.json").write_text('{"<other>": 5}')
    fmmeta.adapt(model, pairs, output_dir=tmp_path / "three", early_stopping=False, **flags)
    assert not (tmp_path / "three" / "added_tokens.json").exists()


def test_adapters_of_the_builtin_model_can_be_moved(tmp_path):
    adapted = fmmeta.adapt("tiny", PAIRS, output_dir=tmp_path / "out", lora_r=4, **ONE_STEP)
    (tmp_path / "out").rename(tmp_path / "moved")
    answers = zip(fmmeta.load(tmp_path / "moved").predict(TEXTS), adapted.predict(TEXTS), strict=True)
    assert all(one.output == other.output for one, other in answers)


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


def test_builtin_model_with_a_learned_head_needs_no_hub(monkeypatch):
    requested = []
    monkeypatch.setattr("transformers.utils.cached_file", lambda name, *_, **__: requested.append(name))
    fmmeta.adapt("tiny", PAIRS, head_init="learned", **ONE_STEP)
    assert not requested


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

    def run(*words, stdin=""):
        return python(["-m", "fmmeta", *words], tmp_path, stdin=stdin)

    data = ["adapt", f"--model_name_or_path={bert}", f"--support={support}", f"--output_dir={out}"]
    ended = run(*data, f"--query={query}", "--inner_lr=0.5", "--inner_steps=10")
    assert ended.returncode == 0, ended.stderr
    predictions = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert rows_of((one["text"], one["truth"]) for one in predictions) == asked
    accuracy = sum(one["label"] == one["truth"] for one in predictions) / 4
    assert f"accuracy on {query}: {100 * accuracy:.1f} % of 4" in ended.stdout
    assert "right of examples that were left out" in ended.stdout
    (line,) = [line for line in ended.stdout.splitlines() if "repeat" in line]
    check_message(line, f"fmmeta: {support}: 2 of 14 rows", "left out")
    lines = f'{predictions[0]["text"]}\n\n{{"sentence": "{predictions[1]["text"]}"}}\n{{"words": "x"}}\n'
    ended = run("predict", f"--model_name_or_path={out}", stdin=lines)
    answers = [json.loads(line)["label"] for line in ended.stdout.splitlines()]
    assert answers == [one["label"] for one in predictions[:2]], ended.stderr
    assert ended.returncode == 2
    check_message(ended.stderr.strip(), "fmmeta: error: input line 4", "name one with --text_column")
    ended = run(*data)
    assert ended.returncode == 2
    check_message(ended.stderr.strip(), f"fmmeta: error: output_dir={out} is not empty", "choose another")


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


@pytest.mark.parametrize("setting", ["support", "query"])
@pytest.mark.parametrize("name", ["notes.txt", "notes.md"])
def test_a_text_without_columns_is_refused(name, setting, tmp_path):
    (tmp_path / name).write_text("{}")
    message = refusal(AdaptConfig, **{setting: str(tmp_path / name)})
    check_message(message, f"{setting}={tmp_path / name}", "convert it to one of them")


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: command.run(AdaptConfig(output_dir="out")), ("support is missing", "give --support")),
        (PredictConfig, ("model_name_or_path is missing", "give the folder that fmmeta adapt wrote")),
        (lambda: PredictConfig("x", input="nowhere"), ("input=nowhere", "or - for standard input")),
    ],
)
def test_commands_without_data_or_model_are_refused(call, parts):
    check_message(refusal(call), *parts)


def test_diverging_inner_loop_leaves_no_folder_that_was_not_there(bert, tmp_path):
    """The loss before the only step is finite, the loss after it is not."""
    (tmp_path / "there").mkdir()
    for name, stops, steps in (
        ("new/out", True, "examples left out is not finite after any of 2 "),
        ("there", False, "the support set is not finite after 1 "),
    ):
        flags = {"inner_lr": 3e38, "inner_steps": 1, "early_stopping": stops}
        message = refusal(fmmeta.adapt, bert, PAIRS, output_dir=tmp_path / name, **flags)
        check_message(message, "inner_lr=3e+38", steps, "lower --inner_lr")
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


def test_unfinished_folder_is_removed(tmp_path, monkeypatch):
    stopped = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("fmmeta.adaptation.folder.write_card", stopped)  # after the weights
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(KeyboardInterrupt):
            fmmeta.adapt("tiny", PAIRS, output_dir=tmp_path / name, **ONE_STEP)
    assert [*tmp_path.rglob("*")] == [tmp_path / "empty"]


@pytest.mark.parametrize(
    ("error", "text"), [(KeyboardInterrupt, None), (UsageError, "out is not empty.*; choose")]
)
def test_files_of_another_process_stay_as_they_are(tmp_path, monkeypatch, error, text):
    """They appear while the task is learned, and nothing is written beside them."""
    other = tmp_path / "out" / "of another process"

    def write_card(*_):
        other.write_text("")
        if error is KeyboardInterrupt:
            raise error

    monkeypatch.setattr("fmmeta.adaptation.folder.write_card", write_card)
    with pytest.raises(error, match=text):
        fmmeta.adapt("tiny", PAIRS, output_dir=tmp_path / "out", **ONE_STEP)
    assert [*other.parent.iterdir()] == [other]


def test_what_a_killed_command_left_is_removed(tmp_path):
    """As of one of several tasks; nothing else is."""
    out, other = tmp_path / "out", tmp_path / "out" / ".partial"
    (out / f".out{PARTIAL}" / "out").mkdir(parents=True)
    other.mkdir()
    message = refusal(fmmeta.adapt, "tiny", PAIRS, output_dir=out, **ONE_STEP)
    check_message(message, "is not empty (.partial)", "choose another")
    other.rmdir()
    fmmeta.adapt("tiny", PAIRS, output_dir=out, **ONE_STEP)
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
