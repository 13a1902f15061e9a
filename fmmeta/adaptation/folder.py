"""The folder of an adapted model: weights, fmmeta.json, model card, answers; whether it is complete."""

import filecmp
import json
import math
import os
import shutil
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from fmmeta.adaptation.model import AdaptedModel, LoadedModel
from fmmeta.adaptation.task_learner import Encoded, TaskExamples, TaskLearner
from fmmeta.checkpoint import model_card
from fmmeta.checkpoint.hf_export import export, export_adapters, write_json
from fmmeta.checkpoint.model_card import (
    INPUT,
    Content,
    code,
    escaped,
    inner_loop,
    public_name,
    trained_weights,
)
from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.security import printable, publish, sync
from fmmeta.common.text import counted, units_of
from fmmeta.config.fields import unset_of
from fmmeta.config.learners import stored_kind
from fmmeta.evaluation.settings import AdaptConfig
from fmmeta.learners.files import BASE_FOLDER, SETTINGS_FILE, remembered, trained_with, weights_state
from fmmeta.meta.algorithms.baselines import leading_bos
from fmmeta.tasks.data.encode import example_input
from fmmeta.tasks.data.images import content_digest
from fmmeta.tasks.data.rows import Table
from fmmeta.tasks.data.splits import few
from fmmeta.tasks.data.token_store import digest
from fmmeta.training.run_files import LOCK

PARTIAL = ".partial"  # ending of folders that are being written
SHARED_BYTES = 2**16  # equal files of many tasks are one file on the disk from this size: the tokenizer
NOT_IDENTIFYING = {
    "support",
    "query",
    "output_dir",
    "micro_batch_size",
    "max_new_tokens",
    "deepspeed",
    "group_size",
    "tokens_per_pass",
    "gradient_checkpointing",
    "attn_implementation",
    "trust_remote_code",
    "text_column",
    "label_column",
    "image_column",
    "input_column",
    "output_column",
}
"""Settings on which an adapted model does not depend, but for rounding, or only by way of its examples."""


class ChangedSettings(UsageError):
    """The folders are of a command with other settings."""


def is_complete(folder: Path, table: Table, settings: AdaptConfig, method: str) -> bool:
    """Whether the folder holds the model of this task. method: the one in use.

    Raises `UsageError` for a folder of something else.
    """
    if not folder.exists() and not folder.is_symlink():
        return False
    where = f"output_dir={folder.parent}"
    with usage_errors(
        f"{where}: {folder.name} is there, and its {SETTINGS_FILE} is not of fmmeta adapt",
        "move it away, or choose another output_dir",
    ):
        stored = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))["adapted"]
        before, digest = dict(stored["settings"]), stored["support"]
    now = json.loads(json.dumps(identifying(settings, method)))
    before = {name: value for name, value in before.items() if name not in NOT_IDENTIFYING}
    before, now = ({"method": "finetune", **values} for values in (before, now))
    differ = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if texts := [f"{name} {before.get(name)} -> {now.get(name)}" for name in differ]:
        raise ChangedSettings(
            f"{where} holds models of a command with other settings ({'; '.join(texts)}); use the values"
            " before ->, or another output_dir"
        )
    weights = weights_state(settings.model_name_or_path)
    if stored.get("weights", weights) != weights:
        raise ChangedSettings(
            f"{where}: {folder.name} was learned from other weights than those of"
            f" model_name_or_path={settings.model_name_or_path} now; remove the folders to learn the tasks"
            " again, or use another output_dir"
        )
    if digest != support_digest(table):
        raise UsageError(
            f"{where}: {folder.name} was learned from other examples; remove the folder to learn the task"
            " again, or choose another output_dir"
        )
    return True


def partial_folder(output: Path, name: str | None) -> Path:
    """The folder in which that of a task is written."""
    return output / f".{name or Path(os.path.abspath(output)).name}{PARTIAL}"


def remove_partial(folder: Path) -> None:
    """Remove what an interrupted command has left of a task. Raises `UsageError` for a file or link."""
    if os.path.lexists(folder):
        if folder.is_symlink() or not folder.is_dir():
            raise UsageError(
                f"output_dir={folder.parent}: {folder.name} is no folder, and the task is first written under"
                " this name; move it away"
            )
        shutil.rmtree(folder)


def refuse_files(output: Path) -> None:
    """Raise `UsageError` for the folder of the only task that holds more than this command writes there."""
    names = sorted({path.name for path in output.iterdir()} - {LOCK, partial_folder(output, None).name})
    if names:
        raise UsageError(
            f"output_dir={output} is not empty ({few(names)}); choose another, so that nothing is overwritten"
        )


