"""Mixtures of experts: loading by parameter, markers, and what is refused."""

import json
import shutil
from functools import cache

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import fmmeta
from fmmeta import MetaTrainer
from fmmeta.config.settings import Config
from fmmeta.evaluation.command import episodes_of
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.experts import fused_experts, release_weights, router_names
from fmmeta.learners.lazy_weights import open_lazy_model
from fmmeta.learners.load import describe, load_learner, load_tokenizer
from fmmeta.learners.parameter_sets import choose_parameters
from fmmeta.meta.algorithms.setup import refuse_jumps
from fmmeta.meta.hessian import HvpOptions
from tests.support import learners
from tests.support.exports import exported
from tests.support.helpers import fast_or_slow, refusal
from tests.support.matrix import oracle_inputs, relative_error
from tests.support.messages import check_message
from tests.support.models import MIXTURES, WORDS, save, save_family, tiny, write_pairs

AUX = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
RUN = {"task_type": "causal_lm", "k_shot": 5, "num_query": 3, "meta_batch_size": 2}
RUN |= {"inner_steps": 2, "inner_lr": 0.1, "outer_steps": 2, "outer_optimizer": "sgd", "outer_lr": 0.5}
RUN |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0, "eval_episodes": 0}


def config_of(folder, **settings) -> Config:
    given = {"task_type": "causal_lm", "dataset": ["-"], **settings}
    return Config(model_name_or_path=str(folder), **given)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    return {family: save_family(root / family, family) for family in MIXTURES}


@pytest.mark.parametrize("family", MIXTURES)
def test_weights_read_by_parameter_are_those_of_transformers(folders, family):
    """Of 12 experts: the order of the names of their tensors is not that of the experts."""
    config = config_of(folders[family])
    wanted, lazy = load_learner(config, describe(config)), open_lazy_model(config, describe(config))
    assert len(fused_experts(wanted)) == (2 if "first_k_dense_replace" in vars(wanted.hf.config) else 3)
    lazy.materialize([name for name, _ in lazy.learner.named_parameters()])
    torch.testing.assert_close(lazy.learner.state_dict(), wanted.state_dict(), rtol=0, atol=0)


