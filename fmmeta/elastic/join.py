"""Joins a launch to an elastic run: lighthouse client, communicators, hash of the settings (--elastic)."""

import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config, changed_settings
from fmmeta.elastic.communicator import AllGroups, ElasticCommunicator
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.rendezvous import PROOF
from fmmeta.parallel.workers.base import Worker
from fmmeta.training.run_folder import version

SECRET = ".elastic-secret"


def join(config: Config, own: Communicator) -> ElasticCommunicator | None:
    """A communicator across groups, not connected yet; None without --elastic.

    Raises `UsageError`. Collective: world.
    """
    if not config.elastic:
        return None
    lighthouse = config.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
    if not lighthouse:
        raise UsageError(
            "elastic=True needs a lighthouse; start `fmmeta lighthouse` and give --lighthouse with what it"
            " prints, or use `fmmeta elastic`, which does both"
        )
    return ElasticCommunicator(own, lighthouse, config.group_name or f"{platform.node()}-{os.getpid()}")


def with_other_groups(
    ranks: ProcessGroups,
    cross: ElasticCommunicator | None,
    config: Config,
    settings: Mapping[str, Any],
    worker: Worker,
    precision: DeepSpeedSettings,
) -> ProcessGroups:
    """Add the communicators across groups to those of this group; without --elastic return `ranks`.

    settings: those of the run (run_folder.settings_of). Collective: world.
    """
    if cross is None:
        return ranks
    with ranks.world.raise_on_all("reading the secret of the run"):
        if ranks.world.rank == 0:
            cross.secret = run_secret(Path(str(config.output_dir)))
    cross.config_hash = config_hash(settings, str(ranks.layout), worker.params.numel, precision)
    return replace(ranks, cross=cross, all_groups=AllGroups(ranks.world, cross))


def run_secret(folder: Path) -> bytes:
    """The secret of the run: random hex digits in a file of its folder (mode 0600), created by the first
    group. Raises `UsageError`.
    """
    file, deadline = folder / SECRET, time.monotonic() + 10
    try:
        with (
            suppress(FileExistsError),
            os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened,
        ):
            opened.write(token_hex(PROOF // 2).encode())
        while len(found := file.read_bytes()) < PROOF and time.monotonic() < deadline:
            time.sleep(0.05)  # another group is writing it
    except OSError as error:
        raise UsageError(
            f"output_dir={folder}: {SECRET} cannot be read ({error.strerror}); start all groups of a run as"
            " one user"
        ) from None
    if len(found) < PROOF:
        raise UsageError(
            f"output_dir={folder}: {SECRET} has {len(found)} bytes instead of {PROOF}; remove it, no group"
            " running"
        )
    return found


def config_hash(settings: Mapping[str, Any], layout: str, numel: int, precision: DeepSpeedSettings) -> str:
    """Hash of what the groups of one run must share: settings that change theta, layout and versions."""
    fixed = {name: settings[name] for name in changed_settings(dict.fromkeys(settings, ...), dict(settings))}
    shared = [fixed, layout, numel, precision.zero_stage, precision.bf16, version("fmmeta"), version("torch")]
    return sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()
