"""`fmmeta report`: writes the report of a run again, once or until the run has ended."""

import fcntl
import time
from dataclasses import dataclass
from pathlib import Path

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.config.fields import check_values
from fmmeta.config.settings import setting
from fmmeta.report.page import NAME, read, write

LOCK = ".lock"  # in the folder of a run, locked by the process that writes its files
GONE_S = 60.0  # without such a process after which a run has stopped; launchers start it again before


@dataclass
class ReportConfig:
    """The settings of `fmmeta report`."""

    output_dir: str = setting(None, "Folder of the run")
    watch: bool = setting(False, "Write the report again and again until the run has ended")
    every: float = setting(10.0, "Seconds between two reports of --watch", positive=True)

    def __post_init__(self) -> None:
        check_values(self)
        if self.output_dir is None:
            raise UsageError("output_dir is not given; name the folder of a run")


def run(config: ReportConfig) -> None:
    """`fmmeta report`: write the report of a run. Raises `UsageError`."""
    folder = Path(str(config.output_dir))
    with usage_errors(
        f"output_dir={folder}: {NAME} cannot be written from run.json and metrics.jsonl",
        "restore them, or copy the run to a folder that you can write to",
    ):
        try:
            print(f"fmmeta: report {write(folder, config.every if config.watch else 0.0)}", flush=True)
            if config.watch:
                print(f"fmmeta: {watch(folder, config.every)}", flush=True)
        except KeyboardInterrupt:
            if not config.watch:
                raise
            print(f"fmmeta: {write(folder)} is no longer written", flush=True)


def watch(folder: Path, every_s: float) -> str:
    """Write the report every `every_s` seconds until the run has ended; say how, and where the run is.

    Browsers load the page again as often, and the last one no more.
    """
    why, seen_at = "finished", time.monotonic()
    while not (facts := read(folder)).run.get("finished"):
        write(folder, every_s)
        seen_at = time.monotonic() if is_running(folder) else seen_at
        if time.monotonic() - seen_at > GONE_S:
            why = f"stopped, as no process has written it for {GONE_S:.0f} s"
            break
        time.sleep(every_s)
    write(folder)
    return f"the run is {why}: outer step {facts.outer_step}"


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock of a run's folder; unknown, and so true, without locks."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a run that begins now tries again
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
