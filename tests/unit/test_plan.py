"""`fmmeta plan`: its counts against counts of real models, its commands against the command line, its
messages.
"""

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from fmmeta.cli import parse
from fmmeta.config.algorithms import OUTER_OPTIMIZERS
from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, empty_learner, fitted, load_learner
from fmmeta.meta.outer_step import OuterOptimizer
from fmmeta.meta.parameters import MetaGradient, MetaParameters, PendingMean
from fmmeta.parallel import costs
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings, find
from fmmeta.parallel.layout import Nodes
from fmmeta.parallel.memory import Counts, estimate, largest_part, micro_batches, rank_sizes
from fmmeta.planning import command, machines
from fmmeta.planning.compute import (
    Topology,
    count_matmuls,
    needed_flops,
    step_seconds,
    task_cost,
    task_passes,
)
from fmmeta.planning.layouts import Planner, Strategy, strategies
from fmmeta.planning.machines import PROFILES, Profile
from fmmeta.planning.settings import PlanConfig
from fmmeta.tasks.batching import Batcher, Example
from tests.support.launch import ROOT
from tests.support.learners import LEARNERS, config_of, passes_of, worker_of
from tests.support.messages import check_message, check_text, exit_code, refusal
from tests.support.models import save_family, tiny

FAMILIES = [("llama", "causal_lm"), ("bert", "classification"), ("gpt2", "causal_lm")]


def plan_of(**given) -> PlanConfig:
    fixed = {"gpus": 4, "gpu_memory_gib": 1.0, "gpus_per_node": 4, "dataset": ["rows.jsonl"]}
    return PlanConfig(**{**fixed, **given})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """config.json alone is all that a plan reads."""
    found = {}
    for family, _ in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        shutil.copy(save_family(tmp_path_factory.mktemp("saved"), family) / "config.json", folder)
        found[family] = str(folder)
    return found


@pytest.fixture(scope="module")
def planned(folders):
    plan = plan_of(model_name_or_path=folders["llama"], task_type="causal_lm", gpu_memory_gib=80.0)
    planner = Planner(plan, PROFILES["h100"])
    return planner, planner.layouts()


# what is counted


@pytest.mark.parametrize("lora_r", [0, 4])
@pytest.mark.parametrize(("family", "task"), FAMILIES)
def test_parameters_are_those_of_the_real_model(tmp_path, family, task, lora_r):
    config = Config(model_name_or_path=str(save_family(tmp_path, family)), task_type=task, lora_r=lora_r)
    description = describe(config)
    real = [(param.requires_grad, param.numel()) for param in load_learner(config, description).parameters()]
    counted = largest_part(config, empty_learner(config, description), description.hf_config)
    assert (counted.params, counted.frozen) == tuple(
        sum(size for is_trained, size in real if is_trained == kind) for kind in (True, False)
    )


@pytest.mark.parametrize(
    ("family", "task", "settings", "slack"),
    [
        ("llama", "causal_lm", {}, 1e-9),
        ("gpt2", "causal_lm", {}, 1e-9),
        ("bert", "classification", {}, 0.08),  # a pooler sees one token
        ("llama", "causal_lm", {"gradient_checkpointing": True}, 0.08),  # torch skips a layer's last product
        ("bert", "classification", {"gradient_checkpointing": True}, 0.08),
        ("llama", "causal_lm", {"lora_r": 2}, 0.05),  # the first layer's input needs no gradient
        ("qwen3_moe", "causal_lm", {}, 1e-9),
        ("glm4_moe", "causal_lm", {}, 1e-9),  # a dense layer, and an expert for all tokens
        ("gpt_oss", "causal_lm", {}, 0.02),  # biases count as weights
    ],
)
def test_flops_are_those_that_torch_counts(tmp_path, family, task, settings, slack):
    """Matrix products and attention of forward and backward passes; frozen weights cost no gradients."""
    model = str(save_family(tmp_path, family, layers=6))
    given = {"model_name_or_path": model, "task_type": task, "n_way": 2, "attn_implementation": "eager"}
    config = Config(**given, **settings)
    learner = load_learner(config, describe(config))
    if "num_experts_per_tok" in learner.hf.config.to_dict():
        learner.hf.set_experts_implementation("eager")  # torch does not count grouped products
    rows, tokens = 3, 20
    ids = torch.randint(3, 200, (rows, tokens))
    with FlopCounterMode(display=False) as forward:
        logits = learner.logits(learner(input_ids=ids, attention_mask=torch.ones_like(ids)))
    with FlopCounterMode(display=False) as backward:
        logits.float().sum().backward()
    asked, how = count_matmuls(learner, config), (True, config.gradient_checkpointing)
    found = [rows * tokens * asked.flops(tokens, *passes) for passes in ((False, False), how)]
    counted = [forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()]
    assert found == pytest.approx(counted, rel=slack)


