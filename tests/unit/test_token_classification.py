"""Token classification: rows, labels of words, losses, metrics of entities, and a run with adaptation."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import fmmeta
from fmmeta.adaptation.predict import AdapterDirectory
from fmmeta.adaptation.predict import run as predict
from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.evaluation.command import evaluate
from fmmeta.evaluation.settings import EvaluateConfig, PredictConfig
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.learners.token_classification import TokenClassifier, entities, first_tokens
from fmmeta.tasks.batching import IGNORE, Batcher
from fmmeta.tasks.data.columns import Row
from fmmeta.tasks.data.encode import RowEncoder
from fmmeta.tasks.data.hub import class_names, named
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeRows
from fmmeta.train import MetaTrainer
from tests.support.helpers import stored_by
from tests.support.launch import ROOT

KIND: dict[str, Any] = {"task_type": "token_classification"}
DATA = ROOT / "examples" / "data" / "entities.jsonl"
ROWS = [
    {"tokens": ["ann", "is", "in", "new", "york"], "tags": ["B-per", "O", "O", "B-loc", "I-loc"]},
    {"tokens": ["oslo"], "tags": ["B-loc"]},
]
SHORT: dict[str, Any] = {
    **{"outer_steps": 2, "eval_steps": 2, "eval_episodes": 3, "num_workers": "0", "meta_batch_size": 2},
    **{"k_shot": 4, "num_query": 4, "n_way": 5},
}


def config(**settings):
    return Config(**KIND, **settings)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"Words": ["a", "b"], "NER_tags": ["O", "B-x"]}, {"tokens": ["a", "b"], "tags": ["O", "B-x"]}),
        ({"tokens": "a b", "labels": [0, 3]}, {"tokens": ["a", "b"], "tags": ["0", "3"]}),
    ],
)
def test_rows_have_words_and_tags_under_usual_names(row, found):
    assert stored_by(TokenClassifier, config(), row) == found


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "has 2 tokens and 1 tags; give one for each"),
        ({"tokens": [], "tags": []}, "has tokens=.*, which is no list of texts; fix the row"),
        ({"tokens": ["a"], "tags": [None]}, "has tags=.*, which is no list of texts; fix the row"),
        ({"tokens": ["a", " "], "tags": ["O", "O"]}, "has tokens=.*, which is no list of texts; fix the row"),
        (
            {"text": "a", "tags": ["O"]},
            "none of the columns tokens, words; it has .*name one with --text_column",
        ),
    ],
)
def test_other_rows_are_refused_in_one_line(row, message):
    with pytest.raises(UsageError, match=message):
        stored_by(TokenClassifier, config(), row)


def test_rows_to_answer_need_no_tags():
    stored = stored_by(TokenClassifier, config(), {"tokens": "a b"}, answered=False)
    assert stored == {"tokens": ["a", "b"]}


def test_lists_of_class_labels_get_their_names():
    import datasets

    names = class_names(
        {"tags": datasets.List(datasets.ClassLabel(names=["O", "B-x"])), "n": datasets.Value("int8")}
    )
    assert names == {"tags": ["O", "B-x"]}
    assert named(Row({"tags": [1, 0, -1]}, "row"), names).values == {"tags": ["B-x", "O", None]}


def encoded(support, query, **settings):
    encoder = RowEncoder(config(**settings), byte_tokenizer())
    return EpisodeRows(Task(0, "", "", 0, ()), support, query).encoded(encoder)


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
    (whole,) = TokenClassifier.encode(config(), wordpiece(), [row], {"names": [*"wxyz"]})
    assert whole.input_ids == [2, 3, 4, 1, 5]
    assert whole.labels == [0, 1, IGNORE, 2, 3]
    (cut,) = TokenClassifier.encode(config(max_length=4), wordpiece(), [row], {"names": [*"wxyz"]})
    assert cut.labels == [0, 1, IGNORE, 2]
    assert first_tokens([(0, 0), (0, 1), (2, 4), (4, 5), (0, 0)], ["a", "bcd", "e"]) == [1, 2, None]


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(UsageError, match="give a fast one"):
        TokenClassifier.encode(config(), SimpleNamespace(is_fast=False), ROWS, TokenClassifier.facts(ROWS))


def test_more_tags_than_outputs_are_refused_by_n_way():
    with pytest.raises(
        UsageError, match=r"has 4 labels \(B-loc, B-per, I-loc, O\), and n_way=3 .*raise --n_way"
    ):
        encoded(ROWS, ROWS, n_way=3)


def batch_of(support, query):
    found = encoded(support, query)
    batcher = Batcher(0, collate_fn=TokenClassifier.collate)
    return found, batcher.split(found.query, len(found.classes))[0]


def learner(outputs):
    torch.manual_seed(0)
    hf_config = transformers.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    hf_config.num_labels = outputs
    return TokenClassifier(
        transformers.AutoModelForTokenClassification.from_config(hf_config).eval(), outputs
    )


def test_losses_are_those_of_plain_pytorch_over_the_words():
    """The head has an output more than the support set has tags; tags that it does not have are never right
    and have no loss.
    """
    query = [{"tokens": ["ann", "met", "bo"], "tags": ["B-per", "O", "B-new"]}, ROWS[1]]
    found, batch = batch_of(ROWS, query)
    made = learner(5)
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
    made = learner(4)
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
    rng = torch.Generator().manual_seed(0)
    tags = ["O", "B-a", "I-a", "B-b", "I-b", "E-a", "S-b"]
    for _ in range(200):
        pairs = [
            [[tags[i] for i in torch.randint(len(tags), (6,), generator=rng).tolist()] for _ in range(3)]
            for _ in range(2)
        ]
        assert TokenClassifier.metrics(*pairs)["f1"] == pytest.approx(seqeval.f1_score(pairs[1], pairs[0]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    settings: dict[str, Any] = {**KIND, **SHORT, "dataset": [str(DATA)], "output_dir": str(folder / "run")}
    return MetaTrainer(Config(**settings)).train()


def test_a_run_has_the_metrics_of_the_learner_everywhere(run):
    last = run.log_history[-1]
    assert {"valid_f1", "valid_precision", "valid_recall", "valid_accuracy"} <= last.keys()
    assert {"f1", "precision", "recall"} == run.held_out["metrics"].keys()
    card = (run.output_dir / "model" / "README.md").read_text()
    assert "learns a new token classification task" in card
    assert "type: f1" in card
    assert "AutoModelForTokenClassification.from_pretrained" in card
    model = transformers.AutoModelForTokenClassification.from_pretrained(run.output_dir / "model")
    assert model.config.num_labels == 5


def test_an_evaluation_scores_the_same_and_refuses_methods_of_features(run):
    same: dict[str, Any] = {
        "k_shot": [4],
        "num_query": 4,
        "episodes": 3,
        "model_name_or_path": str(run.output_dir / "model"),
    }
    settings: dict[str, Any] = {**same, "dataset": [str(DATA)]}
    found = evaluate(EvaluateConfig(**settings))
    assert found["f1"]["mean"] == pytest.approx(run.held_out["metrics"]["f1"]["after"][0])
    with pytest.raises(UsageError, match=r"method=prototype classifies features.*use finetune"):
        evaluate(EvaluateConfig(**settings, method=["prototype"]))


@pytest.mark.parametrize("lora", [0, 2])
def test_a_task_is_adapted_to_answered_and_loaded(run, tmp_path, lora):
    rows = [json.loads(line) for line in DATA.read_text().splitlines()[:12]]
    support, query = (
        [{key: row[key] for key in ("tokens", "tags")} for row in part] for part in (rows[:8], rows[8:])
    )
    adapted = fmmeta.adapt(
        run.output_dir / "model", support, query=query, output_dir=tmp_path / "task", lora_r=lora or None
    )
    tags = {tag for row in support for tag in row["tags"]}
    assert set(adapted.labels) == tags
    assert adapted.metrics == TokenClassifier.metrics(
        [one.output for one in adapted.predictions], [row["tags"] for row in query]
    )
    assert adapted.accuracy is None
    words = [row["tokens"] for row in query]
    answers = adapted.predict(words)
    assert [one.output for one in answers] == [one.output for one in adapted.predictions]
    assert [len(one.output) for one in answers] == [len(one) for one in words]
    assert fmmeta.load(tmp_path / "task").predict(words) == answers
    if not lora:
        pipe = transformers.pipeline("token-classification", model=str(tmp_path / "task"))
        by_word = {one["word"].strip("Ġ"): one["entity"] for one in pipe(" ".join(words[0]))}
        assert set(by_word.values()) <= tags


def test_tasks_of_other_tag_sets_are_learned_and_answered_in_one_pass(run, tmp_path):
    """With adapters, whose head has as many outputs as the task has tags."""
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    supports = {
        "short": [{"tokens": ["a", "b"], "tags": ["X", "O"]}, {"tokens": ["b", "a"], "tags": ["O", "X"]}],
        "long": [{key: row[key] for key in ("tokens", "tags")} for row in rows[:8]],
    }
    models = fmmeta.adapt_many(
        run.output_dir / "model", supports, output_dir=tmp_path / "all", lora_r=2, inner_steps=3
    )
    assert models.failed == {}
    assert models["short"].labels == ("O", "X")
    answer = models["short"].predict([["a", "b", "c"]])[0]
    assert (answer.input, len(answer.output)) == (["a", "b", "c"], 3)
    alone = fmmeta.adapt(run.output_dir / "model", supports["long"], lora_r=2, inner_steps=3)
    words = [row["tokens"] for row in rows[8:12]]
    assert models["long"].predict(words) == alone.predict(words)
    adapters = AdapterDirectory(PredictConfig(adapters=str(tmp_path / "all")))
    asked = [("long", words[0]), ("short", ["a", "b"]), ("long", words[1]), ("short", words[2])]
    found = adapters.answer(
        [replace(adapters.model.read(Row({"tokens": one}, "row")), adapter=name) for name, one in asked]
    )
    assert found == [models[name].predict([one])[0] for name, one in asked]


def test_a_model_of_another_origin_answers_by_the_names_in_its_configuration(tmp_path):
    made = learner(2)
    made.hf.config.id2label = {0: "O", 1: "B-x"}
    made.hf.config.label2id = {"O": 0, "B-x": 1}
    made.hf.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    adapted = fmmeta.load(tmp_path / "model", **KIND)
    assert adapted.labels == ("O", "B-x")
    (answer,) = adapted.predict([["a", "b"]])
    assert set(answer.output) <= {"O", "B-x"}
    (tmp_path / "in.jsonl").write_text('{"id": 1, "sentence": ["a", "b"]}\n')
    settings: dict[str, Any] = {
        "model_name_or_path": str(tmp_path / "model"),
        **KIND,
        "text_column": "sentence",
    }
    predict(PredictConfig(**settings, input=str(tmp_path / "in.jsonl"), output=str(tmp_path / "out.csv")))
    table = (tmp_path / "out.csv").read_text().splitlines()
    assert table[0] == "input,output"
    assert '[""a"", ""b""]' in table[1]


def test_a_folder_of_files_has_a_task_in_each(tmp_path):
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    for number in range(6):
        file = tmp_path / "data" / f"s{number % 2}" / f"t{number}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        part = rows[12 * number : 12 * number + 12]
        lines = [json.dumps({key: row[key] for key in ("tokens", "tags")}) for row in part]
        file.write_text("\n".join(lines))
    settings: dict[str, Any] = {
        **KIND,
        **SHORT,
        "dataset": [str(tmp_path / "data")],
        "eval_steps": 0,
        "test_episodes": 2,
    }
    result = MetaTrainer(Config(**settings, output_dir=str(tmp_path / "run"))).train()
    assert result.held_out["metrics"].keys() == {"precision", "recall", "f1"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_stages": 2}, "pipeline_stages=2 with task_type=token_classification"),
        ({"head_init": "prototype"}, "head_init=prototype is made of means of classes"),
        ({"algorithm": "anil"}, "task_type=token_classification does not go with algorithm=anil"),
        ({"pooling": "mean"}, "pooling=mean means nothing for task_type=token_classification"),
        ({"input_column": "x"}, "input_column=x means nothing for task_type=token_classification"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        config(**settings)
