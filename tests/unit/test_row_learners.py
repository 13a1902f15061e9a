"""Token classification and regression: labels, scaled targets, losses, metrics, runs and adaptation."""

import json
import math
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import fmmeta
from fmmeta.adaptation.predict import AdapterDirectory
from fmmeta.adaptation.predict import run as predict
from fmmeta.config import learners
from fmmeta.config.learners import REGRESSION, check_loss
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import PredictConfig
from fmmeta.evaluation.tune import shown
from fmmeta.learners.regression import PooledRegressor, Regressor
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.learners.token_classification import TokenClassifier, entities, first_tokens
from fmmeta.metrics.scores import EpisodeScore
from fmmeta.report.page import write
from fmmeta.tasks.batching import IGNORE, Batcher
from fmmeta.tasks.data.columns import Row
from fmmeta.tasks.data.encode import RowEncoder
from fmmeta.tasks.data.hub import class_names, named
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeRows
from fmmeta.train import MetaTrainer
from fmmeta.training.state import Best
from tests.support.helpers import refusal, write_rows
from tests.support.launch import ROOT
from tests.support.messages import check_message
from tests.support.models import save, tiny

TAGS: dict[str, Any] = {"task_type": "token_classification"}
NUMBERS: dict[str, Any] = {"task_type": "regression"}
DATA = {
    "token_classification": ROOT / "examples" / "data" / "entities.jsonl",
    "regression": ROOT / "examples" / "data" / "ratings.jsonl",
}
ROWS = [
    {"tokens": ["ann", "is", "in", "new", "york"], "tags": ["B-per", "O", "O", "B-loc", "I-loc"]},
    {"tokens": ["oslo"], "tags": ["B-loc"]},
]
SHORT: dict[str, Any] = {
    **{"outer_steps": 2, "eval_steps": 2, "eval_episodes": 3, "num_workers": "0", "meta_batch_size": 2},
    **{"k_shot": 4, "num_query": 4},
}


def read(kind: dict[str, Any]) -> list[dict[str, Any]]:
    """The sample data of a kind, without the names of tasks."""
    lines = DATA[kind["task_type"]].read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("task", "domain")} for line in lines]


def encoded(support, query, **settings):
    given = {**TAGS, **settings}
    encoder = RowEncoder(Config(**given), byte_tokenizer())
    return EpisodeRows(Task(0, "", "", 0, ()), support, query).encoded(encoder)


SMALL = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
AUTO = {
    TokenClassifier: "AutoModelForTokenClassification",
    Regressor: "AutoModelForSequenceClassification",
    PooledRegressor: "AutoModel",
}


def learner(kind, outputs):
    """A BERT of one layer."""
    hf = tiny("bert", auto=AUTO[kind], **SMALL, num_labels=outputs).eval()
    return kind(hf, outputs, "mean") if kind is PooledRegressor else kind(hf, outputs)


def test_lists_of_class_labels_get_their_names():
    labels = datasets.List(datasets.ClassLabel(names=["O", "B-x"]))
    names = class_names({"tags": labels, "n": datasets.Value("int8")})
    assert names == {"tags": ["O", "B-x"]}
    assert named(Row({"tags": [1, 0, -1]}, "row"), names).values == {"tags": ["B-x", "O", None]}


def test_the_label_of_a_word_is_on_its_first_token():
    """Of the words with spaces between them, as the tokenizer cuts them."""
    found = encoded(ROWS, [])
    assert found.classes == ("B-loc", "B-per", "I-loc", "O")
    first, second = found.support
    assert first.input_ids == byte_tokenizer()("ann is in new york")["input_ids"]
    at = {place: label for place, label in enumerate(first.labels) if label != IGNORE}
    assert list(at.values()) == [1, 3, 3, 0, 2]
    text = byte_tokenizer().convert_ids_to_tokens(first.input_ids)
    assert "".join(text[place] for place in at) == "aiiny"
    assert (first.label_tokens, second.label_tokens) == (5, 1)


def wordpiece(**marks):
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "a", "bc", "##d", "e"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", **marks
    )


