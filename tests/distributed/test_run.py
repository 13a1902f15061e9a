"""Whole runs from outside: layouts, bytes, resume, bad input, agreement between ranks."""

import json
import platform
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fmmeta.cli import parse
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms import imaml
from fmmeta.meta.hessian import DifferenceHessian
from fmmeta.meta.parameters import MetaGradient
from fmmeta.meta.task import TaskRun
from fmmeta.parallel.workers import create
from fmmeta.training import build
from harness.fork_server import shared
from tests.support import open_files
from tests.support.launch import ProcessResults, run_ranks, train, train_flags
from tests.support.messages import check_message, refusal
from tests.support.models import save, save_llama, tiny, write_classes, write_pairs
from tests.support.ranks import built, first_episode, on_ranks
from tests.support.short_runs import metrics_of, model_of


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    off = sum(float((a[name] - b[name]).double().square().sum()) for name in a)
    return (off / sum(float(value.double().square().sum()) for value in a.values())) ** 0.5


ZERO = {stage: {"deepspeed": f"ds_configs/zero{stage}.json", "group_size": 2} for stage in range(4)}
STAGES = {**ZERO[1], "pipeline_stages": 2}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_layouts_and_a_resumption_on_another_one_give_the_same_model(tmp_path):
    settings = {"outer_steps": 6, "save_steps": 2}
    whole = train(tmp_path / "whole", 2, **settings).ok()
    four = train(tmp_path / "four", 4, **settings, **ZERO[2]).ok()
    assert "2 groups of 1 rank" in whole.output[0]
    assert "2 groups of 2 ranks on cpu; DeepSpeed ZeRO 2" in four.output[0]
    assert not whole.others + four.others  # only rank 0 logs
    assert "holds this run, finished" in train(tmp_path / "whole", 2, **settings).ok().output[0]
    begun = shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "from")
    train(tmp_path / "moved", 2, **settings, **ZERO[3], resume_from_checkpoint=begun).ok()
    for name in ("four", "moved"):
        assert relative_difference(model_of(tmp_path / "whole"), model_of(tmp_path / name)) < 1e-6
    one, other = ([line["accuracy"] for line in metrics_of(tmp_path / name)] for name in ("whole", "four"))
    assert one == pytest.approx(other)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_are_the_same_on_other_layouts_and_after_a_resumption(tmp_path):
    """One rank of plain PyTorch; a group of two with ZeRO 3, its base sharded; that one again from the
    first's checkpoint; and two stages, the first of which trains nothing, from a checkpoint of theirs.
    """
    base, data = save_llama(tmp_path / "base"), write_pairs(tmp_path / "pairs.jsonl")
    flags = {
        **{"model_name_or_path": base, "dataset": data, "task_type": "causal_lm", "num_query": 3},
        **{"meta_batch_size": 3, "outer_lr": 5e-3, "adam_epsilon": 1e-3, "save_steps": 2, "lora_r": 4},
        "lora_target_modules": "all-linear",
    }
    few = {**flags, "lora_target_modules": "layers.1.self_attn.v_proj"}
    outputs = {}
    for name, ranks, settings, begun in (
        ("one", 1, flags, None),
        ("two", 2, {**flags, **ZERO[3], "lora_merge": True}, None),
        ("two-again", 2, {**flags, **ZERO[3]}, "one"),
        ("few", 1, few, None),
        ("stages", 2, {**few, **STAGES}, None),
        ("stages-again", 2, {**few, **STAGES}, "stages"),
        ("few-again", 1, few, "stages"),
    ):
        named = {"resume_from_checkpoint": tmp_path / begun / "checkpoint-2"} if begun else {}
        ended = train(tmp_path / name, ranks, **settings, **named).ok()
        assert not ended.others
        outputs[name] = ended.output[0]
    assert "3,712 of 27,520 parameters" in outputs["one"]
    assert "192 of 24,000 parameters" in outputs["stages"]
    found = {name: load_file(tmp_path / name / "model" / "adapter_model.safetensors") for name in outputs}
    for whole, others in (("one", ("two", "two-again")), ("few", ("stages", "stages-again", "few-again"))):
        assert all(
            float(value.abs().max()) > 1e-4 for name, value in found[whole].items() if "lora_B" in name
        )
        for name in others:
            assert relative_difference(found[whole], found[name]) < 1e-6, name
    ids = torch.randint(3, 250, (2, 9))
    plain, below, merged = (
        AutoModelForCausalLM.from_pretrained(one) for one in (base, base, tmp_path / "two" / "merged")
    )
    with torch.no_grad():
        logits = merged(ids).logits
        loaded = PeftModel.from_pretrained(below, tmp_path / "two" / "model")(ids).logits
        torch.testing.assert_close(logits, loaded, rtol=1e-5, atol=1e-5)
        assert float((logits - plain(ids).logits).abs().max()) > 1e-3


