"""The `tune` section of a run: chooses settings on tasks that are not trained on, and stores the choice.

    the inner loop        inner_lrs, max_steps, ...           before training (evaluation/tune.py)
    init_interpolation    init_interpolations, folds, ...     0 keeps the initial weights

With validation classes (or tasks) the interpolation is chosen on them at the end of the run. Without them the
training classes are divided into folds before training; a trial for each fold trains on the others with half
of the outer steps, and is scored on the fold. The run's own `init_interpolation` is kept unless another
value, which may be 0, is significantly above it (`choose`).

Class means of features are scored at one and at five examples, in episodes that are drawn from the features
of the held-out classes: these are computed once. Other methods are scored in episodes of the run's shape.
"""

import gc
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmmeta.common.errors import Stopped, UsageError
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.text import counted
from fmmeta.config.algorithms import find
from fmmeta.config.fields import check_values, refuse_first, setting
from fmmeta.config.recipes import typed
from fmmeta.config.resume import FREE_ON_RESUME
from fmmeta.config.settings import Config
from fmmeta.evaluation.methods import embed, prototype
from fmmeta.evaluation.results import write_output
from fmmeta.evaluation.tune import (
    CHOSEN,
    OF_SECTION,
    read_section,
    section_of,
    tune_inner_loop,
    with_optimizer,
)
from fmmeta.meta.parameters import MetaParameters
from fmmeta.metrics.scores import mean_ci95
from fmmeta.parallel.layout import ParallelPlan
from fmmeta.parallel.process_groups import ProcessGroups, World
from fmmeta.reliability.signals import Signals
from fmmeta.reliability.watchdog import watching
from fmmeta.tasks.data.token_store import digest
from fmmeta.tasks.sources.base import ClassKey, GlobalLabelSource
from fmmeta.tasks.sources.load import Sources
from fmmeta.training import build
from fmmeta.training.loop import Run, StaticController
from fmmeta.training.run_folder import RunStart, make
from fmmeta.training.validation import VALID

SHOTS = (1, 5)  # examples of a class at which class means are scored
QUERIES, EPISODES = 5, 500  # queries of a class; episodes for each number of shots


@dataclass
class InterpolationConfig:
    """A `tune` section that chooses `init_interpolation`. Raises `UsageError`."""

    init_interpolations: list[float] = setting(
        [], "Values of --init_interpolation to choose from, beside the run's own; 0: the initial weights"
    )
    folds: int = setting(
        3, "Folds of the training classes or tasks, where there are none for validation", least=2
    )
    episodes: int = setting(
        40, "Episodes whose rows are scored, of the validation tasks or of each fold", least=1
    )

    def __post_init__(self) -> None:
        check_values(self)
        refuse_first(
            (
                not 0 <= alpha <= 1,
                f"init_interpolations={alpha} is not in [0, 1]; use some such as 0.6",
            )
            for alpha in self.init_interpolations
        )


OF_INTERPOLATION = [*InterpolationConfig.__dataclass_fields__]


def interpolation_section(config: Config) -> InterpolationConfig | None:
    """The run's `tune` section, if it chooses `init_interpolation`. Raises `UsageError`."""
    section = read_section(config, [*dict.fromkeys([*OF_SECTION, *OF_INTERPOLATION])])
    if not section.keys() - {*OF_SECTION}:
        return None
    if inner := [name for name in section if name not in OF_INTERPOLATION]:
        raise UsageError(
            f"tune sets {inner[0]} and init_interpolations, of the inner loop and of the whole run; choose"
            " one, and set the other"
        )
    if find(config.algorithm).trains_nothing:
        raise UsageError(
            f"tune sets init_interpolations, and algorithm={config.algorithm} trains nothing; leave the"
            " section out"
        )
    return InterpolationConfig(
        **{name: typed(InterpolationConfig, name, value, "tune") for name, value in section.items()}
    )


def check_section(config: Config) -> None:
    """Raise `UsageError` for a `tune` section that cannot be used."""
    if interpolation_section(config) is None:
        section_of(config)


