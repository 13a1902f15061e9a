"""`fmmeta adapt`: adapts a model to one task from a few labelled examples and writes a Hugging Face folder.

    support file --> number of inner steps, by cross-validation --> inner loop on all examples
                 --> model folder, model card, predictions

The inner loop has the settings of meta-training (stored in fmmeta.json) unless flags override them. Runs in
one process.
"""

import copy
import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult

from fmmeta.adaptation.predict import AdaptedModel, LoadedModel, load_single_process
from fmmeta.checkpoint import model_card
from fmmeta.checkpoint.hf_export import export
from fmmeta.checkpoint.model_card import (
    PLACEHOLDER,
    Content,
    code,
    escaped,
    generation_code,
    public_name,
    python_code,
)
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.security import make_folders, printable, remove_empty
from fmmeta.config.fields import refuse_first
from fmmeta.config.settings import Config
from fmmeta.evaluation.methods import scores_by_step, with_stored_rates
from fmmeta.evaluation.settings import AdaptConfig
from fmmeta.meta.algorithms import setup as rules
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.inner_optimizers import Rates
from fmmeta.models.files import remembered, trained_with
from fmmeta.models.from_gguf import as_folder
from fmmeta.models.load import suggest_chat
from fmmeta.reliability.checks import SupportLosses
from fmmeta.tasks.batching import Episode, Example
from fmmeta.tasks.data.encode import answer_without_room, encode, full_rows
from fmmeta.tasks.data.rows import Examples, Table, read_file, rows_of, tabulate
from fmmeta.tasks.data.splits import few

FOLDS = 2  # at most; each costs an inner loop


def run(settings: AdaptConfig) -> None:
    """`fmmeta adapt`."""
    refuse_first(
        (not getattr(settings, name), f"{name} is missing; give --{name}")
        for name in ("support", "output_dir")
    )
    progress = Progress(enabled=True)
    adapted = adapt(settings, progress)
    if adapted.accuracy is not None:
        progress.notice(
            f"accuracy on {settings.query}: {100 * adapted.accuracy:.1f} % of {len(adapted.predictions)};"
            f" answers in {Path(str(settings.output_dir), 'predictions.jsonl')}"
        )
    progress.notice(f"model {settings.output_dir}")


def adapt(
    settings: AdaptConfig,
    progress: Progress,
    support: Examples | None = None,
    query: Examples | None = None,
) -> AdaptedModel:
    """Adapt to the task of the examples `support`, or of the file `settings.support`; the query set likewise.

    A folder is written if `settings.output_dir` is set. Raises `UsageError`.
    """
    settings = replace(settings, model_name_or_path=as_folder(settings.model_name_or_path, progress.notice))
    config = settings.run_config(n_way=2)
    task = read_task("support", support or settings.support, config, progress.notice)
    queries = read_task("query", query or settings.query, config, progress.notice)
    labels = tuple(sorted(set(task.target))) if config.task_type == "classification" else ()
    unknown = sorted(set(queries.target) - set(labels)) if labels else []
    if len(labels) == 1:
        raise UsageError(
            f"support={settings.support} has one class only, {labels[0]!r}; give examples of two or more"
        )
    if unknown:
        raise UsageError(
            f"query={settings.query} has the class {unknown[0]!r}, of which the support set has none; add"
            " some"
        )
    for one in trained_with([settings.model_source]):
        if shared := sorted(one.trained_names("class") & set(labels)):
            progress.notice(
                Warn(
                    f"{settings.support or 'support'}: {len(shared)} of {len(labels)} classes ({few(shared)})"
                    f" have names of classes that the model was trained on with dataset={one.dataset}; its"
                    " accuracy on them is not that on new classes"
                )
            )
    with new_folder(settings.output_dir) as folder:
        adapted, rates = learn(settings, task, labels, progress)
        answers = adapted.predict(queries.input, settings.max_new_tokens)
        adapted.predictions = [
            replace(answer, truth=truth) for answer, truth in zip(answers, queries.target, strict=True)
        ]
        if folder is not None:
            write_folder(adapted, folder, settings, task, config.inner_steps, rates)
    return adapted


