"""The report of a run: report.html, one file that loads nothing and runs no script."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Warn
from fmmeta.common.security import one_line, publish_text, redact
from fmmeta.common.text import counted, render, units_of
from fmmeta.config.settings import setting
from fmmeta.report import charts
from fmmeta.report.data import AFTER, BEFORE, FROM_START, Facts, Line, number, read, tasks_per_step

NAME = "report.html"


@dataclass
class ReportConfig:
    """The settings of `fmmeta report`."""

    output_dir: str = setting(None, "Folder of the run")

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise UsageError("output_dir is not given; name the folder of a run")


def run(config: ReportConfig) -> None:
    """`fmmeta report`: write the report of a run. Raises `UsageError`."""
    folder = Path(config.output_dir)
    try:
        print(f"fmmeta: report {write(folder)}", flush=True)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(
            f"output_dir={folder}: {NAME} cannot be written ({error.strerror}); copy the run to a folder that"
            " you can write to"
        ) from None
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise UsageError(
            f"output_dir={folder}: run.json or metrics.jsonl is not of fmmeta train ({one_line(error)});"
            " restore them"
        ) from None


def write(folder: Path) -> Path:
    """Write report.html of a run, from run.json and metrics.jsonl.

    Raises `UsageError` where the folder holds no run.
    """
    file = folder / NAME
    publish_text(file, page(read(folder), time.strftime("%Y-%m-%d %H:%M %Z")))
    return file


def write_or_log(folder: Path, notice: Callable[[str], None]) -> None:
    """Write the report; an error is logged and does not end the run."""
    try:
        write(folder)
    except Exception as error:
        why = f"({type(error).__name__}: {error}); the run is not affected"
        notice(Warn(f"{folder / NAME} could not be written {why}"))


def page(facts: Facts, written: str) -> str:
    """The report as text. written: the time to show."""
    return render(
        Path(__file__).with_name("report.html.j2"),
        facts=facts,
        title=title(facts),
        state="Finished"
        if facts.run.get("finished")
        else f"Not finished: logged to outer step {facts.outer_step:,} of"
        f" {facts.settings.get('outer_steps'):,}",
        what=summary(facts),
        shape=shape_of(facts.settings),
        strata=strata(facts),
        training=charts.training(facts),
        time=timing(facts),
        confusion=confusion(facts),
        verdict=facts.held_out.get("verdict") or {},
        over=units_of(facts.held_out.get("units", 0), facts.held_out.get("kind", "task")),
        about=[
            ("Settings", texts(facts.settings)),
            (
                "Versions",
                texts(
                    {
                        **(facts.run.get("versions") or {}),
                        "git commit": facts.run.get("git_commit"),
                        "layout": facts.run.get("layout"),
                    }
                ),
            ),
        ],
        command=redact(f"fmmeta report --output_dir {facts.folder}"),
        written=written,
        number=number,
        BEFORE=BEFORE,
        FROM_START=FROM_START,
        AFTER=AFTER,
    )


def title(facts: Facts) -> str:
    data = facts.settings.get("dataset") or ["?"]
    names = " + ".join(Path(str(name)).name for name in (data if isinstance(data, list) else [data]))
    return f"{facts.settings.get('algorithm')} on {redact(names)}"


def summary(facts: Facts) -> str:
    """Model, tasks, inner and outer loop, and layout in one line."""
    settings = facts.settings
    model = Path(redact(str(settings.get("model_name_or_path")))).name
    tasks, steps = tasks_per_step(settings), settings.get("inner_steps")
    inner = f"{counted(steps, 'inner step')} at {settings.get('inner_lr')}" if steps else "no inner steps"
    return (
        f"{model}, {shape_of(settings)} tasks, {inner}, {settings.get('outer_steps'):,} outer steps of"
        f" {tasks} tasks; {facts.run.get('layout')}"
    )


def shape_of(settings: dict[str, Any]) -> str:
    """5-way 1-shot; without ways for language models; ranges where the size of episodes varies."""

    def ranged(name: str) -> str:
        low, high = settings.get(name), settings.get(f"{name}_max")
        return str(low) if high in (None, low) else f"{low} to {high}"

    shots = f"{ranged('k_shot')}-shot"
    return f"{ranged('n_way')}-way {shots}" if settings.get("task_type") == "classification" else shots


def strata(facts: Facts) -> list[tuple[str, float | None, float]]:
    """Accuracy after adaptation by stratum, from the start and meta-trained; the largest gain first."""
    trained = facts.held_out.get("per_stratum") or {}
    started = facts.held_out.get("per_stratum_at_start") or {}
    return [
        (name, started.get(name), trained[name])
        for name in sorted(trained, key=lambda name: started.get(name, 0.0) - trained[name])
    ]


def confusion(facts: Facts) -> dict[str, Any] | None:
    """Right classes against answers on the query set of one held-out episode: counts, and how they look."""
    found = facts.held_out.get("confusion")
    if not found or "counts" not in found:
        return found and {"left_out": found.get("left_out")}
    rows = []
    for i, (name, counts) in enumerate(zip(found["classes"], found["counts"], strict=True)):
        most = max(1, sum(counts))
        looks = [f"m{round(5 * count / most)}{' right' if i == j else ''}" for j, count in enumerate(counts)]
        rows.append((name, list(zip(counts, looks, strict=True))))
    return {
        "task": f"{found.get('task')}" + (f" ({found['stratum']})" if found.get("stratum") else ""),
        "right": sum(counts[i] for i, counts in enumerate(found["counts"])),
        "queries": sum(map(sum, found["counts"])),
        "rows": rows,
    }


def texts(values: dict[str, Any]) -> dict[str, str]:
    """Settings as text, secrets removed."""
    shown = {key: " ".join(map(str, one)) if isinstance(one, list) else one for key, one in values.items()}
    return {key: "\u2013" if one is None else redact(str(one)) for key, one in shown.items()}


MOST_GROUPS = 24


def times(steps: Sequence[Line]) -> dict[str, Any] | None:
    """Mean seconds of the logged steps with as many groups as the last one.

    steps: their number; whole: of the step; data: waiting for data; by group waiting for other groups, and
    computing: the remaining seconds. Of more than three steps the first is left out, since it warms up.
    """
    usable = [line for line in steps if number(line.get("seconds")) is not None]
    if not usable:
        return None
    usable = [line for line in usable if len(waits(line)) == len(waits(usable[-1]))]
    kept = usable[1:] if len(usable) > 3 else usable
    waiting = [sum(column) / len(kept) for column in zip(*map(waits, kept), strict=True)]
    whole, data = (
        sum(number(line.get(key)) or 0.0 for line in kept) / len(kept) for key in ("seconds", "data_seconds")
    )
    return {
        "steps": len(kept),
        "first_left_out": len(kept) < len(usable),
        "whole": whole,
        "data": data,
        "waiting": waiting,
        "computing": [max(0.0, whole - data - seconds) for seconds in waiting],
    }


def waits(line: Line) -> list[float]:
    """Seconds that each group has waited for others in a logged step."""
    return [float(one) for one in line.get("wait_seconds_by_group") or [line.get("wait_seconds") or 0.0]]


def timing(facts: Facts) -> dict[str, Any] | None:
    """Mean times of an outer step, and the parts of it by group: of many groups the extreme ones."""
    mean = times(facts.steps)
    if mean is None or mean["whole"] <= 0:
        return None
    waiting, groups = mean["waiting"], []
    shown = sorted(range(len(waiting)), key=waiting.__getitem__)
    if len(shown) > MOST_GROUPS:
        shown = shown[: MOST_GROUPS // 2] + shown[-MOST_GROUPS // 2 :]
    for group in shown:
        parts, begin, drawn = (mean["computing"][group], mean["data"], waiting[group]), 0.0, []
        for seconds, look in zip(parts, "abd", strict=True):
            share = 100 * seconds / (sum(parts) or 1.0)
            drawn.append(
                {"seconds": seconds, "look": look, "begin": f"{begin:.2f}%", "width": f"{share:.2f}%"}
            )
            begin += share
        groups.append((group, drawn))
    return {"mean": mean, "groups": groups}
