"""LoRA: only adapters and the head are trained, and the exported folder is loaded by peft."""

import json
import re
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, CTRLConfig, CTRLLMHeadModel

from fmmeta import Config, MetaTrainer, adapt, evaluate
from fmmeta.adaptation.predict import load as predict_from
from fmmeta.evaluation.settings import EvaluateConfig, PredictConfig
from fmmeta.learners.load import describe, empty_learner, load_learner, load_tokenizer
from fmmeta.learners.lora import lora_config, scalings
from fmmeta.parallel import memory
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World
from fmmeta.training import build
from tests.support.exports import assert_same_logits, exported, inputs
from tests.support.messages import check_message, refusal
from tests.support.models import save, tiny, write_classes


@pytest.fixture(scope="module")
def sources(bert, llama, tmp_path_factory):
    # its classifier has a dense layer below the output layer, and it has no pooler
    roberta = save(tiny("roberta", num_hidden_layers=1, num_labels=3), tmp_path_factory.mktemp("roberta"))
    qwen2 = save(tiny("qwen2", num_hidden_layers=1), tmp_path_factory.mktemp("qwen2"))
    folders = {"bert": bert, "llama": llama, "roberta": roberta, "qwen2": qwen2, "tiny": "tiny"}
    return {name: str(folder) for name, folder in folders.items()}


def trained_of(learner) -> dict[str, torch.Tensor]:
    return {name: param for name, param in learner.named_parameters() if param.requires_grad}


def learner_of(source: str, **settings):
    config = Config(model_name_or_path=source, **{"lora_r": 4, "n_way": 3, **settings})
    return load_learner(config, describe(config))


@pytest.mark.parametrize(
    ("base", "settings", "beside", "adapters"),
    [
        ("llama", {"task_type": "causal_lm"}, set(), {"q_proj", "v_proj"}),
        ("llama", {"pooling": "model"}, {"hf.score.weight"}, {"q_proj", "v_proj"}),
        ("bert", {"pooling": "model"}, {"hf.classifier.weight", "hf.classifier.bias"}, {"query", "value"}),
        ("bert", {"pooling": "mean"}, {"head.weight", "head.bias"}, {"query", "value"}),
        (
            "bert",
            {"pooling": "cls", "lora_target_modules": ["all-linear"]},
            {"head.weight", "head.bias"},
            {"query", "key", "value", "dense"},
        ),
        (
            "roberta",
            {"pooling": "model", "lora_target_modules": ["dense", "key"]},
            {
                f"hf.classifier.{layer}.{part}"
                for layer in ("dense", "out_proj")
                for part in ("weight", "bias")
            },
            {"key", "dense"},
        ),
    ],
)
def test_only_adapters_and_head_are_trained(sources, base, settings, beside, adapters):
    learner = learner_of(sources[base], **settings)
    trained = {*trained_of(learner)}
    assert {name for name in trained if "lora_" not in name} == beside
    assert {name.split(".lora_")[0].split(".")[-1] for name in trained - beside} == adapters
    assert not any("pooler" in name for name in trained - beside) or settings["pooling"] == "model"
    ids = torch.tensor([[1, 5, 6]])
    logits = learner.logits(learner(input_ids=ids, attention_mask=torch.ones_like(ids)))
    (logits * torch.randn_like(logits)).sum().backward()
    reached = {name for name, param in learner.named_parameters() if param.grad is not None}
    assert reached == trained
    config = Config(model_name_or_path=sources[base], **{"lora_r": 4, "n_way": 3, **settings})
    one, other = (
        [(name, p.shape, p.requires_grad) for name, p in of.named_parameters()]
        for of in (learner, empty_learner(config, describe(config)))
    )
    assert one == other


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        ("llama", {"task_type": "causal_lm"}),
        ("bert", {"pooling": "mean", "head_init": "learned"}),
    ],
)
def test_output_equals_w_plus_alpha_over_r_times_b_a(sources, base, settings):
    adapted = learner_of(sources[base], lora_alpha=6, **settings)
    plain = learner_of(sources[base], lora_r=0, **settings)
    batch = inputs(Path(sources[base]))
    with torch.no_grad():
        one, other = (learner.logits(learner(**batch)) for learner in (adapted, plain))
        assert torch.equal(one, other)  # B is zero: the start is the checkpoint
        for name, module in adapted.named_modules():
            if hasattr(module, "lora_B"):
                a, b = module.lora_A["default"].weight, module.lora_B["default"].weight.normal_()
                assert a.shape[0] == b.shape[1] == 4
                plain.get_submodule(name).weight += 6 / 4 * b @ a
        one, other = (learner.logits(learner(**batch)) for learner in (adapted, plain))
        assert_same_logits(one, other, batch["attention_mask"])