def test_a_missing_expert_is_named(folders, tmp_path):
    folder = save_family(tmp_path / "damaged", "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.7.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = config_of(folder)
    check_message(
        refusal(open_lazy_model, config, describe(config)),
        "model.layers.1.mlp.experts.down_proj of shape [11, 32, 16]",
        "its configuration says [12, 32, 16]",
        "fix config.json or the weights",
    )


@pytest.mark.parametrize("back_end", ["eager", "grouped_mm"])
def test_the_backward_pass_keeps_no_view_of_weights_that_were_released(back_end):
    torch.manual_seed(0)
    model = tiny("mixtral")
    model.config._experts_implementation = back_end
    experts = next(iter(fused_experts(model).values()))
    inputs = torch.randn(5, 32), torch.randint(12, (5, 2)), torch.rand(5, 2)
    params = [*experts.parameters()]
    wanted = torch.autograd.grad(experts(*inputs).square().sum(), params)
    release_weights(experts)
    loss = experts(*inputs).square().sum()
    kept = [param.detach().clone() for param in params]
    before = [StorageWeakRef(param.untyped_storage()) for param in params]
    for param, values in zip(params, kept, strict=True):
        param.data = torch.empty(0)  # as ZeRO 3 does after the forward pass
        param.data = values  # and before the backward pass
    assert all(one.expired() for one in before)
    torch.testing.assert_close(torch.autograd.grad(loss, params), wanted)


@pytest.mark.parametrize("targets", ["target_parameters", "all-linear"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_are_those_of_peft(folders, tmp_path, family, targets):
    """Written, loaded by peft, merged by transformers, and loaded again to be trained further."""
    options = {"r": 2, "target_modules": targets}  # peft adapts experts too in some families, at another rank
    if targets != "all-linear":
        named = ["experts.gate_up_proj", "experts.down_proj"]
        options = {"r": 2, "alpha_pattern": {"down_proj": 3}, "target_parameters": named}
    given, source = {"lora_r": 2, "peft_config": json.dumps(options)}, folders[family]
    _, worker = exported(source, tmp_path / "model", task_type="causal_lm", lora_merge=True, **given)
    batch = {"input_ids": torch.arange(3, 15)[None], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    base, again = AutoModelForCausalLM.from_pretrained(source), config_of(tmp_path / "model", **given)
    with torch.no_grad():
        wanted, without = worker.learner(**batch), base(**batch).logits
        found = PeftModel.from_pretrained(base, tmp_path / "model")(**batch).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(**batch).logits
        further = load_learner(again, describe(again))(**batch)
    assert float((wanted - without).abs().max()) > 1e-3
    for logits in (found, merged, further):
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)


def test_tasks_share_no_pass_through_adapted_experts(folders, tmp_path):
    options = json.dumps({"target_parameters": ["experts.down_proj"]})
    data = [str(write_pairs(tmp_path / "pairs.jsonl"))]
    config = config_of(folders["qwen3_moe"], lora_r=2, peft_config=options, tasks_per_pass="2", **RUN)
    check_message(
        refusal(MetaTrainer(config.but(dataset=data)).train), "experts.lora_A", "use --tasks_per_pass 1"
    )


def test_parameters_that_are_not_there_are_refused(folders):
    options = {"r": 2, "target_parameters": ["experts.gate_proj"]}
    config = config_of(folders["qwen3_moe"], peft_config=json.dumps(options))
    check_message(
        refusal(load_learner, config, describe(config)),
        "target_parameters experts.gate_proj fits no parameter of Qwen3MoeForCausalLM",
        "such as mlp.experts.gate_up_proj (down_proj, gate_up_proj)",
    )


def test_the_inner_loop_leaves_routers_as_they_are_by_default(folders):
    """Of rules of gradients with all weights, unless a set is given."""
    config = config_of(folders["gpt_oss"])
    learner = load_learner(config, describe(config))
    routers = router_names(learner)
    assert [name.split(".")[-1] for name in routers] == ["weight", "bias"] * 3
    for settings, wanted in (
        ({}, {*routers}),
        ({"algorithm": "maml"}, {*routers}),
        ({"algorithm": "none"}, {*routers}),
        ({"inner_lr_learned": "layer"}, {*routers}),
        ({"algorithm": "reptile"}, set()),
        ({"inner_parameters": ["all"]}, set()),
        ({"inner_parameters": ["except", "model.layers.0.*.sinks"]}, {"hf.model.layers.0.self_attn.sinks"}),
    ):
        choose_parameters(learner, config_of(folders["gpt_oss"], **settings))
        assert learner.outer_only == wanted, settings


@pytest.mark.parametrize("inner", [[], ["all"], ["except", "routers", "norms"]], ids=" ".join)
def test_a_trained_mixture_is_adapted_with_the_inner_set_of_its_training(folders, tmp_path, inner):
    """The commands that adapt a model run without the rule of its training."""
    one = {"inner_steps": 1, "inner_lr": 1.0, "outer_steps": 1, "eval_episodes": 0, "num_workers": 0}
    source, few = str(folders["qwen3_moe"]), {"meta_batch_size": 1, "k_shot": 2, "num_query": 2}
    settings = {
        "task_type": "causal_lm",
        "output_dir": str(tmp_path),
        "inner_parameters": inner,
        **one,
        **few,
    }
    MetaTrainer(Config(model_name_or_path=source, dataset=["words"], **settings)).train()
    pairs = [{"input": "one", "output": "two"}, {"input": "three", "output": "four"}]
    fmmeta.adapt(tmp_path / "model", pairs, output_dir=tmp_path / "adapted", early_stopping=False)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "adapted"))
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    norms = {name for name in before if name.endswith("norm.weight")}
    assert same & (routers | norms) == (set() if "all" in inner else routers | (norms if inner else set()))
    assert len(same) < len(before) / 2


@pytest.mark.parametrize(
    ("family", "settings", "most"),
    [
        ("qwen3_moe", {"second_order": "autograd"}, 1e-4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpt_oss", {"second_order": "autograd", "inner_parameters": ["all"]}, 1e-4),
                ("deepseek_v3", {"second_order": "differences"}, 2e-3),
            )
        ),
    ],
)
def test_exact_meta_gradients_equal_autograd_in_fp64(family, settings, most):
    sizes = {"num_hidden_layers": 2, "num_experts": 4, "n_routed_experts": 4, "tie_word_embeddings": False}
    learner = CausalLearner(tiny(family, **sizes)).train()
    config = learners.config_of(learner, algorithm="maml", inner_steps=2, **settings)
    episode = learners.episode_of(learner, support=4, query=2)
    found, worker = learners.rule_gradient(learner, config, episode)
    learner.hf.config._experts_implementation = "eager"  # the others know no fp64
    exact, first = (
        learners.oracle_gradient(learner, given, episode)[0]
        for given in (
            config,
            learners.config_of(learner, inner_steps=2, inner_parameters=config.inner_parameters),
        )
    )
    assert learners.compared(learner, config, worker, found.gradient, exact)[1] < most
    assert learners.compared(learner, config, worker, found.gradient, first)[1] > 20 * most
    routers = [name for name in worker.routers if "bias" not in name]
    assert all(exact[name].abs().max() > 0 for name in routers)  # they are trained in the outer loop


