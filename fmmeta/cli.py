"""The command line: flags and `--config` files become a command's settings, errors become one line and exit
code 2.

Nothing else lives here. `launch/train.py` and the console script `fmmeta` both call `main`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fmmeta.common.errors import MachineFault, Stopped, UsageError
from fmmeta.common.security import printable, redact
from fmmeta.config.fields import rules
from fmmeta.config.renamed import refuse
from fmmeta.reliability.signals import EXIT_FAULT, EXIT_STOPPED, Signals, interrupting

INTERRUPTED, CUT_OFF = (
    130,
    141,
)  # as shells have them: 128 + SIGINT, 128 + SIGPIPE (nobody reads standard output any more)


class Command(NamedTuple):
    """What it does, its settings and what runs with them, both as `module:name`, so that nothing is imported
    before its turn.
    """

    text: str
    settings: str
    run: str


COMMANDS = {
    "train": Command(
        "meta-train a checkpoint (one process; `deepspeed launch/train.py` starts more)",
        "fmmeta.config.settings:Config",
        "fmmeta.train:train",
    ),
    "evaluate": Command(
        "few-shot scores of a model on held-out tasks, with intervals and paired comparison",
        "fmmeta.evaluation.settings:EvaluateConfig",
        "fmmeta.evaluation.command:run",
    ),
    "tune": Command(
        "choose a model's inner loop on validation tasks and store it with the model",
        "fmmeta.evaluation.settings:TuneConfig",
        "fmmeta.evaluation.tune:run",
    ),
    "adapt": Command(
        "learn a task from a file of a few examples; an HF folder comes out",
        "fmmeta.evaluation.settings:AdaptConfig",
        "fmmeta.adaptation.command:run",
    ),
    "predict": Command(
        "answers of an adapted model to a file or to standard input",
        "fmmeta.evaluation.settings:PredictConfig",
        "fmmeta.adaptation.predict:run",
    ),
    "elastic": Command(
        "start the groups of a run on this node, and start those again that die (docs/elastic.md)",
        "fmmeta.elastic.supervisor:ElasticConfig",
        "fmmeta.elastic.supervisor:run",
    ),
    "lighthouse": Command(
        "tell the groups of an elastic run who is there",
        "fmmeta.elastic.lighthouse:LighthouseConfig",
        "fmmeta.elastic.lighthouse:lighthouse",
    ),
    "plan": Command(
        "layouts of a model on given GPUs: memory, bytes on the wire, time, and the command that runs the"
        " best",
        "fmmeta.planning.settings:PlanConfig",
        "fmmeta.planning.command:run",
    ),
    "doctor": Command(
        "check this machine: accelerator, versions, disk, memory, stale locks",
        "fmmeta.doctor:DoctorConfig",
        "fmmeta.doctor:run",
    ),
    "report": Command(
        "write report.html of a run anew, also while it goes on",
        "fmmeta.report.page:ReportConfig",
        "fmmeta.report.page:run",
    ),
}


def main(argv: list[str] | None = None) -> NoReturn:
    """Console script `fmmeta COMMAND [--flags]`; the same on every rank of a launch."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(
            "usage: fmmeta COMMAND [--flags]\n\n"
            + "\n".join(f"  {name:10} {one.text}" for name, one in COMMANDS.items())
        )
        print("\n`fmmeta COMMAND --help` lists the flags.")
        sys.exit(0 if argv else 2)
    if argv[0] not in COMMANDS:
        fail(f"command={argv[0]} is unknown{nearest(argv[0], list(COMMANDS))}; use {', '.join(COMMANDS)}")
    run(argv[0], argv[1:])


def train(argv: list[str] | None = None) -> NoReturn:
    """Entry of `launch/train.py`."""
    run("train", sys.argv[1:] if argv is None else argv)


def run(command: str, argv: list[str]) -> NoReturn:
    """One command, on every rank alike; only rank 0 speaks."""
    with listening(command) as signals:
        try:
            config = parse(argv, command)
            find(COMMANDS[command].run)(config, *([signals] if signals else []))
            sys.stdout.flush()
        except UsageError as error:
            end(signals)
            fail(str(error))
        except Stopped as stopped:
            leave(f"fmmeta: {stopped}", EXIT_STOPPED)
        except MachineFault as fault:
            end(signals)
            leave(f"fmmeta: error: {fault}", EXIT_FAULT)
        except KeyboardInterrupt as stop:
            if stop.args:
                leave(
                    f"fmmeta: stopped by {stop.args[0]}; outputs that were not finished are removed",
                    EXIT_STOPPED,
                )
            leave("fmmeta: interrupted", INTERRUPTED)
        except BrokenPipeError:
            if command == "train":
                raise
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # what is still to be flushed goes nowhere
            sys.exit(CUT_OFF)
        end(signals)
        sys.exit(0)


