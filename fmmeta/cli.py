"""The command line: flags and `--config` files become a command's settings, errors one line and an exit code.

The console script `fmmeta` and `launch/train.py` call `main`.
"""

import argparse
import errno
import os
import pkgutil
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn, cast

import fmmeta
from fmmeta.common.errors import EXIT_STOPPED, MachineFault, PeerError, Stopped, UsageError, usage_errors
from fmmeta.common.install import warn_untested
from fmmeta.common.processes import end_process, keep_output
from fmmeta.common.progress import terminal_log
from fmmeta.common.security import printable, redact
from fmmeta.common.text import nearest
from fmmeta.config import recipes
from fmmeta.config.fields import KINDS
from fmmeta.config.settings import Config
from fmmeta.reliability.signals import Signals, interrupting


class Command(NamedTuple):
    """settings, run: `module:name` of the settings and of the function that runs with them; a command imports
    only what it needs. values: the setting that words without a flag are values of, or several, a word each.
    """

    text: str
    settings: str
    run: str
    usage: str = "[--flags]"
    values: str = ""


COMMANDS = {
    "train": Command(
        "meta-train a checkpoint (one process; `deepspeed --module fmmeta train` starts more)",
        "fmmeta.config.settings:Config",
        "fmmeta.train:train",
        "[RECIPE or FILE.yaml] [--flags]",
    ),
    "inspect": Command(
        "tasks, classes, lengths, rows and one episode of data sets, and what training would refuse",
        "fmmeta.inspection:InspectConfig",
        "fmmeta.inspection:run",
        "[RECIPE or FILE.yaml] DATA... [--flags of the data and the model]",
        "dataset",
    ),
    "evaluate": Command(
        "few-shot scores of a model on held-out tasks, with intervals and paired comparison",
        "fmmeta.evaluation.settings:EvaluateConfig",
        "fmmeta.evaluation.command:evaluate",
    ),
    "tune": Command(
        "choose a model's inner loop on validation tasks and store it with the model",
        "fmmeta.evaluation.settings:TuneConfig",
        "fmmeta.evaluation.tune:tune",
    ),
    "adapt": Command(
        "adapt a model to a file of a few examples, or to each file of a directory, and write HF folders",
        "fmmeta.evaluation.settings:AdaptConfig",
        "fmmeta.adaptation.command:run",
    ),
    "predict": Command(
        "answers of an adapted model, or of many adapters, to a file or to standard input",
        "fmmeta.evaluation.settings:PredictConfig",
        "fmmeta.adaptation.predict:run",
    ),
    "push": Command(
        "upload a finished run's model, or an adapted one, to the Hugging Face Hub",
        "fmmeta.checkpoint.push:PushConfig",
        "fmmeta.checkpoint.push:run",
    ),
    "elastic": Command(
        "start the groups of a run on this node (docs/how-to/elastic.md)",
        "fmmeta.elastic.starter:ElasticConfig",
        "fmmeta.elastic.starter:run",
    ),
    "lighthouse": Command(
        "serve the list of groups to an elastic run",
        "fmmeta.elastic.lighthouse:LighthouseConfig",
        "fmmeta.elastic.lighthouse:lighthouse",
    ),
    "convert": Command(
        "write a GGUF file, or a model with prime MLPs, as a Hugging Face folder with safetensors",
        "fmmeta.learners.from_gguf:ConvertConfig",
        "fmmeta.learners.from_gguf:run",
        "MODEL DIR",
        "model_name_or_path output_dir",
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
    "env": Command(
        "what a bug report needs: versions, machine, GPUs, launcher and installation",
        "fmmeta.doctor:EnvConfig",
        "fmmeta.doctor:print_environment",
    ),
    "report": Command(
        "write report.html of a run again, also during the run (--watch)",
        "fmmeta.report.command:ReportConfig",
        "fmmeta.report.command:run",
    ),
}

LAUNCHED = ("train", "evaluate", "tune", "adapt")  # commands that launchers start on several ranks
PRINTING = ("predict", "inspect", "plan", "doctor", "env")  # without --output they only print


def main(argv: list[str] | None = None) -> NoReturn:
    """Console script `fmmeta COMMAND [--flags]`; the same on every rank of a launch."""
    # the deepspeed launcher gives this flag, before a command too; it sets LOCAL_RANK as well
    argv = [word for word in (sys.argv[1:] if argv is None else argv) if not word.startswith("--local_rank=")]
    keep_output("stderr")
    if not argv or argv[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:10} {one.text}" for name, one in COMMANDS.items())
        end = (
            "`fmmeta lm-eval` runs lm-evaluation-harness with the model `fmmeta`.\n"
            "`fmmeta COMMAND --help` lists the flags, `fmmeta --version` the version."
        )
        print_and_exit(f"usage: fmmeta COMMAND [--flags]\n\n{listed}\n\n{end}", 0 if argv else 2)
    if argv[0] == "--version":
        print_and_exit(f"fmmeta {fmmeta.__version__}")
    if argv[0] == "lm-eval":
        with exit_code():
            with usage_errors("lm-eval needs lm_eval", "pip install 'fmmeta[lm-eval]'"):
                launch = pkgutil.resolve_name("fmmeta.adaptation.lm_eval:launch")
            launch(argv[1:])
    if argv[0] not in COMMANDS:
        known = f"{nearest(argv[0], list(COMMANDS))}; use {', '.join(COMMANDS)}"
        leave(f"error: command={argv[0]} is unknown{known}", UsageError.exit_code)
    run(argv[0], argv[1:])


def run(command: str, argv: list[str]) -> NoReturn:
    """Run a command, on every rank alike, and exit; of several ranks only rank 0 prints how it ended."""
    launched = command in LAUNCHED
    if command not in ("doctor", "report", "lighthouse"):
        warn_untested(global_rank() if launched else 0)
    with listening(command) as signals, exit_code(launched, signals):
        settings = parse(argv, command)
        if command not in PRINTING or getattr(settings, "output", "-") != "-":
            keep_output("stdout")
        with terminal_log(getattr(settings, "log_level", "info")):
            pkgutil.resolve_name(COMMANDS[command].run)(settings, *([signals] if signals else []))
    raise AssertionError("exit_code ends the process")


@contextmanager
def exit_code(launched: bool = True, signals: Signals | None = None) -> Iterator[None]:
    """Exit after the block: with 0, or as a command does after an error, in one line on rank 0.

    For programs that launchers start, also those with `fmmeta.prepare`: 75 after a stop signal, 2 for what
    the user has to correct, 70 where a machine misbehaves. Other errors are raised.
    """
    line, code = "", 0
    try:
        yield
        sys.stdout.flush()
    except (UsageError, PeerError, MachineFault, Stopped) as error:
        line, code = f"{'' if isinstance(error, Stopped) else 'error: '}{error}", error.exit_code
    except KeyboardInterrupt as interrupt:
        line, code = "interrupted", 128 + signal.SIGINT  # as shells
        if interrupt.args:
            line, code = (
                f"stopped by {interrupt.args[0]}; outputs that were not finished are removed",
                EXIT_STOPPED,
            )
    except BrokenPipeError:
        code = discard_output()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename)
        line = f"error: {name[:40]}... has {len(name)} characters, too many for a path; give a shorter one"
        code = UsageError.exit_code
    if signals:
        signals.end()
    leave(line, code, not launched or global_rank() == 0)