def test_words_that_are_cut_off_do_not_count_and_dropped_ones_keep_their_place():
    row = {"tokens": ["a", "bcd", "\u200b", "e"], "tags": ["w", "x", "y", "z"]}
    whole, cut = (
        TokenClassifier.encode(Config(**TAGS, max_length=length), wordpiece(), [row], {"names": [*"wxyz"]})[0]
        for length in (9, 4)
    )
    assert whole.input_ids == [2, 3, 4, 1, 5]
    assert whole.labels == [0, 1, IGNORE, 2, 3]
    assert cut.labels == [0, 1, IGNORE, 2]
    assert first_tokens([(0, 0), (0, 1), (2, 4), (4, 5), (0, 0)], ["a", "bcd", "e"]) == [1, 2, None]


def test_a_slow_tokenizer_is_refused():
    slow = SimpleNamespace(is_fast=False)
    message = refusal(TokenClassifier.encode, Config(**TAGS), slow, ROWS, TokenClassifier.facts(ROWS))
    assert "give a fast one" in message


def test_more_labels_than_outputs_are_refused_by_n_way(tmp_path):
    message = refusal(encoded, ROWS, ROWS, n_way=3)
    check_message(message, "has 4 labels (B-loc, B-per, I-loc, O), and n_way=3 ", "raise --n_way")
    rows = [{"task": f"t{n % 6}", "text": f"text {n}", "target": [n, 2 * n]} for n in range(60)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    few = {**NUMBERS, **SHORT, "k_shot": 2, "num_query": 2, "outer_steps": 1, "eval_steps": 0}
    config = Config(**few, dataset=[str(data)], output_dir=str(tmp_path / "run"))
    message = refusal(MetaTrainer(config).train)
    check_message(message, "2 labels (target 0, target 1), and n_way=1 ", "raise --n_way")
    result = MetaTrainer(config.but(n_way=2)).train()
    assert result.held_out["metrics"].keys() == {"mse", "mae", "r2"}


def batch_of(support, query, learner=TokenClassifier, **settings):
    found = encoded(support, query, **settings)
    (batch,) = Batcher(0, collate_fn=learner.collate).split(found.query, len(found.classes))
    return found, batch


def test_losses_are_those_of_plain_pytorch_over_the_words():
    """The head has an output more than the support set has tags; tags that it does not have are never right
    and have no loss.
    """
    query = [{"tokens": ["ann", "met", "bo"], "tags": ["B-per", "O", "B-new"]}, ROWS[1]]
    found, batch = batch_of(ROWS, query)
    made = learner(TokenClassifier, 5)
    with torch.no_grad():
        outputs = made(**batch.inputs)
        rows = made.losses(outputs, batch)
        plain = made.hf(**batch.inputs).logits[..., :4]
    assert found.facts == {"unseen": ["B-new"]}
    labels = batch.targets["labels"]
    wanted, right = torch.zeros(2), torch.zeros(2)
    for row, place in (labels != IGNORE).nonzero().tolist():
        label = int(labels[row, place])
        if label < 4:
            wanted[row] += F.cross_entropy(plain[row, place], torch.tensor(label))
            right[row] += plain[row, place].argmax() == label
    torch.testing.assert_close(rows.loss, wanted)
    assert (rows.correct.tolist(), rows.answers.tolist()) == (right.tolist(), [3, 1])
    assert batch.weights.tolist() == pytest.approx([1 / 3, 1 / 3])  # of words with a loss
    ((guess, truth), _) = made.answers(outputs, batch)
    assert TokenClassifier.present(truth, found.classes, found.facts) == ["B-per", "O", "B-new"]
    assert max(guess) < 4


def test_a_query_set_of_unseen_tags_alone_has_no_loss():
    _, batch = batch_of(ROWS, [{"tokens": ["x"], "tags": ["new"]}])
    made = learner(TokenClassifier, 4)
    rows = made.losses(made(**batch.inputs), batch).weighted(batch.weights)
    assert [part.item() for part in rows] == [0.0, 0, 1]


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("B-a I-a O B-b", {(0, 1, "a"), (3, 3, "b")}),
        ("B-a B-a I-b", {(0, 0, "a"), (1, 1, "a"), (2, 2, "b")}),
        ("O I-a I-a", {(1, 2, "a")}),  # a wrong beginning
        ("B-a I-a E-a S-a S-a", {(0, 2, "a"), (3, 3, "a"), (4, 4, "a")}),  # BIOES
        ("B-a L-a U-b I-b", {(0, 1, "a"), (2, 2, "b"), (3, 3, "b")}),  # BILOU
        ("E-a E-a", {(0, 0, "a"), (1, 1, "a")}),
        ("NOUN NOUN O x-y", {(0, 0, "NOUN"), (1, 1, "NOUN"), (3, 3, "x-y")}),  # no marks
        ("B-a-b I-a-b", {(0, 1, "a-b")}),
    ],
)
def test_entities_by_hand(tags, found):
    assert entities(tags.split()) == found