def test_adapters_follow_the_seed(sources):
    one, same, other = (learner_of(sources["llama"], task_type="causal_lm", seed=seed) for seed in (1, 1, 2))
    values = {name: param for name, param in one.named_parameters() if "lora_A" in name}
    assert len(values) == 4
    assert all(torch.equal(value, same.get_parameter(name)) for name, value in values.items())
    assert not any(torch.equal(value, other.get_parameter(name)) for name, value in values.items())
    assert all(float(value.detach().std()) > 0.01 for value in values.values())


@pytest.mark.parametrize(
    ("base", "auto", "settings"),
    [
        ("llama", "AutoModelForCausalLM", {"task_type": "causal_lm"}),
        ("llama", "AutoModelForSequenceClassification", {"pooling": "model"}),
        ("bert", "AutoModelForSequenceClassification", {"pooling": "model", "head_init": "learned"}),
        (
            "roberta",
            "AutoModelForSequenceClassification",
            {"pooling": "model", "lora_target_modules": ["all-linear"]},
        ),
        (
            "bert",
            "AutoModel",
            {"pooling": "mean", "head_init": "learned", "lora_target_modules": ["all-linear"]},
        ),
        ("tiny", "AutoModel", {}),
        (
            "llama",
            "AutoModelForCausalLM",
            {
                "task_type": "causal_lm",
                "peft_config": '{"rank_pattern": {"layers.0.self_attn.v_proj": 5, "v_proj": 2},'
                ' "alpha_pattern": {"layers.0.*": 9, ".*_proj": 2}, "use_rslora": true,'
                ' "exclude_modules": ".*1.*q_proj"}',
            },
        ),
        (
            "bert",
            "AutoModel",
            {
                "pooling": "mean",
                "head_init": "learned",
                "peft_config": '{"target_modules": ".*(key|dense)", "exclude_modules": ["output.dense"],'
                ' "init_lora_weights": "gaussian"}',
            },
        ),
    ],
)
def test_export_is_loaded_by_peft_and_transformers(tmp_path, sources, base, auto, settings):
    folder = tmp_path / "model"
    _, worker = exported(sources[base], folder, lora_r=3, lora_alpha=5, lora_merge=True, **settings)
    make, batch = getattr(transformers, auto), inputs(folder)
    labels = {"num_labels": 3, "ignore_mismatched_sizes": True} if "Classification" in auto else {}
    below = make.from_pretrained(folder / "base" if base == "tiny" else sources[base], **labels)
    loaded = (
        PeftModel.from_pretrained(below, folder),
        make.from_pretrained(folder, **labels),
        make.from_pretrained(tmp_path / "merged"),
    )
    key = "last_hidden_state" if auto == "AutoModel" else "logits"
    with torch.no_grad():
        wanted = worker.model.hf(**batch)[key]
        for model in loaded:
            assert_same_logits(model.eval()(**batch)[key], wanted, batch["attention_mask"])
    kept = re.compile(r".*\.lora_[AB]\.weight|base_model\.model\.(classifier|score)\..*")
    assert all(map(kept.fullmatch, load_file(folder / "adapter_model.safetensors")))
    assert not any("lora" in name for name in load_file(tmp_path / "merged" / "model.safetensors"))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["inference_mode"]) == (3, 5, True)
    has_head = auto == "AutoModel" and settings.get("head_init") == "learned"
    for place in (folder, tmp_path / "merged"):
        assert (place / "head.safetensors").exists() == has_head


