"""MetaTrainer with a model, a tokenizer and a data set that were made in Python."""

import json
import re
from pathlib import Path
from typing import Any

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

from fmmeta import Callback, Config, MetaTrainer, Tasks, evaluate, inspection
from fmmeta.learners import files
from fmmeta.learners.files import check_given_model, store_model
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.data.rows import rows_in_memory
from tests.support.helpers import write_rows
from tests.support.messages import check_message, refusal
from tests.support.models import WORDS
from tests.support.short_runs import QUICK, same

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
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    split = {"class_splits": str(write_splits(tmp_path))}
    train(tmp_path, "file", {**split, "dataset": [str(file)]})
    given = {
        "pairs": PAIRS,
        "encoded": TABLE.class_encode_column("label"),
        "dict": datasets.DatasetDict(train=TABLE, test=TABLE.select([0])),
    }
    for name, data in given.items():
        train(tmp_path, name, split, dataset=data)
        assert same(tmp_path / "file", tmp_path / name), name


def test_a_function_decides_about_the_shots_of_its_tasks(tmp_path, capsys):
    """Tables, verdict, card and report do not name the shots of the settings."""

    def draw(number):
        rows = [(f"{WORDS[number % 8]} {other}", other) for other in WORDS[8:10]]
        return rows * 3, rows

    settings = {**DRAWN, "test_episodes": 2, "eval_steps": 0}
    result = train(tmp_path, "run", settings, dataset=Tasks(draw, train=8, valid=2, test=2))
    printed = capsys.readouterr().out
    assert "\n2 held-out 2-way episodes, 1 inner step" in printed
    run = tmp_path / "run"
    for text in (printed, result.verdict, *((run / name).read_text() for name in PAGES)):
        assert not re.search(r"[\d ]shots?\b|\d-shot", text)
    assert "Mean of 2 2-way episodes and" in (run / PAGES[0]).read_text()
    assert "2 held-out 2-way episodes; " in (run / PAGES[1]).read_text()


def draw_rows(number):
    rows = [{"text": f"{WORDS[number % 8]} {other}", "label": other} for other in WORDS[8:10]]
    return rows * 2, rows


DRAWN = {"k_shot": Config.k_shot, "num_query": Config.num_query}  # by the function
TASKS = Tasks(draw_rows, train=8, valid=2, test=2)
GIVEN = "tests.unit.test_given_objects:TASKS"


def test_a_lost_connection_of_a_function_is_tried_again(tmp_path):
    """An OSError; any other error is one of the task."""
    failing = [ConnectionError("gone"), ConnectionError("gone")]

    def draw(number):
        if failing:
            raise failing.pop()
        return draw_rows(number)

    tasks, settings = Tasks(draw, train=8), {**DRAWN, "eval_steps": 0}
    train(tmp_path, "run", settings, dataset=tasks)
    assert not failing
    failing.append(ValueError("wrong"))
    text = refusal(train, tmp_path, "other", settings, dataset=tasks)
    check_message(text, "failed (wrong)", "correct")


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


PAGES = ("model/README.md", "report.html")


def write_splits(folder: Path) -> Path:
    path = folder / "splits.json"
    path.write_text(json.dumps({"train": WORDS[:8]}))
    return path


def test_a_run_with_rows_in_python_resumes_and_refuses_other_rows(tmp_path):
    first = train(tmp_path, "run", dataset=PAIRS)
    assert train(tmp_path, "run", dataset=ROWS) == first  # the same content
    text = refusal(train, tmp_path, "run", dataset=[*PAIRS[:-1], ("another text", WORDS[7])])
    assert "dataset_fingerprint" in text
    assert "holds a run with other settings" in text


def test_a_given_model_is_theta_0(bert, tmp_path):
    """A run from the object gives the weights of a run from the folder, also after a change in memory."""
    model = AutoModelForSequenceClassification.from_pretrained(bert)
    tokenizer = byte_tokenizer()
    settings = {"pooling": "mean"}
    folder = tmp_path / "saved"
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    train(tmp_path, "folder", {**settings, "model_name_or_path": str(folder)}, dataset=PAIRS)
    train(tmp_path, "object", settings, dataset=PAIRS, model=model, tokenizer=tokenizer)
    assert same(tmp_path / "folder", tmp_path / "object")
    train(tmp_path, "object", settings, dataset=PAIRS, model=model, tokenizer=tokenizer)  # finished
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    text = refusal(train, tmp_path, "object", settings, dataset=PAIRS, model=model, tokenizer=tokenizer)
    assert "other settings (model_name_or_path: " in text


def test_models_that_cannot_be_trained_are_refused(bert):
    model = AutoModelForSequenceClassification.from_pretrained(bert)
    check_message(refusal(check_given_model, torch.nn.Linear(1, 1)), "model=Linear is no PreTrainedModel")
    model.is_quantized = True  # type: ignore[attr-defined]
    check_message(refusal(check_given_model, model), "is quantised", "give the full one")
    model.is_quantized = False  # type: ignore[attr-defined]
    parameter = next(model.parameters())
    parameter.ds_id = 1  # type: ignore[attr-defined]
    check_message(refusal(check_given_model, model), "already sharded by DeepSpeed", "load it without")
    del parameter.ds_id  # type: ignore[attr-defined]
    check_message(refusal(check_given_model, model.to("meta")), "has no weights", "load them")


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
    settings = {"task_type": "causal_lm", "n_way": 5, "outer_steps": 1}
    given = {"dataset": pairs, "tokenizer": byte_tokenizer()}
    train(tmp_path, "run", settings, model=WordsModel(WordsConfig()), **given)
    text = refusal(train, tmp_path, "small", settings, model=WordsModel(WordsConfig(200)), **given)
    check_message(text, "259 tokens", "200 rows")
    monkeypatch.delattr(WordsModel, "get_input_embeddings")
    text = refusal(train, tmp_path, "none", settings, model=WordsModel(WordsConfig()), **given)
    assert "(WordsModel) does not say which layer its embedding is; define get_input_embeddings" in text


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
