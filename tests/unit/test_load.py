"""Models load with every pooling, with a seeded head and without dropout; others are refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
)

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
    learners = [load_learner(config, describe(config)) for _ in range(2)]
    assert learners[0].head_names == head
    assert learners[0].get_parameter(head[0]).shape == (4, 32)
    assert bool(learners[0].get_parameter(head[0]).any()) == (head_init == "learned")
    for (name, a), (_, b) in zip(learners[0].named_parameters(), learners[1].named_parameters(), strict=True):
        assert torch.equal(a, b), name  # a fresh head follows the seed
    empty = empty_learner(config, describe(config))
    assert [(n, p.shape) for n, p in empty.named_parameters()] == [
        (n, p.shape) for n, p in learners[0].named_parameters()
    ]


def test_dropout_is_off_in_training(bert):
    config = Config(model_name_or_path=str(bert), n_way=4)
    description = describe(config)
    assert description.dropouts == {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
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
    assert description.dropouts.items() >= own.items()
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
    assert describe(Config(model_name_or_path=str(tmp_path), pooling="cls")).pooling == "cls"


@pytest.mark.parametrize(
    "modes", [("max_tokens",), ("cls_token", "mean_tokens"), ("mean_tokens", "max_tokens")]
)
def test_unsupported_and_combined_pooling_is_refused(tmp_path, bert, modes):
    (tmp_path / "1_Pooling").mkdir()
    text = json.dumps({f"pooling_mode_{mode}": True for mode in modes})
    (tmp_path / "1_Pooling" / "config.json").write_text(text)
    check_message(
        refusal(describe, Config(model_name_or_path=str(changed(tmp_path, bert)))),
        "pooling=auto",
        f"1_Pooling/config.json of model_name_or_path={tmp_path}",
        "choose one with --pooling",
    )


@pytest.mark.parametrize(
    ("values", "causes"),
    [
        ({"num_experts": 8}, (" ", "a mixture of experts (bert)", "use a dense model")),
        ({"quantization_config": {"quant_method": "gptq"}}, (" ", "is quantised", "use the full one")),
        ({"model_type": "nonsense"}, (": its configuration cannot be read (",)),
        ({"hidden_size": "many"}, (": its configuration cannot be read (",)),
        ({"num_labels": "two"}, (": its configuration cannot be read (",)),
    ],
)
def test_models_that_cannot_be_read_or_trained_are_refused(tmp_path, bert, values, causes):
    check_message(
        refusal(describe, Config(model_name_or_path=str(changed(tmp_path, bert, **values)))),
        f"model_name_or_path={tmp_path}{causes[0]}",
        *causes[1:],
    )


def test_models_without_a_padding_token(tmp_path):
    """The configurations of CodeGen and Gemma 3 have no pad_token_id."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "eos_token_id": 7}
    transformers.CodeGenConfig(**sizes).save_pretrained(tmp_path)
    config = Config(model_name_or_path=str(tmp_path), task_type="causal_lm")
    assert describe(config).hf_config.pad_token_id == 7
    transformers.Gemma3Config().save_pretrained(tmp_path)
    check_message(
        refusal(describe, config), f"model_name_or_path={tmp_path}", "gemma3", "give a text model alone"
    )


def test_ids_of_generation_settings_are_rows_of_the_embedding(tmp_path, llama):
    """-1 and null are none. One beyond the rows is named in a notice, and ends no answer."""
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    config, notices = Config(model_name_or_path=str(tmp_path), task_type="causal_lm"), list[str]()
    for key, value, shown in (
        ("eos_token_id", [[1], 2], "[1]"),
        ("eos_token_id", {"a": 1}, "{'a': 1}"),
        ("eos_token_id", [2, -3], "-3"),
        ("eos_token_id", "1", "'1'"),
        ("eos_token_id", 2.0, "2.0"),
        ("eos_token_id", True, "True"),
        ("pad_token_id", "0", "'0'"),
        ("bos_token_id", -2, "-2"),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, key: value}))
        check_message(
            refusal(load_tokenizer, config, describe(config), notices.append),
            f"model_name_or_path={tmp_path}: {key}={shown} of generation_config.json is not among the 259",
            "use the id of a token, or null",
        )
    facts = {"eos_token_id": [2, -1, 900], "pad_token_id": None, "bos_token_id": -1}
    (tmp_path / "generation_config.json").write_text(json.dumps(facts))
    description = describe(config)
    load_tokenizer(config, description, notices.append)
    assert description.ends == (2,)
    assert ["eos_token_id=900 of generation_config.json" in str(one) for one in notices] == [True]


def test_an_empty_list_of_end_tokens_gives_no_padding_token(tmp_path, llama):
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    changed(tmp_path, llama, eos_token_id=[], pad_token_id=None)
    assert describe(Config(model_name_or_path=str(tmp_path))).hf_config.pad_token_id == 0


