"""What an application sees of fmmeta: results as data, log records, progress bars, libraries as it had set
them; models, tokenizers, data and metrics that it has made itself.
"""

import io
import json
import logging
import os
import re
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pandas
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

import fmmeta
from fmmeta import Callback, Config, MetaTrainer, Tasks, evaluate, inspection
from fmmeta.adaptation import model
from fmmeta.common.processes import restored_process
from fmmeta.common.progress import LOGGER, Progress, Warn, terminal_log
from fmmeta.learners import files
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.files import check_given_model, store_model
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.parallel.workers.zero import import_deepspeed
from fmmeta.tasks.batching import IGNORE, Batcher, Example, pack
from fmmeta.tasks.data.rows import rows_in_memory
from tests.support.helpers import write_rows
from tests.support.messages import check_message, check_text, refusal
from tests.support.models import WORDS, write_pairs
from tests.support.own_metric import f1
from tests.support.short_runs import QUICK, same

SHORT = {
    "n_way": 2,
    "k_shot": 1,
    "num_query": 1,
    "meta_batch_size": 1,
    "inner_steps": 1,
    "max_length": 16,
    "num_workers": "0",
    "outer_steps": 2,
    "eval_episodes": 2,
    "logging_steps": 1,
}
COLOURS = [("red", "colour"), ("blue", "colour"), ("one", "number"), ("two", "number")]


