"""A transform that does harm: at a given outer step it breaks files that are yet to be read, or kills its own
process.

The plan is JSON in the file that FMMETA_DAMAGE names: {"at": outer step, "truncate": [...], "forbid": [...],
"kill_at": outer step}. Each harm is done once, by whichever loader process comes first.
"""

import json
import os
import signal
from pathlib import Path


def harm(episode, rng):
    file = Path(os.environ["FMMETA_DAMAGE"])
    plan = json.loads(file.read_text())
    step = episode.task.seed[2]
    if step >= plan["at"] and once(file.with_suffix(".broken")):
        for path in plan.get("truncate", ()):
            os.truncate(path, os.path.getsize(path) // 2)
        for path in plan.get("forbid", ()):
            os.chmod(path, 0)
    if step >= plan.get("kill_at", 10**9) and once(file.with_suffix(".killed")):
        os.kill(os.getpid(), signal.SIGKILL)
    return episode


def once(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