def test_differences_are_taken_only_where_they_are_asked_for():
    learner = CausalLearner(tiny("mixtral")).train()
    config = learners.config_of(learner, algorithm="maml")
    worker, by_differences = learners.worker_of(learner, config), HvpOptions("fp32")
    check_message(
        refusal(refuse_jumps, config, worker, by_differences),
        "algorithm=maml and second_order=auto take differences",
        "use --second_order autograd",
    )
    for settings in ({"second_order": "differences"}, {"algorithm": "fomaml"}):
        config = learners.config_of(learner, **{"algorithm": "maml", **settings})
        refuse_jumps(config, worker, by_differences)


def loss_of_set(hf, phi, rows, share):
    """The cross-entropy, and `share` of transformers' loss of the routers of the whole set."""
    length = max(len(row.input_ids) for row in rows)
    ids, labels, mask = (
        torch.tensor([list(part) + [fill] * (length - len(part)) for part in parts])
        for parts, fill in (
            ([row.input_ids for row in rows], 0),
            ([row.token_labels for row in rows], -100),
            ([[1] * len(row.input_ids) for row in rows], 0),
        )
    )
    given = {"input_ids": ids, "attention_mask": mask, "output_router_logits": True, "use_cache": False}
    out = torch.func.functional_call(hf, phi, kwargs=given)
    logits, answers = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    balance = load_balancing_loss_func(out.router_logits, 12, 2, mask)
    return torch.nn.functional.cross_entropy(logits, answers, ignore_index=-100) + share * balance


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"algorithm": "maml", "second_order": "autograd", "inner_parameters": ["all"]}),
        pytest.param("olmoe", {"gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_the_loss_of_routers_is_that_of_transformers(tmp_path, family, settings):
    folder = save(tiny(family, num_hidden_layers=2, **AUX), tmp_path / "base")
    data = [str(write_pairs(tmp_path / "pairs.jsonl"))]
    given = {**RUN, **settings, "model_name_or_path": str(folder), "dataset": data}
    config = Config(**given, output_dir=str(tmp_path / "run"))
    MetaTrainer(config).train()
    learner, began, steps = oracle_inputs(config.but(gradient_checkpointing=False))
    began = {name.removeprefix("hf."): value for name, value in began.items()}
    frozen = () if config.inner_parameters else {name for name in began if "mlp.gate.weight" in name}

    def ended(share):
        theta, exact = began, config.algorithm == "maml"
        for episodes in steps:
            gradients = []
            for one in episodes:
                leaf = {name: value.clone().requires_grad_() for name, value in theta.items()}
                phi = leaf
                for _ in range(2):
                    loss = loss_of_set(learner.hf, phi, one.support, share)
                    found = torch.autograd.grad(loss, [*phi.values()], create_graph=exact)
                    rates = [0.0 if name in frozen else 0.1 for name in phi]
                    phi = {
                        name: phi[name] - rate * each
                        for name, rate, each in zip(phi, rates, found, strict=True)
                    }
                loss = loss_of_set(learner.hf, phi, one.query, share)
                gradients.append(torch.autograd.grad(loss, [*leaf.values()]))
            means = [sum(each) / len(episodes) for each in zip(*gradients, strict=True)]
            theta = {name: theta[name] - 0.5 * mean for name, mean in zip(theta, means, strict=True)}
        return theta

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.output_router_logits
    theta = {name: param.detach() for name, param in model.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        with_it, without = (relative_error(theta, ended(share), began) for share in (0.5, 0.0))
    assert with_it < 1e-5 < 0.1 < without


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"micro_batch_size": 3}, ("micro_batch_size=3", "cut the 5 rows", "depend on each other")),
        ({"task_type": "classification"}, ("task_type=classification", "output_router_logits to false")),
        ({"packing": True}, ("packing=True", "output_router_logits to false")),
        ({"pipeline_stages": 2}, ("pipeline_stages=2", "output_router_logits to false")),
        ({"tasks_per_pass": "2", "lora_r": 2}, ("tasks_per_pass=2", "output_router_logits to false")),
    ],
)
def test_what_the_loss_of_routers_does_not_go_with_is_refused(tmp_path, settings, parts):
    folder, data = save(tiny("mixtral", **AUX), tmp_path / "base"), write_pairs(tmp_path / "pairs.jsonl")
    given = {**RUN, **settings, "model_name_or_path": str(folder), "dataset": [str(data)]}
    config = Config(**given, output_dir=str(tmp_path / "run"))
    check_message(
        refusal(MetaTrainer(config).train) if "micro_batch_size" in settings else refusal(describe, config),
        *parts,
    )


def test_a_mixture_that_computes_no_loss_of_routers_is_refused(tmp_path):
    folder = save(tiny("deepseek_v3", **AUX), tmp_path)
    check_message(refusal(describe, config_of(folder)), "deepseek_v3, which computes none", "set output")