def test_f1_by_hand_and_by_seqeval():
    """Two of three found entities are right, of four: 2/3, 1/2, 4/7."""
    right = [["B-a", "I-a", "O", "B-b"], ["B-a", "B-b"]]
    found = [["B-a", "I-a", "O", "B-a"], ["O", "B-b"]]
    numbers = TokenClassifier.metrics(found, right)
    assert numbers == pytest.approx({"precision": 2 / 3, "recall": 1 / 2, "f1": 4 / 7})
    assert TokenClassifier.metrics([["O"]], [["O"]]) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    seqeval = pytest.importorskip("seqeval.metrics")
    rng, tags = random.Random(0), ["O", "B-a", "I-a", "B-b", "I-b", "E-a", "S-b"]
    for _ in range(200):
        found, right = ([rng.choices(tags, k=6) for _ in range(3)] for _ in range(2))
        assert TokenClassifier.metrics(found, right)["f1"] == pytest.approx(seqeval.f1_score(right, found))


@pytest.fixture(scope="module", params=[TAGS, NUMBERS], ids=lambda kind: kind["task_type"])
def run(request, tmp_path_factory):
    """A run of a kind with the best weights at its end, and the settings of its kind."""
    settings = {**request.param, **SHORT, "load_best_model_at_end": True}
    settings |= {"n_way": 5} if request.param is TAGS else {}
    folder = tmp_path_factory.mktemp("run")
    config = Config(**settings, dataset=[str(DATA[settings["task_type"]])], output_dir=str(folder / "run"))
    return MetaTrainer(config).train(), request.param


def test_a_run_has_the_metrics_of_the_learner_everywhere(run):
    """Of tags an accuracy among them; a regression is judged by its loss."""
    result, kind = run
    model, names = result.output_dir / "model", {"precision", "recall", "f1"}
    shown = [(model / "README.md").read_text(), write(result.output_dir).read_text()]
    if kind is NUMBERS:
        names = {"mse", "mae", "r2"}
        assert not any("accuracy" in key for line in result.log_history for key in line)
        assert not any(word in text for word in ("Accuracy", "accuracy %") for text in shown)
        assert "accuracy" not in shown[0]
        assert result.before is None
        assert "squared standard deviations (over " in result.verdict
    else:
        for part in ("learns a new token classification task", "type: f1", "AutoModelForTokenClass"):
            assert part in shown[0]
        loaded = transformers.AutoModelForTokenClassification.from_pretrained(model)
        assert loaded.config.num_labels == 5
        assert "valid_accuracy" in result.log_history[-1]
    assert {f"valid_{name}" for name in (*names, "loss")} <= result.log_history[-1].keys()
    assert result.held_out["metrics"].keys() == names
    assert json.loads((model / "fmmeta.json").read_text())["task_type"] == kind["task_type"]


