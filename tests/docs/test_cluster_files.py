"""The files of examples/cluster: torchrun and fmmeta parse what they start, and their numbers agree."""

import re
import shlex

import yaml
from torch.distributed.run import get_args_parser

from fmmeta.cli import parse
from fmmeta.parallel.deepspeed_config import find
from tests.support.launch import ROOT

FOLDER = ROOT / "examples" / "cluster"
INSTALL = re.findall(r"^RUN (.*)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)


def started(words: list[str]):
    """What torchrun makes of a command, and fmmeta of the rest; the files that they name are there."""
    assert words[0] == "torchrun"
    launch = get_args_parser().parse_args(words[1:])
    settings = parse(launch.training_script_args)
    assert (ROOT / launch.training_script).is_file()
    assert find(settings.deepspeed).is_file()
    assert settings.output_dir.startswith("/runs/")
    assert int(settings.group_size) == int(launch.nproc_per_node)  # a group stays on its node
    return launch


def test_the_pods_of_the_jobset_find_each_other():
    jobset = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    launch = started(container["command"])
    assert spec["parallelism"] == spec["completions"] == int(launch.nnodes)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(launch.nproc_per_node)
    # JobSet's name of a pod: JobSet, job, number of the job, number of the pod; the service has the JobSet's
    name = jobset["metadata"]["name"]
    assert launch.rdzv_endpoint == f"{name}-{job['name']}-0-0.{name}:29500"
    volumes = {one["name"] for one in spec["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    assert "/runs" in {one["mountPath"] for one in container["volumeMounts"]}


def test_the_task_of_skypilot_starts_every_node():
    task = yaml.safe_load((FOLDER / "sky.yaml").read_text())
    gpus = task["resources"]["accelerators"].split(":")[1]
    values = {"NUM_NODES": str(task["num_nodes"]), "NUM_GPUS_PER_NODE": gpus, "NODE_RANK": "0"}
    run = re.sub(r"\$\(echo \"\$SKYPILOT_NODE_IPS\" \| head -n 1\)", "10.0.0.1", task["run"])
    run = re.sub(r"\$SKYPILOT_(\w+)", lambda found: values[found[1]], run).replace("\\\n", " ")
    launch = started(shlex.split(run))
    assert (launch.nnodes, launch.nproc_per_node, launch.master_addr) == ("2", gpus, "10.0.0.1")
    assert task["setup"].split() == INSTALL[0].split()
    assert "/runs" in task["file_mounts"]


def test_the_image_installs_as_the_makefile_does():
    """CI runs the Makefile's line from nothing; an image is built by no test."""
    (line,) = INSTALL
    (made,) = re.findall(
        r"^\t\$\(BIN\)/(python .*) --editable \.$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert line.replace(" --no-cache-dir", "").rsplit(" ", 1)[0] == made.replace(" --quiet", "")
    (extra,) = re.findall(r"'\.\[(\w+)\]'$", line)
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
    assert "COPY . ." in (FOLDER / "Dockerfile").read_text()