def write_task(adapted: AdaptedModel, learner: TaskLearner, learned: Encoded) -> None:
    """Write the folder of a task, complete or not at all; that of the only task is `output_dir` itself.

    Files that another process has written there stay as they are. Raises `UsageError`.
    """
    output, name = Path(str(learner.settings.output_dir)), learned.task.name
    partial, folder = partial_folder(output, name), output / (name or "")
    temporary = partial / Path(os.path.abspath(folder)).name  # the card's title
    temporary.mkdir(parents=True)
    try:
        write_folder(adapted, temporary, learner, learned)
        store_base_path(temporary, folder)
        if learner.written is not None:
            share_files(temporary, learner.written)
        for path in temporary.rglob("*"):
            sync(path)
        finished = [temporary]
        if name is None:
            refuse_files(output)
            # last the files without which no program takes the folder for a model
            finished = sorted(temporary.iterdir(), key=lambda path: path.name.endswith("config.json"))
        for path in finished:
            publish(path, output / path.name)
        learner.written = folder
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def share_files(folder: Path, other: Path) -> None:
    """Replace large files of `folder` that are equal in `other`, such as the tokenizer, by hard links to
    those. Where the file system has no links they stay.
    """
    for path in [one for one in folder.rglob("*") if one.is_file() and one.stat().st_size >= SHARED_BYTES]:
        same, link = other / path.relative_to(folder), path.with_name(f".{path.name}")
        with suppress(OSError):
            if filecmp.cmp(same, path, shallow=False):
                os.link(same, link)
                link.replace(path)


def store_base_path(temporary: Path, folder: Path) -> None:
    """Store the absolute path that the base of adapters of the built-in model will have in `folder`: peft
    reads it.
    """
    if (temporary / BASE_FOLDER).is_dir():
        file = temporary / "adapter_config.json"
        stored = json.loads(file.read_text(encoding="utf-8"))
        write_json(file, {**stored, "base_model_name_or_path": os.path.abspath(folder / BASE_FOLDER)})


def write_folder(adapted: AdaptedModel, folder: Path, learner: TaskLearner, learned: Encoded) -> None:
    """Write the adapted model: weights, head, card, answers.

    fmmeta.json stores the inner_steps of the settings, and under `adapted` the number of steps that this task
    took, with what identifies the task. The inner rates are stored if they are those of the model.
    """
    settings, model = learner.settings, adapted.loaded
    config, rates = replace(model.config, head_init="learned"), learner.rates_to_store
    shared = config, model.description, model.tokenizer
    trained = trained_with([settings.model_source])
    if learned.weights is None:
        export(
            folder,
            model.worker.read(),
            model.worker,
            model.frozen,
            *shared,
            model.ranks,
            rates,
            folder / "merged",
            trained,
        )
    else:
        export_adapters(
            folder, learned.weights, *shared, rates, learner.element_rates, folder / "merged", trained
        )
    table = learned.task.table
    pairs = [*zip(table.input, table.target, strict=True)] if learner.prompts else []
    facts = {
        "inner_steps": learned.steps,
        "left_out": learned.left_out,
        "support": support_digest(table),
        "settings": identifying(settings, learner.method),
        "weights": weights_state(settings.model_name_or_path),
        **({"prompt_examples": pairs} if pairs else {}),
        **({"facts": learned.task.facts} if learned.task.facts else {}),
    }
    for each in model_folders(folder):
        stored = json.loads((each / SETTINGS_FILE).read_text(encoding="utf-8"))
        if learner.config.learner.generates:
            stored["method"] = learner.method
        write_json(each / SETTINGS_FILE, {**stored, "adapted": facts})
    write_card(adapted, folder, settings, learned.task)
    if adapted.predictions:
        (folder / "predictions.jsonl").write_text(
            "".join(f"{one.line()}\n" for one in adapted.predictions), encoding="utf-8"
        )


def model_folders(folder: Path) -> list[Path]:
    """The folder of an adapted model, and merged/ inside it, if it is there."""
    return [one for one in (folder, folder / "merged") if one.is_dir()]


def support_digest(table: Table) -> str:
    """Digest of the examples of a task, with the content of image files."""
    return digest([table.input, table.target, *map(content_digest, table.image)])


