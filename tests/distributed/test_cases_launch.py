"""Launchers, lost terminals and killed ranks, with the inputs of ../shared/cases that are about them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fmmeta.parallel.layout import LAUNCHERS
from harness.fork_server import environment, free_port, shared
from tests.support.helpers import CASES, ROOT, needs_cases
from tests.support.launch import python, run_ranks, train_flags
from tests.support.short_runs import QUICK, steps_of

MEET = """
import os, torch
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World
world = World(Launch.from_env(os.environ), torch.device("cpu"))
print(world.comm.gather_bytes(str(world.launch.local_rank).encode()), world.launch.local_world_size)
world.close()
"""


@pytest.mark.parametrize("names", LAUNCHERS, ids=lambda names: names.rank)
def test_the_ranks_of_a_launcher_are_one_world(names, tmp_path):
    """Each launcher in its own variables, of all of which only the place of the rank is given."""
    port, ranks = str(free_port()), []
    alone = [*names.local_size[:1], *filter(None, [names.nodes])]
    for rank in range(2):
        place = {names.rank: rank, names.size: 2, names.local_rank[0]: rank}
        place |= dict.fromkeys(alone, 2 if names.local_size else 1)
        env = environment(**{name: str(value) for name, value in place.items()}, MASTER_PORT=port)
        ranks.append(shared().start(["-c", MEET], tmp_path / f"{rank}.log", env))
    assert shared().wait(ranks, 60) == [0, 0], ranks[0].text + ranks[1].text
    assert [rank.text.split("\n")[0] for rank in ranks] == ["[b'0', b'1'] 2"] * 2


@pytest.mark.slow
@needs_cases
def test_two_processes_of_mpirun_train_one_run(tmp_path):
    env = environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    words = ["bash", CASES / "mpirun" / "run.sh"]
    subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, timeout=200, check=True)
    first, second = ((tmp_path / f"mpirun-{rank}.log").read_text() for rank in range(2))
    assert "2 groups of 1 rank on cpu" in first, first
    assert (second.strip(), len([*(tmp_path / "runs").iterdir()])) == ("", 1)


@pytest.mark.parametrize(
    ("command", "flags"),
    [("mpirun.openmpi", ["--allow-run-as-root", "--oversubscribe"]), ("mpiexec.hydra", [])],
)
def test_a_real_mpirun(command, flags, tmp_path):
    if not shutil.which(command):
        pytest.skip(f"{command} is not installed")
    env = environment(MASTER_PORT=str(free_port()))
    words = [command, *flags, "-n", "2", sys.executable, "-c", MEET]
    ended = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout.count("[b'0', b'1']") == 2, ended.stdout + ended.stderr  # lines may be mixed


LOST = {  # what becomes of standard output before the command writes to it
    "reader": "r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w)",
    "disk": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "closed": "os.close(1); sys.stdout = None",
    "both": "r, w = os.pipe(); os.dup2(w, 1); os.dup2(w, 2); os.close(r); os.close(w)",
}
RUN = "import os, sys; {}; from fmmeta.cli import main; main(sys.argv[1:])"
READER = RUN.format(LOST["reader"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "ranks", "loaders", "line"),
    [
        ("reader", 2, 1, "Broken pipe"),
        ("disk", 1, 0, "No space left on device"),
        ("closed", 1, 1, ""),
        ("both", 1, 0, ""),
    ],
)
def test_a_run_goes_on_without_its_output(lost, ranks, loaders, line, tmp_path):
    """All ranks lose theirs; loader processes and callbacks print too."""
    data = {"dataset": ROOT / "examples/data/intents.jsonl", "num_workers": loaders}
    settings = {**QUICK, **data, "meta_batch_size": 2, "eval_episodes": 2, "eval_steps": 1}
    flags = train_flags(tmp_path, **settings, episode_transforms="tests.support.short_runs:noisy_episode")
    ended = run_ranks(["-c", RUN.format(LOST[lost]), "train", *flags], ranks).ok()
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert steps_of(tmp_path) >= 4
    expected = f"fmmeta: standard output: {line}; the command continues without it\n" if line else ""
    assert set(ended.output[0].splitlines()) == set(expected.splitlines())


SCRIPT = f"""
import os, sys; {LOST["reader"]}
from fmmeta import Config, MetaTrainer
MetaTrainer(Config(outer_steps=2, eval_episodes=0, inner_steps=1, num_workers='0', output_dir='run')).train()
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([SCRIPT], 0),  # a trainer of a script
        ([READER, "evaluate", "--episodes", "2"], 0),
        ([READER, "inspect", "letters"], 141),
        ([READER, "plan", "--gpus", "1"], 141),
        ([READER, "env"], 141),
        ([READER, "train", "--help-all"], 141),
        ([READER, "--help"], 141),
        ([READER, "--version"], 141),
    ],
    ids=lambda words: " ".join(words[1:]) if isinstance(words, list) else None,
)
def test_a_command_whose_reader_has_exited(words, code, tmp_path):
    ended = python(["-c", *words], tmp_path, cwd=tmp_path)
    assert ended.returncode == code, ended.stderr
    assert not re.search("Traceback" if code == 0 else ".", ended.stderr)