def test_export_is_a_sentence_transformers_folder(tmp_path, sources):
    """Its vectors are those of training, which leaves out a default prompt; other prompts stay."""
    st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    base = shutil.copytree(sources["bert"], tmp_path / "base")
    prompts = {"prompts": {"query": "stone lantern "}, "default_prompt_name": "query"}
    (base / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    _, worker = exported(
        base, tmp_path / "model", notice=lambda text: None, lora_r=3, lora_merge=True, pooling="mean"
    )
    batch, texts = inputs(tmp_path / "model"), ["river", "river stone lantern"]
    with torch.no_grad():
        wanted = worker.model(**batch)[0]
    for folder in ("model", "merged"):
        encoder = st.SentenceTransformer(str(tmp_path / folder))
        found = torch.from_numpy(encoder.encode(texts))
        assert encoder.prompts["query"] == "stone lantern "
        assert_same_logits(found, wanted, batch["attention_mask"])


def test_run_saves_only_adapters_and_resumes_from_them(tmp_path, sources, classes):
    config = {
        **{"model_name_or_path": sources["bert"], "dataset": [str(classes)], "k_shot": 1, "num_query": 2},
        **{"outer_steps": 4, "eval_episodes": 0, "save_steps": 2, "lora_r": 2, "head_init": "learned"},
        "pooling": "mean",
    }
    MetaTrainer(Config(**config, output_dir=str(tmp_path / "whole"))).train()
    shard = load_file(tmp_path / "whole" / "checkpoint-2" / "shard-00000.safetensors")
    assert {name.split("/")[0] for name in shard} == {"theta", "exp_avg", "exp_avg_sq"}
    assert all("lora_" in name or "/head." in name for name in shard)
    assert len(shard) == 3 * (2 * 4 + 2)
    begun = shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "from")
    again = Config(**config, output_dir=str(tmp_path / "again"), resume_from_checkpoint=str(begun))
    MetaTrainer(again).train()
    for name in ("adapter_model.safetensors", "head.safetensors"):
        whole, resumed = (load_file(tmp_path / run / "model" / name) for run in ("whole", "again"))
        assert all(torch.equal(value, resumed[key]) for key, value in whole.items())
    assert any(float(value.abs().max()) > 0 for name, value in whole.items())
    other = Config(**{**config, "lora_r": 3}, output_dir=str(tmp_path / "whole"))
    assert "(lora_alpha: 4.0 -> 6.0; lora_r: 2 -> 3)" in refusal(MetaTrainer(other).train)


def test_the_estimate_counts_frozen_weights_once(sources, classes, monkeypatch):
    """Frozen weights need 4 bytes; trained ones also 4 of gradient and 20 of meta state."""
    seen = []

    def chosen(world, sizes_at, precision, model_ranks):
        seen.append(sizes_at(1))
        return 1, ""

    monkeypatch.setattr(build, "choose_group_size", chosen)
    world = World(Launch(), torch.device("cpu"))
    given = {"model_name_or_path": sources["bert"], "dataset": [str(classes)], "pooling": "mean"}
    for lora_r in (0, 2):
        config = Config(**given, k_shot=1, num_query=2, lora_r=lora_r)
        inputs = build.read_inputs(config, world, lambda text: None)
        build.plan_parallel(config, inputs, world, lambda text: None)
    full, lora = seen
    adapters = 2 * 2 * (2 * 32 * 2)  # layers x targets x (A and B)
    head, pooler = 5 * 32 + 5, 32 * 32 + 32
    assert (lora.params, lora.frozen) == (adapters + head, full.params + full.frozen - head)
    assert full.frozen == pooler
    estimate = memory.estimate(lora, inputs.deepspeed, 1)
    assert estimate.kinds["weights"] == 4 * (lora.params + lora.frozen)
    assert estimate.meta == 16 * lora.params


def test_missing_peft_is_refused_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    check_message(
        refusal(describe, Config(lora_r=4)), "lora_r=4 needs peft (", "; pip install 'fmmeta[lora]'"
    )
    describe(Config())  # not needed without adapters


