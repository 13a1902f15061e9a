"""`fmmeta predict`: every file that `adapt` reads, answers that appear when they are whole, and models that
cannot answer.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers, processors
from transformers import AutoModelForSequenceClassification

import fmmeta
from fmmeta.adaptation import model as models
from fmmeta.adaptation import predict
from fmmeta.adaptation.task_learner import read_task
from fmmeta.cli import parse
from fmmeta.common import security
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import EvaluateConfig, PredictConfig, TuneConfig
from fmmeta.learners.classification import NativeClassifier
from fmmeta.learners.tiny import byte_tokenizer
from harness.fork_server import shared
from tests.support.helpers import recorded, refusal, write_rows
from tests.support.launch import environment
from tests.support.messages import check_message
from tests.support.models import WORDS, with_settings
from tests.support.short_runs import until

PAIRS = [(f"{word} {other}", f"class {word}") for word in WORDS[:3] for other in WORDS[5:9]]
TEXTS = [f"{word} {WORDS[10]}" for word in WORDS[:3]]


@pytest.fixture(scope="module")
def adapted(bert, tmp_path_factory):
    """A folder that `adapt` wrote, and its answers to TEXTS."""
    folder = tmp_path_factory.mktemp("adapted") / "out"
    model = fmmeta.adapt(bert, PAIRS, output_dir=folder, inner_steps=4, inner_lr=0.5, early_stopping=False)
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


def test_load_answers_as_the_model_that_was_saved(adapted):
    folder, expected = adapted
    model = fmmeta.load(folder, micro_batch_size=2)
    same([one.as_dict() for one in model.predict(TEXTS)], expected)
    assert model.labels == tuple(sorted({label for _, label in PAIRS}))
    assert (model.output_dir, model.inner_steps, model.left_out) == (str(folder), 4, None)


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
        message = refusal(fmmeta.adapt, bert, write_rows(path, rows))
        check_message(message, "more than 2e-08 GiB", "split the file")
    check_message(refusal(answers, adapted[0], path, tmp_path), "more than 2e-08 GiB", "split the file")


def test_answers_never_replace_the_input(tmp_path):
    path, link = write_rows(tmp_path / "same.jsonl", [{"text": "a"}]), tmp_path / "link.jsonl"
    link.symlink_to(path)
    for other in (path, link):
        message = refusal(PredictConfig, "x", input=str(path), output=str(other))
        check_message(message, f"output={other}", "give another file")


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
        message = refusal(answers, adapted[0], source, tmp_path, target)
        check_message(message, f"output={tmp_path / target}", reason, "give a")


def test_an_untrained_head_is_refused(bert, tmp_path):
    """The built-in model, an encoder without a head, a head beside the model's own, and what a meta-trained
    run leaves.
    """
    run = with_settings(bert, tmp_path / "run", algorithm="fomaml", head_init="zero", n_way=5)
    plain = shutil.copytree(bert, tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    for name, pooling in (("tiny", "auto"), (plain, "auto"), (bert, "mean"), (run, "auto")):
        message = refusal(predict.load, PredictConfig(str(name), pooling=pooling))
        check_message(message, f"model_name_or_path={name}", "run fmmeta adapt first")


def test_a_head_trained_with_other_pooling_or_another_length_of_features_is_refused(bert, adapted, tmp_path):
    """A folder is read with the settings that it was adapted with, and its head must be there."""
    mean = tmp_path / "mean"
    settings = {"pooling": "mean", "feature_norm": 3.0, "inner_steps": 1, "early_stopping": False}
    fmmeta.adapt(bert, PAIRS, output_dir=mean, **settings)

    def load(folder, **settings):
        return predict.load(PredictConfig(str(folder), **settings)).loaded

    for folder, own, others in ((adapted[0], "model", ("mean", "cls")), (mean, "mean", ("model", "cls"))):
        for other in others:
            message = refusal(load, folder, pooling=other)
            check_message(message, f"pooling={other}", f"={folder}", f"{own}", f"use --pooling {own}")
        assert load(folder, pooling=own).description.pooling == own
    message = refusal(load, mean, feature_norm=30.0)
    check_message(message, "feature_norm=30.0 does not fit", "was trained with 3.0", "leave it out")
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
    message = refusal(language.predict, ["a"], equal_classes=True)
    check_message(message, "equal_classes=True", "language model", "leave it out")


@pytest.mark.parametrize(
    ("flag", "value"), [("--lora_r", "4"), ("--head_init", "zero"), ("--gradient_checkpointing", "true")]
)
def test_flags_that_predict_does_not_use_are_refused(flag, value):
    words = ["--model_name_or_path", "x", flag, value]
    assert f"{flag} is not a flag" in refusal(parse, words, "predict")


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
    message = refusal(model.predict, ["a"] * 15, equal_classes=equal_classes)
    check_message(message, f"model_name_or_path={broken}", "'a'", "adapt it with a lower --inner_lr")


def test_a_text_without_tokens_is_refused(bert, tmp_path):
    """A tokenizer that adds no special tokens and drops blanks."""
    folder, tokenizer = shutil.copytree(bert, tmp_path / "plain"), byte_tokenizer(128)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    tokenizer.save_pretrained(folder)
    single = predict.load(PredictConfig(str(folder)))
    assert len(single.predict(["a"])) == 1
    message = refusal(single.predict, ["a", " "])
    check_message(message, "text='", f"model_name_or_path={folder}", "fix or remove it")


def test_answers_are_a_table_in_a_csv_file(adapted, tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": 'say "river,\nstone"'}, {"text": "stone"}])
    wanted, table = answers(adapted[0], source, tmp_path), tmp_path / "b.CSV"
    predict.run(PredictConfig(str(adapted[0]), input=str(source), output=str(table)))
    with table.open(newline="") as file:
        found = [{**row, "score": float(row["score"])} for row in csv.DictReader(file)]
    assert found == wanted
    assert list(found[0]) == ["text", "label", "score"]


@pytest.mark.parametrize(
    ("kind", "file", "written"),
    [
        (PredictConfig, "b.tsv", ".jsonl, .json or .csv"),
        (PredictConfig, "b.jsonl.gz", ".jsonl, .json or .csv"),
        (EvaluateConfig, "b.csv", ".json"),
        (TuneConfig, "b.yaml", ".json"),
    ],
)
def test_an_output_whose_ending_promises_another_format_is_refused(kind, file, written):
    data = {} if kind is PredictConfig else {"dataset": ["letters"]}
    message = refusal(kind, "model", **data, output=file)
    check_message(message, f"output={file} ends with", f"{written} is written", "change the ending")


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