def tune_before_training(
    config: Config,
    inputs: build.RunInputs,
    plan: ParallelPlan,
    world: World,
    ranks: ProcessGroups,
    progress: Progress,
    signals: Signals,
) -> Config:
    """The settings of a run with what its `tune` section chooses, and without the section; with it, where the
    choice is made at the end of the run.

    The choice is stored in output_dir (without one, in runs/) under a name that the settings and the data
    determine; the same command finds it and resumes the same run. Raises `UsageError`, and `Stopped` with
    nothing stored. Collective: world.
    """
    section = interpolation_section(config)
    if section is not None and inputs.sources.valid is not None:
        return config
    fixed = {**config.as_dict(), **inputs.settings(config), "tune": vars(section) if section else config.tune}
    free = {*FREE_ON_RESUME, "deepspeed_layout"}
    fixed = {name: value for name, value in fixed.items() if name not in free}
    file = Path(config.output_dir or "runs") / f"tuned-{digest(fixed)[:8]}.json"
    found = b""
    with world.comm.raise_on_all("reading the tuned settings"):
        if world.comm.rank == 0 and file.is_file():
            found = file.read_bytes()
    names = CHOSEN if section is None else ("init_interpolation",)
    values = stored_choice(world.comm.broadcast_bytes(found), file, names)
    if not values:
        with world.comm.raise_on_all("making the output folder"):
            if world.comm.rank == 0:
                make(file.parent)
        try:
            if section is None:
                values = tune_inner_loop(config, world, ranks, progress, signals)
            else:
                values = choose_by_folds(config, section, inputs, plan, world, ranks, progress, signals)
        except Stopped as error:
            raise Stopped(
                f"stopped by {error} while settings were tuned; nothing is stored, and the same command"
                " begins again"
            ) from None
        with world.comm.raise_on_all("storing the tuned settings"):
            if world.comm.rank == 0:
                write_output(file, values)
    chosen = {name: values[name] for name in names if name in values}  # older files have no optimizer
    try:
        if section is None:
            tuned = with_optimizer(config, **{"inner_optimizer": config.inner_optimizer, **chosen}, tune=None)
        else:
            tuned = replace(config, **chosen, tune=None)
    except UsageError:
        raise no_choice(file) from None
    text = ", ".join(f"{name} {value}" for name, value in chosen.items())
    progress.notice(f"tuned: {text} ({file}; remove it to tune again)")
    return tuned


def stored_choice(text: bytes, file: Path, names: Sequence[str]) -> dict[str, Any]:
    """The choice of some settings in a file; empty without one. Raises `UsageError` for another file."""
    try:
        values = json.loads(text) if text else {}
        if not text or {*names} - {"inner_optimizer"} <= {*values}:
            return values
    except (ValueError, TypeError, RecursionError):
        pass
    raise no_choice(file)


def no_choice(file: Path) -> UsageError:
    return UsageError(f"{file} holds no choice of this tune section; remove it to tune again")


Scores = dict[float, list[float]]
"""Accuracies by interpolation, 0 among them: of each held-out class, or (with an inner loop) of each episode;
the same ones for every interpolation."""


def choose(scores: Scores, own: float, section: InterpolationConfig, where: str, progress: Progress) -> float:
    """The interpolation to export: the run's own, unless the best of the section's is above it by more than
    the 95 % interval of the paired difference.

    where: what was scored, for the log. Local; every rank chooses alike.
    """
    means = {alpha: round(float(np.mean(each)), 6) for alpha, each in scores.items()}
    best = max(sorted({own, *section.init_interpolations}), key=lambda alpha: (means[alpha], alpha == own))
    gain, half = mean_ci95(np.subtract(scores[best], scores[own]).tolist())
    chosen, why = (best, "significantly above") if gain > half else (own, "none is significantly above")
    why += f" the run's own {own:g}" if chosen != own else " it"
    progress.notice(f"init_interpolation {chosen:g}, {why}; accuracy on {where}: {shown(scores)}")
    if means[0.0] > means[chosen]:
        progress.notice(
            Warn("the weights at the start are above that; compare both before you use the trained ones")
        )
    return chosen