@pytest.fixture
def records():
    """Records of the logger, as an application's handler receives them."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    yield found
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(logging.NOTSET)


def test_adapt_has_the_precision_of_training_and_load_has_fp32(tmp_path, monkeypatch):
    """On hardware where bf16 is the default, which this pretends to be."""
    monkeypatch.setattr(model, "chosen_bf16", lambda config, *_: config.bf16 is not False)
    short = {"inner_steps": 1, "early_stopping": False, "output_dir": str(tmp_path / "task")}
    made = [fmmeta.adapt("tiny", COLOURS, **short), fmmeta.load(str(tmp_path / "task"))]
    found = [next(iter(one.loaded.worker.model.parameters())).dtype for one in made]
    assert found == [torch.bfloat16, torch.float32]


def test_the_result_has_the_log_history_and_the_held_out_table(tmp_path, capsys):
    """Messages are printed, because the application has not configured logging."""
    trainer = MetaTrainer(Config(**SHORT, output_dir=str(tmp_path)))
    result = trainer.train()
    assert f"fmmeta: output_dir {tmp_path}\n" in capsys.readouterr().out
    assert (LOGGER.level, LOGGER.propagate) == (logging.NOTSET, True)
    assert [type(handler) for handler in LOGGER.handlers] == [logging.NullHandler]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert result.log_history == [json.loads(line) for line in lines]
    assert [line["step"] for line in result.log_history] == [1, 2]
    assert result.held_out == json.loads((tmp_path / "run.json").read_text())["held_out"]
    assert result.held_out["gain"].keys() == {"accuracy", "loss"}
    assert result.after == result.held_out["after adaptation, meta-trained"]["accuracy"][0]
    assert repr(result).startswith(f"Result(output_dir='{tmp_path}', outer_steps=2, before=")
    assert "log_history=[2 lines], held_out={2 episodes}" in repr(result)
    assert trainer.train() == result  # the run is finished: its files are read


def test_messages_are_records_of_the_logger(bert, tmp_path, records, capsys):
    """An application that has configured logging gets the messages in its handlers alone; of quiet calls
    too.
    """
    MetaTrainer(Config(**SHORT | {"eval_episodes": 0}, output_dir=str(tmp_path))).train()
    said = [record.getMessage() for record in records]
    assert f"output_dir {tmp_path}" in said
    assert "fmmeta:" not in capsys.readouterr().out
    assert {record.levelno for record in records} == {logging.INFO}
    fmmeta.adapt(bert, COLOURS, inner_steps=2)
    assert any("inner steps" in record.getMessage() for record in records[len(said) :])
    assert capsys.readouterr() == ("", "")


def test_the_level_filters_messages(capsys):
    with terminal_log("warning"):
        Progress(True).notice("a notice")
        Progress(True).notice(Warn("a warning"))
        LOGGER.error("an error")
    assert capsys.readouterr() == ("fmmeta: a warning\n", "fmmeta: an error\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_bars_and_messages_above_them(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("LINES", "30")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    progress = Progress(True)
    with terminal_log():
        progress.line("outer step", 1, 8, "loss 0.5")
        progress.notice("a message")
        progress.line("validation", 0, 3)
        now = time.monotonic()
        for step in range(2, 7):
            monkeypatch.setattr(time, "monotonic", lambda step=step: now + 50 * step)
            progress.line("outer step", step, 8, "loss 0.5")
        progress.line("outer step", 8, 8, "loss 0.4")
    shown = terminal.getvalue()
    parts = "outer step:  12%", "fmmeta: a message\n", "validation:   0%", "loss 0.5  1:40 left]"
    check_text(shown, *parts)
    assert re.search("outer step: 100%.*loss 0.4", shown)
    assert not progress.bars  # a finished bar ends those below it, and itself


@pytest.mark.parametrize("module", ["fmmeta.learners.shared_prefix", "transformers.cache_utils"])
@pytest.mark.parametrize("kind", [FutureWarning, DeprecationWarning])
def test_a_deprecated_call_fails_the_tests(kind, module):
    with pytest.raises(kind):
        warnings.warn_explicit("it will be removed", kind, "file.py", 1, module=module)


def test_a_pipe_gets_plain_lines(capsys):
    progress = Progress(True)
    progress.line("outer step", 4, 4, "loss 0.4")
    progress.table("title", ["", "a"], [["row", "1"]])
    out = capsys.readouterr().out
    assert out.startswith("outer step 4/4  loss 0.4\n\ntitle\n")
    assert "\r" not in out


def state_of_libraries():
    from transformers.utils import logging as of_transformers

    names = ("transformers", "datasets", "DeepSpeed", "torch.distributed", "fmmeta")
    levels = {name: logging.getLogger(name).level for name in names}
    return dict(os.environ), levels, list(warnings.filters), of_transformers.is_progress_bar_enabled()


@pytest.fixture
def loud():
    """Libraries as an application may have set them, and not as fmmeta does."""
    import deepspeed  # noqa: F401
    from transformers.utils import logging as of_transformers

    bars, logger = of_transformers.is_progress_bar_enabled(), logging.getLogger("transformers")
    level = logger.level
    of_transformers.enable_progress_bar()
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(level)
    if not bars:
        of_transformers.disable_progress_bar()


def test_train_evaluate_adapt_and_load_restore_libraries_and_environment(tmp_path, loud, monkeypatch):
    monkeypatch.delenv("FMMETA_GLOBAL_RANK", raising=False)
    short = SHORT | {"eval_episodes": 0, "outer_steps": 1}
    uses = [
        MetaTrainer(Config(**short, output_dir=str(tmp_path / "run"))).train,
        lambda: fmmeta.evaluate("tiny", "letters", n_way=2, k_shot=1, episodes=2, method="prototype"),
        lambda: fmmeta.adapt("tiny", COLOURS, inner_steps=1, output_dir=tmp_path / "adapted"),
        lambda: fmmeta.load(tmp_path / "adapted"),
    ]
    before = state_of_libraries()
    for use in uses:
        use()
        assert state_of_libraries() == before


def test_deepspeed_is_quiet_only_inside_a_run(monkeypatch, loud):
    import deepspeed

    monkeypatch.setattr(deepspeed, "init_distributed", lambda **named: None)
    before = state_of_libraries()
    with restored_process():
        import_deepspeed()
        assert logging.getLogger("DeepSpeed").level == logging.ERROR
        assert list(warnings.filters) != before[2]
    assert state_of_libraries() == before


def test_a_failed_call_restores_the_environment(monkeypatch):
    before = state_of_libraries()
    with pytest.raises(fmmeta.UsageError):
        fmmeta.evaluate("/no/such/model", "letters")
    assert state_of_libraries() == before


def test_dir_lists_the_public_names():
    assert [name for name in dir(fmmeta) if not name.startswith("_")] == sorted(fmmeta.__all__)


ROWS = [{"text": f"{word} {other}", "label": word} for word in WORDS[:8] for other in WORDS[8:13]]
TABLE = datasets.Dataset.from_list(ROWS)
PAIRS = [(row["text"], row["label"]) for row in ROWS]
SETTINGS = {**QUICK, "num_workers": "0", "outer_steps": 2, "outer_lr": 1e-2, "lr_scheduler_type": "constant"}


def train(tmp_path, name, settings=None, **given):
    return MetaTrainer(
        Config(**SETTINGS | (settings or {}), output_dir=str(tmp_path / name)), **given
    ).train()


def test_rows_in_python_train_as_the_rows_of_a_file(tmp_path):
    """Pairs, a Dataset and a DatasetDict give the weights of a run over the same file; dictionaries are the
    same content as pairs in the next test.
    """
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"train": WORDS[:8]}))
    file, split = write_rows(tmp_path / "rows.jsonl", ROWS), {"class_splits": str(splits)}
    train(tmp_path, "file", {**split, "dataset": [str(file)]})
    for name, data in (
        ("pairs", PAIRS),
        ("encoded", TABLE.class_encode_column("label")),
        ("dict", datasets.DatasetDict(train=TABLE, test=TABLE.select([0]))),
    ):
        train(tmp_path, name, split, dataset=data)
        assert same(tmp_path / "file", tmp_path / name), name


def test_a_function_decides_about_the_shots_of_its_tasks(tmp_path, capsys):
    """Tables, verdict, card and report do not name the shots of the settings."""
    settings = {**DRAWN, "test_episodes": 2, "eval_steps": 0}
    result = train(tmp_path, "run", settings, dataset=TASKS)
    printed = capsys.readouterr().out
    assert "\n2 held-out 2-way episodes, 1 inner step" in printed
    card, report = ((tmp_path / "run" / name).read_text() for name in ("model/README.md", "report.html"))
    for text in (printed, result.verdict, card, report):
        assert not re.search(r"[\d ]shots?\b|\d-shot", text)
    assert "Mean of 2 2-way episodes and" in card
    assert "2 held-out 2-way episodes; " in report


def draw_rows(number):
    rows = [{"text": f"{WORDS[number % 8]} {other}", "label": other} for other in WORDS[8:10]]
    return rows * 2, rows


DRAWN = {"k_shot": Config.k_shot, "num_query": Config.num_query}  # by the function
TASKS = Tasks(draw_rows, train=8, valid=2, test=2)
GIVEN = "tests.unit.test_python_api:TASKS"


@pytest.mark.parametrize(
    ("errors", "text"),
    [([ConnectionError("gone"), ConnectionError("gone")], ""), ([ValueError("wrong")], "failed (wrong)")],
)
def test_a_lost_connection_of_a_function_is_tried_again(tmp_path, errors, text):
    """An OSError; any other error is one of the task."""
    draw = Mock(side_effect=[*errors, *map(draw_rows, range(40))])
    run = partial(train, tmp_path, "run", {**DRAWN, "eval_steps": 0}, dataset=Tasks(draw, train=8))
    if text:
        check_message(refusal(run), text, "correct")
    else:
        run()
        assert draw.call_count > 2


@pytest.mark.parametrize(
    ("run", "texts"),
    [
        (
            lambda: evaluate("tiny", dataset=GIVEN, method="prototype", episodes=2),
            ["method=prototype", "use finetune"],
        ),
        (
            lambda: evaluate(
                "tiny", dataset=GIVEN, task_type="causal_lm", metrics=["exact_match"], episodes=2
            ),
            ["metrics=exact_match", "module:name"],
        ),
        (lambda: inspection.run(inspection.InspectConfig(dataset=[GIVEN])), ["fmmeta inspect", "draw(0)"]),
    ],
    ids=["features", "answers", "inspect"],
)
def test_what_reads_a_data_set_by_number_refuses_tasks_of_a_function(run, texts):
    check_message(refusal(run), GIVEN, *texts)


def test_a_run_with_rows_in_python_resumes_and_refuses_other_rows(tmp_path):
    first = train(tmp_path, "run", dataset=PAIRS)
    assert train(tmp_path, "run", dataset=ROWS) == first  # the same content
    text = refusal(train, tmp_path, "run", dataset=[*PAIRS[:-1], ("another text", WORDS[7])])
    assert "dataset_fingerprint" in text
    assert "holds a run with other settings" in text


def test_a_given_model_is_theta_0(bert, tmp_path):
    """A run from the object gives the weights of a run from the folder, also after a change in memory."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(bert), byte_tokenizer()
    settings, folder = {"pooling": "mean"}, tmp_path / "saved"
    first = next(model.parameters()).data
    first += 0.01
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    given = {"dataset": PAIRS, "model": model, "tokenizer": tokenizer}
    train(tmp_path, "folder", {**settings, "model_name_or_path": str(folder)}, dataset=PAIRS)
    train(tmp_path, "object", settings, **given)
    assert same(tmp_path / "folder", tmp_path / "object")
    train(tmp_path, "object", settings, **given)  # finished
    first += 0.01
    message = refusal(train, tmp_path, "object", settings, **given)
    assert "other settings (model_name_or_path: " in message