def learn(
    settings: AdaptConfig, support: Table, labels: tuple[str, ...], progress: Progress
) -> tuple[AdaptedModel, Rates]:
    """Choose the number of inner steps and take them, with the model's learned rates.

    Raises `UsageError` for a loss that is not finite.
    """
    config = settings.run_config(n_way=len(labels) or 2)
    if message := settings.unusable_head(config):
        progress.notice(Warn(message))
    chooses = settings.early_stopping and config.inner_lr_schedule == "constant" and config.inner_steps > 0
    folds = leave_out(support, labels) if chooses else []
    config = replace(config, inner_steps=config.inner_steps * (2 if folds else 1))
    model = load_single_process(config, progress, labels, settings.bf16)
    suggest_chat(config, model.tokenizer, progress.notice)
    setup = rules.setup(config, model.worker, model.head_names, config.most_classes, settings.bf16)
    inner = with_stored_rates(settings, config, setup.inner, model.worker)
    if message := answer_without_room(config, model.tokenizer, support.target):
        raise UsageError(f"support={settings.support or 'pairs'}: {message}")
    examples, left_out = encode_task(model, support, labels), None
    if message := full_rows(config, [len(one.input_ids) for one in examples]):
        progress.notice(Warn(f"{settings.support or 'support'}: {message}"))
    if folds:
        steps, left_out = choose_steps(model, inner, examples, folds, progress)
        progress.notice(
            f"{steps} inner steps: {100 * left_out:.1f} % right of examples that were left out, of up to "
            f"{config.inner_steps} steps"
        )
        inner = replace(inner, steps=steps)
    batches = model.batcher.split_support(examples, (config.seed,))
    learned = inner.adapt(model.worker, model.worker.read(), batches)
    losses = SupportLosses(replace(config, inner_steps=inner.steps))
    losses.add(model.worker, learned, batches)
    finite = all(one.finite for one in learned.passes)
    if not (finite and all(math.isfinite(loss) for pair in losses.pairs for loss in pair)):
        raise UsageError(
            f"inner_lr={config.inner_lr}: the loss on the support set is not finite after {inner.steps} inner"
            " steps; lower --inner_lr"
        )
    if warning := losses.warning():
        progress.notice(Warn(warning))
    return AdaptedModel(labels, inner.steps, left_out, model), inner.rates


def write_folder(
    adapted: AdaptedModel, folder: Path, settings: AdaptConfig, support: Table, inner_steps: int, rates: Rates
) -> None:
    """Write the adapted model: weights, head, card, answers.

    fmmeta.json stores `inner_steps`, not the number of steps that was chosen for this task; and `rates` if
    they are those of the model.
    """
    model = adapted.loaded
    has_rates = remembered(settings.model_source).get("inner_rates") is not None
    export(
        folder,
        model.worker.read(),
        model.worker,
        model.frozen,
        replace(model.config, head_init="learned", inner_steps=inner_steps),
        model.description,
        model.tokenizer,
        model.ranks,
        rates if has_rates and not settings.sets_inner_lr else None,
        folder / "merged",
        trained_with([settings.model_source]),
    )
    write_card(adapted, folder, settings, support)
    if adapted.predictions:
        (folder / "predictions.jsonl").write_text(
            "".join(f"{one.line()}\n" for one in adapted.predictions), encoding="utf-8"
        )
    adapted.output_dir = str(folder)