def shown(scores: Scores) -> str:
    """Mean accuracy of each interpolation.

    >>> shown({0.0: [0.5, 0.7], 0.3: [0.8, 0.6]})
    '60.0 % at 0, 70.0 % at 0.3'
    """
    return ", ".join(f"{100 * np.mean(each):.1f} % at {alpha:g}" for alpha, each in scores.items())


def choose_at_the_end(run: Run) -> float:
    """The interpolation to export of a trained run: of a section on its validation tasks, or the settings'.

    Raises `Stopped` after a signal. Collective: world.
    """
    config, initial, source = run.config, run.state.initial, run.inputs.sources.valid
    section = interpolation_section(config) if config.tune is not None else None
    if section is None or source is None or initial is None:
        return config.init_interpolation
    scores = score(run, initial, config, section, "validation")
    return choose(scores, config.init_interpolation, section, "validation tasks", run.progress)


def choose_by_folds(
    config: Config,
    section: InterpolationConfig,
    inputs: build.RunInputs,
    plan: ParallelPlan,
    world: World,
    ranks: ProcessGroups,
    progress: Progress,
    signals: Signals,
) -> dict[str, Any]:
    """The choice, and the scores of all folds. Raises `UsageError`, and `Stopped`. Collective: world."""
    folds, scores = folds_of(inputs.sources, section.folds, config), defaultdict[float, list[float]](list)
    noun = "classes" if config.task_type == "classification" else "tasks"
    nowhere, silent = RunStart(Path(config.output_dir or "runs"), None, False), Progress(enabled=False)
    signals.run()
    for number, sources in enumerate(folds, 1):
        title = f"fold {number} of {len(folds)}"
        trial = build.with_outer_epochs(config, sources.train, silent.notice)
        trial = replace(
            trial,
            outer_steps=math.ceil(trial.outer_steps / 2),
            tune=None,
            max_bad_steps=config.outer_steps + 1,
            load_best_model_at_end=False,
            check_meta_gradient=False,
            profile=False,
            test_episodes=0,
            eval_steps=0,
            save_steps=0,
        )
        of_fold = replace(inputs, sources=sources)
        keys = ranks.with_keys_under(f"trial-{number}")  # the counters of tasks that groups claim
        parts = build.build(trial, of_fold, plan, keys)
        initial = parts.meta_params.snapshot()
        run = Run(trial, of_fold, keys, parts, nowhere, silent, signals, Unwritten())
        progress.line(title, 0, trial.outer_steps)
        try:
            with watching(run.stage, world.shared_store(), keys, signals):
                run.loop()
                found = score(run, initial, config, section, title)
        except Stopped:
            raise Stopped(signals.asked) from None  # what stopped it, as the inner loop's choice says
        finally:
            run.callbacks.close(run)
            del run, parts
            gc.collect()  # the weights, before others are read
        for alpha, each in found.items():
            scores[alpha] += each
        held_out, steps = len(sources.of_split["valid"].items), counted(trial.outer_steps, "outer step")
        progress.notice(f"{title}: {steps} without {held_out} {noun}; accuracy on them: {shown(found)}")
    chosen = choose(scores, config.init_interpolation, section, f"{len(folds)} folds", progress)
    return {"init_interpolation": chosen, "scores": [[alpha, each] for alpha, each in scores.items()]}


class Unwritten(StaticController):
    """Of a trial, which writes no files."""

    writes = False