def test_an_evaluation_scores_the_same(run, capsys, tmp_path):
    """It compares a regression by its loss and prints no accuracy; methods of features need classes."""
    result, kind = run
    same = {"k_shot": 4, "num_query": 4, "episodes": 3, "quiet": False}
    given, out = (str(result.output_dir / "model"), DATA[kind["task_type"]]), str(tmp_path / "results.json")
    found, name = fmmeta.evaluate(*given, **same, output=out), "f1" if kind is TAGS else "mse"
    assert found[name]["mean"] == pytest.approx(result.held_out["metrics"][name]["after"][0])
    if kind is NUMBERS:
        again = fmmeta.evaluate(*given, **same, compare=out)
        assert again["compare"]["cells"][0]["loss_gain"] == 0
        assert "accuracy" not in capsys.readouterr().out
        assert "4-shot loss" in repr(found)
    message = refusal(fmmeta.evaluate, *given, **same, method=["prototype"])
    check_message(message, "method=prototype", "use finetune")


def close(found, wanted) -> bool:
    """Whether answers are the same: tags, or numbers but for rounding."""
    pairs = [(one.output, other.output) for one, other in zip(found, wanted, strict=True)]
    return all(one == other or one == pytest.approx(other, rel=1e-4, abs=1e-4) for one, other in pairs)


@pytest.mark.parametrize("lora", [0, 2])
def test_a_task_is_adapted_to_answered_and_loaded(run, tmp_path, lora):
    result, kind = run
    rows = read(kind)[:12]
    source, target = [*rows[0]][-2:]
    settings = {"lora_r": lora or None, "inner_steps": 3, "output_dir": tmp_path / "task"}
    adapted = fmmeta.adapt(result.output_dir / "model", rows[:8], query=rows[8:], **settings)
    truths, given = [row[target] for row in rows[8:]], [row[source] for row in rows[8:]]
    assert [one.truth for one in adapted.predictions] == [pytest.approx(one, abs=1e-4) for one in truths]
    found = [[getattr(one, name) for one in adapted.predictions] for name in ("output", "truth")]
    assert adapted.metrics == pytest.approx(Config(**kind).learner.kind.metrics(*found))
    answers = adapted.predict(given)
    assert close(answers, adapted.predictions)
    assert close(fmmeta.load(tmp_path / "task").predict(given), answers)
    if kind is TAGS:
        assert set(adapted.labels) == {tag for row in rows[:8] for tag in row["tags"]}
        assert adapted.accuracy is None
        assert [len(one.output) for one in answers] == [len(words) for words in given]
        if not lora:
            pipe = transformers.pipeline("token-classification", model=str(tmp_path / "task"))
            assert {one["entity"] for one in pipe(" ".join(given[0]))} <= set(adapted.labels)


SUPPORTS = {  # tasks of other tag sets and other units
    "token_classification": {
        "small": [{"tokens": ["a", "b"], "tags": ["X", "O"]}, {"tokens": ["b", "a"], "tags": ["O", "X"]}],
        "large": read(TAGS)[:8],
    },
    "regression": {
        name: [{"text": text, "target": unit * n} for n, text in enumerate(("a", "b c", "d"))]
        for name, unit in (("small", 1.0), ("large", 1000.0))
    },
}


