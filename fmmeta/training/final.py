"""The end of a run: export the model, compare it with the initial weights on held-out tasks, show the table,
write the cards of the model folders, close run.json.

The table has the meta-trained weights beside the initial ones, on the same episodes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from torch import Tensor

from fmmeta.checkpoint import model_card
from fmmeta.checkpoint.hf_export import export
from fmmeta.checkpoint.model_card import (
    Content,
    Scores,
    code,
    escaped,
    inner_loop,
    public_name,
    trained_weights,
)
from fmmeta.common.security import printable
from fmmeta.common.text import counted, strict, units_of
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.inner_loop import EvaluationMethod, InnerLoop
from fmmeta.meta.parameters import MetaParameters
from fmmeta.metrics.own import answers_of_group
from fmmeta.metrics.scores import (
    FEW,
    EpisodeScore,
    Interval,
    common,
    format_interval,
    mean_ci95,
    means_by_step,
    metric_means,
    paired,
    per_stratum,
    verdict,
    warning_of_few,
)
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.report.page import AFTER, BEFORE, FROM_START, read, read_lines
from fmmeta.tasks.sources.base import TaskSource
from fmmeta.tasks.sources.load import Sources
from fmmeta.tasks.sources.own import OwnSource
from fmmeta.training.run import Run
from fmmeta.training.scoring import TEST, VALID, HeldOut


@dataclass(repr=False)
class Result:
    """What `MetaTrainer.train` returns on every rank.

    before, after, after_from_start: mean accuracies on the held-out episodes, between 0 and 1: before and
    after adaptation of the meta-trained model, and after adaptation of the initial weights. log_history: the
    lines of metrics.jsonl. verdict: what meta-training has gained, over what it was measured, and what to do.
    held_out: what run.json stores of the held-out tasks; without them the verdict alone. Pairs are a mean and
    half its 95 % interval, None where one is not finite:

        NAME         {"accuracy": pair, "loss": pair} of the three rows, and of `gain`, which is paired
        per_stratum, per_stratum_at_start
                     mean accuracies after adaptation, meta-trained and from the initial weights
        episodes     number of episodes, over `units` classes or tasks (`kind`)
        metrics      {NAME: {"after_from_start": pair, "after": pair}} of the numbers of --metrics
    """

    output_dir: Path
    outer_steps: int
    before: float | None = None
    after: float | None = None
    after_from_start: float | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = ""
    held_out: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        accuracies = "".join(
            f", {name}={value:.4f}"
            for name in ("before", "after_from_start", "after")
            if (value := getattr(self, name)) is not None
        )
        episodes = self.held_out.get("episodes", 0)
        return (
            f"Result(output_dir={str(self.output_dir)!r}, outer_steps={self.outer_steps}{accuracies},"
            f" log_history=[{len(self.log_history)} lines], held_out={{{episodes} episodes}})"
        )


def read_result(folder: Path, comm: Communicator) -> Result:
    """The result of a finished run from its files, which rank 0 reads. Collective: comm (world)."""

    def from_files() -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
        facts = read(folder)
        steps = facts.run.get("outer_steps", facts.settings["outer_steps"])
        return steps, read_lines(folder), facts.held_out

    steps, lines, table = comm.on_first("reading the result", from_files)
    rows = [table.get(name) or {"accuracy": [None]} for name in (BEFORE, AFTER, FROM_START)]
    before, after, from_start = (row["accuracy"][0] for row in rows)
    verdict = table.get("verdict", {}).get("text", "")
    return Result(folder, steps, before, after, from_start, lines, verdict, table)


def finish(run: Run, choose_interpolation: Callable[[Run], float]) -> Result:
    """Export, evaluate, show, close run.json; then `on_train_end`.

    choose_interpolation: gives the `init_interpolation` of the exported weights. Collective: world.
    """
    result = Result(run.folder, run.state.outer_step)
    if run.view.writes:
        _finish(run, choose_interpolation)
        result = read_result(run.folder, run.ranks.world)
    else:
        run.progress.notice("another group writes the model")
    run.callbacks.on_train_end(run.view)
    return result


def _finish(run: Run, choose_interpolation: Callable[[Run], float]) -> None:
    """Collective: world."""
    config, state, test = run.config, run.state, run.inputs.sources.test
    if config.save_steps and run.trains:
        run.save(last=True)
    if state.best is not None:
        run.progress.notice(state.best.text)
    final, alpha = state.meta_params, config.init_interpolation
    if run.trains:
        alpha = choose_interpolation(run)
        config = replace(config, init_interpolation=alpha)
        final = state.interpolate_with_initial(state.trained, alpha)
    if run.trains and alpha < 1:
        run.progress.notice(
            f"init_interpolation={alpha:g}: the exported weights are {1 - alpha:g} * initial + {alpha:g} *"
            " trained"
        )
    run.stage.begin("exporting the model")
    export(
        run.folder / "model",
        final.theta,
        run.worker,
        run.parts.frozen,
        config,
        run.inputs.description,
        run.inputs.tokenizer,
        run.ranks,
        run.parts.setup.inner.rates.variant(final.rates),
        trained=[*run.inputs.trained, *(run.inputs.sources.used if run.trains else ())],
    )
    gains, facts = None, dict[str, Any]()
    if test is not None and config.test_episodes:
        gains, facts = against_start(
            run.held_out,
            run.inputs.sources,
            final,
            state.initial if run.trains else None,
            run.parts.setup,
            run.raise_if_stopped,
        )
        show(gains, config, run.inputs.shape(config), run.progress.table)
        if gains.has_answers:
            line = {"step": state.outer_step, "held_out_accuracy": gains.accuracies}
            run.callbacks.on_log(run.view, line)
    verdict = verdict_of(gains, config, run.inputs.sources)
    run.progress.notice(f"verdict: {verdict['text']}")
    profile = run.profiler.show(run.progress.table)
    with run.ranks.world.raise_on_all("closing the run"):
        if run.ranks.first:
            write_cards(run, config, gains, verdict["text"])
            run.write_run(
                finished=True,
                outer_steps=state.outer_step,
                init_interpolation=alpha,
                held_out={**facts, "verdict": verdict},
                goodput=run.state.goodput.facts(run.ranks.all_groups.size),
                **profile,
            )
            run.held_out.scoring.clear()
    run.progress.notice(f"model {run.folder / 'model'}")


SCALES = (0.1, 0.3, 1.0, 3.0, 10.0)  # factors of the training's inner rates, tried for the baseline
CHOICE_EPISODES = 20  # validation episodes for each factor, at most

Table = Callable[[str, Sequence[str], Sequence[Sequence[str]]], None]
"""Shows a title, a header and rows (progress.Progress.table)."""


@dataclass(frozen=True)
class BaselineLoop:
    """The inner loop of the baseline row: `scale` times the training's inner rates, `steps` inner steps.

    episodes: validation episodes it was chosen on; 0: it is the training's.
    """

    scale: float
    steps: int
    episodes: int = 0


@dataclass(frozen=True)
class Compared:
    """Intervals of accuracy and loss by row, over the classes or tasks that the episodes are drawn for; gains
    are paired, and positive where the loss falls.
    """

    rows: dict[str, tuple[Interval, Interval]]
    gain: tuple[Interval, Interval]
    strata: dict[str, tuple[float, float]]  # accuracy after adaptation: from the start, meta-trained
    episodes: int
    units: int  # classes or tasks of the episodes
    kind: str  # of these: `class` or `task`
    loop: BaselineLoop  # of the baseline
    metrics: dict[str, dict[str, Interval]] = field(default_factory=dict)  # of the user, by name and row

    @property
    def has_answers(self) -> bool:
        """Whether answers are right or wrong, so that there is an accuracy."""
        return not math.isnan(self.rows[AFTER][0][0])

    @property
    def accuracies(self) -> dict[str, float]:
        """Means by the names of `Result`."""
        names = {"before": BEFORE, "after": AFTER, "after_from_start": FROM_START}
        return {name: self.rows[row][0][0] for name, row in names.items()}

    def facts(self) -> dict[str, Any]:
        """The entries of run.json."""
        pairs = {**self.rows, "gain": self.gain}
        return strict(
            {
                **{name: {"accuracy": accuracy, "loss": loss} for name, (accuracy, loss) in pairs.items()},
                "per_stratum": {name: trained for name, (_, trained) in self.strata.items()},
                "per_stratum_at_start": {name: started for name, (started, _) in self.strata.items()},
                "episodes": self.episodes,
                "units": self.units,
                "kind": self.kind,
                "baseline_inner_loop": asdict(self.loop),
                **({"metrics": self.metrics} if self.metrics else {}),
            }
        )


def against_start(
    held_out: HeldOut,
    sources: Sources,
    trained: MetaParameters,
    initial: MetaParameters | None,
    setup: Setup,
    between: Callable[[], None],
) -> tuple[Compared, dict[str, Any]]:
    """Score the held-out episodes from the `trained` weights, then from the `initial` ones (None: nothing was
    trained).

    The baseline gets the inner loop that scores best on validation episodes: with the training's, the sign of
    the gain would depend on the inner rate of the training. between: called after each pass; it may raise.
    Returns the table, and the facts for run.json. Collective: world.
    """
    assert sources.test is not None
    learning = setup.evaluation_method(trained.rates)
    scores = held_out.scores(sources.test, TEST, "held-out tasks", trained.theta, learning)
    between()
    confused = confusion(held_out, sources.test, trained.theta, learning)
    started, loop = scores, BaselineLoop(1.0, setup.inner.steps)
    if initial is not None:
        if sources.valid is not None and isinstance(learning, InnerLoop) and learning.steps:
            loop = choose_loop(held_out, sources.valid, initial, setup, between)
        learning = setup.evaluation_method(initial.rates)
        if isinstance(learning, InnerLoop):
            learning = learning.variant(scale=loop.scale, steps=loop.steps)
        started = held_out.scores(
            sources.test, TEST, "held-out tasks, weights at the start", initial.theta, learning
        )
        between()
    compared = compare(scores, started, loop, sources.test.kind)
    return compared, {**compared.facts(), "confusion": confused}


def choose_loop(
    held_out: HeldOut, source: TaskSource, initial: MetaParameters, setup: Setup, between: Callable[[], None]
) -> BaselineLoop:
    """Choose the inner rate and the number of steps (up to twice the training's) on validation episodes.

    By the highest mean accuracy, for language models by the lowest mean loss; of equals the lowest loss, then
    the lowest rate and the fewest steps. Collective: world.
    """
    config, most = setup.config, 2 * setup.inner.steps
    count = min(CHOICE_EPISODES, config.test_episodes)
    found, episodes = list[tuple[float, float, float, int]](), 0
    for number, scale in enumerate(SCALES, 1):
        scores = held_out.scores(
            source,
            VALID,
            f"inner loop of the baseline, rate {number} of {len(SCALES)}, validation tasks",
            initial.theta,
            setup.inner.variant(initial.rates, scale, most),
            each_step=True,
            count=count,
        )
        between()
        episodes = len(scores)
        for step, (loss, accuracy) in enumerate(means_by_step(scores)[1:], 1):
            if math.isfinite(loss):  # rounded, so that the layout does not decide between equals
                first = -round(accuracy, 6) if config.learner.of_classes else 0.0
                found.append((first, round(loss, 6), scale, step))
    if not found:
        return BaselineLoop(1.0, setup.inner.steps)
    *_, scale, step = min(found)
    return BaselineLoop(scale, step, episodes)


def compare(
    trained: Sequence[EpisodeScore], started: Sequence[EpisodeScore], loop: BaselineLoop, kind: str
) -> Compared:
    """Summarise scores from theta (`trained`) and from the initial weights (`started`). kind: see Compared.

    Episodes that have failed to load in one of the passes do not count.
    """
    pairs, gain = common(trained, started), paired(trained, started)
    of_trained, of_started = ([pair[side] for pair in pairs] for side in (0, 1))
    units = [score.task for score in of_trained]
    places = {BEFORE: (of_trained, 0), FROM_START: (of_started, -1), AFTER: (of_trained, -1)}
    rows = {
        name: (
            mean_ci95([score.at(place)[1] for score in scores], units),
            mean_ci95([score.at(place)[0] for score in scores], units),
        )
        for name, (scores, place) in places.items()
    }
    before, now = metric_means(of_started), metric_means(of_trained)
    of_answers = [score for score in of_trained if score.accuracies]
    at_start, after = per_stratum(of_started), per_stratum(of_answers)
    return Compared(
        rows,
        ((gain["accuracy_gain"], gain["ci95"]), (gain["loss_gain"], gain["loss_ci95"])),
        {name: (at_start[name], accuracy) for name, accuracy in after.items()},
        gain["episodes"],
        gain["units"],
        kind,
        loop,
        {name: {"after_from_start": before[name], "after": now[name]} for name in now if name in before},
    )


AS_BEFORE = "use the weights at the start"
ADVICE = {
    "better": "use the exported weights",
    "no significant difference": f"{AS_BEFORE}, or train on more {{nouns}}",
    "worse": f"{AS_BEFORE}, or train with fewer --outer_steps or on more {{nouns}}",
}


def verdict_of(compared: Compared | None, config: Config, sources: Sources) -> dict[str, str]:
    """What a run has gained, for the log, the report and the card. By accuracy, for language models and where
    there is none by loss.

    compared: None without a table. Returns `name`, that of `verdict`, or empty where the weights cannot be
    compared, and `text`: the gain, over what it was measured, and what to do.
    """
    kind, by_loss = sources.train.kind, config.learner.by_loss or not (compared and compared.has_answers)
    nouns = "classes" if kind == "class" else "tasks"
    gain = compared.gain[by_loss] if compared else (math.nan, math.nan)
    name = verdict(gain)
    if why := incomparable(compared, name, config, len(sources.train.items), nouns):
        return {"name": "", "text": f"no comparison with the weights at the start: {why}"}
    assert compared is not None
    assert name is not None
    said = f"{name} than" if name in ("better", "worse") else "not distinguishable from"
    shots = f" at {counted(config.k_shot, 'shot')}"
    if config.most_shots > config.k_shot:
        shots = f" at {config.k_shot} to {config.most_shots} shots"
    if isinstance(sources.train, OwnSource) or config.learner.ordered:  # the function decides; none
        shots = ""
    size = (
        f"{format_interval(gain, '+.4f')} {config.learner.unit}"
        if by_loss
        else f"{percent(gain, '+')} points"
    )
    over = f"{units_of(compared.units, kind)}, {counted(compared.episodes, 'episode')}"
    text = f"{said} the weights at the start{shots}: {size} (over {over})"
    doubts = [ADVICE[name].format(nouns=nouns), warning_of_few(compared.units, kind)]
    return {"name": name, "text": "; ".join([text, *filter(None, doubts)])}


def incomparable(
    compared: Compared | None, name: str | None, config: Config, trained: int, nouns: str
) -> str:
    """Why a run has no verdict, and what to do; empty if it has one. trained: number of classes or tasks."""
    if find(config.algorithm).trains_nothing:
        return f"algorithm={config.algorithm} trains nothing; fmmeta evaluate --compare compares models"
    if not config.init_interpolation:
        return "init_interpolation=0 exports the weights at the start; use them as they are"
    if compared is not None and compared.units == 1:
        return (
            f"one of the {nouns} is in all episodes, so there is no interval; hold out {FEW} or more, or"
            f" raise test_episodes={config.test_episodes}"
        )
    if compared is not None:
        return "" if name else "a loss is not finite; use lower rates"
    if not config.test_episodes:
        return "test_episodes=0; give 100, say"
    least = 3 * (config.n_way if nouns == "classes" else 1)
    lower = ", or a lower --n_way" if nouns == "classes" else ""
    return (
        f"all {trained} {nouns} are trained on and none is held out; give {least} {nouns} or more{lower}, or"
        " a file of splits"
    )


def show(compared: Compared, config: Config, shape: str, table: Table) -> None:
    """Show the table, and one by stratum where there are several. shape: of the episodes, in words."""
    rows = [[name, f"{loss[0]:.4f}"] for name, (_, loss) in compared.rows.items()]
    loop = compared.loop
    learning = find(config.algorithm).learning
    if loop.steps and not learning:
        rows[1][0] += f" (inner_lr {config.inner_lr * loop.scale:.3g}, {loop.steps} steps)"
    _, fall = compared.gain
    rows.append(["gain of meta-training (paired)", format_interval(fall)])
    shares = [percent(accuracy) for accuracy, _ in (*compared.rows.values(), compared.gain)]
    columns = ["", "loss"]
    if compared.has_answers:
        columns.insert(1, "accuracy %")
        rows = [[name, share, *rest] for (name, *rest), share in zip(rows, shares, strict=True)]
    head = f" (head at the start of a task: {config.head_init})" if config.learner.of_classes else ""
    learning = learning or counted(config.inner_steps, "inner step")
    title = f"{compared.episodes} held-out {shape} episodes, {learning}{head}"
    table(title.replace("  ", " "), columns, rows)
    if len(compared.strata) > 1:
        table(
            "after adaptation, by stratum",
            ["", "start", "meta-trained"],
            [[name, *(f"{100 * one:.1f}" for one in pair)] for name, pair in compared.strata.items()],
        )
    if compared.metrics:
        table(
            "after adaptation, metrics",
            ["", "start", "meta-trained"],
            [[name, *map(format_interval, each.values())] for name, each in compared.metrics.items()],
        )


def percent(interval: Interval, sign: str = "") -> str:
    return format_interval(interval, f"{sign}.1f", 100)


def confusion(
    held_out: HeldOut, source: TaskSource, theta: Tensor, learning: EvaluationMethod
) -> dict[str, Any]:
    """Facts for run.json: names of the classes and counts [classes, classes], a row per right class, a column
    per answer; or `left_out`, the reason why there are none.

    Every group adapts to the same episode, so that the layout does not matter. Collective: world.
    """
    worker, config = held_out.scoring.worker, held_out.config
    if not config.learner.of_classes:
        return {"left_out": f"task_type={config.task_type} has answers, not classes"}
    if not isinstance(worker, FullModelWorker):
        return {
            "left_out": (
                f"pipeline_stages={config.pipeline_stages}: only the last stage has the model's answers"
            )
        }
    task = held_out.tasks(source, TEST)[0]
    found = held_out.reader(source).read_same_task(task)
    if not found:
        return {"left_out": f"task {task.name} failed to load"}
    ((_, episode),) = found
    with held_out.scoring.ranks.world.raise_on_all("naming the classes of an episode"):
        classes = source.draw(task).episode().classes  # a function tells them with its rows
    worker.write(theta)
    learning.score(worker, theta, episode)  # leaves the worker at phi
    counts = [[0] * len(classes) for _ in classes]
    for (prediction,), (reference,) in answers_of_group(worker, episode.query):
        if prediction >= 0:  # no NaN
            counts[reference][prediction] += 1
    worker.write(theta)
    return {"task": task.name, "stratum": task.stratum, "classes": list(classes), "counts": counts}


def write_cards(run: Run, config: Config, compared: Compared | None, verdict: str) -> None:
    """Write the cards of model/ and merged/. compared: None if nothing was measured. verdict: its text."""
    for each in (run.folder / "model", run.folder / "merged"):
        if each.is_dir():
            adapter = bool(config.lora_r) and each.name == "model"
            model_card.write_card(each, card_content(run, config, compared, verdict, adapter))


def card_content(run: Run, config: Config, compared: Compared | None, verdict: str, adapter: bool) -> Content:
    """The card of a meta-trained model. verdict: its text. adapter: its folder holds adapters and not a whole
    model.
    """
    description, shape = run.inputs.description, run.inputs.shape(config)
    spec, learns = find(config.algorithm), config.learner.noun(description.images)
    task = f"a new {learns} task".replace("  ", " ")
    summary = f"This model learns {task} from a few examples. It was meta-trained with fmmeta."
    if spec.trains_nothing:
        summary = "fmmeta has evaluated this model and changed none of its weights."
    data = [public_name(name) for name in config.dataset]
    base = code(public_name(config.model_name_or_path))
    steps, tasks = counted(run.state.outer_step, "step"), counted(config.tasks_per_step, "task")
    merged = "" if adapter else ", merged into the base model"
    facts = {
        "base model": f"{base}, the built-in model, trained from scratch" if config.builtin_model else base,
        "algorithm": escaped(config.algorithm),
        "tasks": f"{' '.join(map(code, data))}, {shape} episodes".replace("  ", " ")
        + (f", answers {config.answers}" if config.answers else ""),
        "inner loop": "" if spec.learning else inner_loop(config, config.inner_steps),
        "learning": spec.learning,
        "outer loop": f"{steps} of {config.outer_optimizer} over {tasks} each,"
        f" outer_lr {config.outer_lr * config.outer_lr_factor:g}, seed {config.seed}",
        "trained weights": trained_weights(config, merged),
        "verdict": escaped(verdict),
        "sentence vector": f"{description.pooling} pooling" if description.pooling != "model" else "",
    }
    if spec.trains_nothing:
        facts["outer loop"] = facts["trained weights"] = ""
    return Content(
        base=config.model_name_or_path,
        config=config,
        pooling=description.pooling,
        images=description.images,
        adapter=adapter,
        summary=summary,
        facts=facts,
        dataset=[] if spec.trains_nothing else config.dataset,
        results=card_results(config, shape, data, compared, description.images) if compared else [],
        scores=card_scores(compared, config, shape) if compared else None,
    )


def card_results(
    config: Config, shape: str, data: Sequence[str], compared: Compared, images: bool = False
) -> list[EvalResult]:
    """The accuracy and the loss after adaptation, and the metrics of a learner that reads rows, for the
    metadata of a card.
    """
    spec, learning = config.learner, find(config.algorithm).learning
    learned = f"with the {learning}" if learning else f"after {counted(config.inner_steps, 'inner step')}"
    found = list[EvalResult]()
    accuracy, loss = compared.rows[AFTER]
    kinds = ("exact_match", "exact match") if spec.generates else ("accuracy", "accuracy")
    own = [((name, name), each["after"]) for name, each in compared.metrics.items() if not spec.plain]
    for (metric, name), (mean, half) in (
        (kinds, accuracy),
        (("loss", f"loss ({config.learner.unit})"), loss),
        *own,
    ):
        if math.isfinite(mean):
            found.append(
                EvalResult(
                    task_type=spec.noun(images).replace(" ", "-") or "other",
                    task_name=f"{shape} learning".strip(),
                    dataset_type=printable(", ".join(data)),
                    dataset_name=printable(", ".join(data)),
                    dataset_split="test",
                    metric_type=metric,
                    metric_name=f"{name} {learned}",
                    metric_value=round(mean, 4),
                    metric_args=strict({"episodes": compared.episodes, "ci95": round(half, 4)}),
                )
            )
    return found


def card_scores(compared: Compared, config: Config, shape: str) -> Scores:
    """The table on held-out tasks of a card."""
    spec = find(config.algorithm)
    trained = not spec.trains_nothing  # the base model is another one
    rows = dict(compared.rows)
    if trained:
        rows["gain of meta-training (paired)"] = compared.gain
    else:
        rows.pop(FROM_START)
    loop = ", with the inner loop that scores best on validation tasks" if compared.loop.steps else ""
    base = f" The base model is adapted to the same episodes{loop}."
    if spec.learning:
        base = f" The base model learns in the same way: {spec.learning}."
    shown, episodes = ["accuracy %"] if compared.has_answers else [], f"{shape} episodes".strip()
    names = {BEFORE: "before adaptation", FROM_START: "base model, adapted", AFTER: "this model, adapted"}
    return Scores(
        f"Mean of {compared.episodes} {episodes} and 95 % interval over their"
        f" {units_of(compared.units, compared.kind)}, which were held out." + (base if trained else ""),
        (*shown, f"loss ({config.learner.unit})"),
        [
            (names.get(name, name), *(percent(accuracy) for _ in shown), format_interval(loss))
            for name, (accuracy, loss) in rows.items()
        ],
    )