@pytest.mark.parametrize(
    ("name", "total", "active", "without"),
    [  # published, in billions; without: embeddings that the published number of active ones leaves out
        ("qwen3-30b-a3b", 30.5, 3.3, 0),
        ("gpt-oss-120b", 117, 5.1, 1),
        ("glm-4.5-air", 106, 12, 2),
    ],
)
def test_parameters_of_public_mixtures(name, total, active, without):
    config = Config(model_name_or_path=f"{ROOT}/benchmarks/shapes/{name}", task_type="causal_lm")
    learner = empty_learner(config, describe(config))
    embedding = learner.hf.get_input_embeddings().weight.numel()
    counted = largest_part(config, learner, learner.hf.config)
    assert counted.all / 1e9 == pytest.approx(total, rel=0.01)
    at_work = count_matmuls(learner, config).whole + (1 - without) * embedding
    assert at_work / 1e9 == pytest.approx(active, rel=0.02)
    layer = learner.hf.model.layers[-1].mlp.experts
    assert counted.experts == sum(param.numel() for param in layer.parameters())


ALGORITHMS = [
    ("llama", {"algorithm": "fomaml"}),
    ("llama", {"algorithm": "fomaml", "multi_step_loss_steps": 9}),
    ("llama", {"algorithm": "fomaml", "inner_lr_learned": "layer"}),
    ("llama", {"algorithm": "reptile"}),
    ("llama", {"algorithm": "maml"}),
    ("llama", {"algorithm": "joint"}),
    ("llama", {"algorithm": "meta_icl"}),
    ("llama", {"algorithm": "imaml", "proximal_weight": 300.0, "inner_lr": 0.003, "cg_steps": 3}),
    ("bert", {"algorithm": "boil"}),
    ("bert", {"algorithm": "meta_sgd"}),
    ("bert", {"algorithm": "proto_maml"}),
    ("bert", {"algorithm": "proto_maml", "prototype_gradient": True}),
    ("bert", {"algorithm": "anil"}),
    ("bert", {"algorithm": "protonet"}),
]


@pytest.mark.parametrize(("model", "given"), ALGORITHMS, ids=str)
def test_passes_are_those_of_the_real_rules(model, given, monkeypatch):
    learner = LEARNERS[model]
    without = ("protonet", "joint", "meta_icl")
    asked = {**given} if given["algorithm"] in without else {**given, "inner_steps": 4}
    found = costs.passes(config_of(learner, **asked))
    assert (found.training, found.support_forwards + found.query_forwards) == passes_of(
        learner, monkeypatch, **asked
    )