@contextmanager
def new_folder(output_dir: str | None) -> Iterator[Path | None]:
    """An empty folder for the block to fill, removed again if the block raises; None without a name.

    Raises `UsageError`.
    """
    if not output_dir:
        yield None
        return
    folder = Path(output_dir)
    try:
        created = make_folders(folder)
        if any(folder.iterdir()):
            raise UsageError(
                f"output_dir={folder} is not empty; choose another, so that nothing is overwritten"
            )
    except OSError as error:
        raise UsageError(f"output_dir={folder} cannot be made: {error.strerror}; choose another") from None
    try:
        yield folder
    except BaseException:
        for inside in folder.iterdir():
            shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
        remove_empty(created)
        raise


def read_task(
    setting: str, source: str | Examples | None, config: Config, notice: Callable[[str], None]
) -> Table:
    """The rows of a file, or examples, as one task; no rows without a source.

    Duplicates in the support set are dropped. Raises `UsageError`.
    """
    if not source:
        return Table([], [], [], [], [])
    name = source if isinstance(source, str) else setting
    rows = read_file(Path(source)) if isinstance(source, str) else rows_of(setting, source, config)
    return tabulate(
        name, rows, config, lambda text: notice(f"{name}: {text}"), one_task=True, unique=setting == "support"
    )


def encode_task(model: LoadedModel, table: Table, labels: Sequence[str]) -> list[Example]:
    """The rows as tokens; classes by their index in `labels`."""
    tokenizer = copy.deepcopy(model.tokenizer)  # encoding sets its truncation
    examples = encode(tokenizer, model.config, table.input, table.target)
    if not labels:
        return examples
    return [
        Example(row.input_ids, labels.index(label)) for row, label in zip(examples, table.target, strict=True)
    ]


def leave_out(table: Table, labels: Sequence[str]) -> list[list[int]]:
    """Indices of the rows of each fold: the j-th example of every class; none if a class has one example."""
    by_class: dict[str, list[int]] = defaultdict(list)
    for index, label in enumerate(table.target):
        by_class[label if labels else ""].append(index)
    fewest = min(map(len, by_class.values()))
    folds = min(FOLDS, fewest) if fewest > 1 else 0
    return [[rows[fold] for rows in by_class.values()] for fold in range(folds)]


def choose_steps(
    model: LoadedModel,
    inner: InnerLoop,
    examples: Sequence[Example],
    folds: Sequence[Sequence[int]],
    progress: Progress,
) -> tuple[int, float]:
    """The number of steps (1 or more) with the lowest loss on examples left out, and the accuracy there.

    Raises `UsageError` if no loss is finite.
    """
    theta, scores = model.worker.read(), []
    for done, fold in enumerate(folds):
        progress.line("examples left out", done, len(folds))
        episode = Episode(
            model.batcher.split_support(
                [one for index, one in enumerate(examples) if index not in fold], (model.config.seed,)
            ),
            model.batcher.split([examples[index] for index in fold]),
        )
        scores.append(scores_by_step(inner, model.worker, theta, episode))
    loss, accuracy = torch.stack(scores).mean(0).tolist()
    best = min(range(1, inner.steps + 1), key=lambda step: loss[step])
    if not math.isfinite(loss[best]):
        raise UsageError(
            f"inner_lr={model.config.inner_lr}: the loss on examples left out is not finite after any of "
            f"{inner.steps} inner steps; lower --inner_lr"
        )
    return best, accuracy[best]


