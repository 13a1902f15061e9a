"""Bad data while two ranks train: the run ends as the policy says, the counts add up, no rank hangs."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fmmeta.config.settings import Config
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.schedule.meta_batches import Schedule, Task
from fmmeta.tasks.sources.load import load_sources
from tests.support.launch import ProcessResults, run_ranks
from tests.support.messages import check_message
from tests.support.models import write_tasks
from tests.support.short_runs import metrics_of

STEPS, HARM_AT, SAFE = (
    16,
    3,
    10,
)  # outer steps; when files break; from where on no loader has read ahead by then
FLAGS = {
    "n_way": 2,
    "k_shot": 1,
    "num_query": 1,
    "meta_batch_size": 2,
    "inner_steps": 1,
    "outer_steps": STEPS,
    "eval_episodes": 0,
    "logging_steps": 1,
    "num_workers": 1,
    "prefetch_factor": 1,
    "episode_transforms": "tests.support.damage:harm",
}


def schedule_of(root: Path) -> list[list[Task]]:
    config = Config(dataset=[str(root)], **{key: FLAGS[key] for key in ("n_way", "k_shot", "num_query")})
    items = load_sources(config, byte_tokenizer(), lambda text: None).train.items
    schedule = Schedule(items, 2, config.seed)
    return [schedule.meta_batch(step) for step in range(STEPS)]


def drop_root_file_access() -> None:
    """Root reads everything; without these two capabilities, neither it nor what it starts does."""
    import ctypes

    libc, gone = ctypes.CDLL(None), 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    for capability in (1, 2):
        libc.prctl(24, capability)  # PR_CAPBSET_DROP: of what it starts
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for place in range(3):  # effective, permitted, inheritable: of the process itself
        sets[place] &= ~gone
    assert libc.capset(header, sets) == 0


def train(root: Path, out: Path, plan: dict, **flags) -> ProcessResults:
    file = out.with_suffix(".damage.json")
    file.write_text(json.dumps(plan))
    given = {**FLAGS, "dataset": root, "output_dir": out, **flags}
    env = {"FMMETA_DAMAGE": str(file)}
    return run_ranks(
        ["launch/train.py", *(f"--{key}={value}" for key, value in given.items())],
        2,
        200,
        {0: env, 1: env},
        before=drop_root_file_access,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bad_tasks_are_left_out_and_counted(tmp_path):
    root = write_tasks(tmp_path / "tasks")
    steps = schedule_of(root)
    path = {task.name: root / f"{task.name}.jsonl" for step in steps for task in step}
    cut, forbidden = (steps[step][0].name for step in (SAFE, SAFE + 2))
    nul, mixed, long = (steps[step][1].name for step in (2, SAFE, SAFE + 3))
    path[nul].write_bytes(b"\0" * 4096)
    path[mixed].write_bytes(
        path[mixed].read_bytes()[:200] + '{"text": "gr\u00fcn", "label": "a"}\n'.encode("latin-1")
    )
    path[long].write_text(
        path[long].read_text() + json.dumps({"text": "word " * 2_000_000, "label": "a"}) + "\n"
    )
    plan = {"at": HARM_AT, "truncate": [str(path[cut])], "forbid": [str(path[forbidden])], "kill_at": 6}
    ended = train(root, tmp_path / "out", plan, on_bad_task="skip", max_bad_fraction=0.1).ok()
    lines = metrics_of(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    found = {bad["task"]: bad["error"] for line in lines for bad in line.get("bad_tasks", ())}
    wanted = {name for name in (cut, forbidden, nul, mixed)}
    assert set(found) == wanted  # and not the long one, which is read as far as it counts
    where = {bad["task"]: line["step"] - 1 for line in lines for bad in line.get("bad_tasks", ())}
    assert all(
        name in {task.name for task in steps[step]} for name, step in where.items()
    )  # the schedule is as it was
    assert sum(line["skipped_tasks"] for line in lines) == 4
    assert all(line["skipped_tasks"] == len(line.get("bad_tasks", ())) for line in lines)
    assert "is not a line of JSON" in found[cut]
    assert found[forbidden].startswith("PermissionError: ")
    assert str(path[forbidden]) in found[forbidden]
    assert "is not a line of JSON ('utf-8' codec" in found[mixed]
    assert "1 of 1 rows cannot be used" in found[nul]
    output = "".join(ended.output)
    assert all(f"fmmeta: left out: task {name}: " in output for name in wanted)
    assert re.search(
        r"fmmeta: rank [01]: .* replaced: process \d+ was killed by SIGKILL",
        output,
    )
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bad_task_stops_all_ranks_and_the_repaired_run_resumes(tmp_path):
    root = write_tasks(tmp_path / "tasks")
    steps = schedule_of(root)
    undisturbed = train(root, tmp_path / "undisturbed", {"at": 10**9}).ok()
    assert "Traceback" not in undisturbed.output[0]
    bad = steps[SAFE][0].name
    file = root / f"{bad}.jsonl"
    ended = train(root, tmp_path / "out", {"at": HARM_AT, "forbid": [str(file)]})
    assert ended.codes == [2, 2]
    check_message(
        ended.output[0].splitlines()[-1],
        f"fmmeta: error: task {bad}: PermissionError",
        f"'{file}'",
        "--on_bad_task skip",
    )
    assert not ended.others
    assert (tmp_path / "out" / f"checkpoint-{SAFE}").is_dir()  # what was learned so far is kept
    os.chmod(file, 0o644)
    train(root, tmp_path / "out", {"at": 10**9}, num_workers=0).ok()
    one, other = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("undisturbed", "out")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_too_many_bad_tasks_stop_all_ranks(tmp_path):
    root = write_tasks(tmp_path / "tasks")
    steps = schedule_of(root)
    bad = [task.name for step in steps[SAFE:] for task in step]
    ended = train(
        root,
        tmp_path / "out",
        {"at": HARM_AT, "truncate": [str(root / f"{name}.jsonl") for name in bad]},
        on_bad_task="skip",
        max_bad_fraction=0.03,
    )
    assert ended.codes == [2, 2]
    last = ended.output[0].splitlines()[-1]
    assert last.startswith("fmmeta: error: max_bad_fraction=0.03: 4 of 24 tasks ")
    assert not ended.others