def discard_output() -> int:
    """Discard what Python flushes to a standard output whose reader has exited; the exit code of shells."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def print_and_exit(text: str, code: int = 0) -> NoReturn:
    """Print a help text and exit; without a traceback if its reader (`| head`) exits first."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        code = discard_output()
    sys.exit(code)


def listening(command: str) -> AbstractContextManager[Signals | None]:
    """How a command handles signals: train and tune stop at a safe point, evaluate exits at once until it has
    results, adapt and predict are interrupted.
    """
    if command in ("adapt", "predict"):
        return interrupting()
    if command in ("evaluate", "tune"):
        return Signals(starting=True, leave=leave_at_once)
    return Signals(starting=True) if command == "train" else nullcontext()


def leave_at_once(code: int) -> None:
    """Exit from a thread; with EXIT_STOPPED the output has not been written yet."""
    if code == EXIT_STOPPED and global_rank() == 0:
        print("fmmeta: stopped by a signal before the output was written", file=sys.stderr, flush=True)
    os._exit(code)


def leave(line: str, code: int, is_rank0: bool = True) -> NoReturn:
    """Print a line on rank 0, unless it is empty, and exit with this code on every rank."""
    if line and is_rank0:
        print(printable(redact(f"fmmeta: {line}")), file=sys.stderr, flush=True)
    elif line:
        time.sleep(3)  # launchers kill the other ranks at the first exit, which should be rank 0's
    end_process(code)