def test_rows_of_meta_icl_are_as_long_as_its_prompts_or_the_positions():
    hf_config = LEARNERS["llama"].hf.config  # 32 positions
    for shots, tokens in ((2, 24), (5, 32)):
        config = config_of(LEARNERS["llama"], algorithm="meta_icl", k_shot=shots, max_length=8, num_query=3)
        sizes = rank_sizes(config, hf_config, Counts(params=1), lazy=True)
        assert (sizes.tokens, sizes.rows) == (tokens, 3)


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS)
def test_bytes_are_those_of_a_real_worker(name):
    """Weights, gradients, theta, the sum of directions, moments: each tensor of a plain worker, counted one
    by one.
    """
    learner = LEARNERS["llama"]
    config = config_of(learner, outer_optimizer=name, outer_lr=1e-3)
    worker = worker_of(learner, config)
    theta = worker.read()
    meta, outer = MetaGradient(theta), OuterOptimizer(MetaParameters(theta), worker, config)
    outer.step(PendingMean({"theta": torch.ones_like(theta)}), 0)
    sizes = rank_sizes(config, learner.hf.config, largest_part(config, learner, learner.hf.config), lazy=True)
    found = estimate(sizes, DeepSpeedSettings(0, False, False), 1)
    wanted = {
        "weights": worker.theta.numel(),
        "gradients": worker.grad.numel(),
        "theta": theta.numel(),
        "meta_gradient": meta.sum.numel(),
        "moments": sum(moment.numel() for moment in outer.moments.values()),
    }
    assert {kind: found.kinds[kind] / 4 for kind in wanted} == wanted
    assert set(outer.moments) == set(OUTER_OPTIMIZERS[name].moments)


@pytest.mark.parametrize(
    ("kind", "attention", "bounds"),
    [
        ("llama", "sdpa", (0.95, 1)),
        ("qwen3", "sdpa", (0.95, 1.1)),  # norms of queries and keys are not counted
        ("llama", "eager", (0.95, 1.02)),
        ("qwen3_moe", "sdpa", (0.95, 1.1)),
        ("glm4_moe", "sdpa", (0.95, 1.1)),
        ("mixtral", "sdpa", (0.95, 1.1)),
        ("bert", "sdpa", (0.9, 1)),
        ("bert", "eager", (0.45, 1)),  # its softmax is not in fp32
    ],
)
def test_activations_of_a_layer_are_what_autograd_saves(kind, attention, bounds):
    """Bytes of two layers in bf16; scores where the kernel of attention stores them."""
    wide = {"hidden_size": 64, "intermediate_size": 192, "max_position_embeddings": 256}
    wide |= {"moe_intermediate_size": 64, "first_k_dense_replace": 0} if "moe" in kind else {}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if kind == "bert" else {}
    saved, estimated = [], []
    for layers in (2, 4):
        sizes = {**wide, **quiet, "num_hidden_layers": layers, "attn_implementation": attention}
        model = tiny(kind, auto="AutoModel", **sizes).to(torch.bfloat16)
        weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
        found: dict[int, torch.Tensor] = {}

        def keep(tensor, weights=weights, found=found):
            if (at := tensor.untyped_storage().data_ptr()) not in weights:
                found[at] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=torch.randint(3, 200, (2, 256)))
        saved.append(sum(tensor.untyped_storage().nbytes() for tensor in found.values()))
        asked = rank_sizes(config_of(LEARNERS["llama"]), model.config, Counts(params=1), lazy=True)
        bf16 = DeepSpeedSettings(0, True, False)
        estimated.append(estimate(replace(asked, rows=2, tokens=256), bf16, 1).kinds["activations"])
    low, high = bounds
    assert low < (saved[1] - saved[0]) / (estimated[1] - estimated[0]) <= high


@given(st.integers(1, 70), st.integers(1, 5), st.integers(1, 9))
def test_micro_batches_are_those_of_the_batcher(rows, data, most):
    examples = [Example([1] * (1 + i % 3), 0) for i in range(rows)]
    dealt = [Batcher(0, most, rank, data).split(examples) for rank in range(data)]
    rounds, largest = micro_batches(rows, data, most)
    assert {len(batches) for batches in dealt} == {rounds}
    assert max(len(batch.weights) for batches in dealt for batch in batches) == largest


# what is predicted

RATES = Profile("round", "cuda", 1e12, 1e12, 1e9, 1e9, 5e8, 1e8, 1e8, 0.0, 0.0, 0.0, "made up")


def sizes_of(config: Config, ranks: int = 1):
    """What a rank holds, and the products of the model."""
    learner = empty_learner(config, describe(config))
    hf_config = learner.hf.config
    sizes = rank_sizes(config, hf_config, largest_part(config, learner, hf_config), False, ranks)
    return sizes, count_matmuls(learner, config)