@pytest.mark.parametrize(
    ("base", "settings", "targets", "parts"),
    [
        (
            "bert",
            {"pooling": "mean"},
            ["nix"],
            ["=nix: BertModel has no layer 'nix'", "dense, key, query, value"],
        ),
        (
            "bert",
            {"pooling": "mean"},
            ["query", "nix"],
            ["=query nix: BertModel has no layer 'nix'", "dense, key, query, value"],
        ),
        (
            "bert",
            {"pooling": "mean"},
            ["word_embeddings"],
            ["=word_embeddings: ", "name linear layers"],
        ),
        (  # peft refuses it
            "bert",
            {"pooling": "mean"},
            ["LayerNorm"],
            ["=LayerNorm ", "cannot be adapted in BertModel: "],
        ),
        (  # tied
            "llama",
            {"task_type": "causal_lm"},
            ["lm_head"],
            ["=lm_head", "the weight of an embedding", "name linear layers"],
        ),
        (
            "bert",
            {"pooling": "model"},
            ["query", "classifier"],
            ["no layer 'classifier' to adapt", "dense, key, query, value"],
        ),
    ],
)
def test_targets_that_cannot_be_adapted(sources, base, settings, targets, parts):
    message = refusal(learner_of, sources[base], **settings, lora_target_modules=targets)
    check_message(message, "lora_target_modules", *parts)


def test_unknown_architecture_needs_targets(tmp_path):
    save(CTRLLMHeadModel(CTRLConfig(vocab_size=259, n_embd=8, dff=8, n_layer=1, n_head=2)), tmp_path)
    message = refusal(learner_of, str(tmp_path), task_type="causal_lm")
    parts = ("cannot be adapted in CTRLLMHeadModel: ", "or use all-linear")
    check_message(message, "lora_target_modules=(peft's choice) ", *parts)
    learner = learner_of(str(tmp_path), task_type="causal_lm", lora_target_modules=["Wq"])
    assert any("lora_A" in name for name, _ in learner.named_parameters())


@pytest.mark.parametrize("source", ["bert", "llama"])
def test_an_adapter_folder_is_read_as_its_merged_model(source, tmp_path, sources):
    exported(sources[source], tmp_path / "model", lora_r=3, lora_merge=True)
    ours, theirs = (
        learner_of(str(tmp_path / name), lora_r=0, n_way=5, head_init="learned").state_dict()
        for name in ("model", "merged")
    )
    assert set(ours) == set(theirs)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


OURS = {"lora_r": 3, "lora_alpha": 5}
HELD, SAME = "holds adapters of rank 3, alpha 5", "give the same --lora_r, --lora_alpha"
PATTERNS = '{"rank_pattern": {"query": 2}, "alpha_pattern": {"value": 8}, "use_rslora": true}'
AS_FILE = ("lora_r=3", "holds adapters of rank 3", "adapter_config.json as --peft_config")


@pytest.mark.parametrize(
    ("source", "settings", "again", "refused"),
    [
        *(
            (
                source,
                OURS,
                OURS,
                [
                    ({**OURS, "lora_r": 4}, ("lora_r=4", HELD, SAME)),
                    ({"lora_r": 3}, ("lora_r=3", HELD, SAME)),
                    ({**OURS, "lora_target_modules": ["all-linear"]}, ("lora_r=3", HELD, SAME)),
                ],
            )
            for source in ("bert", "llama", "roberta")
        ),
        (
            "bert",
            {"lora_r": 3, "peft_config": PATTERNS},
            {"lora_r": 0, "peft_config": "adapter_config.json"},
            [  # the latter has the same ranks and other factors
                ({"lora_r": 3, "peft_config": None}, AS_FILE),
                ({"lora_r": 3, "peft_config": '{"rank_pattern": {"query": 2}}'}, AS_FILE),
            ],
        ),
    ],
)
def test_training_continues_from_stored_adapters(
    source, settings, again, refused, tmp_path, sources, monkeypatch
):
    model = str(tmp_path / "model")
    _, worker = exported(sources[source], tmp_path / "model", **settings)
    monkeypatch.chdir(model)
    config = Config(model_name_or_path=model, **again, head_init="learned")
    learner = load_learner(config, describe(config))
    stored, found = trained_of(worker.model), trained_of(learner)
    assert {*found} == {*stored}
    assert all(torch.equal(found[name], stored[name]) for name in {*stored} - {*worker.model.head_names})
    assert lora_config(learner, config).base_model_name_or_path == sources[source]
    layers = len([name for name in stored if "lora_A" in name])
    for other, parts in refused:
        check_message(refusal(learner_of, model, **other), model, f"{layers} layers", *parts)