def test_models_that_cannot_be_trained_are_refused(bert):
    load = partial(AutoModelForSequenceClassification.from_pretrained, bert)
    quantized, sharded = load(), load()
    quantized.is_quantized = True
    next(sharded.parameters()).ds_id = 1
    for given, parts in (
        (torch.nn.Linear(1, 1), ("model=Linear is no PreTrainedModel",)),
        (quantized, ("is quantised", "give the full one")),
        (sharded, ("already sharded by DeepSpeed", "load it without")),
        (load().to("meta"), ("has no weights", "load them")),
    ):
        check_message(refusal(check_given_model, given), *parts)


class WordsConfig(PreTrainedConfig):
    """Of a model of a user: no vocab_size."""

    model_type = "words-of-a-user"

    def __init__(self, words: int = 259, **others) -> None:
        super().__init__(**others)
        self.words = words


class WordsModel(PreTrainedModel):
    config_class = WordsConfig

    def __init__(self, config) -> None:
        super().__init__(config)
        self.table, self.out = torch.nn.Embedding(config.words, 8), torch.nn.Linear(8, config.words)
        self.post_init()

    def forward(self, input_ids=None, **_):
        return CausalLMOutput(logits=self.out(self.table(input_ids).cumsum(1)))

    def get_input_embeddings(self):
        return self.table