@pytest.mark.slow
def test_cross_group_traffic_is_one_reduction_of_the_shard(tmp_path):
    few = {"meta_batch_size": 4, "inner_steps": 1, "outer_steps": 2}
    many = {"meta_batch_size": 64, "inner_steps": 10, "outer_steps": 1, "meta_accumulation_steps": 1}
    train(tmp_path / "few", 2, **few).ok()
    train(tmp_path / "many", 2, **many, k_shot=1, num_query=1).ok()
    tensors = {name: value.numel() for name, value in model_of(tmp_path / "few").items()}
    shard = sum(size for name, size in tensors.items() if not name.startswith("pooler"))
    head = 64 * 5 + 5  # the head is in the shard, though every task reinitializes it
    seen = [line["comm_bytes"] for folder in ("few", "many") for line in metrics_of(tmp_path / folder)]
    assert seen == [4 * (shard + head)] * 3


@pytest.mark.slow
def test_metrics_and_run_json_hold_the_documented_keys(tmp_path):
    train(tmp_path / "run", 1, outer_steps=2, fresh=True).ok()
    keys = (
        "step epoch seconds tokens support_loss query_loss accuracy grad_norm lr skipped_tasks comm_bytes"
        " data_seconds wait_seconds wait_seconds_by_group imbalance tasks_per_second tokens_per_second"
        " useful_share goodput_percent"
    )
    for line in metrics_of(tmp_path / "run"):
        assert line.keys() - {"seconds_left"} == {*keys.split()}  # which is there after some steps
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["finished"]
    assert run["goodput"].keys() == {"percent", "useful_seconds", "rank_seconds"}
    assert run["settings"]["outer_lr"] == 2e-3
    assert len(run["settings"]["dataset_fingerprint"]) == 64
    assert {"torch", "deepspeed", "transformers"} <= set(run["versions"])


