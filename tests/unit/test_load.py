"""Models load with every pooling, with a seeded head and without dropout; others are refused."""

import json
import shutil
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from fmmeta.adaptation.model import load_model
from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config
from fmmeta.learners.classification import NativeClassifier
from fmmeta.learners.files import base_model_name
from fmmeta.learners.lazy_weights import open_lazy_model
from fmmeta.learners.load import (
    describe,
    embedding_rows,
    empty_learner,
    fitted,
    load_hf,
    load_learner,
    load_tokenizer,
)
from fmmeta.parallel.workers.zero import move_buffers
from fmmeta.tasks.batching import Example
from tests.support.messages import check_message, refusal
from tests.support.models import save, save_family


def changed(folder, source, **values):
    """A copy of a checkpoint's configuration with other values, without weights."""
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


def read_by(read, config: Config):
    return read(config, describe(config))


def check_refused(read, config: Config, *parts: str) -> None:
    """Reading a model is refused in a line that names it."""
    check_message(refusal(read_by, read, config), f"model_name_or_path={config.model_name_or_path}", *parts)


@pytest.mark.parametrize(
    ("pooling", "head"),
    [
        ("model", ("hf.classifier.weight", "hf.classifier.bias")),
        ("mean", ("head.weight", "head.bias")),
        ("cls", ("head.weight", "head.bias")),
    ],
)
@pytest.mark.parametrize("head_init", ["zero", "learned", "prototype"])
def test_heads(bert, pooling, head, head_init):
    config = Config(model_name_or_path=str(bert), pooling=pooling, head_init=head_init, n_way=4)
    one, same, empty = (read_by(read, config) for read in (load_learner, load_learner, empty_learner))
    assert one.head_names == head
    assert one.get_parameter(head[0]).shape == (4, 32)
    assert bool(one.get_parameter(head[0]).any()) == (head_init == "learned")
    values = dict(one.named_parameters())
    assert all(torch.equal(p, values[name]) for name, p in same.named_parameters())  # it follows the seed
    assert [(n, p.shape) for n, p in empty.named_parameters()] == [(n, p.shape) for n, p in values.items()]