@pytest.mark.parametrize(("pad", "positions"), [(900, 1200), (900, 130), (-2, 130), (129, 130)])
def test_positions_behind_a_padding_token_that_leaves_none(tmp_path, pad, positions):
    transformers.RobertaConfig(vocab_size=512, max_position_embeddings=positions).save_pretrained(tmp_path)
    changed(tmp_path, tmp_path, pad_token_id=pad)
    check_message(
        refusal(describe, Config(model_name_or_path=str(tmp_path), max_length=200)),
        f"model_name_or_path={tmp_path}: pad_token_id={pad} of config.json",
        f"512 rows of its embedding, or leaves none of its {positions} positions",
        "use the id of the padding token",
    )


def write_modules(folder, *types):
    """modules.json, with folders as sentence-transformers names them."""
    modules = [
        {"type": one, "path": f"{i}_{one.rpartition('.')[2]}" * (i > 0)} for i, one in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return Config(model_name_or_path=str(folder))


TRANSFORMER, POOLING = (f"sentence_transformers.models.{one}" for one in ("Transformer", "Pooling"))


def test_a_pooling_without_its_file_is_refused(tmp_path, bert):
    config = write_modules(changed(tmp_path, bert), TRANSFORMER, POOLING)
    check_message(
        refusal(describe, config),
        f"pooling=auto: model_name_or_path={tmp_path} lacks 1_Pooling/config.json",
        "choose a pooling with --pooling",
    )
    assert describe(replace(config, pooling="mean")).pooling == "mean"


@pytest.mark.parametrize(
    ("types", "part"),
    [
        (("custom_st.Transformer", POOLING), "begins with the sentence-transformers module custom_st.Transf"),
        ((TRANSFORMER, "my_pkg.Pooling"), "need the module my_pkg.Pooling (1_Pooling), which"),
        ((TRANSFORMER, POOLING, "my_pkg.Normalize"), "need the module my_pkg.Normalize (2_Normalize), which"),
    ],
)
def test_modules_of_other_packages_are_refused(tmp_path, bert, types, part):
    config = write_modules(changed(tmp_path, bert), *types)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    check_message(refusal(describe, config), f"model_name_or_path={tmp_path} ", part)


@pytest.mark.parametrize(
    ("stored", "most", "length"),
    [({}, 9, 9), ({}, 10**30, 128), ({"max_seq_length": 7}, 9, 7), ({"max_seq_length": None}, 9, 9)],
)
def test_the_longest_text_may_be_in_the_settings_of_the_tokenizer(tmp_path, bert, stored, most, length):
    """As sentence-transformers 6 writes it; of other folders it changes nothing."""
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(stored))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": most}))
    config = Config(model_name_or_path=str(changed(tmp_path, bert)))
    hf_config = describe(config).hf_config
    assert fitted(config, hf_config).max_length == (stored.get("max_seq_length") or 128)
    write_modules(tmp_path, TRANSFORMER)
    assert fitted(config, hf_config).max_length == length


def test_folders_without_a_model_are_refused(tmp_path):
    empty = "give a Hugging Face folder or hub id"
    missing = dict.fromkeys((str(tmp_path / "none"), "./none", "a/b/c"), "check the path")
    for name, remedy in {str(tmp_path): empty, **missing}.items():
        check_message(
            refusal(describe, Config(model_name_or_path=name)), f"model_name_or_path={name}", remedy
        )


def test_missing_weights_are_refused(tmp_path, bert):
    config = Config(model_name_or_path=str(changed(tmp_path, bert)))
    assert refusal(load_learner, config, describe(config)).startswith(
        f"model_name_or_path={tmp_path}: the model cannot be read ("
    )


def rewritten(folder, source, tensors, **values):
    """A copy of a checkpoint with these tensors, and other values in its configuration."""
    save_file(tensors, changed(folder, source, **values) / "model.safetensors", {"format": "pt"})
    return str(folder)


LANGUAGE_MODEL, NATIVE, ENCODER = (
    {"task_type": "causal_lm"},
    {"pooling": "model"},
    {"pooling": "mean"},
)


@pytest.mark.parametrize("read", [load_learner, open_lazy_model])
@pytest.mark.parametrize("settings", [LANGUAGE_MODEL, NATIVE, ENCODER], ids=str)
@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (
            lambda name: f"module.{name}",
            ("lacks 20 of the", "embed_tokens.weight", "give a complete checkpoint"),
        ),
        (
            lambda name: name.replace("1.mlp.down_proj", "9"),
            ("lacks 1 of the", "layers.1.mlp.down_proj.weight)", "give a complete checkpoint"),
        ),
    ],
    ids=["prefix", "one"],
)
def test_a_checkpoint_without_all_weights_is_refused(tmp_path, llama, read, settings, names, parts):
    """On layouts that read it at once and on those that read it tensor by tensor."""
    tensors = {names(name): value for name, value in load_file(llama / "model.safetensors").items()}
    config = Config(model_name_or_path=rewritten(tmp_path, llama, tensors), **settings)
    check_message(refusal(read, config, describe(config)), f"model_name_or_path={tmp_path} ", *parts)