def test_adapters_of_several_tasks_answer_in_one_pass(run, tmp_path):
    """Each has a head of as many outputs as its task has labels, and answers in the units of its task."""
    result, kind = run
    supports, model = SUPPORTS[kind["task_type"]], result.output_dir / "model"
    models = fmmeta.adapt_many(model, supports, output_dir=tmp_path / "all", lora_r=2, inner_steps=3)
    assert models.failed == {}
    adapters = AdapterDirectory(PredictConfig(adapters=str(tmp_path / "all")))
    asked = [("large", "a"), ("small", "d"), ("large", "b c d"), ("small", "a b")]
    rows = [Row({"text": text, "tokens": text.split()}, "row") for _, text in asked]
    answers = adapters.answer(
        [replace(adapters.model.read(row), adapter=name) for row, (name, _) in zip(rows, asked, strict=True)]
    )
    for (name, text), answer in zip(asked, answers, strict=True):
        given = text.split() if kind is TAGS else text
        assert answer.input == given
        assert close([answer], models[name].predict([given]))
    alone = fmmeta.adapt(model, supports["large"], lora_r=2, inner_steps=3)
    given = [["a", "b"]] if kind is TAGS else ["a b"]
    assert close(models["large"].predict(given), alone.predict(given))


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("pooling", ["mean", "model"])
def test_an_encoder_learns_numbers(tmp_path, bert, pooling, lora):
    """Transformers answers with numbers that are scaled by the support set."""
    settings: dict[str, Any] = {**NUMBERS, "pooling": pooling, "inner_steps": 3, "lora_r": lora or None}
    pairs, texts = [(row["text"], row["score"]) for row in read(NUMBERS)[:8]], ["a", "b c"]
    adapted = fmmeta.adapt(bert, pairs, output_dir=tmp_path / "task", **settings)
    answers = adapted.predict(texts)
    assert close(fmmeta.load(tmp_path / "task").predict(texts), answers)
    if lora:
        models = fmmeta.adapt_many(bert, {"one": pairs}, output_dir=tmp_path / "all", **settings)
        adapters = AdapterDirectory(PredictConfig(adapters=str(tmp_path / "all")))
        row = replace(adapters.model.read(Row({"text": "a"}, "row")), adapter="one")
        assert close(adapters.answer([row]), models["one"].predict(["a"]))
    elif pooling == "model":
        facts = json.loads((tmp_path / "task" / "fmmeta.json").read_text())["adapted"]["facts"]
        pipe = transformers.pipeline("text-classification", model=str(tmp_path / "task"))
        shown = [one["score"] * facts["std"][0] + facts["mean"][0] for one in pipe(texts)]
        assert shown == pytest.approx([one.output for one in answers], abs=1e-3)


def test_a_model_of_another_origin_answers_by_the_names_in_its_configuration(tmp_path):
    made = learner(TokenClassifier, 2)
    made.hf.config.id2label = {0: "O", 1: "B-x"}
    made.hf.config.label2id = {"O": 0, "B-x": 1}
    save(made.hf, tmp_path / "model")
    adapted = fmmeta.load(tmp_path / "model", **TAGS)
    assert adapted.labels == ("O", "B-x")
    (answer,) = adapted.predict([["a", "b"]])
    assert set(answer.output) <= {"O", "B-x"}
    rows, out = write_rows(tmp_path / "in.jsonl", [{"id": 1, "sentence": ["a", "b"]}]), tmp_path / "out.csv"
    files = {"model_name_or_path": str(tmp_path / "model"), "input": str(rows), "output": str(out)}
    predict(PredictConfig(**TAGS, **files, text_column="sentence"))
    table = out.read_text().splitlines()
    assert table[0] == "input,output"
    assert '[""a"", ""b""]' in table[1]


def test_a_folder_of_files_has_a_task_in_each(tmp_path):
    rows = read(TAGS)
    for number in range(6):
        folder = tmp_path / "data" / f"s{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(folder / f"t{number}.jsonl", rows[12 * number : 12 * number + 12])
    settings = {**TAGS, **SHORT, "n_way": 5, "outer_steps": 1, "eval_steps": 0, "test_episodes": 1}
    config = Config(**settings, dataset=[str(tmp_path / "data")], output_dir=str(tmp_path / "run"))
    assert MetaTrainer(config).train().held_out["metrics"].keys() == {"precision", "recall", "f1"}


@pytest.mark.parametrize(("length", "lines"), [(8, 1), (64, 0)])
def test_texts_that_are_cut_when_they_are_drawn_are_reported_once(tmp_path, capsys, length, lines):
    short = {**NUMBERS, **SHORT, "eval_steps": 0, "test_episodes": 0, "outer_steps": 1}
    config = Config(
        **short, dataset=[str(DATA["regression"])], max_length=length, output_dir=str(tmp_path / "run")
    )
    MetaTrainer(config).train()
    assert "".join(capsys.readouterr()).count(f"rows fill max_length={length}") == lines


HUBER = replace(REGRESSION, loss=partial(F.huber_loss, reduction="none"))


MEAN = replace(REGRESSION, loss=lambda outputs, targets: (outputs - targets).mean().expand(len(targets)))