def test_dropout_is_off_in_training(bert):
    config = Config(model_name_or_path=str(bert), n_way=4)
    description = describe(config)
    assert description.restored == {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    learner = load_learner(config, description)
    assert learner.training
    assert {module.p for module in learner.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}


@pytest.mark.parametrize(
    ("family", "sizes", "own"),
    [
        (
            "xlnet",
            {"n_layer": 1, "n_head": 2, "d_model": 16, "d_inner": 16},
            {"dropout": 0.0, "summary_last_dropout": 0.5},
        ),
        ("mpt", {"n_layers": 1, "n_heads": 2, "d_model": 16}, {"emb_pdrop": 0.5, "resid_pdrop": 0.5}),
        (
            "seed_oss",
            {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "intermediate_size": 16,
            },
            {"attention_dropout": 0.0, "residual_dropout": 0.5},
        ),
        (
            "opt",
            {
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "ffn_dim": 16,
                "word_embed_proj_dim": 16,
            },
            {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.5},
        ),
    ],
)
def test_dropout_of_every_name_is_off(family, sizes, own, tmp_path):
    hf_config = transformers.AutoConfig.for_model(
        family, **sizes, **own, vocab_size=259, pad_token_id=0, num_labels=3
    )
    causal = family in ("mpt", "seed_oss")
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSequenceClassification
    save(auto.from_config(hf_config), tmp_path)
    config = Config(
        model_name_or_path=str(tmp_path),
        n_way=3,
        task_type="causal_lm" if causal else "classification",
        head_init=None if causal else "learned",
    )
    description = describe(config)
    assert description.restored.items() >= own.items()
    learner = load_learner(config, description)
    ids = torch.arange(3, 15).view(2, 6)
    first = learner.logits(learner(input_ids=ids, attention_mask=torch.ones_like(ids)))
    for _ in range(4):
        again = learner.logits(learner(input_ids=ids, attention_mask=torch.ones_like(ids)))
        assert torch.equal(again, first)


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        (None, "model"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_pooling_auto_follows_the_folder(tmp_path, bert, modes, pooling):
    changed(tmp_path, bert)
    if modes is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    assert describe(Config(model_name_or_path=str(tmp_path))).pooling == pooling
    write_files(tmp_path, modules(TRANSFORMER, POOLING))  # also where the file is missing
    assert describe(Config(model_name_or_path=str(tmp_path), pooling="cls")).pooling == "cls"


TRANSFORMER, POOLING = (f"sentence_transformers.models.{one}" for one in ("Transformer", "Pooling"))
MEAN = {"1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}'}
UNSUPPORTED = [("max_tokens",), ("cls_token", "mean_tokens"), ("mean_tokens", "max_tokens")]
NO_CONFIG = (": its configuration cannot be read (",)


def modules(*types):
    """modules.json, with folders as sentence-transformers names them."""
    named = [(one, f"{i}_{one.rpartition('.')[2]}" * (i > 0)) for i, one in enumerate(types)]
    return {"modules.json": json.dumps([{"type": one, "path": path} for one, path in named])}


def write_files(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "values", "settings", "parts"),
    [
        *(
            (
                {"1_Pooling/config.json": json.dumps({f"pooling_mode_{mode}": True for mode in modes})},
                {},
                {},
                ("pooling=auto", "1_Pooling/config.json of model_name_or_path=", "choose one with --pooling"),
            )
            for modes in UNSUPPORTED
        ),
        (
            modules(TRANSFORMER, POOLING),
            {},
            {},
            ("pooling=auto: ", " lacks 1_Pooling/config.json", "choose a pooling with --pooling"),
        ),
        (
            {**MEAN, **modules("custom_st.Transformer", POOLING)},
            {},
            {},
            ("begins with the sentence-transformers module custom_st.Transf",),
        ),
        (
            {**MEAN, **modules(TRANSFORMER, "my_pkg.Pooling")},
            {},
            {},
            ("need the module my_pkg.Pooling (1_Pooling), which",),
        ),
        (
            {**MEAN, **modules(TRANSFORMER, POOLING, "my_pkg.Normalize")},
            {},
            {},
            ("need the module my_pkg.Normalize (2_Normalize), which",),
        ),
        *(
            ({**MEAN, name: text}, {}, {}, (f": {name} cannot be read (",))
            for name in ("1_Pooling/config.json", "modules.json")
            for text in ("{", "[1]", "7", "[" * 100_000)
        ),
        *(
            ({}, {"num_experts": number}, {}, ("a mixture of experts (bert)", "use a dense model"))
            for number in (8, "8")
        ),
        (
            {},
            {"quantization_config": {"quant_method": "gptq"}},
            {},
            ("is quantised by gptq", "--load_in_4bit"),
        ),
        ({}, {"model_type": "nonsense"}, {}, NO_CONFIG),
        ({}, {"hidden_size": "many"}, {}, NO_CONFIG),
        ({}, {"num_labels": "two"}, {}, NO_CONFIG),
        ({}, {}, {"task_type": "causal_lm"}, (" is a bert", "give a decoder, or use --task_type")),
        (
            {},
            transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8).to_dict(),
            {"pooling": "mean"},
            ("an encoder and a decoder", "give an encoder"),
        ),
        *(
            (
                {},
                {
                    "model_type": "roberta",
                    "vocab_size": 512,
                    "max_position_embeddings": most,
                    "pad_token_id": pad,
                },
                {"max_length": 200},
                (
                    f": pad_token_id={pad} of config.json",
                    f"512 rows of its embedding, or leaves none of its {most} positions",
                    "use the id of the padding token",
                ),
            )
            for pad, most in ((900, 1200), (900, 130), (-2, 130), (129, 130))
        ),
    ],
)
def test_models_that_cannot_be_read_or_trained_are_refused(tmp_path, bert, files, values, settings, parts):
    write_files(changed(tmp_path, bert, **values), files)
    check_refused(load_learner, Config(model_name_or_path=str(tmp_path), **settings), *parts)


def test_models_without_a_padding_token(tmp_path, llama):
    """The configurations of CodeGen and Gemma 3 have no pad_token_id; no end tokens give none."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "eos_token_id": 7}
    transformers.CodeGenConfig(**sizes).save_pretrained(tmp_path)
    config = Config(model_name_or_path=str(tmp_path), task_type="causal_lm")
    assert describe(config).hf_config.pad_token_id == 7
    changed(tmp_path, llama, eos_token_id=[], pad_token_id=None)
    assert describe(config).hf_config.pad_token_id == 0
    transformers.Gemma3Config().save_pretrained(tmp_path)
    classes = Config(model_name_or_path=str(tmp_path))
    check_refused(describe, classes, "gemma3", "give a text model alone")


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("eos_token_id", [[1], 2], "[1]"),
        ("eos_token_id", {"a": 1}, "{'a': 1}"),
        ("eos_token_id", [2, -3], "-3"),
        ("eos_token_id", "1", "'1'"),
        ("eos_token_id", 2.0, "2.0"),
        ("eos_token_id", True, "True"),
        ("pad_token_id", "0", "'0'"),
        ("bos_token_id", -2, "-2"),
        ("eos_token_id", [2, -1, 900], None),
    ],
)
def test_ids_of_generation_settings_are_rows_of_the_embedding(tmp_path, llama, key, value, shown):
    """-1 and null are none. One beyond the rows is named in a notice, and ends no answer."""
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    facts = {"eos_token_id": 2, "pad_token_id": None, "bos_token_id": -1, key: value}
    (tmp_path / "generation_config.json").write_text(json.dumps(facts))
    config, notices = Config(model_name_or_path=str(tmp_path), task_type="causal_lm"), list[str]()
    description = describe(config)
    if shown is None:
        load_tokenizer(config, description, notices.append)
        assert description.ends == (2,)
        assert ["eos_token_id=900 of generation_config.json" in str(one) for one in notices] == [True]
        return
    check_message(
        refusal(load_tokenizer, config, description, notices.append),
        f"model_name_or_path={tmp_path}: {key}={shown} of generation_config.json is not among the 259",
        "use the id of a token, or null",
    )


@pytest.mark.parametrize(
    ("stored", "most", "length"),
    [({}, 9, 9), ({}, 10**30, 128), ({"max_seq_length": 7}, 9, 7), ({"max_seq_length": None}, 9, 9)],
)
def test_the_longest_text_may_be_in_the_settings_of_the_tokenizer(tmp_path, bert, stored, most, length):
    """As sentence-transformers 6 writes it; of other folders it changes nothing."""
    limits = {"sentence_bert_config": stored, "tokenizer_config": {"model_max_length": most}}
    write_files(tmp_path, {f"{name}.json": json.dumps(facts) for name, facts in limits.items()})
    config = Config(model_name_or_path=str(changed(tmp_path, bert)))
    hf_config = describe(config).hf_config
    assert fitted(config, hf_config).max_length == (stored.get("max_seq_length") or 128)
    write_files(tmp_path, modules(TRANSFORMER))
    assert fitted(config, hf_config).max_length == length


def test_folders_without_a_model_are_refused(tmp_path):
    empty = "give a Hugging Face folder or hub id"
    missing = dict.fromkeys((str(tmp_path / "none"), "./none", "a/b/c"), "check the path")
    for name, remedy in {str(tmp_path): empty, **missing}.items():
        check_message(
            refusal(describe, Config(model_name_or_path=name)), f"model_name_or_path={name}", remedy
        )


def rewritten(folder, source, tensors, **values):
    """A copy of a checkpoint with these tensors, and other values in its configuration."""
    save_file(tensors, changed(folder, source, **values) / "model.safetensors", {"format": "pt"})
    return str(folder)


LANGUAGE_MODEL, NATIVE, ENCODER = {"task_type": "causal_lm"}, {"pooling": "model"}, {"pooling": "mean"}
NORM, EMBEDDING = "bert.embeddings.LayerNorm.weight", "model.embed_tokens.weight"
DTYPES = [(torch.int8, "I8"), (torch.int32, "I32"), (torch.bool, "BOOL"), (torch.complex64, "C64")]


def renamed(tensors, change):
    return {change(name): value for name, value in tensors.items()}


def with_norm(tensors, name, dtype):
    """The weight of a LayerNorm in another type; a buffer of whole numbers is no weight."""
    others = {key: value for key, value in tensors.items() if key != NORM}
    return {**others, name: tensors[NORM].to(dtype), "bert.embeddings.position_ids": torch.arange(130)[None]}


@pytest.mark.parametrize("read", [load_learner, open_lazy_model])
@pytest.mark.parametrize(
    ("model", "settings", "change", "values", "parts"),
    [
        *(
            (
                "llama",
                settings,
                lambda tensors: renamed(tensors, lambda name: f"module.{name}"),
                {},
                ("lacks 20 of the", "embed_tokens.weight", "give a complete checkpoint"),
            )
            for settings in (LANGUAGE_MODEL, NATIVE, ENCODER)
        ),
        *(
            (
                "llama",
                settings,
                lambda tensors: renamed(tensors, lambda name: name.replace("1.mlp.down_proj", "9")),
                {},
                ("lacks 1 of the", "layers.1.mlp.down_proj.weight)", "give a complete checkpoint"),
            )
            for settings in (LANGUAGE_MODEL, NATIVE, ENCODER)
        ),
        (
            "llama",
            LANGUAGE_MODEL,
            lambda tensors: {**tensors, "model.norm.weight": torch.ones(31)},
            {},
            ("[31]", "[32]", "fix config.json or the weights"),
        ),
        *(
            (
                "bert",
                settings,
                dict,
                {"max_position_embeddings": 140},
                (
                    "embeddings.position_embeddings.weight of shape [130, 32]",
                    "(its configuration says [140, 32])",
                    "fix config.json or the weights",
                ),
            )
            for settings in (NATIVE, ENCODER)
        ),
        *(
            (
                "bert",
                settings,
                partial(with_norm, name=name, dtype=dtype),
                {},
                (
                    f"holds {name} as {shown}, which is no floating-point type",
                    "give the checkpoint that is not quantised",
                ),
            )
            for settings, name in ((NATIVE, NORM), (ENCODER, NORM.replace("weight", "gamma")))
            for dtype, shown in DTYPES
        ),
        (  # one layout would untie them, another would drop one of them
            "llama",
            LANGUAGE_MODEL,
            lambda tensors: {**tensors, "lm_head.weight": tensors[EMBEDDING] + 1},
            {},
            (f"{EMBEDDING} and lm_head.weight", "set tie_word_embeddings to false in config.json"),
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, request, read, model, settings, change, values, parts):
    """On layouts that read them at once and on those that read them tensor by tensor."""
    source = request.getfixturevalue(model)
    folder = rewritten(tmp_path, source, change(load_file(source / "model.safetensors")), **values)
    check_refused(read, Config(model_name_or_path=folder, **settings), *parts)


@pytest.mark.parametrize("read", [load_learner, open_lazy_model])
def test_weights_that_fit_are_read(tmp_path, bert, llama, read):
    """In bf16; stored twice and equal they are tied; the remedy for different ones is tried too."""
    folder = rewritten(tmp_path, bert, with_norm(load_file(bert / "model.safetensors"), NORM, torch.bfloat16))
    for settings in (NATIVE, ENCODER):
        read_by(read, Config(model_name_or_path=folder, **settings))
    tensors = load_file(llama / "model.safetensors")
    for change, values in ((0, {}), (1, {"tie_word_embeddings": False})):
        rewritten(tmp_path, llama, {**tensors, "lm_head.weight": tensors[EMBEDDING] + change}, **values)
        learner = read_by(read, Config(model_name_or_path=folder, **LANGUAGE_MODEL))
        names = dict(getattr(learner, "learner", learner).named_parameters())
        assert ("hf.lm_head.weight" in names) == bool(change)


@pytest.mark.parametrize("read", [load_learner, open_lazy_model])
@pytest.mark.parametrize("settings", [NATIVE, ENCODER], ids=str)
@pytest.mark.parametrize("head", ["AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel"])
def test_a_classifier_starts_from_a_model_without_its_head(tmp_path, bert, read, settings, head):
    """Without classifier and pooler, and with or without the prefix of the base model."""
    save(getattr(transformers, head).from_pretrained(bert, is_decoder="Causal" in head), tmp_path)
    (tmp_path / "config.json").write_text((bert / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if "pooler" not in name}
    read_by(read, Config(model_name_or_path=rewritten(tmp_path, bert, kept), n_way=4, **settings))


def test_missing_and_truncated_weights_are_refused(tmp_path, bert):
    """No file, read at once; a truncated one, and a truncated index, tensor by tensor too."""
    config, file = Config(model_name_or_path=str(changed(tmp_path, bert))), tmp_path / "model.safetensors"
    check_refused(load_learner, config, ": the model cannot be read (")
    file.write_bytes((bert / "model.safetensors").read_bytes()[:-100])
    check_refused(load_learner, config, ": the model cannot be read (")
    check_refused(open_lazy_model, config, f": {file} cannot be read (")
    file.unlink()
    for text in ("{", "{}"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        check_refused(load_learner, config, ": the model cannot be read (")
        check_refused(open_lazy_model, config, "index.json cannot be read")


def test_a_checkpoint_without_tokenizer_reads_bytes(tmp_path, bert):
    notices: list[str] = []
    config = Config(model_name_or_path=str(changed(tmp_path, bert)))
    tokenizer = load_tokenizer(config, describe(config), notices.append)
    (line,) = notices
    check_message(line, f"{tmp_path} has no tokenizer", "bytes")
    assert tokenizer.decode(tokenizer("über")["input_ids"], skip_special_tokens=True) == "über"
    changed(tmp_path, bert, vocab_size=100)
    check_message(
        refusal(load_tokenizer, config, describe(config), notices.append),
        f"model_name_or_path={tmp_path}",
        "100 rows in its embedding",
        "add its tokenizer",
    )


def test_model_without_a_linear_classifier_is_refused(bert):
    hf = AutoModelForSequenceClassification.from_pretrained(bert)
    check_message(refusal(NativeClassifier, hf, 99), f"model_name_or_path={bert} ", "use --pooling mean")


@pytest.mark.parametrize("pad", [0, 2])
def test_a_decoder_as_classifier(tmp_path, llama, pad):
    """It scores the last token that is no padding, and its features are those of that token; transformers'
    classifiers leave out tokens with the id of padding, also an eos at the end.
    """
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    changed(tmp_path, llama, pad_token_id=pad)
    settings = {"n_way": 3, "pooling": "model", "head_init": "learned"}
    learner = read_by(load_learner, Config(model_name_or_path=str(tmp_path), **settings))
    assert learner.head_names == ("hf.score.weight",)
    assert learner.hf.config.pad_token_id == pad
    ids, mask = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 2]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    features, logits = learner(input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(features @ learner.get_parameter("hf.score.weight").T, logits)


def own(kind, change):
    """A class of a user: that of transformers with another output."""

    def forward(self, input_ids, attention_mask=None, **more):
        return change(kind.forward(self, input_ids, attention_mask=attention_mask))

    return type("OwnModel", (kind,), {"forward": forward, "__module__": "own"})


def failed(output):
    raise RuntimeError("no GPU")


@pytest.mark.parametrize("settings", [LANGUAGE_MODEL, NATIVE, ENCODER], ids=str)
@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda output: output, None),
        (failed, None),
        (lambda output: (output[0],), "a tuple "),
        (lambda output: output[0], "a Tensor "),
        (lambda output: {**output}, "a dict "),
        (lambda output: None, "a NoneType "),
        (lambda output: type(output)(**{next(iter(output)): output[0][..., :1]}), "outputs of shape "),
    ],
)
def test_a_class_of_a_user_returns_what_is_read(llama, monkeypatch, settings, change, shown):
    """A class that raises is no such case: it may need a GPU."""
    config = Config(model_name_or_path=str(llama), n_way=3, **settings)
    description = describe(config)
    hf = load_hf(config, description)
    hf.__class__ = own(type(hf), change)
    monkeypatch.setattr("fmmeta.learners.load.load_hf", lambda *_: hf)
    if not shown:
        load_learner(config, description)
        return
    missing = "last_hidden_state in its forward" if settings == ENCODER else "logits in its forward"
    check_refused(load_learner, config, " (OwnModel) returns ", shown, missing)


@pytest.mark.parametrize("layer", ["None", "raises"])
def test_a_class_without_its_embedding_is_refused(llama, monkeypatch, layer):
    def embedding(self):
        return None if layer == "None" else {}["x"]

    monkeypatch.setattr(transformers.LlamaForCausalLM, "get_input_embeddings", embedding)
    config = Config(model_name_or_path=str(llama), task_type="causal_lm")
    parts = (" (LlamaForCausalLM) does not say", "define get_input_embeddings in its class")
    check_refused(embedding_rows, config, *parts)


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_rows_of_different_numbers_of_end_tokens_are_refused(kind):
    """Classifiers of transformers with a decoder read a text at its last end token."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    more = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "num_labels": 2}
    more = {**more, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    hf_config = transformers.AutoConfig.for_model(kind, **sizes, **more, **ids)
    learner = NativeClassifier(AutoModelForSequenceClassification.from_config(hf_config), 2)
    right, other = torch.tensor([[5, 6, 2], [7, 8, 2]]), torch.tensor([[5, 2, 2], [7, 8, 2]])
    learner(input_ids=right, attention_mask=torch.ones_like(right))
    for tokens, end in ((other, 2), (right, 3), (right, None), (right, [2, 3])):
        learner.hf.config.eos_token_id = end
        check_message(
            refusal(learner, input_ids=tokens, attention_mask=torch.ones_like(tokens)),
            f"at its last token eos_token_id={end} of config.json",
            "leave this token out of the texts",
        )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_model_uses_the_padding_token_of_the_tokenizer(kind, tmp_path):
    """The logits of a row do not depend on the other rows of its batch."""
    folder = save_family(tmp_path / kind, kind, layers=1)
    changed(folder, folder, pad_token_id=None)
    config = Config(model_name_or_path=str(folder), pooling="model", n_way=3, head_init="learned")
    single = load_model(config, Progress(enabled=False))
    assert single.description.hf_config.pad_token_id == single.tokenizer.pad_token_id == 0
    rows = [Example([5, 6, 7, 8, 9, 10][:length], 0) for length in (2, 6, 4)]
    sets = [rows, *([row] for row in rows)]
    batched, *alone = (torch.stack([one for one, _ in single.respond(some, 1, 3)]) for some in sets)
    single_rows = torch.cat(alone)
    assert batched.std(0).min() > 1e-3
    torch.testing.assert_close(batched, single_rows)


def test_an_encoder_that_is_a_decoder_is_a_language_model(bert, tmp_path):
    changed(tmp_path, bert, is_decoder=True)
    assert describe(Config(model_name_or_path=str(tmp_path), task_type="causal_lm")).hf_config.is_decoder


def test_prototypes_need_a_bias(llama):
    """Classifiers of decoders have no bias, which class means need."""
    message = refusal(read_by, load_learner, Config(model_name_or_path=str(llama), head_init="prototype"))
    parts = ("LlamaForSequenceClassification", "use --pooling mean or another")
    check_message(message, "head_init=prototype", *parts)


@pytest.mark.parametrize("value", [0.5, 1, [0.0, 0.5]])
def test_stochastic_depth_is_off_in_training(tmp_path, bert, value):
    description = describe(Config(model_name_or_path=str(changed(tmp_path, bert, drop_path_rate=value))))
    assert description.restored["drop_path_rate"] == value
    assert not torch.tensor(description.hf_config.drop_path_rate).any()


def test_adapters_keep_the_revision_of_their_base(tmp_path):
    file = tmp_path / "adapter_config.json"
    file.write_text('{"base_model_name_or_path": "org/model", "revision": "v1"}')
    assert base_model_name(str(tmp_path)) == "org/model@v1"
    file.write_text('{"base_model_name_or_path": "org/model", "revision": null}')
    assert base_model_name(str(tmp_path)) == "org/model"


@pytest.mark.parametrize("model", ["bert", "llama"])
def test_buffers_move_to_the_device_of_a_model_that_is_sharded_while_loading(model, request):
    """On the meta device; the state dict has the same names."""
    config = Config(model_name_or_path=str(request.getfixturevalue(model)))
    learner = open_lazy_model(config, describe(config)).learner
    before, names = dict(learner.named_buffers()), list(learner.state_dict())
    assert {buffer.device.type for buffer in before.values()} == {"cpu"}
    move_buffers(learner, torch.device("meta"))
    after = dict(learner.named_buffers())
    assert {buffer.device.type for buffer in after.values()} == {"meta"}
    assert (list(after), list(learner.state_dict())) == (list(before), names)
