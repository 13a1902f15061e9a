"""The peak of the memory of a GPU is what fmmeta/parallel/memory.py estimates (dry_run.py)."""

import json

import pytest

from tests.gpu.dry_run import dry_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("pretended"),
]
ZERO = "--deepspeed=ds_configs/zero{}.json".format
ROWS = {  # ranks, flags
    "plain fp32": (1, "--bf16=false"),
    "plain bf16": (1, "--bf16"),
    "adapters": (1, "--bf16 --lora_r=4"),
    "reptile with AdamW": (1, "--bf16 --algorithm=reptile --inner_optimizer=adamw"),
    "imaml": (1, "--bf16 --algorithm=imaml"),
    "offloaded outer vectors": (8, "--group_size=1 --bf16 --offload_outer"),
    "DeepSpeed in a group of one": (1, f"--engine=deepspeed --group_size=1 --bf16 {ZERO(2)}"),
    "ZeRO 0 fp32": (8, f"--group_size=8 --bf16=false {ZERO(0)}"),
    "ZeRO 1": (8, f"--group_size=8 --bf16 {ZERO(1)}"),
    "ZeRO 2": (8, f"--group_size=8 --bf16 {ZERO(2)}"),
    "ZeRO 3": (8, f"--group_size=8 --bf16 {ZERO(3)}"),
    "ZeRO 3, offloaded": (8, f"--group_size=8 --bf16 {ZERO('3_offload')}"),
    "tensor ranks": (8, "--group_size=8 --tensor_parallel_size=8 --bf16"),
}


MIXTURES = {  # of 4 layers of 16 experts
    f"{trained}, ZeRO {stage} of {ranks}": (ranks, stage, f"--group_size={ranks} --bf16 {flags}")
    for trained, flags in (("all weights", ""), ("adapters", "--lora_r=4"))
    for stage in (2, 3)
    for ranks in (2, 64)
}


@pytest.mark.parametrize("name", ROWS)
def test_the_peak_is_the_estimate(name):
    ranks, flags = ROWS[name]
    found = dry_run(ranks, "llama-20m", flags.split())
    assert 0.88 < found["peak"] / found["estimate"]["total"] < 1.02


@pytest.mark.parametrize("name", MIXTURES)
def test_the_peak_of_a_mixture_is_the_estimate(name, tmp_path):
    """Buckets are smaller than experts, so that what one layer needs is seen, most of all on 64 ranks."""
    ranks, stage, flags = MIXTURES[name]
    zero = {"stage": stage, "reduce_bucket_size": 10**5}
    if stage == 3:
        zero |= {"stage3_max_live_parameters": 2 * 10**5, "stage3_max_reuse_distance": 0}
        zero |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 1000}
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": zero}))
    found = dry_run(ranks, "mixture-40m", [*flags.split(), f"--deepspeed={file}"])
    print(
        f"{name}: {found['peak']:,} bytes, {found['peak'] / found['estimate']['total']:.3f} of the estimate"
    )
    assert 0.85 < found["peak"] / found["estimate"]["total"] < 1.02
