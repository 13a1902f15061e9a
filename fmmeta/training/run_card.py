"""The cards of the model folders that a run writes."""

import math
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import EvalResult

from fmmeta.checkpoint import model_card
from fmmeta.checkpoint.model_card import Content, Scores, code, escaped, inner_loop, public_name
from fmmeta.common.security import printable
from fmmeta.common.text import counted, strict, units_of
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.learners.load import Description
from fmmeta.metrics.scores import format_interval
from fmmeta.report.data import AFTER, BEFORE, FROM_START
from fmmeta.training.comparison import Compared, percent


def write_cards(
    folder: Path,
    config: Config,
    outer_steps: int,
    description: Description,
    compared: Compared | None,
    verdict: str,
) -> None:
    """Write the cards of model/ and merged/. outer_steps: how many were done. compared: None if nothing was
    measured. verdict: its text.
    """
    for each in (folder / "model", folder / "merged"):
        if each.is_dir():
            adapter = bool(config.lora_r) and each.name == "model"
            content = card_content(config, outer_steps, description, compared, verdict, adapter)
            model_card.write_card(each, content)


def card_content(
    config: Config,
    outer_steps: int,
    description: Description,
    compared: Compared | None,
    verdict: str,
    adapter: bool,
) -> Content:
    """The card of a meta-trained model. outer_steps: how many were done. verdict: its text. adapter: its
    folder holds adapters and not a whole model.
    """
    spec, learns = find(config.algorithm), config.learner.noun(description.images)
    task = f"a new {learns} task".replace("  ", " ")
    summary = f"This model learns {task} from a few examples. It was meta-trained with fmmeta."
    if spec.trains_nothing:
        summary = "fmmeta has evaluated this model and changed none of its weights."
    data = [public_name(name) for name in config.dataset]
    base = code(public_name(config.model_name_or_path))
    tasks = counted(config.tasks_per_step, "task")
    merged = "" if adapter else ", merged into the base model"
    facts = {
        "base model": f"{base}, the built-in model, trained from scratch" if config.builtin_model else base,
        "algorithm": escaped(config.algorithm),
        "tasks": f"{' '.join(map(code, data))}, {config.shape} episodes",
        "inner loop": "" if spec.learning else inner_loop(config, config.inner_steps),
        "learning": spec.learning,
        "outer loop": f"{counted(outer_steps, 'step')} of {config.outer_optimizer} over {tasks} each,"
        f" outer_lr {config.outer_lr * config.outer_lr_factor:g}, seed {config.seed}",
        "trained weights": f"LoRA adapters of rank {config.lora_r}{merged}" if config.lora_r else "",
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
        results=results(config, data, compared, description.images) if compared else [],
        scores=scores(compared, config) if compared else None,
    )


def results(
    config: Config, data: Sequence[str], compared: Compared, images: bool = False
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
                    task_name=f"{config.shape} learning",
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


def scores(compared: Compared, config: Config) -> Scores:
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
    shown = ["accuracy %"] if compared.has_answers else []
    names = {BEFORE: "before adaptation", FROM_START: "base model, adapted", AFTER: "this model, adapted"}
    return Scores(
        f"Mean of {compared.episodes} {config.shape} episodes and 95 % interval over their"
        f" {units_of(compared.units, compared.kind)}, which were held out." + (base if trained else ""),
        (*shown, f"loss ({config.learner.unit})"),
        [
            (names.get(name, name), *(percent(accuracy) for _ in shown), format_interval(loss))
            for name, (accuracy, loss) in rows.items()
        ],
    )