def seconds_of(
    config: Config, stage: int, group_size: int, groups: int = 1, profile: Profile = RATES, tasks: float = 1
):
    sizes, matmuls = sizes_of(config, group_size)
    precision = DeepSpeedSettings(stage, False, False)
    room = Topology(group_size, group_size, groups, True, groups == 1)
    _, one = task_cost(config, precision, sizes, matmuls, 16, room, profile)
    return sizes, one, step_seconds(one, tasks, sizes, precision, room, profile)


def language(folders, **given) -> Config:
    fixed = {"k_shot": 8, "num_query": 8}
    return Config(**{**fixed, "model_name_or_path": folders["llama"], "task_type": "causal_lm", **given})


def test_one_rank_computes_and_nothing_else(folders):
    config = language(folders, num_query=4, inner_steps=3)
    _, matmuls = sizes_of(config)
    flops = (3 * 8 + 4) * 16 * (6 * matmuls.whole + 12 * 3 * 32 * 16)
    _, one, step = seconds_of(config, 0, 1, tasks=2)
    assert one.compute == pytest.approx(flops / 1e12)
    assert needed_flops(config, matmuls, 16, 16) == pytest.approx(flops)
    assert (one.group, step.cross) == (0, 0)
    assert step.compute == 2 * one.compute


@pytest.mark.parametrize(
    ("stage", "profile", "parts"),
    [
        (1, {}, 2 * 3 / 4 * 4 + 3 / 4 * 4),  # 3 + 1 ring all-reduces of all gradients and a gather
        (3, {}, 3 / 4 * 4 + 3 / 4 * 4),  # a gather and a scatter
        (3, {"device": "cpu"}, 1.5 * 2 * 3 / 4 * 4),  # gloo scatters by an all-reduce
        (3, {"matmul_fp32": 1e3, "hidden": 0.5}, 0.5 * 2 * 3 / 4 * 4),
    ],
)
def test_communication_time_of_a_task_is_bytes_over_bandwidth(folders, stage, profile, parts):
    rates = replace(RATES, **profile)
    sizes, one, _ = seconds_of(language(folders, inner_steps=3), stage, 4, profile=rates)
    assert one.group == pytest.approx(4 * parts * sizes.params / 1e9)


def test_communication_time_of_an_outer_step_is_bytes_over_bandwidth(folders):
    config = language(folders, inner_steps=3)
    sizes, one, step = seconds_of(config, 2, 4, groups=8)
    gather = 3 / 4 * 4 * sizes.params / 1e9  # of the outer step's weights
    assert step.group == pytest.approx(one.group + gather)
    assert step.cross == pytest.approx(2 * 7 / 8 * 4 * (sizes.params // 4) / 5e8)  # once, between nodes
    half = seconds_of(replace(config, reduce_dtype="bf16"), 2, 4, groups=8)[2]
    assert half.cross == pytest.approx(step.cross / 2)


def test_offloaded_weights_are_fetched_for_every_micro_batch(folders):
    config = language(folders, micro_batch_size=2)
    sizes, matmuls = sizes_of(config)
    room = Topology(1, 1, 1, True, True)
    for live, times in ((1000, 2 * 4), (10**9, 4)):
        precision = DeepSpeedSettings(3, False, True, live, offload_param=True)
        _, found = task_cost(config, precision, sizes, matmuls, 16, room, RATES)
        assert found.group == pytest.approx(6 * times * 4 * sizes.params / 1e8)


# what is tried


def test_all_strategies_are_tried(folders):
    found = list(strategies(plan_of(model_name_or_path=folders["llama"], gpus=8, gpus_per_node=4)))
    assert {way.group_size for way in found} == {1, 2, 4, 8}  # 8 spans two nodes
    of_four = {(way.stages, way.tensor) for way in found if way.group_size == 4}
    assert of_four == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)}
    assert max(way.tensor for way in found) == 4  # inside a node
    assert {way.zero_stage for way in found if way.stages > 1} == {0, 1}
    assert {way.zero_stage for way in found if way.group_size == 2 and way.data == 2} == {0, 1, 2, 3}
    assert {way.zero_stage for way in found if way.group_size == 1 and not way.offload} == {0}
    assert {(way.lora_r, way.checkpointing, way.offload_outer) for way in found} == {
        (lora, check, outer) for lora in (0, 8) for check in (False, True) for outer in (False, True)
    }
    fixed = {
        "group_size": "2",
        "zero_stage": [3],
        "pipeline_stages": 1,
        "tensor_parallel_size": 1,
        "lora_r": 4,
        "gradient_checkpointing": True,
        "offload_outer": False,
        "offload": False,
    }
    assert [*strategies(plan_of(**fixed))] == [Strategy(2, 3, lora_r=4, checkpointing=True)]