def test_a_model_of_a_user_without_a_vocab_size(tmp_path, monkeypatch):
    """The rows of its embedding are counted; a language model has to name its embedding."""
    AutoConfig.register(WordsConfig.model_type, WordsConfig, exist_ok=True)
    AutoModelForCausalLM.register(WordsConfig, WordsModel, exist_ok=True)
    pairs = [{"task": f"t{one}", "input": word, "output": word} for one in "ab" for word in WORDS]

    def run(name, words=259):
        settings, model = (
            {"task_type": "causal_lm", "n_way": 5, "outer_steps": 1},
            WordsModel(WordsConfig(words)),
        )
        train(tmp_path, name, settings, dataset=pairs, tokenizer=byte_tokenizer(), model=model)

    run("run")
    check_message(refusal(run, "small", 200), "259 tokens", "200 rows")
    monkeypatch.delattr(WordsModel, "get_input_embeddings")
    text = "(WordsModel) does not say which layer its embedding is; define get_input_embeddings"
    check_message(refusal(run, "none"), text)


def test_arguments_that_are_bad_or_contradict_the_settings_are_refused(bert, tmp_path):
    model, module = AutoModelForSequenceClassification.from_pretrained(bert), torch.nn.Linear(1, 1)
    both: dict[str, Any] = {"model_name_or_path": str(bert)}
    for settings, given, parts in (
        ({}, {"model": model}, ("has no tokenizer", "give tokenizer=")),
        ({}, {"model": module}, ("model=Linear is no PreTrainedModel",)),
        (both, {"model": model, "tokenizer": byte_tokenizer()}, ("with model=: give one of them",)),
        ({"dataset": ["digits"]}, {"dataset": PAIRS}, ("dataset=digits in the settings", "give one")),
        ({}, {"tokenizer": "bert"}, ("tokenizer=str is no tokenizer",)),
        ({"dataset": ["in-memory"]}, {}, ("dataset=in-memory stands for",)),
        # rows without the columns, and bytes, which are no text
        (
            {},
            {"dataset": [{"words": "a", "label": "b"}]},
            ("dataset=in-memory: the data has none of the columns text", "--text_column"),
        ),
        (
            {},
            {"dataset": [(b"red", "colour"), (b"one", "number")]},
            ("dataset[0] has text=b'red'", "is no text", "fix the row"),
        ),
        ({}, {"callbacks": Callback()}, ("callbacks=Callback", "is no list", "give callbacks=[...]")),
        ({}, {"metrics": len}, ("metrics=builtin_function_or_method", "is no list", "give metrics=[...]")),
    ):
        check_message(refusal(train, tmp_path, "a", settings, **given), *parts)
    assert not (tmp_path / "a").exists()