def global_rank() -> int:
    """Rank of this process in the launch; `World` keeps it when RANK becomes the group's.

    0 where the launcher's variables are wrong: each rank then says so.
    """
    from fmmeta.parallel.layout import Launch

    if kept := os.environ.get("FMMETA_GLOBAL_RANK"):
        return int(kept)
    with suppress(UsageError):
        return Launch.from_env(os.environ).global_rank
    return 0


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `UsageError`s."""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            wanted = KINDS.get(cast(type, action.type), KINDS[bool])[0]
            wanted = "true, false or auto" if action.type is truth_or_auto else wanted
            raise UsageError(f"{action.dest}={arg_string} is not {wanted}; give one") from None

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def truth_or_auto(text: str) -> bool | None:
    """The value of a switch that may be left open. Raises `argparse.ArgumentTypeError`."""
    from transformers.hf_argparser import string_to_bool

    return None if text == "auto" else string_to_bool(text)


def parse(argv: list[str], command: str = "train") -> Any:
    """Turn flags into the command's settings.

    A recipe (`--config`, or the first word that is no flag) gives values that flags override.
    """
    settings, words = pkgutil.resolve_name(COMMANDS[command].settings), COMMANDS[command].values.split()
    print_help(argv, command, settings)
    from transformers import HfArgumentParser

    if len(words) == 1:
        at = int(bool(argv) and recipes.is_recipe(argv[0]))
        if argv[at:] and not argv[at].startswith("-"):
            argv = [*argv[:at], f"--{words[0]}", *argv[at:]]
    elif words:
        given = list(takewhile(lambda word: not word.startswith("-"), argv[: len(words)]))
        named = [word for pair in zip(words, given, strict=False) for word in (f"--{pair[0]}", pair[1])]
        argv = [*named, *argv[len(given) :]]
    # argparse would take it for an empty list, whatever the type of the setting
    if any(word == "--" or word.endswith("=--") for word in argv):
        raise UsageError("-- is not a flag; --help lists them")
    parser = HfArgumentParser(settings, add_help=False, allow_abbrev=False)
    parser.__class__ = type("HfParser", (Parser, HfArgumentParser), {})
    for action in parser._actions:
        if action.nargs == "?" and action.default is None:  # a switch that may be left open
            action.type = truth_or_auto
        action.choices = None  # the settings check them, with a suggestion
        action.default = argparse.SUPPRESS  # so that the parser returns the given flags only
    parser.add_argument("--config", help="A recipe, by its name or its YAML or JSON file; flags win")
    values, unknown = parser.parse_known_args(argv)
    flags, found = vars(values), dict[str, Any]()
    takes_recipe = command == "inspect" or issubclass(settings, Config)
    if recipe := recipes.choose(flags.pop("config"), unknown if takes_recipe else []):
        # inspect has some of the settings of a run
        found = recipes.read(*recipe, Config if command == "inspect" else settings)
        found = {name: one for name, one in found.items() if name in settings.__dataclass_fields__}
        elastic = command == "elastic" or flags.get("elastic")
        if elastic and "tune" not in flags and found.pop("tune", None) and global_rank() == 0:
            print(f"fmmeta: {recipe[1]} without its tune, which elastic runs do not have", flush=True)
    for flag in unknown:
        name = flag.split("=")[0]
        close, of_run = "", name.removeprefix("--") in Config.__dataclass_fields__
        if name.startswith("--"):
            close = nearest(name, [option for action in parser._actions for option in action.option_strings])
        where = f" of {command}, but of training" if of_run else ""
        raise UsageError(f"{name} is not a flag{where}{close}; --help lists them")
    return settings(**{**found, **flags})


def print_help(argv: list[str], command: str, settings: Any) -> None:
    """Print the help of a command and exit, if --help, --help GROUP or --help-all is among the flags."""
    place = next(
        (n for n, word in enumerate(argv) if word in ("-h", "--help", "--help-all", "--help_all")), None
    )
    if place is None:
        return
    from fmmeta.config.help import help_text

    asked = [word for word in argv[place + 1 : place + 2] if not word.startswith("-")]
    everything = argv[place] in ("--help-all", "--help_all")
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    one = COMMANDS[command]
    print_and_exit(
        help_text(command, one.text, one.usage, settings, next(iter(asked), None), everything, width)
    )
