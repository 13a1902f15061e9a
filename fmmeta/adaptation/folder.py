"""The folder of an adapted model: weights, fmmeta.json, model card, answers."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from fmmeta.adaptation.model import AdaptedModel, LoadedModel
from fmmeta.adaptation.task_learner import Learned, TaskExamples, TaskLearner
from fmmeta.checkpoint import model_card
from fmmeta.checkpoint.hf_export import export, export_adapters, write_json
from fmmeta.checkpoint.model_card import INPUT, Content, code, escaped, public_name
from fmmeta.common.errors import UsageError
from fmmeta.common.security import make_folders, printable, remove_empty
from fmmeta.config.fields import default_of
from fmmeta.evaluation.settings import AdaptConfig
from fmmeta.meta.algorithms.baselines import leading_bos
from fmmeta.models.files import BASE_FOLDER, SETTINGS_FILE, remembered, trained_with, weights_state
from fmmeta.tasks.data.encode import example_input
from fmmeta.tasks.data.images import content_digest
from fmmeta.tasks.data.rows import Table
from fmmeta.tasks.data.splits import few
from fmmeta.tasks.data.token_store import digest

PARTIAL = ".partial"  # ending of folders that are being written
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


@contextmanager
def new_folder(output_dir: str | None) -> Iterator[Path | None]:
    """A folder inside the empty `output_dir` for the block to fill; None without a name.

    It has the name of `output_dir`, which becomes the card's title. Its content is moved into `output_dir`
    when the block ends, and removed if the block raises. Files that another process has written to
    `output_dir` stay as they are. Raises `UsageError`.
    """
    if not output_dir:
        yield None
        return
    folder = Path(output_dir)
    temporary = folder / PARTIAL / Path(os.path.abspath(folder)).name
    try:
        created = make_folders(folder)
        refuse_files(folder)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"output_dir={folder} cannot be made: {error.strerror}; choose another") from None
    try:
        yield temporary
        refuse_files(folder, PARTIAL)
        store_base_path(temporary, folder)
        # last the files without which no program takes the folder for a model
        for path in sorted(temporary.iterdir(), key=lambda path: path.name.endswith("config.json")):
            path.rename(folder / path.name)
    finally:
        shutil.rmtree(temporary.parent, ignore_errors=True)
        remove_empty(created)


def refuse_files(folder: Path, but: str = "") -> None:
    """Raise `UsageError` for a folder that holds more than a file or folder named `but`."""
    names = sorted({path.name for path in folder.iterdir()} - {but})
    if names == [PARTIAL]:
        raise UsageError(
            f"output_dir={folder} holds {PARTIAL}, which fmmeta adapt writes to while it runs; remove it if"
            " no such command runs, or choose another output_dir"
        )
    if names:
        raise UsageError(
            f"output_dir={folder} is not empty ({few(names)}); choose another, so that nothing is overwritten"
        )


def store_base_path(temporary: Path, folder: Path) -> None:
    """Store the absolute path that the base of adapters of the built-in model will have in `folder`: peft
    reads it.
    """
    if (temporary / BASE_FOLDER).is_dir():
        file = temporary / "adapter_config.json"
        stored = json.loads(file.read_text(encoding="utf-8"))
        write_json(file, {**stored, "base_model_name_or_path": os.path.abspath(folder / BASE_FOLDER)})


def write_folder(adapted: AdaptedModel, folder: Path, learner: TaskLearner, learned: Learned) -> None:
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
    }
    for each in model_folders(folder):
        stored = json.loads((each / SETTINGS_FILE).read_text(encoding="utf-8"))
        if learner.config.task_type == "causal_lm":
            stored["method"] = learner.method
        write_json(each / SETTINGS_FILE, {**stored, "adapted": facts})
    write_card(adapted, folder, settings, learned.task, pairs)
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
    unchanged = {item.name: default_of(item) for item in fields(AdaptConfig)} | {"method": "finetune"}
    return {
        name: value
        for name, value in {**vars(settings), "method": method}.items()
        if value != unchanged[name] and name not in NOT_IDENTIFYING
    }


def write_card(
    adapted: AdaptedModel,
    folder: Path,
    settings: AdaptConfig,
    task: TaskExamples,
    pairs: Sequence[tuple[str, str]],
) -> None:
    """Write README.md into the adapted model's folder, and into merged/ inside it. pairs: those that precede
    every input.
    """
    config, base, labels = adapted.loaded.config, settings.model_name_or_path, adapted.labels
    source = code(task.name or Path(settings.support).name) if settings.support else "given in Python"
    examples, query = len(task.table.input), Path(settings.query).name if settings.query else "query"
    left_out, accuracy = adapted.left_out, adapted.accuracy
    facts = {
        "base model": code(public_name(base)),
        "meta-training": meta_training(base),
        "support": f"{source}: {examples} examples" + (f" of {len(labels)} classes" if labels else ""),
        "prompt": "the examples precede every input" if pairs else "",
        "inner loop": ""
        if not adapted.inner_steps
        else f"{adapted.inner_steps} steps of {config.inner_optimizer}, inner_lr {config.inner_lr:g}"
        + (f", LoRA of rank {config.lora_r}" if config.lora_r else ""),
        "accuracy on examples left out": ""
        if left_out is None
        else f"{100 * left_out:.1f} %; the steps were chosen on them",
        f"accuracy on {code(query)}": ""
        if accuracy is None
        else f"{100 * accuracy:.1f} % of {len(adapted.predictions)} examples",
    }
    inputs = "an image" if adapted.loaded.description.images else "a text"
    kind = f"{inputs} classification task" if labels else "a text generation task"
    prompt = prompt_text(adapted.loaded, pairs) if pairs else ""
    for each in model_folders(folder):
        model_card.write_card(
            each,
            Content(
                base=base,
                config=config,
                pooling=adapted.loaded.description.pooling,
                images=adapted.loaded.description.images,
                adapter=bool(config.lora_r) and each == folder,
                summary=f"This model was adapted to {kind} from {examples} examples with fmmeta.",
                facts=facts,
                adapted=True,
                classes=labels,
                prompt=prompt,
                results=query_results(adapted, printable(query)),
            ),
        )


def prompt_text(model: LoadedModel, pairs: Sequence[tuple[str, str]]) -> str:
    """The text of an input with pairs before it, as far as there are positions, without a leading `bos`."""
    _, examples, _ = model.encode_inputs([example_input(model.config.prompt_template, INPUT)])
    (ids,) = model.prompts_of(model.encode_pairs(pairs), examples, 1)
    begin = leading_bos(ids, model.tokenizer.bos_token_id)
    return model.tokenizer.decode(ids[begin:], clean_up_tokenization_spaces=False)


def query_results(adapted: AdaptedModel, name: str) -> list[EvalResult]:
    """The accuracy on the query set for the metadata of a card; none without a query set."""
    inputs = "image" if adapted.loaded.description.images else "text"
    if adapted.accuracy is None:
        return []
    return [
        EvalResult(
            task_type=f"{inputs}-classification" if adapted.labels else "text-generation",
            dataset_type=name,
            dataset_name=name,
            dataset_split="query",
            metric_type="accuracy" if adapted.labels else "exact_match",
            metric_name="accuracy" if adapted.labels else "exact match",
            metric_value=round(adapted.accuracy, 4),
            metric_args={"examples": len(adapted.predictions)},
        )
    ]


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