SUPPORT = [{"text": "a", "target": [1.0, 5.0]}, {"text": "bb", "target": [3.0, 5.0]}]


QUERY = [{"text": "c", "target": [4.0, 6.0]}, {"text": "ddd", "target": [0.0, 1.0]}]


def test_targets_are_scaled_by_the_support_set_and_answers_are_not():
    found = encoded(SUPPORT, QUERY, **NUMBERS, n_way=2)
    assert found.facts == {"mean": [2.0, 5.0], "std": [1.0, 1.0]}  # a constant target keeps its unit
    assert [row.labels for row in found.support] == [[-1.0, 0.0], [1.0, 0.0]]
    assert found.query[0].labels == [2.0, 1.0]
    assert Regressor.present(found.query[0].labels, found.classes, found.facts) == [4.0, 6.0]
    (unknown,) = Regressor.encode(Config(**NUMBERS), byte_tokenizer(), [{"text": "c"}], found.facts)
    assert unknown.labels == [0.0, 0.0]
    message = refusal(encoded, SUPPORT, [{"text": "c", "target": [4.0]}], **NUMBERS)
    assert "a row has 1 targets, and others 2" in message


@pytest.mark.parametrize("kind", [Regressor, PooledRegressor])
def test_the_loss_is_the_mean_over_rows_and_targets(kind):
    """The head may have more outputs than a row targets."""
    _, batch = batch_of(SUPPORT, QUERY, Regressor, **NUMBERS, n_way=2)
    made, labels = learner(kind, 3), batch.targets["labels"]
    with torch.no_grad():
        outputs = made(**batch.inputs)
    rows = made.losses(outputs, batch).weighted(batch.weights)
    torch.testing.assert_close(rows.loss.sum(), F.mse_loss(outputs[1][:, :2], labels))
    assert (rows.answers.sum(), rows.correct.sum()) == (0, 0)
    made.own_loss = HUBER.loss
    found = made.losses(outputs, batch).weighted(batch.weights).loss.sum()
    torch.testing.assert_close(found, F.huber_loss(outputs[1][:, :2], labels))
    assert [len(one) for pair in made.answers(outputs, batch) for one in pair] == [2] * 4


def test_an_own_loss_is_one_of_numbers(monkeypatch):
    for name, spec in (("huber", HUBER), ("mean", MEAN)):
        monkeypatch.setitem(learners.GIVEN, name, spec)
    check_loss("huber")
    assert HUBER.unit == "units of loss"
    assert "depends on the other rows" in refusal(check_loss, "mean")


def test_metrics_are_in_the_units_of_the_data():
    right, found = [1.0, 2.0, 4.0], [1.5, 2.0, 3.0]
    numbers = Regressor.metrics(found, right)
    spread = sum((one - 7 / 3) ** 2 for one in right)
    assert numbers == pytest.approx({"mse": 1.25 / 3, "mae": 0.5, "r2": 1 - 1.25 / spread})
    several = Regressor.metrics([[a, 0.0] for a in found], [[a, 1.0] for a in right])
    assert several == pytest.approx(
        {"mse": (1.25 / 3 + 1) / 2, "mae": 0.75, "r2": (1 - 1.25 / spread) / 2}  # a constant target adds 0
    )


def test_the_best_weights_and_interpolation_are_those_of_the_lowest_loss():
    best, weights = Best(None), SimpleNamespace(snapshot=lambda: "weights")  # type: ignore[arg-type]
    for step, loss in enumerate([2.0, 1.0, 1.5], 1):
        best.update(weights, step, math.nan, loss)  # type: ignore[arg-type]
    assert (best.step, best.accuracy, best.text.split(", ")[1]) == (2, None, "loss 1.0000")
    score = EpisodeScore(0, "t", "all", [2.0, 1.0], [])
    assert (score.merit, EpisodeScore.of(0, "t", "all", 1.0, None).merit) == (-1.0, -1.0)
    assert shown({0.0: [-1.0, -2.0]}, "validation tasks") == "loss on validation tasks: 1.5000 at 0"