def score(
    run: Run, initial: MetaParameters, config: Config, section: InterpolationConfig, what: str
) -> Scores:
    """Scores of the run's weights, and of each interpolation of them with `initial`, on its validation tasks.

    Raises `Stopped` after a signal. Collective: world.
    """
    source, found, live = run.inputs.sources.valid, Scores(), run.state.trained
    assert source is not None
    tasks = run.held_out.tasks(source, VALID, section.episodes)
    by_means = not config.inner_steps and config.head_init == "prototype" and config.feature_norm > 0
    for alpha in sorted({0.0, config.init_interpolation, *section.init_interpolations}):
        run.stage.begin(f"{what}, scoring init_interpolation {alpha:g}")
        meta = live.interpolated(initial, 1 - alpha)
        if by_means:
            run.worker.write(meta.theta)
            draws = [source.draw(task) for task in tasks]
            features = embed(run.worker, draws, run.parts.batcher, run.ranks, run.progress)
            groups = defaultdict[ClassKey, defaultdict[ClassKey, dict[Any, Tensor]]](
                lambda: defaultdict(dict)
            )
            for draw in draws:
                names = {*draw.store.label_rows.values()}
                for row, label in (*draw.support, *draw.query):
                    key = source.class_key(draw.task.item, draw.classes[label])
                    if row not in names:
                        groups[key[:-1]][key][row] = features[draw.store.path, row]
            found[alpha] = []
            for classes in groups.values():
                rows = [torch.stack([*each.values()]) for each in classes.values() if len(each) > 1]
                if len(rows) > 1:
                    of_shots = [class_accuracies(rows, config.n_way, shots) for shots in SHOTS]
                    found[alpha] += [one for one in np.mean(of_shots, axis=0).tolist() if one == one]
        else:
            learning = run.parts.setup.evaluation_method(meta.rates)
            scores = run.held_out.scores(source, VALID, what, meta.theta, learning, count=section.episodes)
            found[alpha] = [one.accuracies[-1] for one in scores]
        run.raise_if_stopped()
    run.worker.write(run.theta)
    return found


def class_accuracies(
    features: Sequence[Tensor], n_way: int, shots: int, episodes: int = EPISODES
) -> np.ndarray:
    """Accuracy of each class [C] in episodes with class means as classifier; NaN of a class in none. Local.

    features: [rows, D] of each class, two rows or more. Every row is in the support or in the query set; a
    class with few rows has fewer examples.
    """
    rng, ways = np.random.default_rng(0), min(n_way, len(features))
    hits, seen = np.zeros((2, len(features)))
    for _ in range(episodes):
        chosen = rng.choice(len(features), ways, replace=False)
        drawn = [features[one][rng.permutation(len(features[one]))[: shots + QUERIES]] for one in chosen]
        supports = [each[: min(shots, len(each) - 1)] for each in drawn]
        queries = [each[len(one) :] for one, each in zip(supports, drawn, strict=True)]
        labels, truth = (
            torch.arange(ways).repeat_interleave(torch.tensor(list(map(len, part))))
            for part in (supports, queries)
        )
        guessed = prototype(torch.cat(supports), labels, torch.cat(queries), ways).argmax(1)
        np.add.at(hits, chosen[truth], (guessed == truth).numpy())
        np.add.at(seen, chosen[truth], 1)
    return hits / np.where(seen, seen, np.nan)


def folds_of(sources: Sources, most: int, config: Config) -> list[Sources]:
    """The data's own parts, or up to `most` divisions of the training classes or tasks into two.

    Held-out parts are equal in size, by a hash of the names in each stratum. Raises `UsageError` for fewer
    than four classes or tasks.
    """
    if sources.valid is not None:
        return [sources]
    train = sources.train
    codes, names = train.items.stratum, train.items.names
    if len(names) < 4:
        raise UsageError(
            f"tune needs validation tasks, or four classes or tasks to train on, and dataset="
            f"{' '.join(config.dataset)} has {len(names)}; leave the section out"
        )
    order = sorted(range(len(names)), key=lambda one: (codes[one], sha256(names[one].encode()).digest()))
    plain = train.source if isinstance(train, GlobalLabelSource) else train
    number, found = train.folds(most), list[Sources]()
    for fold in range(number):
        held_out = np.zeros(len(names), dtype=bool)
        held_out[order[fold::number]] = True
        parts = {"train": train.part(~held_out), "valid": plain.part(held_out)}
        found.append(replace(sources, of_split=parts))
    return found