@pytest.mark.parametrize("second_order", ["auto", "autograd"])
def test_a_group_of_one_with_offload_is_planned_as_the_run_computes_it(folders, second_order):
    """DeepSpeed's ZeRO 3 runs it, which cannot differentiate twice and cannot defer a backward pass."""
    plan = plan_of(
        model_name_or_path=folders["llama"],
        task_type="causal_lm",
        algorithm="maml",
        lora_r=2,
        second_order=second_order,
        gpu_memory_gib=80.0,
    )
    for device in ("cuda", "cpu"):  # on CPUs it is plain PyTorch
        planner = Planner(plan, replace(PROFILES["h100"], device=device))
        layouts = {str(one.strategy): one for one in planner.layouts() if one.strategy.group_size == 1}
        whole, offloaded = layouts["LoRA 2"], layouts.get("ZeRO 3, LoRA 2, offload")
        assert (offloaded is None) == (device == "cuda" and second_order == "autograd")
        if offloaded:  # fewer activations without the graphs of gradients
            fewer = offloaded.memory.kinds["activations"] < whole.memory.kinds["activations"]
            assert fewer == (device == "cuda")


@pytest.mark.parametrize(("stage", "tensor", "forwards"), [(0, 1, 0), (0, 2, 0), (3, 1, 1)])
def test_tensor_ranks_defer_a_backward_pass_and_zero_3_does_not(folders, stage, tensor, forwards):
    """ANIL: a forward of the support set more where its activations cannot wait for the query set."""
    config = Config(
        model_name_or_path=folders["llama"],
        pooling="mean",
        algorithm="anil",
        k_shot=1,
        num_query=1,
        tensor_parallel_size=tensor,
    )
    many = task_passes(config, DeepSpeedSettings(stage, False, stage == 3), 1)
    assert many.support_forwards + many.query_forwards == forwards


@pytest.mark.parametrize(("given", "ranks"), [({}, {4}), ({"lora_r": 4}, {4})])
def test_the_rank_of_a_peft_config_is_planned(given, ranks):
    options = {"use_rslora": True, "rank_pattern": {"query": 2}, **({} if given else {"r": 4})}
    plan = plan_of(peft_config=json.dumps(options), **given)
    assert {way.lora_r for way in strategies(plan)} == ranks
    planner = Planner(plan, PROFILES["h100"])
    ranks_of_layers = {
        param.shape[0] for name, param in planner.learner(4).named_parameters() if ".lora_A." in name
    }
    assert ranks_of_layers == {2, 4}
    assert planner.config_of(lora_r=0).peft_config is None


def test_shipped_deepspeed_files_are_what_is_planned():
    for way in strategies(plan_of()):
        moved = ("offload_optimizer", "offload_param") if way.offload else ()
        zero = {"stage": way.zero_stage, **{part: {"device": "cpu"} for part in moved}}
        assert json.loads(find(way.deepspeed_file).read_text()) == {"zero_optimization": zero}


def test_layouts_are_sorted_by_time_and_those_as_fast_by_the_size_of_their_groups(planned):
    planner, layouts = planned
    assert all(not one.lacking for one in layouts)
    order = [(round(20 * math.log(one.step.total)), one.strategy.group_size) for one in layouts]
    assert order == sorted(order)
    assert layouts[0].memory.total <= planner.gpu_bytes
    assert all(0 < one.efficiency <= 1 for one in layouts)
    assert {one.strategy.tensor for one in layouts if one.strategy.lora_r} > {1}


