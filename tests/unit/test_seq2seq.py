"""Encoder-decoders against transformers' own loss and greedy search; their rows, and runs."""

import json

import pytest
import torch

import fmmeta
from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_tokenizer
from fmmeta.learners.seq2seq import Seq2SeqLearner
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.batching import IGNORE, Batcher
from tests.support.helpers import stored_by
from tests.support.models import save, save_llama, tiny, write_pairs

ROWS = [
    {"input": "a river", "output": "stone"},
    {"input": "maple and thunder", "output": "copper ribbon"},
    {"input": "silver", "output": "o"},
]


def batch_of(rows, **settings):
    config = Config(task_type="seq2seq", **settings)
    examples = Seq2SeqLearner.encode(config, byte_tokenizer(), rows, {})
    (batch,) = Batcher(0, collate_fn=Seq2SeqLearner.collate).split(examples)
    order = sorted(range(len(rows)), key=lambda i: -len(examples[i].input_ids))
    return batch, [examples[i] for i in order]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_losses_are_those_of_transformers_row_by_row(family):
    model = tiny(family).eval()
    learner = Seq2SeqLearner(model)
    batch, examples = batch_of(ROWS)
    outputs = learner(**batch.inputs)
    rows = learner.losses(outputs, batch)
    answers = [*learner.answers(outputs, batch)]
    total = 0.0
    for i, example in enumerate(examples):
        labels = torch.tensor([example.labels])
        found = model(input_ids=torch.tensor([list(example.input_ids)]), labels=labels)
        torch.testing.assert_close(rows.loss[i], found.loss * labels.numel(), rtol=1e-4, atol=1e-4)
        guess = found.logits[0].argmax(-1)
        assert bool(rows.correct[i]) == bool((guess == labels[0]).all())
        assert answers[i] == (guess.tolist()[:-1], example.labels[:-1])
        total += float(rows.loss[i])
    counted = float(rows.weighted(batch.weights).sums()[0])
    assert counted == pytest.approx(total / sum(len(one.labels) for one in examples), rel=1e-5)


def test_a_row_is_right_when_each_of_its_tokens_is():
    learner = Seq2SeqLearner(tiny("t5").eval())
    batch, _ = batch_of(ROWS)
    labels = batch.targets["labels"]
    logits = torch.nn.functional.one_hot(labels.clamp(min=0), 259).float() * 30
    assert learner.losses(logits, batch).correct.tolist() == [1, 1, 1]
    wrong = logits.clone()
    wrong[1, int((labels[1] != IGNORE).sum()) - 1] = 0.0  # its end token
    assert learner.losses(wrong, batch).correct.tolist() == [1, 0, 1]
    broken = logits.clone()
    broken[2, 0] = torch.nan
    assert learner.losses(broken, batch).correct.tolist() == [1, 1, 0]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_answers_are_greedy(family):
    model = tiny(family).eval()
    model.generation_config.repetition_penalty = 5.0  # of a checkpoint, and left out
    learner = Seq2SeqLearner(model)
    batch, examples = batch_of(ROWS)
    for example, found in zip(examples, learner.respond(batch, 6), strict=True):
        ids, wanted = torch.tensor([list(example.input_ids)]), [model.config.decoder_start_token_id]
        for _ in range(6):
            logits = model(input_ids=ids, decoder_input_ids=torch.tensor([wanted])).logits
            wanted.append(int(logits[0, -1].argmax()))
        wanted = wanted[1:]
        assert found == (wanted[: wanted.index(2)] if 2 in wanted else wanted)
    assert model.generation_config.repetition_penalty == 5.0


def test_labels_are_the_answer_and_its_end_also_where_it_is_cut():
    tokenizer = byte_tokenizer()
    rows = [{"input": "x" * 40, "output": "y" * 40}, {"input": "a", "output": "b"}]
    config = Config(task_type="seq2seq", max_length=8)
    cut, short = Seq2SeqLearner.encode(config, tokenizer, rows, {})
    assert len(cut.input_ids) == len(cut.labels) == 8
    assert cut.labels[-1] == short.labels[-1] == tokenizer.eos_token_id
    assert short.labels == [*tokenizer("b")["input_ids"], tokenizer.eos_token_id]


def test_the_input_is_read_alone_or_in_a_format_string():
    tokenizer = byte_tokenizer()
    row = {"document": "abc", "style": "short", "output": "a"}
    settings = {"task_type": "seq2seq", "input_column": "document"}

    def text(**more):
        config = Config(**settings, **more)
        stored = stored_by(Seq2SeqLearner, config, row)
        (example,) = Seq2SeqLearner.encode(config, tokenizer, [stored], {})
        return tokenizer.decode(example.input_ids, skip_special_tokens=True)

    assert text() == "abc"
    assert text(prompt_template="summarize: {input}") == "summarize: abc"
    assert text(prompt_template="{style} summary: {input}") == "short summary: abc"