@pytest.mark.parametrize(
    ("options", "resized", "parts"),
    [
        (
            {"modules_to_save": ["lm_head"]},
            0,
            ("would be lost (base_model.model.lm_head.weight", "leave --lora_r out"),
        ),
        (
            {"bias": "all"},
            0,
            ("would be lost (base_model.model.model.layers.0.self_attn.k_proj.bias", "leave --lora"),
        ),
        ({}, 8, ("2 weights that are not trained further", "leave --lora_r out")),
        ({"trainable_token_indices": [3]}, 0, ("trainable_tokens_delta", "leave --lora_r out")),
        ({"use_dora": True}, 0, ("lora_magnitude_vector", "leave --lora_r out")),
        ({"init_lora_weights": "pissa"}, 0, ("init_lora_weights=pissa", "leave --lora_r out")),
        ({"init_lora_weights": "olora"}, 0, ("init_lora_weights=olora", "leave --lora_r out")),
        ({"init_lora_weights": "eva"}, 0, ()),
    ],
    ids=str,
)
def test_adapters_with_more_than_is_trained_are_not_continued(options, resized, parts, tmp_path, sources):
    """Their other weights would be lost. Without --lora_r they are merged."""
    base = AutoModelForCausalLM.from_pretrained(sources["qwen2"])
    if resized:
        base.resize_token_embeddings(base.config.vocab_size + resized)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options}
    model, folder = peft.get_peft_model(base, peft.LoraConfig(**options)), str(tmp_path / "model")
    with torch.no_grad():
        for param in filter(lambda param: param.requires_grad, model.parameters()):
            param += 0.1
    model.save_pretrained(folder)
    given = {"task_type": "causal_lm", "lora_target_modules": ["q_proj"]}
    if parts:
        check_message(refusal(learner_of, folder, **given), f"lora_r=4: {folder}", *parts)
    else:
        learner_of(folder, **given)
    if not resized:
        batch = inputs(Path(sources["qwen2"]))
        with torch.no_grad():
            ours = learner_of(folder, task_type="causal_lm", lora_r=0).hf(**batch).logits
            assert_same_logits(ours, model.eval()(**batch).logits, batch["attention_mask"])


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (peft.PrefixTuningConfig(num_virtual_tokens=2), ("PREFIX_TUNING", "give LoRA adapters")),
        (peft.LoraConfig(layer_replication=[[0, 2], [1, 2]]), ("layer_replication", "give LoRA adapters")),
        (peft.LoraConfig(r=4), ("adapter_config.json has use_future_scaling=True", "install --upgrade peft")),
    ],
    ids=["prefix", "replication", "unknown option"],
)
def test_adapters_that_are_no_change_of_weights_are_refused(options, parts, rank, tmp_path, sources):
    """Or that may be none, by an option that peft does not know."""
    options.task_type = "CAUSAL_LM"
    base = AutoModelForCausalLM.from_pretrained(sources["llama"])
    peft.get_peft_model(base, options).save_pretrained(tmp_path)
    facts = json.loads((file := tmp_path / "adapter_config.json").read_text())
    unknown = {"use_future_scaling": "future" in parts[0], "use_none": None}
    file.write_text(json.dumps({**facts, **unknown}))
    message = refusal(learner_of, str(tmp_path), task_type="causal_lm", lora_r=rank)
    check_message(message, f"model_name_or_path={tmp_path}", *parts)