def test_less_memory_leaves_fewer_layouts(folders):
    most, fixed = [], {"model_name_or_path": folders["llama"], "task_type": "causal_lm", "offload": False}
    for gib in (1.0, 0.0015):
        plan = plan_of(**fixed, gpu_memory_gib=gib, zero_stage=[0, 3])
        layouts = Planner(plan, replace(PROFILES["h100"], device="cpu")).layouts()
        fits = [one.memory.total for one in layouts if not one.lacking]
        most.append(len(fits))
        assert max(fits) <= 0.9 * gib * 2**30
    assert most[0] > most[1] > 0


def starts(strategy: Strategy) -> list[str]:
    """The commands that are printed for 4 and for 16 GPUs."""
    planners = [Planner(plan_of(gpus=gpus), PROFILES["h100"]) for gpus in (4, 16)]
    return [command.run_command(planner, strategy) for planner in planners]


def test_train_accepts_every_printed_command(planned):
    planner, layouts = planned
    for one in layouts:
        config = parse(command.flags(planner, one.strategy))
        wanted = planner.config_of(**one.strategy.settings(planner.plan.bf16_planned))
        assert replace(config, deepspeed=None) == replace(wanted, deepspeed=None), one.strategy
        assert (config.deepspeed is None) == (one.strategy.group_size == 1 and not one.strategy.offload)
    few, many = starts(Strategy(1, 0))
    assert few.startswith("deepspeed --num_gpus 4 launch/train.py ")
    assert many.startswith(
        "torchrun --nnodes 4 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint $HEAD:29500 launch/"
    )


def test_groups_of_the_plan_are_those_that_the_run_accepts():
    for gpus, size in ((24, 4), (24, 8), (24, 12), (24, 24), (4, 2)):
        nodes = Nodes(tuple(rank // 8 for rank in range(gpus)), ("a", "b", "c")[: -(-gpus // 8)])
        nodes.check(size)
        assert next(strategies(plan_of(gpus=gpus, gpus_per_node=8, group_size=str(size)))).group_size == size


def test_rows_are_no_longer_than_the_positions_of_the_model(folders, tmp_path):
    model = shutil.copytree(folders["bert"], tmp_path / "bert")
    facts = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 100}
    (model / "config.json").write_text(json.dumps(facts))
    message = refusal(Planner, plan_of(model_name_or_path=str(model), max_length=101), PROFILES["h100"])
    check_message(message.replace(str(model), "bert"), "max_length=101 is above the 100 positions", "use 100")
    planner = Planner(plan_of(model_name_or_path=str(model)), PROFILES["h100"])
    layouts = planner.layouts()
    assert "rows of up to 100 tokens" in command.text(planner, layouts)
    config = parse(command.flags(planner, layouts[0].strategy))
    assert fitted(config, planner.description.hf_config).max_length == 100


@pytest.mark.parametrize(("enabled", "flag"), [(False, None), (False, True), (True, False), (True, None)])
def test_the_precision_of_a_deepspeed_file_is_planned(folders, tmp_path, enabled, flag):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"bf16": {"enabled": enabled}, "zero_optimization": {"stage": 2}}))
    plan = plan_of(model_name_or_path=folders["bert"], deepspeed=str(file), bf16=flag)
    planner = Planner(plan, PROFILES["h100"])
    layouts = planner.layouts()
    assert f"tokens, {'bf16' if enabled else 'fp32'}" in command.text(planner, layouts)
    assert parse(command.flags(planner, layouts[0].strategy)).bf16 == enabled


def test_printed_commands_start_the_module_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("launch").mkdir()
    Path("launch/train.py").write_text("raise SystemExit('a script of another project')")
    few, many = starts(Strategy(1, 3, offload=True))
    assert few.startswith("deepspeed --num_gpus 4 --module fmmeta train ")
    assert "$HEAD:29500 -m fmmeta train " in many
    assert all("--deepspeed zero3_offload " in one for one in (few, many))