def test_settings_that_do_not_exist_or_are_no_config_are_refused():
    for name, advice in (("inner_step", "did you mean inner_steps?"), ("qqq", "leave it out")):
        check_message(refusal(Config, **{name: 3}), f"{name}=3 is no setting", advice)
    text = refusal(MetaTrainer({"outer_steps": 1}).train)  # pyright: ignore[reportArgumentType]
    check_message(text, "config={'outer_steps': 1} is no Config", "give fmmeta.Config(...)")


@pytest.mark.parametrize(
    ("data", "settings", "parts"),
    [
        ([], {}, ("dataset=[] holds no rows", "give pairs")),
        ("rows.jsonl", {}, ("dataset='rows.jsonl' holds no rows", "where settings are")),
        (
            datasets.Dataset.from_dict({"text": []}),
            {},
            ("dataset=Dataset(", "holds no rows", "give pairs"),
        ),
        (
            pandas.DataFrame({"text": ["a"]}),
            {},
            ("dataset=DataFrame is a table", "give datasets.Dataset.from_"),
        ),
        ([("a", "b", "c")], {}, ("dataset[0]=", "is no pair")),
        (
            datasets.DatasetDict(test=TABLE),
            {},
            ("dataset_split=train", "use test"),
        ),
        (
            TABLE.to_iterable_dataset(),
            {},
            ("is a stream", "give a datasets.Dataset"),
        ),
    ],
)
def test_data_without_usable_rows_is_refused(data, settings, parts):
    check_message(refusal(rows_in_memory, data, Config(**settings)), *parts)