def test_a_head_of_another_task_is_not_continued(tmp_path, sources):
    base = AutoModelForCausalLM.from_pretrained(sources["llama"])
    options = peft.LoraConfig(r=4, task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    peft.get_peft_model(base, options).save_pretrained(tmp_path)
    assert learner_of(str(tmp_path), pooling="model").hf.score.weight.shape[0] == 3


def options_file(path: Path, **options) -> str:
    path.write_text(json.dumps(options))
    return str(path)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        (
            {
                "r": 6,
                "lora_alpha": 10,
                "target_modules": ["q_proj", "v_proj", "down_proj"],
                "exclude_modules": ["layers.0.self_attn.v_proj"],
                "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\..*": 5},
                "alpha_pattern": {"layers.1.self_attn.v_proj": 2},
                "use_rslora": True,
            },
            5,
        ),
        ({"r": 2, "lora_alpha": 4, "layers_to_transform": [1]}, 2),
    ],
)
def test_adapters_of_a_peft_config_are_those_of_peft(tmp_path, sources, options, layers):
    """The same layers with the same ranks and factors as peft creates from the same file."""
    file = options_file(tmp_path / "options.json", **options)
    learner = learner_of(sources["llama"], lora_r=0, task_type="causal_lm", peft_config=file)
    base = AutoModelForCausalLM.from_pretrained(sources["llama"])
    theirs = peft.get_peft_model(base, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
    wanted, found = (
        {
            name: (module.scaling, module.lora_A["default"].weight.shape)
            for name, module in model.named_modules()
            if hasattr(module, "lora_A")
        }
        for model in (theirs.base_model.model, learner.hf)
    )
    assert found == wanted
    assert len(wanted) == layers


@pytest.mark.parametrize(("given", "layer"), [(-1, 1), ([-2], 0), (0, 0)])
def test_negative_numbers_of_layers_count_from_the_last(tmp_path, sources, given, layer):
    """Of a model of two layers; the exported adapters have peft's numbers."""
    options = {"lora_r": 2, "peft_config": json.dumps({"layers_to_transform": given})}
    exported(sources["bert"], tmp_path / "model", **options)
    stored = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert stored["layers_to_transform"] == [layer]
    learner = learner_of(sources["bert"], pooling="model", **options)
    adapted = {name.split("layer.")[1][0] for name in scalings(learner)}
    assert adapted == {str(layer)}


def test_a_peft_config_is_kept_as_text(tmp_path, sources):
    """Rank, alpha and layers become settings; the rest is stored, so that the file is not needed again."""
    exported(sources["bert"], tmp_path / "model", lora_r=3, peft_config='{"use_rslora": true}')
    file = str(tmp_path / "model" / "adapter_config.json")
    config = Config(model_name_or_path=sources["bert"], n_way=3, peft_config=file, pooling="model")
    assert (config.lora_r, config.lora_alpha, config.lora_target_modules) == (3, 6, ["query", "value"])
    options = json.loads(config.peft_config)
    assert options["use_rslora"] is True
    assert options["modules_to_save"] == ["classifier"]
    assert not {"r", "lora_alpha", "target_modules", "peft_type"} & set(options)
    assert config.but(seed=1).peft_config == config.peft_config
    only_flags = options_file(tmp_path / "options.json", r=2, lora_alpha=3, target_modules="all-linear")
    config = Config(model_name_or_path=sources["bert"], peft_config=only_flags, lora_r=2)
    assert (config.lora_r, config.lora_alpha, config.peft_config) == (2, 3, None)
    assert config.lora_target_modules == ["all-linear"]
    load_learner(config, describe(config))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"r": 4, "use_dora": True}, ("use_dora True", "not linear", "leave it out")),
        ({"r": 4, "lora_dropout": 0.1}, ("lora_dropout 0.1", "no dropout", "leave it out")),
        ({"r": 4, "bias": "all"}, ("bias 'all'", "leave it out")),
        ({"r": 4, "rank_patern": {"query": 2}}, ("rank_patern", "did you mean rank_pattern?")),
        ({"r": 4, "init_lora_weights": "pissa"}, ("init_lora_weights 'pissa'", "use true, false")),
        ({"r": 4, "peft_type": "IA3"}, ("peft_type 'IA3'", "use LORA")),
        ({"r": "4"}, ("lora_r='4' is not a whole number", "give one")),
        ({"r": 4, "rank_pattern": ["query"]}, ("rank_pattern ['query']", "fix it")),
        ({"r": 4, "rank_pattern": {"query": 0}}, ("rank_pattern", "not numbers above 0", "fix it")),
        ({"r": 4, "rank_pattern": {"query": "2"}}, ("rank_pattern", "not numbers", "fix it")),
        ({"r": 4, "rank_pattern": {"query": 10**9}}, ("rank_pattern", "up to 65536", "fix it")),
        ({"r": 4, "alpha_pattern": {"query": float("nan")}}, ("alpha_pattern", "not numbers", "fix it")),
        ({"use_rslora": True}, ("has no r", "give --lora_r")),
        ([1], ("holds no object", 'write {"r": 8}')),
    ],
)
def test_peft_configs_that_are_refused(tmp_path, options, parts):
    file = tmp_path / "options.json"
    file.write_text(json.dumps(options))
    check_message(refusal(Config, peft_config=str(file)), "peft_config=", *parts)


