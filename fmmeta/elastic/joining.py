"""How a launch becomes a group of an elastic run: its line to the lighthouse, its communicators, and the mark by which groups of
one run know each other (--elastic).
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from fmmeta.config import Config, UsageError, changed_settings
from fmmeta.parallel.communicator import Communicator, Ranks
from fmmeta.parallel.crew import Crew, Everyone
from fmmeta.parallel.ds_config import Precision
from fmmeta.parallel.worker import Worker


def join(config: Config, own: Communicator) -> Crew | None:
    """A crew that nobody has been called for yet; None without --elastic. Raises `UsageError`. Collective: world."""
    if not config.elastic:
        return None
    lighthouse = config.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
    if not lighthouse:
        raise UsageError("elastic=True needs a lighthouse; start `fmmeta lighthouse` and give --lighthouse with what it prints, "
                         "or use `fmmeta elastic`, which does both")  # fmt: skip
    return Crew(own, lighthouse, config.group_name or f"{platform.node()}-{os.getpid()}")


def with_crew(ranks: Ranks, crew: Crew | None, settings: Mapping[str, Any], worker: Worker, precision: Precision) -> Ranks:
    """The communicators of a group in a crew. `settings`: those of the run (record.settings_of)."""
    if crew is None:
        return ranks
    crew.mark = mark_of(settings, str(ranks.layout), worker.params.numel, precision)
    return replace(ranks, cross=crew, crew=Everyone(ranks.world, crew))


def mark_of(settings: Mapping[str, Any], layout: str, numel: int, precision: Precision) -> str:
    """What groups must share to be one run: settings that change theta, and how theta is cut."""
    fixed = {name: settings[name] for name in changed_settings(dict.fromkeys(settings, ...), dict(settings))}
    return sha256(json.dumps([fixed, layout, numel, precision.zero_stage, precision.bf16], sort_keys=True).encode()).hexdigest()