def test_generation_settings_of_a_given_model_are_stored_or_refused(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HF_HOME", str(tmp_path))
    model, folders = AutoModelForCausalLM.from_pretrained(llama), []
    for ends in (2, [2, 5]):
        model.generation_config.eos_token_id = ends
        folders.append(Path(store_model(model)))
        assert json.loads((folders[-1] / "generation_config.json").read_text())["eos_token_id"] == ends
    assert folders[0] != folders[1]
    model.generation_config.update(do_sample=False, temperature=0.5)  # transformers does not save them
    check_message(refusal(store_model, model), "model=LlamaForCausalLM", "generation_config")


def test_a_model_that_another_process_stores_meanwhile_is_used(bert, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HF_HOME", str(tmp_path))
    model = AutoModelForSequenceClassification.from_pretrained(bert)
    save = type(model).save_pretrained

    def save_twice(self, folder):
        save(self, folder)
        save(self, folder.with_name(folder.name.split(".")[1]))  # as another process

    monkeypatch.setattr(type(model), "save_pretrained", save_twice)
    folder = Path(store_model(model))
    assert (folder / "model.safetensors").is_file()
    assert [one.name for one in folder.parent.iterdir()] == [folder.name]


SCORED = {
    "n_way": 3,
    "k_shot": 1,
    "num_query": 2,
    "meta_batch_size": 1,
    "inner_steps": 2,
    "max_length": 16,
    "num_workers": "0",
    "outer_steps": 1,
    "eval_steps": 1,
    "eval_episodes": 3,
}


def trained(folder, model="tiny", data="letters", own=(), **settings):
    given = {"model_name_or_path": str(model), "dataset": [str(data)], "output_dir": str(folder), **settings}
    ways = {"n_way": None} if "task_type" in settings else {}
    return MetaTrainer(Config(**{**SCORED, **ways, **given}), metrics=own).train()


class Seen(fmmeta.Callback):
    def on_evaluate(self, run, metrics):
        self.metrics = metrics


def test_a_metric_gets_the_names_of_classes_after_adaptation(tmp_path):
    """The share of right answers is the accuracy, in validation and in the table on held-out tasks."""
    calls, seen = [], Seen()

    def share(predictions, references):
        calls.append((predictions, references))
        return {"share": f1(predictions, references)["share"]}

    trainer = MetaTrainer(Config(**SCORED, output_dir=str(tmp_path)), callbacks=[seen], metrics=[share])
    result = trainer.train()
    assert seen.metrics["valid_share"] == pytest.approx(seen.metrics["valid_accuracy"])
    assert result.log_history[-1]["valid_share"] == seen.metrics["valid_share"]
    found = result.held_out["metrics"]["share"]
    assert found["after"][0] == pytest.approx(result.after)
    assert found["after_from_start"][0] == pytest.approx(result.after_from_start)
    assert len(calls) == 9  # validation, held-out tasks, the same from the weights at the start
    for predictions, references in calls:
        names = sorted({*references})
        assert references == [name for name in names for _ in range(2)]
        assert len(names) == 3
        assert {*predictions} <= {*names}
    assert trainer.train().held_out == result.held_out


@pytest.mark.parametrize("method", ["finetune", "prototype"])
def test_an_evaluation_takes_the_same_functions(bert, classes, method, capsys, terminal):
    """The share of right answers is the accuracy of an episode, by gradient steps and by frozen features."""
    flags: dict[str, Any] = {"n_way": 3, "k_shot": 1, "num_query": 3, "episodes": 4, "method": method}
    results = fmmeta.evaluate(bert, classes, **flags, metrics="tests.support.own_metric:f1", quiet=False)
    scores = results["cells"][0]["scores"]
    assert [one["metrics"]["share"] for one in scores] == pytest.approx([one["accuracy"] for one in scores])
    assert results["share"]["mean"] == pytest.approx(results["accuracy"])
    assert 0 < results["f1"]["mean"] < 1
    assert f"{results['f1']['mean']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "methods", "names"),
    [
        ({}, ["finetune"], {"options", "exact_match"}),
        ({"algorithm": "in_context"}, ["in_context", "zero_shot"], {"rank"}),
    ],
    ids=["inner loop", "prompts"],
)
def test_a_run_takes_the_metrics_of_an_evaluation(llama, run, methods, names, tmp_path):
    """The table on held-out tasks has the numbers of an evaluation of the exported model."""
    data = write_pairs(tmp_path / "pairs.jsonl", rows=9)
    metrics = [*names, "tests.support.own_metric:f1"]
    result = trained(tmp_path / "run", llama, data, metrics=metrics, task_type="causal_lm", **run)
    few: dict[str, Any] = {"k_shot": 1, "num_query": 2, "episodes": 3, "method": methods}
    found = fmmeta.evaluate(tmp_path / "run" / "model", data, **few, metrics=metrics)
    own = result.held_out["metrics"]
    assert own.keys() == {*names, "f1", "share"}
    for name in own:
        assert own[name]["after"][0] == found[name]["mean"]
        assert run or f"valid_{name}" in result.log_history[-1]
    losses = [cell["loss"] for cell in found["cells"]]
    assert len({*losses}) == len(methods)
    for when, loss in zip(("after", "before"), losses, strict=False):
        assert result.held_out[f"{when} adaptation, meta-trained"]["loss"][0] == pytest.approx(loss)


@pytest.mark.parametrize("packing", [False, True])
def test_a_metric_of_a_language_model_gets_texts(llama, packing, tmp_path):
    data, calls = write_pairs(tmp_path / "pairs.jsonl"), []

    def lengths(predictions, references):
        calls.extend(references)
        return {"rows": len(references)}

    causal = {"task_type": "causal_lm", "inner_lr": 0.01, "packing": packing}
    result = trained(tmp_path / "run", llama, data, [lengths], **causal)
    assert result.held_out["metrics"] == {"rows": {"after_from_start": [2.0, None], "after": [2.0, None]}}
    targets = {json.loads(line)["output"].strip() for line in data.read_text().splitlines()}
    assert calls
    assert set(calls) <= targets


def test_packed_rows_have_the_answers_of_single_rows():
    """Logits that say the number of the next token: each answer is that of its row."""
    rows = [Example([5, 6, 7, 8], [IGNORE, IGNORE, 7, 8]), Example([9, 3, 4], [IGNORE, 3, 4])]
    no_model: Any = None
    found = []
    for packing in (None, lambda examples, least: pack(examples, 1, 16)):
        (batch,) = Batcher(0, pack=packing).split(rows)
        follows = batch.inputs["input_ids"].roll(-1, 1) + 1
        found.append(
            sorted(CausalLearner.answers(no_model, torch.nn.functional.one_hot(follows, 12).float(), batch))
        )
    assert found[0] == found[1] == [([4, 5], [3, 4]), ([8, 9], [7, 8])]


METRICS = """
def raises(predictions, references):
    raise KeyError("no\\nkey")

def listed(predictions, references):
    return [1.0]

def texts(predictions, references):
    return {"f1": "high"}

def taken(predictions, references):
    return {"accuracy": 1.0}

def taken_rank(predictions, references):
    return {"rank": 1.0}

number = 3
"""


@pytest.mark.parametrize(
    ("name", "more", "parts"),
    [
        ("rouge_l", {}, ["task_type=classification has none", "leave them out"]),
        ("f1", {}, ["is unknown", "rank or module:name of a function"]),
        ("bad_metrics:raises", {}, ["failed (KeyError"]),
        ("bad_metrics:listed", {}, ["returned [1.0], no dictionary of numbers"]),
        ("bad_metrics:texts", {}, ["no dictionary of numbers"]),
        ("bad_metrics:taken", {}, ["returned accuracy, a name that is taken"]),
        ("bad_metrics:taken_rank", {}, ["returned rank, a name that is taken"]),
        ("bad_metrics:number", {}, ["is a int and cannot be called"]),
        ("bad_metrics:missing", {}, ["cannot be imported"]),
        (
            "bad_metrics:listed",
            {"pipeline_stages": 2, "group_size": "2"},
            ["only the last stage has the model's answers"],
        ),
        ("bad_metrics:listed", {"eval_episodes": 0, "eval_steps": 0}, ["means nothing"]),
    ],
)
def test_a_metric_that_cannot_work_ends_the_run_with_one_line(name, more, parts, tmp_path, monkeypatch):
    (tmp_path / "bad_metrics.py").write_text(METRICS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "bad_metrics", raising=False)
    message = refusal(trained, tmp_path / "run", metrics=[name], **more)
    monkeypatch.delitem(sys.modules, "bad_metrics", raising=False)
    check_message(message, f"metrics={name}", *parts)