WAYS = {
    "full": {},
    "experts": {
        "lora_r": 2,
        "peft_config": '{"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}',
    },
    "routers": {**AUX, "inner_parameters": ["all"]},
    "bf16": {"bf16": True},
    "packed": {"packing": True, "inner_parameters": ["except", "*norm.weight"]},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a run of each of WAYS, made when a test asks for it, and its settings."""
    root = tmp_path_factory.mktemp("runs")
    data = [str(write_pairs(root / "pairs.jsonl"))]

    @cache
    def run(way):
        of_model = {name: value for name, value in WAYS[way].items() if name in AUX}
        base = save(tiny("qwen3_moe", num_hidden_layers=2, **of_model), root / f"{way}-base")
        given = {**RUN, **WAYS[way], "outer_steps": 4, "save_steps": 2, "outer_optimizer": "adamw"}
        given = {name: value for name, value in given.items() if name not in AUX} | {"outer_lr": 0.01}
        config = Config(**given, model_name_or_path=str(base), dataset=data, output_dir=str(root / way))
        MetaTrainer(config).train()
        return config, root / way

    return run


@pytest.mark.parametrize("way", fast_or_slow([*WAYS], {"full", "experts"}.__contains__))
def test_a_run_of_a_mixture_resumes(runs, tmp_path, way):
    config, whole = runs(way)
    shutil.copytree(whole / "checkpoint-2", tmp_path / "from")
    again = {"output_dir": str(tmp_path / "again"), "resume_from_checkpoint": str(tmp_path / "from")}
    MetaTrainer(config.but(**again)).train()
    (file,) = (whole / "model").glob("*model.safetensors")
    first, wanted, found = (
        load_file(path)
        for path in (
            whole / "checkpoint-2" / "shard-00000.safetensors",
            file,
            tmp_path / "again" / "model" / file.name,
        )
    )
    last = load_file(whole / "checkpoint-4" / "shard-00000.safetensors")
    assert any(not torch.equal(first[name], value) for name, value in last.items())
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("way", fast_or_slow([*WAYS], lambda way: way != "bf16"))
def test_an_exported_mixture_is_adapted_answers_and_is_evaluated(runs, tmp_path, way):
    config, folder = runs(way)
    model, texts = str(folder / "model"), [f"{word} {other}" for word in WORDS[:7] for other in WORDS[:6]]
    support = [(f"{word} {WORDS[3]}", word) for word in WORDS[:4]]
    alone = fmmeta.adapt(model, support, output_dir=str(tmp_path / "one"), inner_steps=2, inner_lr=0.3)
    answers = [one.output for one in fmmeta.load(str(tmp_path / "one")).predict(texts, 3)]
    assert [one.output for one in alone.predict(texts, 3)] == answers
    ids, lora = torch.arange(3, 15)[None], "lora_r" in WAYS[way]

    def loaded(name):
        if lora:
            base = AutoModelForCausalLM.from_pretrained(config.model_name_or_path)
            return PeftModel.from_pretrained(base, name, is_trainable=True)
        return AutoModelForCausalLM.from_pretrained(name)

    with torch.no_grad():
        found, wanted = loaded(tmp_path / "one")(ids).logits, alone.loaded.worker.learner.hf(ids).logits
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=0.1 if way == "bf16" else 1e-5)
    episodes = {"num_query": 3, "episodes": 2, "eval_split": "train"}
    results = fmmeta.evaluate(model, config.dataset, k_shot=3, **episodes)
    share, losses, near = 0.5 if way == "routers" else 0.0, [], 0.01 if way == "bf16" else 1e-5
    still = {"routers": (), "packed": ("norm.weight",)}.get(way, ("mlp.gate.",))  # in the inner loop
    settings = EvaluateConfig(model_name_or_path=model, dataset=config.dataset, **episodes)
    given = settings.run_config(k_shot=3)
    for draw in episodes_of(settings, 3, load_tokenizer(given, describe(given), print)).draws():
        hf, rows = loaded(folder / "model"), draw.episode()
        before = float(loss_of_set(hf, {}, rows.query, share))
        for _ in range(2):
            moved = {
                name: param
                for name, param in hf.named_parameters()
                if param.requires_grad and not any(part in name for part in still)
            }
            gradients = torch.autograd.grad(loss_of_set(hf, {}, rows.support, share), [*moved.values()])
            for param, gradient in zip(moved.values(), gradients, strict=True):
                param.data -= 0.1 * gradient
        losses.append(float(loss_of_set(hf, {}, rows.query, share)))
        assert abs(losses[-1] - before) > 5 * near * before
    assert [score["loss"] for score in results["cells"][0]["scores"]] == pytest.approx(losses, rel=near)