def identifying(settings: AdaptConfig, method: str) -> dict[str, Any]:
    """The settings that change an adapted model, where they are not the defaults. method: the one in use."""
    unchanged = {item.name: unset_of(item) for item in fields(AdaptConfig)} | {"method": "finetune"}
    return {
        name: value
        for name, value in {**vars(settings), "method": method}.items()
        if value != unchanged[name] and name not in NOT_IDENTIFYING
    }


def write_card(adapted: AdaptedModel, folder: Path, settings: AdaptConfig, task: TaskExamples) -> None:
    """Write README.md into the adapted model's folder, and into merged/ inside it."""
    config, base, labels = adapted.loaded.config, settings.model_name_or_path, adapted.labels
    source = code(task.name or Path(settings.support).name) if settings.support else "given in Python"
    examples = counted(len(task.table.input), "example")
    query = Path(settings.query).name if settings.query else "query"
    left_out, accuracy = adapted.left_out, adapted.accuracy
    of_classes = f" of {units_of(len(labels), 'class')}" if config.learner.of_classes else ""
    numbers = ", ".join(f"{escaped(name)} {value:.4g}" for name, value in adapted.metrics.items())
    prompt = prompt_text(adapted.loaded) if adapted.loaded.prompt_examples else ""
    facts = {
        "base model": code(public_name(base)),
        "meta-training": meta_training(base),
        "support": f"{source}: {examples}{of_classes}",
        "prompt": "the examples precede every input" if prompt else "",
        "inner loop": inner_loop(config, adapted.inner_steps),
        "trained weights": trained_weights(config),
        "accuracy on examples left out": ""
        if left_out is None
        else f"{100 * left_out:.1f} %; the steps were chosen on them",
        f"accuracy on {code(query)}": ""
        if accuracy is None
        else f"{100 * accuracy:.1f} % of {counted(len(adapted.predictions), 'example')}",
        f"metrics on {code(query)}": numbers,
    }
    kind = config.learner.noun(adapted.loaded.description.images) or "new"
    kind = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} task"
    for each in model_folders(folder):
        model_card.write_card(
            each,
            Content(
                base=base,
                config=config,
                pooling=adapted.loaded.description.pooling,
                images=adapted.loaded.description.images,
                adapter=bool(config.lora_r) and each == folder,
                summary=f"This model was adapted to {kind} from {examples} with fmmeta.",
                facts=facts,
                adapted=True,
                classes=labels,
                prompt=prompt,
                results=query_results(adapted, printable(query)),
            ),
        )


def prompt_text(model: LoadedModel) -> str:
    """The text of an input with the model's pairs before it, as far as there are positions, without a leading
    `bos`.
    """
    examples = model.encode([{"input": example_input(model.config.prompt_template, INPUT)}], {})
    (ids,) = model.prompts_of(model.prompt_examples, examples, 1)
    begin = leading_bos(ids, model.tokenizer.bos_token_id)
    return model.tokenizer.decode(ids[begin:], clean_up_tokenization_spaces=False)


def query_results(adapted: AdaptedModel, name: str) -> list[EvalResult]:
    """The accuracy on the query set for the metadata of a card, or the metrics of the learner; none without a
    query set.
    """
    numbers, spec = dict(adapted.metrics), adapted.loaded.config.learner
    if adapted.accuracy is not None:
        numbers["accuracy" if spec.of_classes else "exact_match"] = adapted.accuracy
    return [
        EvalResult(
            task_type=spec.noun(adapted.loaded.description.images).replace(" ", "-") or "other",
            dataset_type=name,
            dataset_name=name,
            dataset_split="query",
            metric_type=metric,
            metric_name=metric.replace("_", " "),
            metric_value=round(value, 4),
            metric_args={"examples": len(adapted.predictions)},
        )
        for metric, value in numbers.items()
        if math.isfinite(value)
    ]


def meta_training(base: str) -> str:
    """How the base was meta-trained, from its folder and the run.json beside it."""
    stored: dict[str, Any] = remembered(base)
    if stored.get("algorithm", "none") == "none":  # `tune` writes fmmeta.json too
        return "none"
    shots = "" if stored_kind(stored).ordered else f", {escaped(stored.get('k_shot'))}-shot"
    text = f"{escaped(stored['algorithm'])}{shots}"
    try:
        run = json.loads((Path(base).parent / "run.json").read_text(encoding="utf-8"))["settings"]
        return (
            f"{text}, on {' '.join(code(public_name(one)) for one in run['dataset'])},"
            f" {escaped(run['outer_steps'])} outer steps of {escaped(run['meta_batch_size'])} tasks"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return text  # no such file, or a file of another program