@pytest.mark.parametrize(
    ("settings", "columns", "why"),
    [
        ({"prompt_template": "chat"}, ["input", "output"], "an encoder reads the input alone"),
        ({"prompt_template": "{input} {output}."}, ["input", "output"], "an encoder reads the input alone"),
        ({}, ["input", "answers_"], "has none of the columns output"),
        ({"input_column": "x"}, ["input", "output"], "input_column=x is no column"),
    ],
)
def test_columns_and_templates_that_do_not_fit_are_refused(settings, columns, why):
    with pytest.raises(UsageError, match=why) as refused:
        Seq2SeqLearner.rows(Config(task_type="seq2seq", **settings), None, columns)
    assert "\n" not in str(refused.value)


def test_of_several_right_answers_the_first_is_learned_and_the_best_counts():
    config, tokenizer = Config(task_type="seq2seq", max_length=8), byte_tokenizer()
    rows = [{"input": "a", "output": ["b c", "d", "x" * 9]}, {"input": "aa", "output": ["d"]}]
    stored = [stored_by(Seq2SeqLearner, config, row) for row in rows]
    assert stored[1] == {"input": "aa", "output": "d"}
    examples = Seq2SeqLearner.encode(config, tokenizer, stored, {})
    alone = Seq2SeqLearner.encode(config, tokenizer, [{"input": "a", "output": "b c"}, stored[1]], {})
    assert [one.labels for one in examples] == [one.labels for one in alone]
    (batch,) = Batcher(0, collate_fn=Seq2SeqLearner.collate).split(examples)
    outputs = torch.nn.functional.one_hot(batch.targets["labels"].clamp(min=0), 259).float()
    pairs = [*Seq2SeqLearner(tiny("t5")).answers(outputs, batch)]

    def texts(answer):
        return Seq2SeqLearner.present(answer, (), {}, tokenizer)

    references = [texts(right) for _, right in pairs]
    assert sorted(references, key=str) == [["b c", "d", "x" * 6], "d"]
    assert sorted(texts(predicted) for predicted, _ in pairs) == ["b c", "d"]
    assert Seq2SeqLearner.metrics(["d", "d"], references) == {"exact_match": 1.0, "rouge_l": 1.0}
    found = Seq2SeqLearner.metrics(["c", "c"], references)
    assert found == {"exact_match": 0.0, "rouge_l": pytest.approx(sum((2 / 3, 0.0)) / 2)}


def test_a_row_without_an_answer_is_refused():
    for output in (["b", " "], " ", None):
        with pytest.raises(UsageError, match=r"output=|empty"):
            stored_by(Seq2SeqLearner, Config(task_type="seq2seq"), {"input": "a", "output": output})


def test_a_model_without_an_encoder_is_refused(tmp_path):
    llama = save_llama(tmp_path / "llama")
    with pytest.raises(UsageError, match="which is no encoder with a decoder; give one, such as T5 or BART"):
        describe(Config(task_type="seq2seq", model_name_or_path=str(llama)))


def test_a_tokenizer_is_checked_as_that_of_a_language_model(tmp_path):
    folder = save(tiny("t5", decoder_start_token_id=None), tmp_path / "t5")
    config = Config(task_type="seq2seq", model_name_or_path=str(folder))
    with pytest.raises(UsageError, match="no decoder_start_token_id"):
        load_tokenizer(config, describe(config), print)


@pytest.mark.parametrize("family", ["tiny", "bart"])
def test_train_evaluate_adapt_and_load_with_transformers(family, tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    name = family if family == "tiny" else str(save(tiny(family), tmp_path / family))
    config = Config(
        task_type="seq2seq",
        model_name_or_path=name,
        dataset=[str(write_pairs(tmp_path / "pairs.jsonl"))],
        outer_steps=2,
        meta_batch_size=2,
        k_shot=3,
        num_query=2,
        eval_episodes=1,
        test_episodes=1,
        num_workers="0",
        output_dir=str(tmp_path / "run"),
    )
    fmmeta.MetaTrainer(config).train()
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model")
    assert model.generation_config.decoder_start_token_id == model.config.decoder_start_token_id
    assert model.generation_config.eos_token_id == 2
    rows = [{"input": one, "output": ["yes", "y"]} for one in ("a", "bb", "ccc")]
    adapted = fmmeta.adapt(
        str(tmp_path / "run" / "model"),
        rows,
        query=rows,
        inner_steps=40,
        early_stopping=False,
        inner_optimizer="adamw",
        inner_lr=0.01,
        max_new_tokens=5,
    )
    assert set(adapted.metrics) == {"exact_match", "rouge_l"}
    answers = adapted.predict([{"input": "dd"}], max_new_tokens=5)
    assert isinstance(answers[0].output, str)
    right = [one.output in ("yes", "y") for one in adapted.predictions]
    truths = [one.output if found else "yes" for one, found in zip(adapted.predictions, right, strict=True)]
    assert [one.truth for one in adapted.predictions] == truths
    assert adapted.metrics["exact_match"] == adapted.accuracy == sum(right) / 3
    assert json.loads((tmp_path / "run" / "model" / "fmmeta.json").read_text())["task_type"] == "seq2seq"