def listening(command: str) -> AbstractContextManager[Signals | None]:
    """How a command answers signals: train and tune stop at a safe point, evaluate ends at once until its
    results are there, adapt and predict are interrupted.
    """
    if command in ("adapt", "predict"):
        return interrupting()
    if command in ("evaluate", "tune"):
        return Signals(starting=True, leave=leave_at_once)
    return Signals(starting=True) if command == "train" else nullcontext()


def leave_at_once(code: int) -> None:
    """End the process from a thread; with STOPPED nothing has been written yet."""
    if code == EXIT_STOPPED and global_rank() == 0:
        print("fmmeta: stopped by a signal; nothing was written", file=sys.stderr, flush=True)
    os._exit(code)


def end(signals: Signals | None) -> None:
    if signals:
        signals.end()


def find(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def fail(message: str) -> NoReturn:
    """Print one line on rank 0 and end with exit code 2 on every rank."""
    leave(f"fmmeta: error: {message}", 2)


def leave(line: str, code: int) -> NoReturn:
    """Print one line on rank 0 and end with this code on every rank."""
    if global_rank() == 0:
        print(printable(redact(line)), file=sys.stderr, flush=True)
    else:
        time.sleep(3)  # launchers kill the others at the first exit; let rank 0 be that one
    sys.exit(code)


def global_rank() -> int:
    return int(
        os.environ.get("FMMETA_GLOBAL_RANK", os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    )


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(argv: list[str], command: str = "train") -> Any:
    """Turn flags into the command's settings.

    `--config FILE` (YAML or JSON) gives defaults that flags override.
    """
    from transformers import HfArgumentParser

    settings = find(COMMANDS[command].settings)
    parser = HfArgumentParser(settings, description=COMMANDS[command].text, allow_abbrev=False)
    parser.__class__ = type("HfParser", (Parser, HfArgumentParser), {})
    parser.add_argument("--config", help="YAML or JSON file with the same names as the flags; flags win")
    known = [option for action in parser._actions for option in action.option_strings]
    parser.set_defaults(**read_config(argv, settings))
    values, unknown = parser.parse_known_args(argv)
    for flag in unknown:
        name = flag.split("=")[0]
        close = ""
        if name.startswith("--"):
            refuse([name[2:].replace("-", "_")], settings.__dataclass_fields__, dashes="--")
            close = nearest(f"--{own_name(name[2:], settings)}", known)
        raise UsageError(f"{name} is not a flag{close}; --help lists them")
    given = vars(values)
    given.pop("config")
    return settings(**given)


def read_config(argv: list[str], settings: Any) -> dict[str, Any]:
    """Settings of the `--config` file as text, which argparse then checks as it checks flags; null is the
    default.
    """
    only = Parser(add_help=False, allow_abbrev=False)
    only.add_argument("--config")
    path = only.parse_known_args(argv)[0].config
    if path is None:
        return {}
    import yaml

    if not Path(path).is_file():
        raise UsageError(f"config={path} is not a file; give a YAML or JSON file of settings")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"config={path} cannot be read: {' '.join(str(error).split())}; fix the file"
        ) from None
    if not isinstance(values, dict):
        raise UsageError(f"config={path} holds no settings; write `name: value` lines")
    known = [item.name for item in fields(settings)]
    lists = [item.name for item in fields(settings) if item.default_factory is not MISSING]
    refuse(values, known, f"config={path}: ")
    for name, value in values.items():
        if name not in known:
            close = nearest(own_name(str(name), settings), known)
            raise UsageError(f"config={path} sets {name}, which is no setting{close}; remove it")
        if isinstance(value, dict) or (isinstance(value, list) and name not in lists):
            raise UsageError(
                f"config={path} sets {name}={value}, which is not one value; write `{name}: value`"
            )
    return {
        name: [str(v) for v in value] if isinstance(value, list) else str(value)
        for name, value in values.items()
        if value is not None
    }


def own_name(name: str, settings: Any) -> str:
    """The setting that transformers calls so, or the name itself."""
    return next((own for own, rule in rules(settings).items() if name in rule.synonyms), name)


def nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
