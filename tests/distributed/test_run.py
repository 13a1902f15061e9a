"""Whole runs from outside: layouts, bytes, resume, bad input, agreement between ranks."""

from __future__ import annotations

import json
import platform
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import open_files
from tests.support.fake_runs import write_run
from tests.support.fork_server import shared
from tests.support.launch import ProcessResults, run_ranks, train, train_flags
from tests.support.messages import check_message
from tests.support.models import save, save_llama, write_classes, write_pairs


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "model").glob("model*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    off = sum(float((a[name] - b[name]).double().square().sum()) for name in a)
    return (off / sum(float(value.double().square().sum()) for value in a.values())) ** 0.5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_flags_on_other_layouts_give_the_same_model(tmp_path):
    one = train(tmp_path / "1", 1, deepspeed="ds_configs/zero2.json").ok()
    two = train(tmp_path / "2", 2, deepspeed="ds_configs/zero2.json").ok()
    four = train(tmp_path / "4", 4, deepspeed="ds_configs/zero2.json", group_size=2).ok()
    assert "1 group of 1 rank" in one.output[0]
    assert "2 groups of 1 rank" in two.output[0]
    assert "2 groups of 2 ranks on cpu; DeepSpeed ZeRO 2" in four.output[0]
    assert not two.others  # only rank 0 logs
    assert not four.others
    assert relative_difference(model_of(tmp_path / "1"), model_of(tmp_path / "2")) < 1e-6
    assert relative_difference(model_of(tmp_path / "1"), model_of(tmp_path / "4")) < 1e-6
    assert [line["accuracy"] for line in metrics_of(tmp_path / "1")] == pytest.approx(
        [x["accuracy"] for x in metrics_of(tmp_path / "4")]
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_are_the_same_on_other_layouts_and_after_a_resumption(tmp_path):
    """One rank of plain PyTorch; a group of two with ZeRO 3, its base sharded; that one again from the
    first's checkpoint; and two stages, the first of which trains nothing, from a checkpoint of theirs.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, data = save_llama(tmp_path / "base"), write_pairs(tmp_path / "pairs.jsonl")
    flags = {
        **{
            "model_name_or_path": base,
            "dataset": data,
            "task_type": "causal_lm",
            "num_query": 3,
            "meta_batch_size": 3,
        },
        **{
            "lora_r": 4,
            "lora_target_modules": "all-linear",
            "outer_lr": 5e-3,
            "adam_epsilon": 1e-3,
            "save_steps": 2,
        },
    }
    one = train(tmp_path / "one", 1, **flags).ok()
    sharded = {**flags, "deepspeed": "ds_configs/zero3.json", "group_size": 2}
    two = train(tmp_path / "two", 2, **sharded, lora_merge=True).ok()
    resumed = train(
        tmp_path / "again", 2, **sharded, resume_from_checkpoint=tmp_path / "one" / "checkpoint-2"
    ).ok()
    assert "3,712 of 27,520 parameters" in one.output[0]
    assert not two.others
    assert not resumed.others
    adapters = [
        load_file(tmp_path / run / "model" / "adapter_model.safetensors") for run in ("one", "two", "again")
    ]
    assert relative_difference(adapters[0], adapters[1]) < 1e-6
    assert relative_difference(adapters[0], adapters[2]) < 1e-6
    assert all(
        float(value.abs().max()) > 1e-4 for name, value in adapters[0].items() if "lora_B" in name
    )  # B began at zero
    few = {**flags, "lora_target_modules": "layers.1.self_attn.v_proj"}
    train(tmp_path / "few", 1, **few).ok()
    staged = {**few, "group_size": 2, "pipeline_stages": 2, "deepspeed": "ds_configs/zero1.json"}
    stages = train(tmp_path / "stages", 2, **staged).ok()
    assert "192 of 24,000 parameters" in stages.output[0]
    train(
        tmp_path / "stages-again", 2, **staged, resume_from_checkpoint=tmp_path / "stages" / "checkpoint-2"
    ).ok()
    train(tmp_path / "few-again", 1, **few, resume_from_checkpoint=tmp_path / "stages" / "checkpoint-2").ok()
    wanted = load_file(tmp_path / "few" / "model" / "adapter_model.safetensors")
    for run in ("stages", "stages-again", "few-again"):
        assert (
            relative_difference(wanted, load_file(tmp_path / run / "model" / "adapter_model.safetensors"))
            < 1e-6
        )
    ids = torch.randint(3, 250, (2, 9))
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), tmp_path / "two" / "model"
        )(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "merged")(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(ids).logits
    torch.testing.assert_close(merged, loaded, rtol=1e-5, atol=1e-5)
    assert float((merged - plain).abs().max()) > 1e-3


@pytest.mark.slow
def test_cross_group_traffic_is_one_reduction_of_the_shard(tmp_path):
    few = {"meta_batch_size": 4, "inner_steps": 1, "outer_steps": 2}
    train(tmp_path / "few", 2, **few).ok()
    train(
        tmp_path / "many",
        2,
        meta_batch_size=64,
        inner_steps=10,
        outer_steps=1,
        meta_accumulation_steps=1,
        k_shot=1,
        num_query=1,
    ).ok()
    parameters = sum(value.numel() for value in model_of(tmp_path / "few").values())
    pooler = sum(
        value.numel() for name, value in model_of(tmp_path / "few").items() if name.startswith("pooler")
    )
    head = 64 * 5 + 5  # the head is in the shard, though every task reinitializes it
    expected = 4 * (parameters - pooler + head)
    seen = [line["comm_bytes"] for folder in ("few", "many") for line in metrics_of(tmp_path / folder)]
    assert seen == [expected] * 3


@pytest.mark.slow
def test_metrics_and_run_json_hold_the_documented_keys(tmp_path):
    train(tmp_path / "run", 1, outer_steps=2, fresh=True).ok()
    keys = {
        "step",
        "epoch",
        "seconds",
        "tokens",
        "support_loss",
        "query_loss",
        "accuracy",
        "grad_norm",
        "lr",
        "skipped_tasks",
        "comm_bytes",
        "data_seconds",
        "wait_seconds",
        "wait_seconds_by_group",
        "imbalance",
    }
    assert all(keys == set(line) for line in metrics_of(tmp_path / "run"))
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["finished"]
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
@pytest.mark.timeout(600)
def test_a_run_of_two_groups_resumes_as_one_group_of_zero3(tmp_path):
    settings = {"outer_steps": 6, "save_steps": 2}
    train(tmp_path / "whole", 2, **settings).ok()
    finished = train(tmp_path / "whole", 2, **settings).ok()
    assert "holds this run, finished" in finished.output[0]
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "from")
    moved = {
        **settings,
        "resume_from_checkpoint": tmp_path / "from",
        "group_size": 2,
        "deepspeed": "ds_configs/zero3.json",
    }
    train(tmp_path / "moved", 2, **moved).ok()
    assert relative_difference(model_of(tmp_path / "whole"), model_of(tmp_path / "moved")) < 1e-6


@pytest.mark.timeout(300)
def test_a_stage_that_trains_a_task_initialised_head_alone_resumes(tmp_path):
    """Adapters are in the first stage only, so that the last one moves no meta-parameter."""
    settings = {
        "lora_r": 2,
        "peft_config": '{"layers_to_transform": [0]}',
        "group_size": 2,
        "pipeline_stages": 2,
        "deepspeed": "ds_configs/zero1.json",
        "save_steps": 2,
    }
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
    data = write_pairs(tmp_path / "pairs.jsonl")
    settings = {
        "task_type": "causal_lm",
        "dataset": data,
        "num_query": 3,
        "meta_batch_size": 2,
        "inner_steps": 2,
        "outer_steps": 4,
        "save_steps": 1,
        "save_total_limit": 4,
    }
    train(tmp_path / "plain", 1, **settings).ok()
    spread = {**settings, "group_size": 2}
    first = train(tmp_path / "stages", 2, pipeline_stages=2, deepspeed="ds_configs/zero1.json", **spread).ok()
    assert "DeepSpeed ZeRO 1, 2 pipeline stages; fp32" in first.output[0]
    assert not first.others
    begun = tmp_path / "stages" / "checkpoint-1"
    second = train(
        tmp_path / "tensor", 2, tensor_parallel_size=2, resume_from_checkpoint=begun, **spread
    ).ok()
    assert "DeepSpeed ZeRO 0, 2 tensor ranks" in second.output[0]
    begun = tmp_path / "tensor" / "checkpoint-2"
    train(
        tmp_path / "zero3", 2, deepspeed="ds_configs/zero3.json", resume_from_checkpoint=begun, **spread
    ).ok()
    wanted = model_of(tmp_path / "plain")
    for name in ("stages", "tensor", "zero3"):
        assert relative_difference(wanted, model_of(tmp_path / name)) < 1e-6, name
    assert len(list((tmp_path / "stages" / "model").glob("model-*.safetensors"))) == 2  # one from each stage
    lines = [metrics_of(tmp_path / name) for name in ("plain", "stages")]
    for key in ("tokens", "query_loss", "accuracy", "grad_norm"):
        assert [line[key] for line in lines[1]] == pytest.approx(
            [line[key] for line in lines[0]], rel=1e-4
        ), key


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stages_by_measured_time_hold_the_printed_layers(tmp_path):
    """A large head: the first stage gets more layers than by parameters; theta is the same either way."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "vocab_size": 20000,
    }
    model = save(
        LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, pad_token_id=0)), tmp_path / "model"
    )
    settings = {
        "model_name_or_path": model,
        "task_type": "causal_lm",
        "dataset": write_pairs(tmp_path / "pairs.jsonl"),
        "num_query": 3,
        "meta_batch_size": 2,
        "inner_steps": 1,
        "outer_steps": 2,
        "group_size": 2,
        "pipeline_stages": 2,
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
        assert sum(value.numel() for value in load_file(files[0]).values()) == int(
            matches[2].replace(",", "")
        )
    assert relative_difference(model_of(tmp_path / "parameters"), model_of(tmp_path / "time")) < 1e-6


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
    (folder / "electra").mkdir()
    (folder / "electra" / "config.json").write_text('{"model_type": "electra", "vocab_size": 260}')
    (folder / "moe").mkdir()
    (folder / "moe" / "config.json").write_text('{"model_type": "mixtral", "num_local_experts": 8}')
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
        "moe": ({"model_name_or_path": folder / "moe"}, "is a mixture of experts (mixtral)"),
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
                'sets zero_optimization.offload_optimiser={"device": "cpu"}, which DeepSpeed does not know',
                "did you mean offload_optimizer?",
            ),
        ),
        (
            {"stage": 3, "overlap_comm": "perhaps"},
            ('sets zero_optimization.overlap_comm="perhaps", which DeepSpeed refuses', "change or remove it"),
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


def test_bad_input_is_the_same_error_on_every_rank(tmp_path):
    inputs = {
        name: case for name, case in bad_inputs(tmp_path).items() if name not in ("unknown flag", "choice")
    }
    flags = [[f"--{key}={value}" for key, value in given.items()] for given, _ in inputs.values()]
    (tmp_path / "flags.json").write_text(json.dumps(flags))
    arguments = ["-m", "tests.support.scenarios", "refusals", str(tmp_path / "flags.json")]
    first, second = (text.splitlines() for text in run_ranks(arguments, 2, timeout_s=200).ok().output)
    assert first == second
    assert len(first) == len(inputs)
    for line, (name, (_, text)) in zip(first, inputs.items(), strict=True):
        assert text in line, name


def scenario(name: str, ranks: int, *arguments: str) -> list[str]:
    return run_ranks(["-m", "tests.support.scenarios", name, *arguments], ranks, timeout_s=100).ok().output


def test_replicas_that_differ_by_rounding_take_the_same_steps():
    first, second = (re.search("solved in 4 passes.*", text) for text in scenario("cg_rounding", 2))
    assert first is not None
    assert second is not None
    assert first[0] == second[0]


@pytest.mark.parametrize(
    ("setting", "value"), [("deepspeed", "ds_configs/zero3.json"), ("pipeline_stages", 2)]
)
def test_the_base_model_of_adapters_is_sharded_while_loading(tmp_path, setting, value):
    model, data = save_llama(tmp_path / "llama"), write_pairs(tmp_path / "pairs.jsonl")
    arguments = [
        "-m",
        "tests.support.scenarios",
        "sharded_while_loading",
        str(model),
        str(data),
        setting,
        str(value),
    ]
    output = run_ranks(arguments, 2).ok().output
    matches = [re.search(r"holds (\d+) of the base and 0 frozen tensors", text) for text in output]
    held = [int(found[1]) for found in matches if found]
    total, embedding = 23808, 259 * 32  # tied: each stage has its copy
    if setting == "deepspeed":
        assert held == [total // 2] * 2
        assert all("keeps gathered weights False True" in text for text in output)
    else:
        assert sum(held) == total + embedding
        assert max(held) < 0.75 * total


def test_an_error_of_one_rank_is_raised_on_all():
    outputs = scenario("matching_values", 3)
    assert all("usage value=1 is wrong; use 2" in text for text in outputs)
    assert "own broken" in outputs[0]
    assert all("peer rank 0 failed while testing: broken" in text for text in outputs[1:])
    assert all("[b'', b'after 1', b'after 2']" in text for text in outputs)


def test_a_soft_limit_of_open_files_is_raised_to_what_the_ranks_need():
    matching = ["-m", "tests.support.scenarios", "matching_values"]
    outputs = run_ranks(matching, 4, 60, before=open_files.soft).ok().output
    assert all("[b'', b'after 1', b'after 2', b'after 3']" in text for text in outputs)


def test_a_hard_limit_of_open_files_that_is_too_low_ends_all_ranks_with_one_line(tmp_path):
    ended = run_ranks(["launch/train.py", *train_flags(tmp_path)], 3, 60, before=open_files.hard)
    assert ended.codes == [2, 2, 2]
    (line,) = [line for line in ended.output[0].splitlines() if "world_size=3" in line]
    check_message(
        line.replace(platform.node(), "HOST"), "world_size=3: rank 0 on HOST may open 200 files", "ulimit -Hn"
    )


def test_all_ranks_receive_the_bytes_of_one(tmp_path):
    """No tensor that is sent is longer than metrics.jsonl of a run, however many ranks receive it."""
    folder = write_run(tmp_path / "run")
    size = sum((folder / name).stat().st_size for name in ("metrics.jsonl", "run.json"))
    for text in scenario("bytes_of_one_rank", 3, str(folder)):
        assert "[b'0 ', b'1 x', b'2 xx']\nb''\n" in text
        lines, largest = re.findall(r"lines (\d+) largest (\d+)", text)[0]
        assert int(lines) == 104
        assert size / 2 < int(largest) < 1.1 * size


def test_a_reduction_finishes_bucket_by_bucket():
    for text in scenario("buckets", 2):
        places = "[(0, 8), (8, 16), (16, 20)]"
        assert [line for line in text.splitlines() if places in line] == [
            f"None {places}",
            f"torch.bfloat16 {places}",
        ]
        means = [line for line in text.splitlines() if line.startswith("mean")]
        assert means == [f"mean {[1.0] * length} [[1.0, 1.0], [1.0, 1.0]]" for length in (8, 8, 4)]


def test_ranks_that_share_a_gpu_are_refused_on_all_ranks():
    lines = {line for text in scenario("shared_gpu", 3) for line in text.splitlines()}
    (line,) = lines - {"accepted"}
    assert "accepted" in lines
    check_message(line.replace(platform.node(), "HOST"), "world_size=3: ranks 0 and 2", "--gpus-per-task=1")


def test_kept_moments_are_not_reduced_in_bf16():
    for text in scenario("kept_moments", 2):
        kept, gradient = map(float, re.findall(r"kept (\S+) gradient (\S+)", text)[0])
        assert kept == pytest.approx(1 - 0.999**300, rel=1e-4)
        assert gradient != pytest.approx(1 / 3, rel=1e-4)  # which is sent in bf16
        assert gradient == pytest.approx(1 / 3, rel=1e-2)


def test_initial_weights_are_made_equal_and_checked():
    first, second = scenario("equal_start", 2)
    hashes = [re.findall(r"^hash (\S+) ", text, re.MULTILINE) for text in (first, second)]
    assert len(hashes[0]) == 1
    assert hashes[0] == hashes[1]
    assert "moved False" in first
    assert "moved True" in second
    for text in (first, second):
        assert "(ranks 0, 1 differ)" in text
        assert "the frozen weights and buffers are not" in text