@pytest.mark.parametrize("read", [load_learner, open_lazy_model])
@pytest.mark.parametrize("settings", [NATIVE, ENCODER], ids=str)
def test_a_body_of_another_shape_is_refused(tmp_path, bert, read, settings):
    folder = rewritten(tmp_path, bert, load_file(bert / "model.safetensors"), max_position_embeddings=140)
    config = Config(model_name_or_path=folder, **settings)
    check_message(
        refusal(read, config, describe(config)),
        f"model_name_or_path={tmp_path} ",
        "embeddings.position_embeddings.weight of shape [130, 32] (its configuration says [140, 32])",
        "fix config.json or the weights",
    )


@pytest.mark.parametrize("read", [load_learner, open_lazy_model])
@pytest.mark.parametrize("settings", [NATIVE, ENCODER], ids=str)
@pytest.mark.parametrize(
    ("dtype", "shown"),
    [(torch.int8, "I8"), (torch.int32, "I32"), (torch.bool, "BOOL"), (torch.complex64, "C64")],
)
def test_weights_that_are_no_floating_point_numbers_are_refused(tmp_path, bert, read, settings, dtype, shown):
    """A weight whose name is translated as well; a buffer of whole numbers is none."""
    tensors = load_file(bert / "model.safetensors")
    tensors["bert.embeddings.position_ids"] = torch.arange(130)[None]
    name = "bert.embeddings.LayerNorm.weight"
    changed_weight = tensors.pop(name).to(dtype)
    for key in (name, name.replace("weight", "gamma")):
        config = Config(model_name_or_path=rewritten(tmp_path, bert, {**tensors, key: changed_weight}))
        config = replace(config, **settings)
        check_message(
            refusal(read, config, describe(config)),
            f"model_name_or_path={tmp_path} holds {key} as {shown}, which is no floating-point type",
            "give the checkpoint that is not quantised",
        )
    rewritten(tmp_path, bert, {**tensors, name: torch.ones(32, dtype=torch.bfloat16)})
    read(config, describe(config))


@pytest.mark.parametrize("read", [load_learner, open_lazy_model])
def test_tied_weights_of_different_values_are_refused(tmp_path, llama, read):
    """One layout would untie them, another would drop one of them. Stored twice and equal they are tied; the
    remedy in the message is tried too.
    """
    tensors = load_file(llama / "model.safetensors")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    for change, values in ((0, {}), (1, {}), (1, {"tie_word_embeddings": False})):
        folder = rewritten(tmp_path, llama, {**tensors, head: tensors[embedding] + change}, **values)
        config = Config(model_name_or_path=folder, **LANGUAGE_MODEL)
        if change and not values:
            check_message(
                refusal(read, config, describe(config)),
                f"model_name_or_path={tmp_path} ",
                f"{embedding} and {head}",
                "set tie_word_embeddings to false in config.json",
            )
            continue
        learner = read(config, describe(config))
        names = dict(getattr(learner, "learner", learner).named_parameters())
        assert (f"hf.{head}" in names) == bool(change)


@pytest.mark.parametrize("read", [load_learner, open_lazy_model])
@pytest.mark.parametrize("settings", [NATIVE, ENCODER], ids=str)
@pytest.mark.parametrize("head", ["AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel"])
def test_a_classifier_starts_from_a_model_without_its_head(tmp_path, bert, read, settings, head):
    """Without classifier and pooler, and with or without the prefix of the base model."""
    save(getattr(transformers, head).from_pretrained(bert, is_decoder="Causal" in head), tmp_path)
    (tmp_path / "config.json").write_text((bert / "config.json").read_text())
    tensors = {
        name: value
        for name, value in load_file(tmp_path / "model.safetensors").items()
        if "pooler" not in name
    }
    config = Config(model_name_or_path=rewritten(tmp_path, bert, tensors), n_way=4, **settings)
    read(config, describe(config))


