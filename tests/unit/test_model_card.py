"""Model cards: valid metadata, measured results, no local paths, and code that runs."""

import json
from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results

from fmmeta import Config, MetaTrainer
from fmmeta.checkpoint.model_card import Content, is_hub_id, metadata, public_name, write_card
from tests.support.exports import run_python
from tests.support.models import write_classes, write_pairs

SHORT = {
    "outer_steps": 1,
    "meta_batch_size": 2,
    "k_shot": 2,
    "num_query": 2,
    "save_steps": 0,
    "eval_episodes": 3,
}


def trained(model: Path, data: Path, folder: Path, **settings) -> Path:
    config = Config(
        model_name_or_path=str(model), dataset=[str(data)], output_dir=str(folder), **{**SHORT, **settings}
    )
    return MetaTrainer(config).train().output_dir


def read(folder: Path) -> ModelCard:
    """The card of a folder; its metadata survive a round trip, and it holds no path of this machine."""
    card = ModelCard.load(folder / "README.md")
    if "model-index" in (folder / "README.md").read_text():
        index = card.data.to_dict()["model-index"]
        assert model_index_to_eval_results(index) == (card.data.model_name, card.data.eval_results)
    assert "/tmp" not in str(card)
    assert str(folder.parent) not in str(card)
    return card


def test_a_classifier_has_its_held_out_scores_and_runnable_code(bert, tmp_path):
    run = trained(
        bert,
        write_classes(tmp_path / "rows.jsonl", classes=15),
        tmp_path / "my-run",
        pooling="mean",
        outer_lr=0.01,
        base_meta_batch_size=8,
    )
    card = read(run / "model")
    assert "over 2 tasks each, outer_lr 0.005" in str(card)  # the rate that was used
    wanted = json.loads((run / "run.json").read_text())["held_out"]["after adaptation, meta-trained"]
    for result, metric in zip(card.data.eval_results, ("accuracy", "loss"), strict=True):
        value, half = (round(number, 4) for number in wanted[metric])
        assert (result.metric_value, result.metric_args) == (value, {"episodes": 3, "ci95": half})
        assert (result.dataset_name, result.dataset_split) == ("rows.jsonl", "test")
        assert result.task_type == "text-classification"
    assert (card.data.library_name, card.data.pipeline_tag) == (
        "sentence-transformers",
        "sentence-similarity",
    )
    assert card.data.model_name == "my-run"
    assert not {"base_model", "license", "language", "datasets"} & set(card.data.to_dict())
    assert "| this model, adapted |" in card.text
    first = card.text.split("```python\n")[1].split("```")[0]
    found: dict = {}
    exec(first.replace("USER/MODEL", str(run / "model")), found)
    assert found["adapted"].labels == ("delivery", "fees")
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    assert run_python(card.text, run / "model")["vectors"].shape == (1, 32)


def test_adapters_and_their_merged_model_have_cards(llama, tmp_path):
    data = write_pairs(tmp_path / "pairs.jsonl")
    settings = {"task_type": "causal_lm", "lora_r": 2, "lora_merge": True, "eval_episodes": 0}
    run = trained(llama, data, tmp_path / "run", **settings)
    for name, library in (("model", "peft"), ("merged", "transformers")):
        card = read(run / name)
        assert (card.data.library_name, card.data.pipeline_tag) == (library, "text-generation")
        assert card.data.eval_results is None  # nothing was measured
        assert "model-index" not in str(card)
        assert "base_model" not in card.data.to_dict()
        pipe = run_python(card.text, run / name)["pipe"]
        assert pipe("river", max_new_tokens=2)[0]["generated_text"].startswith("river")


@pytest.mark.parametrize(("pooling", "algorithm"), [("mean", "protonet"), ("model", "fomaml")])
def test_the_code_of_an_encoders_adapters_runs(bert, tmp_path, pooling, algorithm):
    data = write_classes(tmp_path / "rows.jsonl", classes=15)
    settings = {"lora_r": 2, "pooling": pooling, "algorithm": algorithm}
    run = trained(bert, data, tmp_path / "run", **settings, meta_batch_size=1)
    card = read(run / "model")
    assert ("inner loop" in str(card)) == (algorithm == "fomaml")
    assert "adamw over 1 task each" in str(card)
    assert (card.data.library_name, card.data.pipeline_tag) == ("peft", "feature-extraction")
    assert run_python(card.text, run / "model")["encoder"].config.hidden_size == 32


def content(base: str, **changed) -> Content:
    fields = {
        "config": Config(),
        "pooling": "mean",
        "adapter": False,
        "summary": "",
        "facts": {},
        "adapted": True,
    }
    return Content(base=base, **{**fields, **changed})


def test_the_base_model_is_a_hub_id_or_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("fmmeta.learners.files.hub_answers", lambda: False)
    found = metadata(content("acme/base"), "x").to_dict()
    assert (found["base_model"], found.get("base_model_relation")) == ("acme/base", None)
    assert metadata(content("acme/base", adapter=True), "x").base_model_relation == "adapter"
    for base in ("tiny", str(tmp_path), "./model", "a/b/c"):
        assert metadata(content(base), "x").base_model is None
    (tmp_path / "acme" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("acme/base")
    assert public_name("acme/base") == "base"


def test_license_language_and_base_come_from_the_card_of_a_local_base(tmp_path):
    card = "---\nlicense: mit\nlanguage: [en, de]\nbase_model: acme/base\n---\n"
    (tmp_path / "README.md").write_text(card)
    found = metadata(content(str(tmp_path)), "x").to_dict()
    assert (found["license"], found["language"], found["base_model"]) == ("mit", ["en", "de"], "acme/base")
    adapter = metadata(content(str(tmp_path), adapter=True), "x").to_dict()
    assert "base_model" not in adapter  # the adapters are those of the local folder, not of its base


@pytest.mark.parametrize(
    "header",
    [
        "license: [mit]\nlanguage: no\nbase_model: /home/me/model",
        "license: '<b>'\nlanguage: ['<b>', en]\nbase_model: [a, b]",
        "license: 'MIT\\n---'\nlanguage: {en: de}\nbase_model: 3",
        "language: [[",
        "- a list",
    ],
)
def test_invalid_metadata_of_a_base_are_left_out(tmp_path, header):
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
    assert set(metadata(content(str(tmp_path)), "x").to_dict()) == {"library_name", "tags"}


def test_names_from_data_cannot_end_the_metadata_block(tmp_path):
    name = "rows\n---\n# title: [<b>]"
    result = EvalResult("text-classification", name, name, "accuracy", 0.5)
    folder = tmp_path / "a: b\n---\nc"
    folder.mkdir()
    write_card(folder, content("tiny", results=[result], dataset=["letters", "acme/set", str(tmp_path)]))
    card = ModelCard.load(folder / "README.md")
    (found,) = card.data.eval_results
    assert found.dataset_name == name
    assert card.data.datasets == ["acme/set"]
    assert card.text.lstrip().startswith("# a\\: b")