@pytest.mark.timeout(600)
def test_a_killed_run_resumes_to_the_theta_of_an_undisturbed_run(tmp_path, monkeypatch):
    monkeypatch.setenv("EPISODE_S", "0")
    settings = {
        "outer_steps": 6,
        "save_steps": 2,
        "meta_batch_size": 4,
        "k_shot": 1,
        "num_query": 2,
        "episode_transforms": "tests.support.short_runs:slow_episode",
    }
    train(tmp_path / "whole", 2, **settings).ok()
    ranks = shared().train(
        train_flags(tmp_path / "killed", **settings), 2, tmp_path / "logs", EPISODE_S="0.1"
    )
    deadline = time.monotonic() + 100
    while not (tmp_path / "killed" / "checkpoint-2").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in ranks:
        shared().signal(rank, signal.SIGKILL)
    assert shared().wait(ranks, 10) == [-9, -9], ranks[0].text
    assert not (tmp_path / "killed" / "model").exists()
    again = train(tmp_path / "killed", 2, **settings).ok()
    assert "resumed from" in again.output[0]
    whole, killed = model_of(tmp_path / "whole"), model_of(tmp_path / "killed")
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    losses = [
        [(line["step"], line["query_loss"]) for line in metrics_of(tmp_path / name)]
        for name in ("whole", "killed")
    ]
    assert losses[0] == losses[1]
    assert sorted(p.name for p in (tmp_path / "killed").glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-6",
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stage_that_trains_a_task_initialised_head_alone_resumes(tmp_path):
    """Adapters are in the first stage only, so that the last one moves no meta-parameter."""
    settings = {"lora_r": 2, "peft_config": '{"layers_to_transform": [0]}', **STAGES, "save_steps": 2}
    train(tmp_path / "run", 2, **settings).ok()
    named = tmp_path / "run" / "checkpoint-2"
    train(tmp_path / "again", 2, **settings, resume_from_checkpoint=named).ok()
    for file in ("adapter_model.safetensors", "fmmeta.json"):
        assert len({(tmp_path / run / "model" / file).read_bytes() for run in ("run", "again")}) == 1
    shards = [load_file(named / f"shard-0000{rank}.safetensors") for rank in range(2)]
    assert any("lora_" in name for name in shards[0])
    assert all("/head." in name for name in shards[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_resumes_across_pipeline_tensor_and_zero3(tmp_path):
    """A pipeline's checkpoint resumes under tensor parallelism, and that one's under ZeRO 3."""
    settings = {
        **{"task_type": "causal_lm", "dataset": write_pairs(tmp_path / "pairs.jsonl"), "num_query": 3},
        **{"meta_batch_size": 2, "inner_steps": 2, "outer_steps": 4, "save_steps": 1, "save_total_limit": 4},
    }
    train(tmp_path / "plain", 1, **settings).ok()
    wanted = model_of(tmp_path / "plain")
    for name, layout, begun, said in (
        ("stages", STAGES, "", "DeepSpeed ZeRO 1, 2 pipeline stages; fp32"),
        (
            "tensor",
            {"group_size": 2, "tensor_parallel_size": 2},
            "stages/checkpoint-1",
            "ZeRO 0, 2 tensor ranks",
        ),
        ("zero3", ZERO[3], "tensor/checkpoint-2", "DeepSpeed ZeRO 3"),
    ):
        named = {"resume_from_checkpoint": tmp_path / begun} if begun else {}
        ended = train(tmp_path / name, 2, **settings, **layout, **named).ok()
        assert said in ended.output[0]
        assert not ended.others
        assert relative_difference(wanted, model_of(tmp_path / name)) < 1e-6, name
    assert len(list((tmp_path / "stages" / "model").glob("model-*.safetensors"))) == 2  # one from each stage
    for plain, staged in zip(*(metrics_of(tmp_path / name) for name in ("plain", "stages")), strict=True):
        for key in ("tokens", "query_loss", "accuracy", "grad_norm"):
            assert staged[key] == pytest.approx(plain[key], rel=1e-4), key


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stages_by_measured_time_hold_the_printed_layers(tmp_path):
    """A large head: the first stage gets more layers than by parameters; theta is the same either way."""
    sizes = {"num_hidden_layers": 6, "intermediate_size": 32, "vocab_size": 20000}
    model = save(tiny("llama", **sizes, num_key_value_heads=4, tie_word_embeddings=False), tmp_path / "model")
    settings = {
        **{"model_name_or_path": model, "task_type": "causal_lm", "meta_batch_size": 2, "num_query": 3},
        **{"dataset": write_pairs(tmp_path / "pairs.jsonl"), "inner_steps": 1, "outer_steps": 2},
        **{"group_size": 2, "pipeline_stages": 2},
    }
    for balance in ("parameters", "time"):
        ran = train(tmp_path / balance, 2, pipeline_balance=balance, **settings).ok()
        matches = re.search(
            rf"stages by {balance}: layers 0 to (\d) \(([\d,]+) parameters(.*?)\); layers (\d) to 5",
            ran.output[0],
        )
        assert matches, ran.output[0]
        assert ("ms" in matches[3]) == (balance == "time")
        assert (matches[1] == "2") == (balance == "parameters")
        files = sorted((tmp_path / balance / "model").glob("model-*.safetensors"))
        held = [{int(name.split(".")[2]) for name in load_file(file) if ".layers." in name} for file in files]
        assert held == [set(range(int(matches[4]))), set(range(int(matches[4]), 6))]
        first = sum(value.numel() for value in load_file(files[0]).values())
        assert f"{first:,}" == matches[2]
    assert relative_difference(model_of(tmp_path / "parameters"), model_of(tmp_path / "time")) < 1e-6


SMALL = {"vocab_size": 260, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def bad_inputs(folder: Path) -> dict[str, tuple[dict[str, object], str]]:
    """Flags, and a part of the error line that they lead to.

    One case of each place where checks live; tests/unit has the rest.
    """
    data = write_classes(folder / "classes.jsonl")
    (folder / "empty").mkdir()
    (folder / "broken.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": \n')
    (folder / "splits.json").write_text('{"train": ["c0", "no such class"]}')
    (folder / "fp16.json").write_text('{"fp16": {"enabled": true}}')
    (folder / "clip.json").write_text('{"gradient_clipping": 1.0}')
    for name, config in (
        ("electra", {"model_type": "electra", "vocab_size": 260}),
        ("moe", {"model_type": "jetmoe"}),
        ("routed", {"model_type": "mixtral", "output_router_logits": True, **SMALL}),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return {
        "unknown flag": ({"inner_step": 3}, "did you mean --inner_steps?"),
        "choice": ({"algorithm": "maml2"}, "maml2"),
        "group size": ({"group_size": 3}, "group_size=3 does not divide world_size=2"),
        "data set": ({"dataset": folder / "absent.jsonl"}, "absent.jsonl is not a file or folder"),
        "column": ({"dataset": data, "text_column": "txt"}, "text_column=txt is no column"),
        "line": ({"dataset": folder / "broken.jsonl"}, "broken.jsonl:2 is not a line of JSON"),
        "split": ({"dataset": data, "class_splits": folder / "splits.json"}, "'no such class'"),
        "rows": ({"dataset": data, "k_shot": 9}, "k_shot=9 and num_query=5 need 14 rows"),
        "n_way": ({"dataset": data, "n_way": 13, "k_shot": 1, "num_query": 1}, "n_way=13 is above"),
        "model": ({"model_name_or_path": folder / "empty"}, "holds no config.json"),
        "moe": ({"model_name_or_path": folder / "moe"}, "is a mixture of experts (jetmoe)"),
        "fp16": ({"deepspeed": folder / "fp16.json"}, "use bf16 or fp32"),
        "stages": (
            {"group_size": 2, "pipeline_stages": 3},
            "pipeline_stages=3 is above the 2 layers",
        ),
        "stages of a group": (
            {"group_size": 1, "pipeline_stages": 2},
            "not a multiple of pipeline_stages=2",
        ),
        "stages, ZeRO": (
            {"group_size": 2, "pipeline_stages": 2, "deepspeed": "ds_configs/zero2.json"},
            "does not work with ZeRO 2",
        ),
        "stages, family": (
            {"model_name_or_path": folder / "electra", "group_size": 2, "pipeline_stages": 2},
            "no pipeline plan for model_type=electra",
        ),
        "tensor, family": (
            {"group_size": 2, "tensor_parallel_size": 2},
            "no tensor-parallel plan for model_type=bert",
        ),
        "tensor, heads": (
            {
                "group_size": 2,
                "tensor_parallel_size": 3,
                "task_type": "causal_lm",
                "k_shot": 1,
                "num_query": 1,
            },
            "does not divide num_attention_heads=4",
        ),
        "tensor, ZeRO": (
            {"group_size": 2, "tensor_parallel_size": 2, "deepspeed": "ds_configs/zero3.json"},
            "not work with ZeRO 3",
        ),
        "router loss": (
            {
                "model_name_or_path": folder / "routed",
                "task_type": "causal_lm",
                "input_column": "text",
                "output_column": "label",
                "k_shot": 1,
                "num_query": 1,
                "group_size": 2,
            },
            "shares the rows of a set, whose losses depend on each other (output_router_logits=True",
        ),
        "clipping": ({"deepspeed": folder / "clip.json"}, "gradient_clipping=1.0, which fmmeta owns"),
    }


COMPLETE_LAUNCHES = ("unknown flag", "group size", "line", "moe")  # whole launches


@pytest.mark.timeout(600)
def test_bad_input_is_one_line_from_one_rank_and_exit_code_2(tmp_path):
    inputs = bad_inputs(tmp_path)
    started = {
        name: shared().train(
            train_flags(tmp_path / "runs" / name, **inputs[name][0]), 2, tmp_path / f"{name} logs"
        )
        for name in COMPLETE_LAUNCHES
    }
    for name, ranks in started.items():
        ended = ProcessResults(shared().wait(ranks, 100), [rank.text for rank in ranks])
        assert ended.codes == [2, 2], (name, ended.output)
        errors = [line for line in ended.output[0].splitlines() if "error" in line]
        assert len(errors) == 1, (name, ended.output[0])
        assert inputs[name][1] in errors[0], name
        assert "Traceback" not in ended.output[0] + ended.output[1], name
        assert not ended.others, name
        assert not (tmp_path / "runs" / name).exists()


@pytest.mark.parametrize(
    ("zero", "parts"),
    [
        (
            {"stage": 2, "offload_optimiser": {"device": "cpu"}},
            (
                'sets offload_optimiser={"device": "cpu"}, which DeepSpeedZeroConfig of DeepSpeed refuses',
                "did you mean offload_optimizer?",
            ),
        ),
        (
            {"stage": 3, "overlap_comm": "perhaps"},
            ('sets overlap_comm="perhaps", which DeepSpeedZeroConfig', "change or remove it"),
        ),
    ],
    ids=["key", "value"],
)
def test_what_deepspeed_refuses_inside_a_block_is_named(tmp_path, zero, parts):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": zero}))
    flags = train_flags(tmp_path / "run", deepspeed=file, engine="deepspeed")
    ranks = shared().train(flags, 1, tmp_path / "logs")
    assert shared().wait(ranks, 100) == [2], ranks[0].text
    (line,) = [line for line in ranks[0].text.splitlines() if "error" in line]
    assert all(part in line for part in parts), line
    assert "Traceback" not in ranks[0].text


@on_ranks(2, timeout_s=200)
def refusals(world, listed):
    """The texts with which lists of flags are refused; the ranks stay together from one to the next."""

    def start(flags):
        config = parse(flags)
        inputs = build.read_inputs(config, world, lambda text: None)
        plan = build.plan_parallel(config, inputs, world, lambda text: None)
        world.split(plan.group_size, plan.engine == "deepspeed")

    return [refusal(start, flags) for flags in listed]


def test_bad_input_is_the_same_error_on_every_rank(tmp_path):
    inputs = {
        name: case for name, case in bad_inputs(tmp_path).items() if name not in ("unknown flag", "choice")
    }
    first, second = refusals(
        [[f"--{key}={value}" for key, value in given.items()] for given, _ in inputs.values()]
    )
    assert first == second
    for line, (name, (_, text)) in zip(first, inputs.items(), strict=True):
        assert text in line, name


class Rounded(DifferenceHessian):
    """Products that are zero on the first rank, and of the size of a rounding error on the others."""

    def times(self, phi, d):
        super().times(phi, d)
        return d.roll(1) * (1e-4 * self.worker.group.rank)


@on_ranks(2)
def solve(world):
    """Conjugate gradients of a ZeRO 0 group whose copies differ by rounding: they end after one step by those
    of rank 0, and after more by those of rank 1.
    """
    config = Config(algorithm="imaml", group_size="2", num_workers="0")
    inputs, ranks, parts = built(world, config)
    worker = parts.worker
    episode = first_episode(config, inputs, ranks, parts)
    b = worker.zeros()
    worker.gradient(episode.query, b)
    hessian = Rounded(parts.setup.hvp, worker, episode.support)
    task = TaskRun(parts.setup, worker, parts.meta_params, episode, MetaGradient(b))
    _, numbers = imaml.solve(task, hessian, parts.meta_params.theta, b)
    norm = worker.dot(b, b * (1 + 1e-6 * ranks.group.rank))
    return len(hessian.passes), norm, numbers["cg_residual"]


def test_zero_0_in_bf16_says_what_it_runs_as_and_deepspeed_prints_nothing(tmp_path):
    flags = {"deepspeed": "ds_configs/zero0.json", "group_size": 2, "outer_steps": 1, "eval_episodes": 0}
    ended = train(tmp_path, 2, bf16=True, **flags).ok()
    lines = ended.output[0].splitlines()
    assert "fmmeta: ZeRO 0 in bf16 runs as ZeRO 1: DeepSpeed's ZeRO 0 adds up gradients in bf16" in lines
    assert any("DeepSpeed ZeRO 1; bf16" in line for line in lines)
    assert [line for line in lines if not line.startswith(("fmmeta: ", "outer step "))] == []


def test_replicas_that_differ_by_rounding_take_the_same_steps():
    first, second = solve()
    assert first == second
    assert first[0] == 4


@on_ranks(2)
def load_sharded(world, model, data, setting, value):
    """Elements of the base that a rank holds, frozen tensors for export, and operations of the graph.

    No rank loads a complete model, nor keeps more than one tensor that it does not need.
    """

    def whole(*_):
        raise AssertionError("a whole model was loaded")

    create.load_learner = whole
    settings = {
        "model_name_or_path": str(model),
        "dataset": [str(data)],
        "task_type": "causal_lm",
        "num_query": 3,
    }
    _, _, parts = built(world, Config(**settings, lora_r=2, group_size="2", **{setting: value}))
    module = getattr(parts.worker, "model", None) or parts.worker.stage
    held = sum(getattr(p, "ds_tensor", p).numel() for p in module.parameters() if not p.requires_grad)
    if setting == "pipeline_stages":
        return held, len(parts.frozen), {}
    ids = torch.ones(1, 5, dtype=torch.long)
    return held, len(parts.frozen), graph_of(module(input_ids=ids, attention_mask=ids).sum().grad_fn)


def graph_of(node):
    """Names of the operations that a backward pass will go through."""
    seen, todo = {node}, [node]
    while todo:
        for below, _ in todo.pop().next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
    return {each.name() for each in seen}


@pytest.mark.parametrize(
    ("setting", "value"), [("deepspeed", "ds_configs/zero3.json"), ("pipeline_stages", 2)]
)
def test_the_base_model_of_adapters_is_sharded_while_loading(tmp_path, setting, value):
    model, data = save_llama(tmp_path / "llama"), write_pairs(tmp_path / "pairs.jsonl")
    held, frozen, graphs = zip(*load_sharded(model, data, setting, value), strict=True)
    total, embedding = 23808, 259 * 32  # tied: each stage has its copy
    assert frozen == (0, 0)
    if setting == "pipeline_stages":
        assert sum(held) == total + embedding
        assert max(held) < 0.75 * total
        return
    assert held == (total // 2,) * 2
    for names in graphs:  # the backward pass would hold every gathered weight through its transposed view
        assert "TBackward0" not in names
        assert "LinearFunctionForZeroStage3Backward" in names


def test_a_hard_limit_of_open_files_that_is_too_low_ends_all_ranks_with_one_line(tmp_path):
    ended = run_ranks(["launch/train.py", *train_flags(tmp_path)], 3, 60, before=open_files.hard)
    assert ended.codes == [2, 2, 2]
    (line,) = [line for line in ended.output[0].splitlines() if "world_size=3" in line]
    check_message(
        line.replace(platform.node(), "HOST"), "world_size=3: rank 0 on HOST may open 200 files", "ulimit -Hn"
    )