def test_truncated_weights_are_refused(tmp_path, bert):
    """A truncated file, read at once and tensor by tensor; then a truncated index."""
    changed(tmp_path, bert)
    file = tmp_path / "model.safetensors"
    file.write_bytes((bert / "model.safetensors").read_bytes()[:-100])
    config = Config(model_name_or_path=str(tmp_path))
    assert refusal(load_learner, config, describe(config)).startswith(
        f"model_name_or_path={tmp_path}: the model cannot be read ("
    )
    assert refusal(open_lazy_model, config, describe(config)).startswith(
        f"model_name_or_path={tmp_path}: {file} cannot be read ("
    )
    file.unlink()
    for text in ("{", "{}"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        assert refusal(load_learner, config, describe(config)).startswith(
            f"model_name_or_path={tmp_path}: the model cannot be read ("
        )
        message = refusal(open_lazy_model, config, describe(config))
        assert message.startswith(f"model_name_or_path={tmp_path}: ")
        assert "index.json cannot be read" in message


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "modules.json"])
@pytest.mark.parametrize("text", ["{", "[1]", "7", "[" * 100_000])
def test_unreadable_files_of_sentence_transformers_are_refused(name, text, tmp_path, bert):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (tmp_path / name).write_text(text)
    message = refusal(describe, Config(model_name_or_path=str(changed(tmp_path, bert))))
    assert message.startswith(f"model_name_or_path={tmp_path}: {name} cannot be read (")


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


def test_a_decoder_as_classifier(llama):
    """A decoder scores the last token that is no padding, and its features are those of that token."""
    config = Config(model_name_or_path=str(llama), n_way=3, pooling="model", head_init="learned")
    learner = load_learner(config, describe(config))
    assert learner.head_names == ("hf.score.weight",)
    ids, mask = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": mask}
    features, logits = learner(**inputs)
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
    check_message(
        refusal(load_learner, config, description),
        f"model_name_or_path={llama} (OwnModel) returns ",
        shown,
        "last_hidden_state in its forward" if settings == ENCODER else "logits in its forward",
    )


@pytest.mark.parametrize("layer", ["None", "raises"])
def test_a_class_without_its_embedding_is_refused(llama, monkeypatch, layer):
    def embedding(self):
        return None if layer == "None" else {}["x"]

    monkeypatch.setattr(transformers.LlamaForCausalLM, "get_input_embeddings", embedding)
    config = Config(model_name_or_path=str(llama), task_type="causal_lm")
    check_message(
        refusal(embedding_rows, config, describe(config)),
        f"model_name_or_path={llama} (LlamaForCausalLM) does not say",
        "define get_input_embeddings in its class",
    )


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


def test_encoder_as_language_model_is_refused(bert, tmp_path):
    check_message(
        refusal(describe, Config(model_name_or_path=str(bert), task_type="causal_lm")),
        f"model_name_or_path={bert} is a bert",
        "give a decoder, or use --task_type",
    )
    changed(tmp_path, bert, is_decoder=True)
    assert describe(Config(model_name_or_path=str(tmp_path), task_type="causal_lm")).hf_config.is_decoder


def test_prototypes_need_a_bias(llama):
    """Classifiers of decoders have no bias, which class means need."""
    config = Config(model_name_or_path=str(llama), head_init="prototype")
    check_message(
        refusal(load_learner, config, describe(config)),
        "head_init=prototype",
        "LlamaForSequenceClassification",
        "use --pooling mean or another",
    )


def test_an_encoder_decoder_is_not_pooled(tmp_path):
    T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8).save_pretrained(tmp_path)
    check_message(
        refusal(describe, Config(model_name_or_path=str(tmp_path), pooling="mean")),
        f"model_name_or_path={tmp_path}",
        "an encoder and a decoder",
        "give an encoder",
    )


@pytest.mark.parametrize("value", [0.5, 1, [0.0, 0.5]])
def test_stochastic_depth_is_off_in_training(tmp_path, bert, value):
    description = describe(Config(model_name_or_path=str(changed(tmp_path, bert, drop_path_rate=value))))
    assert description.dropouts["drop_path_rate"] == value
    assert not torch.tensor(description.hf_config.drop_path_rate).any()


def test_adapters_keep_the_revision_of_their_base(tmp_path):
    file = tmp_path / "adapter_config.json"
    file.write_text('{"base_model_name_or_path": "org/model", "revision": "v1"}')
    assert base_model_name(str(tmp_path)) == "org/model@v1"
    file.write_text('{"base_model_name_or_path": "org/model", "revision": null}')
    assert base_model_name(str(tmp_path)) == "org/model"


def test_features_of_a_decoder_are_those_of_its_logits_where_pad_is_eos():
    """transformers' classifiers leave out tokens with the id of padding, also an eos at the end."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.num_labels, config.pad_token_id, config.eos_token_id = 3, 2, 2
    learner = NativeClassifier(LlamaForSequenceClassification(config).eval(), 3)
    ids = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 2]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    features, logits = learner(input_ids=ids, attention_mask=mask)
    assert torch.allclose(features @ learner.hf.score.weight.T, logits, atol=1e-6)


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