def test_a_stored_peft_config_that_names_a_file_is_refused(tmp_path, sources):
    """A model from elsewhere names no file of this machine."""
    model = shutil.copytree(sources["bert"], tmp_path / "model")
    file = options_file(tmp_path / "secret.json", r=4)
    (model / "fmmeta.json").write_text(json.dumps({"lora_r": 4, "peft_config": file}))
    message = refusal(EvaluateConfig(model_name_or_path=str(model)).run_config)
    check_message(message, "fmmeta.json cannot be read", "peft_config names a file", "fix or replace it")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"lora_r": 8}, ("lora_r=8", "r 4 of peft_config", "give one")),
        (
            {"lora_target_modules": ["query"]},
            ("lora_target_modules=query", "target_modules .*key", "give one"),
        ),
        ({"peft_config": "broken.json"}, ("cannot be read as JSON", "fix it")),
        ({"peft_config": "."}, ("peft_config=. cannot be read", "give a JSON file")),
        ({"peft_config": "nowhere.json"}, ("peft_config=nowhere.json cannot be read", "give a JSON file")),
        ({"peft_config": "x" * 5000}, ("File name too long",)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_peft_config_beside_other_flags(tmp_path, monkeypatch, settings, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    file = options_file(tmp_path / "options.json", r=4, target_modules=".*key")
    check_message(refusal(Config, **{"peft_config": file, **settings}), *parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"rank_pattern": {"quary": 2}},
            ("rank_pattern quary fits no layer", "query, value", "leave it out"),
        ),
        ({"alpha_pattern": {"key": 2}}, ("alpha_pattern key fits no layer", "leave it out")),
        (
            {"alpha_pattern": {"query": 2, "layer.0.*query": 3}},
            ("alpha_pattern layer.0.*query fits no layer", "put it first"),
        ),
        ({"exclude_modules": ["encoder", "query"]}, ("exclude_modules encoder", "leave it out")),
        ({"layers_to_transform": [0, 9]}, ("layers_to_transform 9 is no layer", "numbers from -2 to 1")),
        ({"modules_to_save": ["classifier", "score", "pooler"]}, ("modules_to_save pooler", "leave it out")),
        ({"target_modules": ".*nothing"}, ("peft_config=", "nothing", "change one of them")),
        ({"target_modules": "(query"}, ("(query", "unterminated", "change one of them")),
        ({"exclude_modules": "(?i).*query"}, ("exclude_modules", "change one of them")),
        ({"layers_to_transform": [-3]}, ("layers_to_transform -3 is no layer", "numbers from -2 to 1")),
        (
            {"layers_to_transform": [0, 1], "exclude_modules": ".*layer.1.*"},
            ("layers_to_transform 1 is no layer", "with adapters; leave it out"),
        ),
        ({"layers_to_transform": ["a"]}, ("layers_to_transform a is no layer", "numbers from -2 to 1")),
        ({"layers_to_transform": [0], "layers_pattern": ["("]}, ("layers_pattern", "change one of them")),
        ({"modules_to_save": [["head"]]}, ("modules_to_save", "change one of them")),
        ({"layers_pattern": "layer"}, ("peft_config=", "layers_to_transform", "change one of them")),
    ],
)
def test_peft_configs_that_fit_no_layer(sources, options, parts):
    message = refusal(learner_of, sources["bert"], pooling="model", peft_config=json.dumps(options))
    check_message(message, "peft_config", *parts)


