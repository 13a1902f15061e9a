"""Checkpoints and data of others in `../shared/cases`, and their relatives: used as they are meant, or
refused in one line.
"""

from __future__ import annotations

import json
import random
import re
import runpy
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from fmmeta import Config, MetaTrainer, inspection
from fmmeta.cli import parse
from fmmeta.common.errors import UsageError
from fmmeta.learners.files import weights_state
from fmmeta.learners.lazy_weights import open_lazy_model
from fmmeta.learners.load import describe, embedding_rows, fitted, load_learner, load_tokenizer
from fmmeta.train import train
from tests.support.helpers import CASES, fast_or_slow, needs_cases, refusal
from tests.support.messages import check_message
from tests.support.models import tiny

pytestmark = needs_cases
SHORT = {"k_shot": 2, "num_query": 2, "outer_steps": 2, "eval_episodes": 0, "num_workers": "0"}
CLASSES = {"dataset": [str(CASES / "rows.jsonl")], "n_way": 2, **SHORT}
PAIRS = {"dataset": [str(CASES / "pairs.jsonl")], "task_type": "causal_lm", "max_length": 48, **SHORT}
CAUSAL, MEAN, MODEL = {"task_type": "causal_lm"}, {"pooling": "mean"}, {"pooling": "model"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The checkpoints of the cases: a folder for each case, with those that its make.py writes as M*."""
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    root, argv, path = tmp_path_factory.mktemp("cases"), sys.argv, [*sys.path]
    for case in (
        "adapters-not-lora",
        "causal-adapter-as-classifier",
        "pad-minus-one",
        "sentence-transformers-modules",
        "tokens-beyond-embeddings",
    ):
        (root / case).mkdir()
        sys.argv = ["make.py", str(root / case / "M")]
        try:
            runpy.run_path(str(CASES / case / "make.py"))
        finally:
            sys.argv, sys.path[:] = argv, path
    return root


def read(folder, **settings):
    """Configuration, tokenizer, learner and the notices of a model."""
    config, notices = Config(model_name_or_path=str(folder), n_way=2, **settings), list[str]()
    description = describe(config)
    config = fitted(config, description.hf_config)
    tokenizer = load_tokenizer(config, description, notices.append)
    return config, tokenizer, load_learner(config, description), [str(one) for one in notices]


def changed(folder: Path, source: Path, name: str = "config.json", **values) -> Path:
    """A copy of a checkpoint with other values in one of its JSON files; None removes a value."""
    shutil.copytree(source, folder)
    facts = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    kept = {key: value for key, value in {**facts, **values}.items() if value is not None}
    (folder / name).write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize(
    ("case", "settings", "parts"),
    [
        ("sentence-transformers-modules/M-old", CLASSES, []),
        ("pad-minus-one/M", PAIRS, []),
        ("causal-adapter-as-classifier/M", CLASSES, []),
        (
            "sentence-transformers-modules/M",
            CLASSES,
            ["the module Dense (2_Dense)", "choose --pooling mean"],
        ),
        (
            "tokens-beyond-embeddings/M",
            {**PAIRS, "prompt_template": "chat", "max_length": 64},
            ["the tokenizer has 371 tokens", "368 rows", "resize_token_embeddings"],
        ),
        ("pad-minus-one/M-big", PAIRS, ["pad_token_id=32000", "512 rows", "use the id of a token"]),
        ("adapters-not-lora/M-prefix", PAIRS, ["peft_type=PREFIX_TUNING", "give LoRA adapters"]),
        ("adapters-not-lora/M-prompt", PAIRS, ["peft_type=PROMPT_TUNING", "give LoRA adapters"]),
    ],
)
def test_the_commands_of_the_cases(made, tmp_path, case, settings, parts):
    """Three train; the others are refused in one line."""
    config = Config(model_name_or_path=str(made / case), output_dir=str(tmp_path / "run"), **settings)
    if parts:
        check_message(refusal(train, config), f"model_name_or_path={made / case}", *parts)
    else:
        assert (Path(train(config).output_dir) / "model" / "config.json").is_file()


def open_lazy(config):
    model = open_lazy_model(config, describe(config))
    model.materialize([name for name, _ in model.learner.named_parameters()])
    return model.learner


def test_vectors_are_those_of_sentence_transformers(made, tmp_path):
    """From the root and from 0_Transformer, read at once and one by one, and with do_lower_case."""
    from sentence_transformers import SentenceTransformer

    old, texts = made / "sentence-transformers-modules" / "M-old", ["Where IS my card", "help"]
    values = {"do_lower_case": True, "max_seq_length": 5}
    lower = changed(tmp_path / "lower", old, "0_Transformer/sentence_bert_config.json", **values)
    for folder, length in ((old, 128), (lower, 5)):
        config, tokenizer, learner, notices = read(folder)
        assert config.max_length == length
        assert [f"max_length {length}" in one for one in notices] == [True] * (length == 5)
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        expected = torch.tensor(SentenceTransformer(str(folder)).encode(texts))
        for one in (learner, open_lazy(config)):
            with torch.no_grad():
                found, _ = one(**{key: inputs[key] for key in ("input_ids", "attention_mask")})
            torch.testing.assert_close(found, expected)
    assert weights_state(str(lower))


PROMPTS = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}


def test_what_sentence_transformers_computes_more_is_refused_or_named(made, tmp_path):
    old, name = made / "sentence-transformers-modules" / "M-old", "config_sentence_transformers.json"
    prompted = changed(tmp_path / "prompted", old, name, **PROMPTS)
    assert any("without the module Dense (2_Dense)" in one for one in read(old.with_name("M"), **MEAN)[-1])
    text = refusal(describe, Config(model_name_or_path=str(prompted)))
    check_message(text, "pooling=auto", "the default prompt 'query: '", "choose --pooling")
    assert any("without the default prompt" in one for one in read(prompted, **MEAN)[-1])
    assert not read(changed(tmp_path / "no", prompted, name, default_prompt_name="document"))[-1]


@pytest.mark.parametrize(
    ("kind", "named", "part"),
    [
        ("Normalize", True, "--feature_norm"),
        ("LayerNorm", False, "the module LayerNorm"),
        ("Router", False, "begins with the sentence-transformers module Router"),
    ],
)
def test_modules_of_sentence_transformers_are_refused_or_named(made, tmp_path, kind, named, part):
    folder = shutil.copytree(made / "sentence-transformers-modules" / "M-old", tmp_path / kind)
    first, *others = json.loads((folder / "modules.json").read_text())
    added = {"idx": 2, "name": "2", "path": "2", "type": f"sentence_transformers.models.{kind}"}
    modules = [{**first, "type": "Router"}, *others] if kind == "Router" else [first, *others, added]
    (folder / "modules.json").write_text(json.dumps(modules))
    texts = read(folder)[-1] if named else [refusal(read, folder)]
    assert any(part in text for text in texts)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("sentence-transformers-modules/M-bert", MEAN),
        ("causal-adapter-as-classifier/M-base", CAUSAL),
        ("causal-adapter-as-classifier/M-base", MODEL),
    ],
)
@pytest.mark.parametrize(
    "kept",
    [
        "",
        "tokenizer_config.json",
        "spiece.model",
        "tokenizer.model",
        "sentencepiece.bpe.model",
        "tekken.json",
    ],
)
def test_a_vocabulary_without_a_tokenizer_that_can_be_read_is_refused(made, tmp_path, case, settings, kept):
    """Never read as bytes: transformers makes a tokenizer of special tokens alone for some families without a
    file.
    """
    folder = shutil.copytree(made / case, tmp_path / "model")
    for file in folder.glob("*token*"):
        if file.name != kept:
            file.unlink()
    if kept not in ("", "tokenizer_config.json"):
        (folder / kept).write_bytes(b"\x00\x01")
    check_message(refusal(read, folder, **settings), f"model_name_or_path={folder}", "tokenizer")


@pytest.mark.parametrize("settings", [CAUSAL, MEAN, MODEL], ids=str)
@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("pad_token_id", 512, "pad_token_id=512"),
        ("pad_token_id", -2, "pad_token_id=-2"),
        ("eos_token_id", [1, -3], "eos_token_id=-3"),
        ("eos_token_id", [1, 900], None),
        ("bos_token_id", -1, None),
    ],
)
def test_ids_of_a_configuration_are_rows_of_the_embedding(made, tmp_path, settings, name, value, part):
    """-1 is none. One that the model never reads is named in a notice."""
    source = made / "causal-adapter-as-classifier" / "M-base"
    folder = changed(tmp_path / "model", source, **{name: value})
    if part:
        assert f"{part} of config.json is not among the 512 rows" in refusal(read, folder, **settings)
        return
    notices = read(folder, **settings)[-1]
    assert [f"{name}=900" in one for one in notices] == [True] * (value != -1)


def test_tokens_that_the_model_has_no_row_for_are_refused(made, tmp_path):
    """A token that only the template of special tokens writes; added ones of a tokenizer in Python."""
    source = made / "sentence-transformers-modules" / "M-bert"
    folder = shutil.copytree(source, tmp_path / "template")
    tokens = json.loads((folder / "tokenizer.json").read_text())
    tokens["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [600], "tokens": ["[CLS]"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    assert "the tokenizer has 601 tokens" in refusal(read, folder, **MEAN)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([f"word{number}" for number in range(200)])
    given = MetaTrainer(
        Config(**CLASSES, **MEAN, output_dir=str(tmp_path / "run")),
        model=AutoModel.from_pretrained(source),
        tokenizer=tokenizer,
    )
    check_message(refusal(given.train), f"{len(tokenizer)} tokens", "512 rows", "resize_token_embeddings")


def test_special_tokens_without_a_row_that_nothing_writes_are_text(made, tmp_path):
    folder = shutil.copytree(made / "causal-adapter-as-classifier" / "M-base", tmp_path / "model")
    hf_config = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"word{number}" for number in range(hf_config["vocab_size"] - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    _, found, _, notices = read(folder, **CAUSAL)
    assert any("[PAD] have no row" in one for one in notices)
    assert max(found("a [PAD] b")["input_ids"]) < hf_config["vocab_size"] <= tokenizer.pad_token_id
    found.save_pretrained(tmp_path / "saved")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "saved")) == hf_config["vocab_size"]
    tokenizer.chat_template = "{{'[PAD]'}}{% for m in messages %}{{m['content']}}{% endfor %}"
    tokenizer.save_pretrained(folder)
    assert "the tokenizer has 513 tokens" in refusal(read, folder, **CAUSAL)


def test_positions_that_begin_after_padding_keep_the_padding_of_the_checkpoint(made, tmp_path):
    """Another padding token in the tokenizer would move every position, and the last one out of the table."""
    tokenizer = AutoTokenizer.from_pretrained(made / "sentence-transformers-modules" / "M-bert")
    sizes = {"vocab_size": 512, "num_hidden_layers": 1, "max_position_embeddings": 20, "pad_token_id": 1}
    tiny("roberta", auto="AutoModel", **sizes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer.pad_token_id != 1
    config, _, learner, _ = read(tmp_path, **MEAN)
    assert (config.max_length, learner.hf.config.pad_token_id) == (18, 1)
    ids = torch.full((1, 18), 7)
    learner(input_ids=ids, attention_mask=torch.ones_like(ids))


TRAINED = {  # class of the model that the adapters were trained with: their task type, and a part of names
    "AutoModelForCausalLM": ("CAUSAL_LM", "model.layers"),
    "AutoModel": ("FEATURE_EXTRACTION", "layers"),
}
QV = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("settings", [MODEL, MEAN, CAUSAL], ids=str)
@pytest.mark.parametrize("trained", TRAINED)
def test_adapters_of_one_class_are_merged_into_another(made, tmp_path, settings, trained):
    """LoRA with patterns, whose keys are parts of names, and a type whose adapters multiply."""
    source = made / "causal-adapter-as-classifier" / "M-base"
    base = load_file(source / "model.safetensors")
    task_type, layers = TRAINED[trained]
    for number, options in enumerate(
        (
            peft.LoraConfig(**QV, alpha_pattern={f"^{layers}.0.self_attn.q_proj": 32}, task_type=task_type),
            peft.LoraConfig(**QV, use_dora=True, task_type=task_type),
            peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type=task_type),
        )
    ):
        model = peft.get_peft_model(getattr(transformers, trained).from_pretrained(source), options)
        torch.manual_seed(1)
        for param in model.parameters():
            if param.requires_grad:
                param.data += torch.randn_like(param) / 10
        model.save_pretrained(tmp_path / str(number))
        merged = model.merge_and_unload().state_dict()
        expected = {name.removeprefix("model."): value for name, value in merged.items() if "layers." in name}
        found = read(tmp_path / str(number), **settings)[2].hf.state_dict()
        assert any(not torch.equal(base[f"model.{name}"], value) for name, value in expected.items())
        for name, value in expected.items():
            torch.testing.assert_close(
                found.get(name, found.get(f"model.{name}")), value, msg=f"{number} {name}"
            )


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ({"r": 2}, MODEL),
        ({"layers_to_transform": [0]}, MEAN),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, CAUSAL),
        ({"alora_invocation_tokens": [1]}, CAUSAL),
    ],
)
def test_adapters_that_do_not_fit_are_refused(made, tmp_path, values, settings):
    """Another rank, layers that the base lacks, weights that are missing: peft leaves them random."""
    source = made / "causal-adapter-as-classifier" / "M"
    folder = changed(tmp_path / "model", source, "adapter_config.json", **values)
    check_message(refusal(read, folder, **settings), f"model_name_or_path={folder}", "adapters")


@pytest.mark.parametrize("load", [load_learner, open_lazy_model])
@pytest.mark.parametrize("layers", [1, 0])
@pytest.mark.parametrize("settings", [MODEL, MEAN, CAUSAL], ids=str)
def test_layers_that_the_configuration_does_not_count_are_refused(made, tmp_path, load, layers, settings):
    source = made / "causal-adapter-as-classifier" / "M-base"
    config = Config(
        **settings, model_name_or_path=str(changed(tmp_path / "m", source, num_hidden_layers=layers))
    )
    assert f"holds {9 * (2 - layers)} weights of layers" in refusal(load, config, describe(config))


VALUES = (None, -1, 0, 3, 2**40, 0.5, "x", "", [], {}, [1], {"a": 1}, True, "../..")


def damage(text: str, draw: random.Random) -> str:
    """A JSON text that is cut, or in which a value is replaced or removed."""
    if draw.random() < 0.1:
        return text[: draw.randrange(len(text))]
    whole = json.loads(text)
    inside, key = whole, draw.choice([*whole] if isinstance(whole, dict) else range(len(whole)))
    while isinstance(inside[key], (dict, list)) and inside[key] and draw.random() < 0.7:
        inside = inside[key]
        key = draw.choice([*inside] if isinstance(inside, dict) else range(len(inside)))
    if draw.random() < 0.25:
        del inside[key]
    else:
        inside[key] = draw.choice(VALUES)
    return json.dumps(whole)


@pytest.mark.parametrize("seed", fast_or_slow(range(4), lambda seed: seed == 0))
@pytest.mark.parametrize(
    ("case", "file", "settings"),
    [
        ("causal-adapter-as-classifier/M", "adapter_config.json", CAUSAL),
        ("causal-adapter-as-classifier/M", "adapter_config.json", MODEL),
        ("causal-adapter-as-classifier/M-base", "config.json", CAUSAL),
        ("causal-adapter-as-classifier/M-base", "tokenizer.json", CAUSAL),
        ("causal-adapter-as-classifier/M-base", "tokenizer_config.json", CAUSAL),
        ("sentence-transformers-modules/M-old", "0_Transformer/config.json", {}),
        ("sentence-transformers-modules/M-old", "modules.json", {}),
    ],
)
def test_a_damaged_file_is_used_or_refused_in_one_line(made, tmp_path, case, file, settings, seed):
    draw = random.Random(seed)
    for number in range(4):
        folder = shutil.copytree(made / case, tmp_path / str(number))
        (folder / file).write_text(damage((folder / file).read_text(), draw))
        try:
            _, tokenizer, learner, _ = read(folder, **settings)
            ids = torch.tensor([tokenizer("where is my card")["input_ids"]])
            learner(input_ids=ids, attention_mask=torch.ones_like(ids))
        except UsageError as error:
            check_message(str(error), str(folder))


def test_rows_of_an_embedding_are_counted_where_no_configuration_has_them(made):
    config = Config(model_name_or_path=str(made / "causal-adapter-as-classifier" / "M-base"), **CAUSAL)
    assert embedding_rows(config, describe(config)) == 512


def inspect(*words: object) -> None:
    inspection.run(parse(list(map(str, words)), "inspect"))


def test_class_names_of_a_parquet_file(tmp_path, monkeypatch, capsys):
    made = CASES / "parquet-classlabel" / "make.py"
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(made))
    shape = ["--n_way", 2, "--k_shot", 1, "--num_query", 1]
    assert "rows.parquet:33 has label=None" in refusal(inspect, "rows.parquet", *shape)
    skipped = ["--on_bad_task", "skip", "--max_bad_fraction", 0.5, "--label_names", "names"]
    inspect("rows.parquet", *shape, *skipped)
    shown = capsys.readouterr().out
    assert "'card_lost'" in shown
    assert "'-1'" not in shown
    assert "8 of 40 rows cannot be used" in shown


PAIR_WORDS = "--task_type", "causal_lm", "--k_shot", 1, "--num_query", 1
TEMPLATE = "template-placeholder/rows.jsonl", *PAIR_WORDS, "--prompt_template"


SHOTS = "--k_shot", 2, "--num_query", 2


@pytest.mark.parametrize(
    ("file", "words", "shown", "hidden"),
    [
        ("alpaca/rows.jsonl", PAIR_WORDS, r"'name a word for t1( |\\n)atm pin", "not read"),
        (
            TEMPLATE[0],
            (*TEMPLATE[1:], "{instruction}\\n{input}\\n"),
            r"g\|i\|v\|e\| \|w\|o\|r\|d\|",
            "{instruction}",
        ),
        *(
            (f"json-and-tsv/{name}", ("--n_way", 2, *SHOTS), "2 classes", "cannot be used")
            for name in ("lines.json", "array.json", "train.tsv")
        ),
        (
            "metaicl-empty-options/tasks.jsonl",
            (*PAIR_WORDS[:2], *SHOTS),
            "Training would accept this",
            "cannot be used",
        ),
    ],
    ids=["instruction and input", "template of columns", "lines", "array", "tsv", "empty options"],
)
def test_files_are_read_as_they_are_meant(file, words, shown, hidden, capsys):
    inspect(CASES / file, *words)
    text = capsys.readouterr().out
    assert re.search(shown, text)
    assert hidden not in text


@pytest.mark.parametrize(
    ("file", "words", "parts"),
    [
        ("json-and-tsv/semicolon.csv", (), ("semicolon.csv:1", "';'", "by commas", "fix the header")),
        ("json-and-tsv/train.label", (), ("is no .jsonl, .json, .csv, .tsv, .parquet file", "convert it")),
        ("json-and-tsv/clinc.json", (), ("none of the columns text", "it has", "train")),
        (
            TEMPLATE[0],
            (*TEMPLATE[1:], "{instruktion}\\n{input}\\n"),
            ("{instruktion}, which is no column", "it has input, instruction, output, task"),
        ),
    ],
)
def test_other_files_and_templates_are_refused_with_a_reason(file, words, parts):
    check_message(refusal(inspect, CASES / file, *words or ("--n_way", 2)), *parts)