# messages


def exit_of(capfd, *argv: str) -> tuple[int, str, str]:
    code, output = exit_code(["plan", *argv]), capfd.readouterr()
    return code, output.out, output.err


def test_groups_without_a_task_are_named(capfd, folders):
    argv = (
        f"--model_name_or_path {folders['bert']} --gpus 16 --gpu_memory_gib 8 --group_size 2 --zero_stage 3"
    )
    argv = [*argv.split(), "--meta_batch_size"]
    text = exit_of(capfd, *argv, "3")[1]
    parts = ("8 (5 idle)", "groups without a task: 5 of 8; 6 GPUs are as fast with 3 tasks")
    check_text(text, *parts, "give --gpus 6, --meta_batch_size 8 or more")
    assert "idle" not in exit_of(capfd, *argv, "8")[1]
    layouts = json.loads(exit_of(capfd, *argv, "3", "--json")[1])["layouts"]
    assert {one["idle_groups"] for one in layouts} == {5}


def test_the_command_prints_a_table_or_json(capfd, folders):
    """Profile, memory and commands of the layouts, also of those that do not fit."""
    argv = f"--task_type causal_lm --gpus 2 --model_name_or_path {folders['llama']} --machine a100".split()
    argv += ["--dataset", "my rows.jsonl", "--gpu_memory_gib"]
    code, text, error = exit_of(capfd, *argv, "8")
    assert (code, error) == (0, "")
    parts = ("2 GPUs of 8 GiB", "from data sheets", "all weights", "adapters (LoRA)", "'my rows.jsonl'")
    parts += ("memory of a rank, all weights: weights ", "times less with adapters than with all weights")
    check_text(text, *parts, "deepspeed --num_gpus 2 launch/train.py")
    base_trained = ["--lora_r", "8", "--inner_parameters", "adapters", "--outer_parameters", "body"]
    text = exit_of(capfd, *argv, "8", *base_trained)[1]
    check_text(text, "\nouter parameters: body, under adapters\n", "# outer parameters: body, under adapters")
    assert "adapters (LoRA)" not in text
    text = exit_of(capfd, *argv, "8", "--outer_parameters", "norms")[1]
    check_text(text, "\nouter parameters: norms\n", "outer parameters: norms, under adapters")
    output = json.loads(exit_of(capfd, *argv, "8", "--json")[1])
    layouts, one = output["layouts"], output["layouts"][0]
    of_model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folders["llama"]))
    assert output["parameters"] == of_model.num_parameters()
    assert (output["gpus"], output["profile"]["name"], one["fits"]) == (2, "a100", True)
    kinds = {"weights", "master", "theta", "meta_gradient", "moments", "activations", "total"}
    assert kinds <= one["bytes_per_rank"].keys()
    assert set(one["bytes_per_outer_step"]) == {"gather", "reduce", "tensor", "send", "cross"}
    assert one["step_seconds"] > 0
    assert "launch/train.py" in one["command"]
    assert {layout["zero_stage"] for layout in layouts} == {0, 1, 2, 3}
    code, text, _ = exit_of(capfd, *argv, "0.0005", "--json")
    too_large = json.loads(text)["layouts"]
    assert (code, any(layout["fits"] for layout in too_large)) == (2, False)
    assert too_large[0]["lacking_bytes"] > 0


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("", ["gpus is not given", "give it, such as --gpus 8"]),
        ("--gpus 0 --gpu_memory_gib 80", ["gpus=0", "use 1 or more"]),
        ("--gpus 8 --gpu_memory_gib -1", ["gpu_memory_gib=-1.0", "use one, such as 80"]),
        ("--gpus 9 --gpu_memory_gib 80", ["gpus=9", "gpus_per_node=8", "give complete nodes"]),
        ("--gpus 8 --zero_stage 4", ["zero_stage=4", "use 0, 1, 2 or 3"]),
        ("--gpus 8 --machine b300", ["machine=b300", "one of a100, h100, h200"]),
        ("--gpus 8 --algorithm none", ["algorithm=none", "use fomaml"]),
        ("--gpus 8 --elastic", ["elastic=True", "leave it out"]),
        ("--gpus 8 --group_size 3", ["group_size=3", "gpus=8", "use 1, 2, 4, 8"]),
        (
            "--gpus 24 --group_size 6",
            ["group_size=6 fits on a node of gpus_per_node=8", "use 1, 2, 4, 8, 24"],
        ),
        (
            "--gpus 8 --max_length 128 --row_tokens 129",
            ["row_tokens=129 is above max_length=128", "use 128 or less"],
        ),
        ("--gpus 8 --model_name_or_path ./none", ["model_name_or_path=./none", "check the path"]),
        (
            "--gpus 2 --model_name_or_path {llama} --task_type causal_lm --gpu_memory_gib 0.0005",
            ["gpu_memory_gib=0.0005 ", "{llama}", "2 GPUs", "90 %", "use more GPUs or memory"],
        ),
        (
            "--gpus 2 --model_name_or_path {llama} --task_type causal_lm --offload --host_memory_gib 0.0001"
            " --bf16 false",
            ["host_memory_gib=0.0001"],
        ),
        (
            "--gpus 2 --model_name_or_path {bert} --tensor_parallel_size 2",
            ["no layout", "tensor_parallel_size=2", "model_type=bert"],
        ),
        (
            "--gpus 2 --model_name_or_path {bert} --offload true --zero_stage 1",
            ["zero_stage=1, offload=True contradict each other; leave one out"],
        ),
    ],
)
def test_bad_input_is_one_line_and_code_2(capfd, folders, argv, parts):
    code, output, error = exit_of(capfd, *argv.format(**folders).split())
    assert (code, output) == (2, "")
    check_message(error, "fmmeta: error: ", *[part.format(**folders) for part in parts])


