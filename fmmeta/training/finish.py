"""The end of a run: export the model, score held-out tasks from theta and from the initial weights, show the
table, close run.json.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult
from torch import Tensor

from fmmeta.checkpoint import model_card
from fmmeta.checkpoint.hf_export import export
from fmmeta.checkpoint.model_card import (
    PLACEHOLDER,
    Content,
    Scores,
    code,
    escaped,
    examples_file,
    generation_code,
    public_name,
    python_code,
)
from fmmeta.common.security import printable
from fmmeta.common.text import strict
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.inner_loop import EvaluationMethod, InnerLoop
from fmmeta.meta.parameters import MetaParameters
from fmmeta.metrics.scores import Interval, format_interval, mean_ci95
from fmmeta.models.load import Description
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.report.data import AFTER, BEFORE, FROM_START, read, read_lines
from fmmeta.tasks.sources.base import TaskSource
from fmmeta.tasks.sources.load import Sources
from fmmeta.training.loop import Run
from fmmeta.training.validation import TEST, VALID, HeldOut, HeldOutScore, metric_values, per_stratum


@dataclass(repr=False)
class Result:
    """What `MetaTrainer.train` returns on every rank.

    before, after, after_from_start: mean accuracies on the held-out episodes, between 0 and 1: before and
    after adaptation of the meta-trained model, and after adaptation of the initial weights. log_history: the
    lines of metrics.jsonl. held_out: the table on held-out tasks, empty without them:

        rows         [{"name", "accuracy", "ci95", "loss", "loss_ci95"}, ...], the paired gain last
        per_stratum  [{"stratum", "after_from_start", "after"}, ...], mean accuracies
        episodes     number of episodes
        metrics      {NAME: {"after_from_start", "after"}}, means of the numbers of --metrics, if there are
    """

    output_dir: Path
    outer_steps: int
    before: float | None = None
    after: float | None = None
    after_from_start: float | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)
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
    found: dict[str, Any] = {}
    with comm.raise_on_all("reading the result"):
        if comm.rank == 0:
            facts = read(folder)
            found = {
                "steps": facts.run.get("outer_steps", facts.settings["outer_steps"]),
                "lines": read_lines(folder),
                "facts": facts.held_out,
            }
    found = json.loads(comm.gather_bytes(json.dumps(found).encode())[0])
    held_out = held_out_table(found["facts"])
    means = {row["name"]: row["accuracy"] for row in held_out.get("rows", ())}
    before, after, from_start = (means.get(name) for name in (BEFORE, AFTER, FROM_START))
    return Result(folder, found["steps"], before, after, from_start, found["lines"], held_out)


def held_out_table(facts: dict[str, Any]) -> dict[str, Any]:
    """`Result.held_out` from the entry of run.json; numbers that are not finite are NaN."""
    if "episodes" not in facts:
        return {}
    rows = []
    for name in filter(facts.get, (BEFORE, FROM_START, AFTER, "gain")):
        (accuracy, ci95), (loss, loss_ci95) = facts[name]["accuracy"], facts[name]["loss"]
        row = {"accuracy": accuracy, "ci95": ci95, "loss": loss, "loss_ci95": loss_ci95}
        rows.append({"name": name, **{key: math.nan if one is None else one for key, one in row.items()}})
    starts = facts.get("per_stratum_at_start", {})
    strata = [
        {"stratum": name, "after_from_start": starts.get(name), "after": after}
        for name, after in facts.get("per_stratum", {}).items()
    ]
    own = {
        name: {row: math.nan if one[0] is None else one[0] for row, one in each.items()}
        for name, each in facts.get("metrics", {}).items()
    }
    found = {"rows": rows, "per_stratum": strata, "episodes": facts["episodes"]}
    return {**found, "metrics": own} if own else found


def finish(run: Run) -> Result:
    """Export, evaluate, show, close run.json; then `on_train_end`. Collective: world."""
    result = Result(run.folder, run.state.outer_step)
    if run.controller.writes:
        _finish(run)
        result = read_result(run.folder, run.ranks.world)
    else:
        run.progress.notice("another group writes the model")
    run.callbacks.on_train_end(run)
    return result


def _finish(run: Run) -> None:
    """Collective: world."""
    config, state, test = run.config, run.state, run.inputs.sources.test
    if config.save_steps and run.trains:
        run.save(last=True)
    if state.best is not None:
        run.progress.notice(state.best.text)
    final, alpha = state.final() if run.trains else state.meta_params, config.init_interpolation
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
    if test is None:
        run.progress.notice("no held-out tasks: nothing to compare")
    elif config.test_episodes:
        gains, facts = against_start(
            run.held_out,
            run.inputs.sources,
            final,
            state.initial if run.trains else None,
            run.parts.setup,
            run.raise_if_stopped,
        )
        show(gains, config, run.progress.table)
        run.callbacks.on_log(run, {"step": state.outer_step, "held_out_accuracy": gains.accuracies})
    profile = run.profiler.show(run.progress.table)
    with run.ranks.world.raise_on_all("closing the run"):
        if run.ranks.first:
            write_cards(run.folder, config, run.inputs.description, gains)
            run.write_run(finished=True, outer_steps=state.outer_step, held_out=facts, **profile)
            run.held_out.clear()
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
    """Intervals of accuracy and loss by row; gains are paired, and positive where the loss falls."""

    rows: dict[str, tuple[Interval, Interval]]
    gain: tuple[Interval, Interval]
    strata: dict[str, tuple[float, float]]  # accuracy after adaptation: from the start, meta-trained
    episodes: int
    loop: BaselineLoop  # of the baseline
    metrics: dict[str, dict[str, Interval]] = field(default_factory=dict)  # of the user, by name and row

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
    compared = compare(scores, started, loop)
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
    found: list[tuple[float, float, float, int]] = []
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
        for step in range(1, most + 1):
            loss = sum(score.losses[step] for score in scores) / len(scores)
            accuracy = sum(score.accuracies[step] for score in scores) / len(scores)
            if math.isfinite(loss):  # rounded, so that the layout does not decide between equals
                first = -round(accuracy, 6) if config.task_type == "classification" else 0.0
                found.append((first, round(loss, 6), scale, step))
    if not found:
        return BaselineLoop(1.0, setup.inner.steps)
    *_, scale, step = min(found)
    return BaselineLoop(scale, step, len(scores))


def compare(trained: Sequence[HeldOutScore], started: Sequence[HeldOutScore], loop: BaselineLoop) -> Compared:
    """Summarise scores from theta (`trained`) and from the initial weights (`started`).

    Episodes that have failed to load in one of the passes do not count.
    """
    by_slot = {score.slot: score for score in started}
    pairs = [(score, by_slot[score.slot]) for score in trained if score.slot in by_slot]
    values = {
        BEFORE: [(new.accuracies[0], new.losses[0]) for new, _ in pairs],
        FROM_START: [(old.accuracies[-1], old.losses[-1]) for _, old in pairs],
        AFTER: [(new.accuracies[-1], new.losses[-1]) for new, _ in pairs],
        "gain": [
            (new.accuracies[-1] - old.accuracies[-1], old.losses[-1] - new.losses[-1]) for new, old in pairs
        ],
    }
    intervals = {
        name: (mean_ci95([accuracy for accuracy, _ in row]), mean_ci95([loss for _, loss in row]))
        for name, row in values.items()
    }
    gain = intervals.pop("gain")
    before, now = metric_values([old for _, old in pairs]), metric_values([new for new, _ in pairs])
    metrics = {
        name: {"after_from_start": mean_ci95(before[name]), "after": mean_ci95(now[name])}
        for name in now
        if name in before
    }
    at_start, after = per_stratum([old for _, old in pairs]), per_stratum([new for new, _ in pairs])
    return Compared(
        intervals,
        gain,
        {name: (at_start[name], accuracy) for name, accuracy in after.items()},
        len(pairs),
        loop,
        metrics,
    )


def show(compared: Compared, config: Config, table: Table) -> None:
    """Show the table, and one by stratum where there are several."""
    rows = [[name, percent(accuracy), f"{loss[0]:.4f}"] for name, (accuracy, loss) in compared.rows.items()]
    loop = compared.loop
    if loop.steps:
        rows[1][0] += f" (inner_lr {config.inner_lr * loop.scale:.3g}, {loop.steps} steps)"
    gain, fall = compared.gain
    rows.append(["gain of meta-training (paired)", percent(gain), format_interval(fall)])
    ways, head = "", ""
    if config.task_type == "classification":
        ways, head = f"{config.n_way}-way ", f" (head at the start of a task: {config.head_init})"
    title = (
        f"{compared.episodes} held-out {ways}{config.k_shot}-shot episodes, {config.inner_steps} inner steps"
    )
    table(f"{title}{head}", ["", "accuracy %", "loss"], rows)
    if len(compared.strata) > 1:
        table(
            "after adaptation, by stratum",
            ["", "start", "meta-trained"],
            [[name, *(f"{100 * one:.1f}" for one in pair)] for name, pair in compared.strata.items()],
        )
    if compared.metrics:
        table(
            "after adaptation, own metrics",
            ["", "start", "meta-trained"],
            [[name, *map(format_interval, each.values())] for name, each in compared.metrics.items()],
        )


def write_cards(folder: Path, config: Config, description: Description, compared: Compared | None) -> None:
    """Write the cards of model/ and merged/. compared: None if nothing was measured."""
    for each in (folder / "model", folder / "merged"):
        if each.is_dir():
            adapter = bool(config.lora_r) and each.name == "model"
            model_card.write_card(each, card_content(config, description, compared, adapter))


def card_content(
    config: Config, description: Description, compared: Compared | None, adapter: bool
) -> Content:
    """The card of a meta-trained model. adapter: its folder holds adapters and not a whole model."""
    spec, classes = find(config.algorithm), config.task_type == "classification"
    learns = "text classification" if classes else "text generation"
    shots = f"{config.k_shot} examples{' per class' if classes else ''}"
    summary = f"This model learns a new {learns} task from a few examples. It was meta-trained with fmmeta."
    if spec.trains_nothing:
        summary = "fmmeta has evaluated this model and changed none of its weights."
    episodes = f"{config.n_way}-way {config.k_shot}-shot" if classes else f"{config.k_shot}-shot"
    data = [public_name(name) for name in config.dataset]
    base = code(public_name(config.model_name_or_path))
    facts = {
        "base model": f"{base}, the built-in model, trained from scratch" if config.builtin_model else base,
        "algorithm": escaped(config.algorithm),
        "tasks": f"{' '.join(map(code, data))}, {episodes} episodes ({shots})",
        "inner loop": f"{config.inner_steps} steps of {config.inner_optimizer}, inner_lr {config.inner_lr:g}",
    }
    if not spec.trains_nothing:
        tasks = config.meta_batch_size * config.meta_accumulation_steps
        facts["outer loop"] = (
            f"{config.outer_steps} steps of {config.outer_optimizer} over {tasks} tasks each,"
            f" outer_lr {config.outer_lr:g}, seed {config.seed}"
        )
        if config.lora_r:
            facts["trained weights"] = f"LoRA adapters of rank {config.lora_r}"
            facts["trained weights"] += "" if adapter else ", merged into the base model"
    if description.pooling != "model":
        facts["sentence vector"] = f"{description.pooling} pooling"
    library, pipeline, load = how_to_load(config, description, adapter)
    return Content(
        base=config.model_name_or_path,
        library=library,
        pipeline=pipeline,
        adapter=adapter,
        summary=summary,
        facts=facts,
        use=examples_file(config.task_type),
        load=load,
        dataset=[] if spec.trains_nothing else config.dataset,
        results=results(config, data, compared) if compared else [],
        scores=scores(compared, episodes, not spec.trains_nothing) if compared else None,
    )


def how_to_load(config: Config, description: Description, adapter: bool) -> tuple[str, str | None, str]:
    """The library and the pipeline that read a folder, and how to load it without fmmeta.

    A classifier's head is that of no task yet, so that no text-classification pipeline is named.
    """
    head = "The head for a task is made by `fmmeta adapt`; this gives the encoder:\n\n"
    if config.task_type == "causal_lm":
        load = generation_code(config.prompt_template)
        return "peft" if adapter else "transformers", "text-generation", load
    if description.pooling != "model" and not adapter:
        made = f'SentenceTransformer("{PLACEHOLDER}").encode(["where is my card"])'
        load = python_code(f"from sentence_transformers import SentenceTransformer\n\nvectors = {made}")
        return "sentence-transformers", "sentence-similarity", head + load
    made = f'encoder = AutoModel.from_pretrained("{PLACEHOLDER}")'
    load = head + python_code(f"from transformers import AutoModel\n\n{made}")
    return "peft" if adapter else "transformers", "feature-extraction", load


def results(config: Config, data: Sequence[str], compared: Compared) -> list[EvalResult]:
    """The accuracy and the loss after adaptation, for the metadata of a card."""
    classes = config.task_type == "classification"
    found = list[EvalResult]()
    accuracy, loss = compared.rows[AFTER]
    kinds = ("accuracy", "accuracy") if classes else ("exact_match", "exact match")
    for (kind, name), (mean, half) in ((kinds, accuracy), (("loss", "loss (nats)"), loss)):
        if math.isfinite(mean):
            found.append(
                EvalResult(
                    task_type="text-classification" if classes else "text-generation",
                    task_name=f"{f'{config.n_way}-way ' if classes else ''}{config.k_shot}-shot learning",
                    dataset_type=printable(", ".join(data)),
                    dataset_name=printable(", ".join(data)),
                    dataset_split="test",
                    metric_type=kind,
                    metric_name=f"{name} after {config.inner_steps} inner steps",
                    metric_value=round(mean, 4),
                    metric_args=strict({"episodes": compared.episodes, "ci95": round(half, 4)}),
                )
            )
    return found


def scores(compared: Compared, episodes: str, trained: bool) -> Scores:
    """The table on held-out tasks of a card. trained: the base model is another one."""
    rows = dict(compared.rows)
    if trained:
        rows["gain of meta-training (paired)"] = compared.gain
    else:
        rows.pop(FROM_START)
    base = (
        " The base model is adapted to the same episodes, with the inner loop that scores best on validation"
        " tasks."
    )
    names = {BEFORE: "before adaptation", FROM_START: "base model, adapted", AFTER: "this model, adapted"}
    return Scores(
        f"Mean and 95 % interval over {compared.episodes} episodes of held-out tasks ({episodes})."
        + (base if trained else ""),
        ("accuracy %", "loss (nats)"),
        [
            (names.get(name, name), percent(accuracy), format_interval(loss))
            for name, (accuracy, loss) in rows.items()
        ],
    )


def percent(interval: Interval) -> str:
    return format_interval(interval, ".1f", 100)


def confusion(
    held_out: HeldOut, source: TaskSource, theta: Tensor, learning: EvaluationMethod
) -> dict[str, Any]:
    """Facts for run.json: names of the classes and counts [classes, classes], a row per right class, a column
    per answer; or `left_out`, the reason why there are none.

    Every group adapts to the same episode, so that the layout does not matter. Collective: world.
    """
    worker, config = held_out.worker, held_out.config
    if config.task_type != "classification":
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
    with held_out.ranks.world.raise_on_all("naming the classes of an episode"):
        classes = source.draw(task).classes
    worker.write(theta)
    learning.score(worker, theta, episode)  # leaves the worker at phi
    counts = torch.zeros(len(classes), len(classes), dtype=torch.float64, device=worker.device)
    for batch, logits in zip(episode.query, worker.logits(episode.query), strict=True):
        if worker.counts_rows:
            rows, answers = batch.to(worker.device), logits[:, : len(classes)].argmax(-1)
            counts.index_put_((rows.labels, answers), (rows.weights > 0).double(), accumulate=True)
    worker.group.sum_(counts)
    worker.write(theta)
    return {
        "task": task.name,
        "stratum": task.stratum,
        "classes": list(classes),
        "counts": counts.long().tolist(),
    }