def write_card(adapted: AdaptedModel, folder: Path, settings: AdaptConfig, support: Table) -> None:
    """Write README.md into the adapted model's folder, and into merged/ inside it."""
    config, base, labels = adapted.loaded.config, settings.model_name_or_path, adapted.labels
    source = code(Path(settings.support).name) if settings.support else "given in Python"
    facts = {
        "base model": code(public_name(base)),
        "meta-training": meta_training(base),
        "support": f"{source}: {len(support.input)} examples"
        + (f" of {len(labels)} classes" if labels else ""),
        "inner loop": (
            f"{adapted.inner_steps} steps of {config.inner_optimizer}, inner_lr {config.inner_lr:g}"
            + (f", LoRA of rank {config.lora_r}" if config.lora_r else "")
        ),
    }
    if adapted.left_out is not None:
        facts["accuracy on examples left out"] = (
            f"{100 * adapted.left_out:.1f} %; the steps were chosen on them"
        )
    query = Path(settings.query).name if settings.query else "query"
    if adapted.accuracy is not None:
        facts[f"accuracy on {code(query)}"] = (
            f"{100 * adapted.accuracy:.1f} % of {len(adapted.predictions)} examples"
        )
    kind = "a text classification task" if labels else "a text generation task"
    merged = folder / "merged"
    for each in (folder, merged) if merged.is_dir() else (folder,):
        adapter = bool(config.lora_r) and each == folder
        library, pipeline, load = how_to_load(adapted, adapter)
        model_card.write_card(
            each,
            Content(
                base=base,
                library=library,
                pipeline=pipeline,
                adapter=adapter,
                summary=f"This model was adapted to {kind} from {len(support.input)} examples with fmmeta.",
                facts=facts,
                use=f"```bash\nfmmeta predict --model_name_or_path {PLACEHOLDER} --input texts.txt\n```",
                load=load,
                classes=list(map(code, labels)),
                results=query_results(adapted, printable(query)),
            ),
        )


def query_results(adapted: AdaptedModel, name: str) -> list[EvalResult]:
    """The accuracy on the query set for the metadata of a card; none without a query set."""
    if adapted.accuracy is None:
        return []
    return [
        EvalResult(
            task_type="text-classification" if adapted.labels else "text-generation",
            dataset_type=name,
            dataset_name=name,
            dataset_split="query",
            metric_type="accuracy" if adapted.labels else "exact_match",
            metric_name="accuracy" if adapted.labels else "exact match",
            metric_value=round(adapted.accuracy, 4),
            metric_args={"examples": len(adapted.predictions)},
        )
    ]


def how_to_load(adapted: AdaptedModel, adapter: bool) -> tuple[str, str | None, str]:
    """The library and the pipeline that read a folder, and how to load it without fmmeta.

    No pipeline is named that would use a random head. adapter: the folder holds adapters.
    """
    model, names = adapted.loaded, dict(enumerate(adapted.labels))
    if names and model.description.pooling != "model":
        return (
            "fmmeta",
            None,
            "The classes are in `head.safetensors`, which transformers does not read: `fmmeta predict` loads"
            " them. `AutoModel` gives the encoder without classes, and a `text-classification` pipeline"
            " would give it a random head.",
        )
    if names and adapter:
        return (
            "peft",
            None,
            "transformers loads the adapters on their base:\n\n"
            + python_code(
                "from transformers import AutoModelForSequenceClassification\n\n"
                "model = AutoModelForSequenceClassification.from_pretrained(\n"
                f'    "{PLACEHOLDER}", num_labels={len(names)}, id2label={printable(repr(names))},'
                " ignore_mismatched_sizes=True\n)"
            ),
        )
    pipeline = "text-classification" if names else "text-generation"
    made = f'from transformers import pipeline\n\nmodel = pipeline("{pipeline}", model="{PLACEHOLDER}")'
    load = python_code(made) if names else generation_code(model.config.prompt_template)
    return "peft" if adapter else "transformers", pipeline, load


def meta_training(base: str) -> str:
    """How the base was meta-trained, from its folder and the run.json beside it."""
    stored: dict[str, Any] = remembered(base)
    if stored.get("algorithm", "none") == "none":  # `tune` writes fmmeta.json too
        return "none"
    text = f"{escaped(stored['algorithm'])}, {escaped(stored.get('k_shot'))} shots"
    try:
        run = json.loads((Path(base).parent / "run.json").read_text(encoding="utf-8"))["settings"]
        return (
            f"{text}, on {' '.join(code(public_name(one)) for one in run['dataset'])},"
            f" {escaped(run['outer_steps'])} outer steps of {escaped(run['meta_batch_size'])} tasks"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return text  # no such file, or a file of another program