@pytest.mark.parametrize("algorithm", ["fomaml", "anil"])
def test_evaluation_adapts_the_adapters_that_were_trained(algorithm, tmp_path, sources, classes):
    """Evaluating the exported folder gives the table of the run; without adapters its rates fit no layer."""
    shared = {"n_way": 3, "k_shot": 2, "num_query": 2}
    file = options_file(tmp_path / "options.json", r=2, use_rslora=True)
    config = Config(
        **{"model_name_or_path": sources["bert"], "dataset": [str(classes)], "algorithm": algorithm},
        **{"lora_alpha": 3, "lora_target_modules": ["key"], "peft_config": file, "inner_lr": 0.5},
        **{"outer_lr": 0.05, "outer_steps": 2, "meta_batch_size": 2, "save_steps": 0, "test_episodes": 3},
        **shared,
        output_dir=str(tmp_path / "run"),
    )
    MetaTrainer(config).train()
    held_out = json.loads((tmp_path / "run" / "run.json").read_text())["held_out"]
    table = held_out["after adaptation, meta-trained"]
    model, given = str(tmp_path / "run" / "model"), {**shared, "n_way": "3", "k_shot": [2], "episodes": 3}
    [cell] = evaluate(model, str(classes), **given)["cells"]
    assert cell["accuracy"] == pytest.approx(table["accuracy"][0])
    assert cell["loss"] == pytest.approx(table["loss"][0], rel=1e-4)
    [prototypes] = evaluate(model, str(classes), method=["prototype"], **given)["cells"]
    assert 0 < prototypes["accuracy"] <= 1
    message = refusal(evaluate, model, str(classes), lora_r=0, **given)
    parts = ("lora_r=0", "--inner_parameters out, or give --inner_lr")
    check_message(message, f"model_name_or_path={model}", *parts)


def test_adapted_adapters_keep_their_base(tmp_path, sources):
    data, own = write_classes(tmp_path / "rows.jsonl", classes=3), tmp_path / "own"
    exported(sources["bert"], tmp_path / "model", lora_r=3, lora_alpha=5)
    adapted = adapt(str(tmp_path / "model"), str(data), output_dir=str(own), early_stopping=False)
    settings = json.loads((own / "adapter_config.json").read_text())
    assert (settings["r"], settings["base_model_name_or_path"]) == (3, sources["bert"])
    before, after = (load_file(one / "adapter_model.safetensors") for one in (tmp_path / "model", own))
    of_a = {name: value for name, value in before.items() if "lora_A" in name}
    moved = [float((after[name] - value).norm() / value.norm()) for name, value in of_a.items()]
    assert 0 < max(moved) < 0.5  # it began where the other ended
    texts = ["alpha beta", "gamma"]
    again = predict_from(PredictConfig(model_name_or_path=str(own))).predict(texts)
    for one, wanted in zip(again, adapted.predict(texts), strict=True):
        assert one.output == wanted.output
        assert one.score == pytest.approx(wanted.score, abs=1e-5)


def test_the_tokenizer_of_a_folder_that_peft_saved_is_that_of_its_base(tmp_path, sources):
    """peft saves no tokenizer; the byte tokenizer would give other tokens than the base was trained on."""
    base, model = tmp_path / "base", AutoModel.from_pretrained(sources["bert"])
    tokenizer = AutoTokenizer.from_pretrained(sources["bert"])
    tokenizer.add_tokens(["river"])
    model.resize_token_embeddings(len(tokenizer))
    for part in (tokenizer, model):
        part.save_pretrained(base)
    peft.get_peft_model(AutoModel.from_pretrained(base), peft.LoraConfig(r=2)).save_pretrained(
        tmp_path / "adapters"
    )
    config = Config(model_name_or_path=str(tmp_path / "adapters"), pooling="mean")
    found = load_tokenizer(config, describe(config), pytest.fail)
    assert found("river")["input_ids"] == tokenizer("river")["input_ids"]
    assert len(found("river")["input_ids"]) < len("river")


def test_unreadable_adapter_folder_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    message = refusal(describe, Config(model_name_or_path=str(tmp_path)))
    check_message(message, f"model_name_or_path={tmp_path}", "fix or replace it")