def test_memory_of_the_gpus_is_that_of_the_machine(capsys, tmp_path):
    small = ["--gpus", "2", "--model_name_or_path", "tiny", "--top", "1"]
    for machine, gib in (([], 80), (["--machine=a100"], 80), (["--machine=h200"], 141)):
        command.run(parse([*small, *machine], "plan"))
        assert f"2 GPUs of {gib} GiB" in capsys.readouterr().out
    path = tmp_path / "mine.json"
    path.write_text('{"gpu_memory_gib": 0}')
    message = refusal(command.run, parse([*small, f"--machine={path}"], "plan"))
    parts = (f"machine={path} names no memory", "give it, such as --gpu_memory_gib 80")
    check_message(message, "gpu_memory_gib is not given", *parts)


def test_profiles_from_files(tmp_path):
    """A file holds what differs from h100; a complete profile is such a file too."""
    path = tmp_path / "mine.json"
    for stored, wanted in (
        (asdict(PROFILES["a100"]), PROFILES["a100"]),
        ({"memory": 1e12}, replace(PROFILES["h100"], name="mine", memory=1e12)),
    ):
        path.write_text(json.dumps(stored))
        assert replace(machines.find(str(path)), source=wanted.source) == wanted


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"memory": 0}', ["memory=0", "is no positive number; use one, such as"]),
        ('{"memory": Infinity}', ["memory=inf", "use one up to"]),
        ('{"memory": true}', ["memory=True is not a number; give one"]),
        ('{"hidden": 2}', ["hidden=2.0 is above 1; use 0 or more, up to 1"]),
        ('{"latency": -1}', ["latency=-1.0 is below 0; use 0 or more"]),
        ('{"device": "tpu"}', ["device=tpu", "use cuda or cpu"]),
        ('{"name": []}', ["name=[] is not a text; give one"]),
        ('{"speed": 1}', ["sets speed", "it holds one or more of name, device, matmul_bf16"]),
        ("[]", ["is no JSON object", "it holds one or more of name"]),
        ("{", [" is none of "]),
    ],
)
def test_bad_profiles_are_refused(tmp_path, text, parts):
    path = tmp_path / "mine.json"
    path.write_text(text)
    check_message(refusal(machines.find, str(path)), f"machine={path}", *parts)
