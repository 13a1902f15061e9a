"""beside.yaml: fmmeta's encoders and other libraries on the same texts. mteb.yaml: MTEB's own program.

As a script it needs no package of this repository, so that a library may have a separate interpreter:
`python beside.py ROW FILE MODEL` reads tasks, {support, query: [[class, text], ...]}, and prints accuracy and
CPU seconds of each.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Texts = list[tuple[int, str]]


def tasks_of(cell: Any, data: str) -> list[dict[str, Texts]]:
    """The tasks of a cell, the same ones for every row."""
    from experiments.data import texts_of

    name, shots, count = cell.axes["set"], cell.axes["shots"], cell.settings["tasks"]
    train, test = (texts_of(data, name, part) for part in ("train", "test"))
    held_out = json.loads(Path(data, name, "class_splits.json").read_text())["01"]["test"]
    tasks = list[dict[str, Texts]]()
    for number in range(count):
        rng = random.Random(f"{name} {cell.axes['classes']} {cell.axes.get('draw', number)}")
        chosen = rng.sample(sorted(held_out), 5) if cell.axes["classes"] == "5" else sorted(train)
        task: dict[str, Texts] = {"support": [], "query": []}
        for place, label in enumerate(chosen):
            learned = rng.sample(train[label], 5)[:shots]
            asked = rng.sample(test[label], 5) if cell.axes["classes"] == "5" else test[label]
            task["support"] += [(place, text) for text in learned]
            task["query"] += [(place, text) for text in asked]
        tasks.append(task)
    return tasks


def write_shots(folder: Path, support: Texts) -> None:
    """The examples as a data set, all of whose classes are trained on."""
    from experiments.data import write_csv

    texts: dict[str, list[str]] = {}
    for label, text in support:
        texts.setdefault(f"class {label}", []).append(text)
    write_csv(folder / "my.csv", texts)
    (folder / "splits.json").write_text(json.dumps({"train": [*texts], "valid": [], "test": []}))


def of_features(encode: Callable, head: Callable, task: dict[str, Texts]) -> list[int]:
    """Predictions of a classifier on features of length 1."""
    support, query = (encode([text for _, text in task[part]]) for part in ("support", "query"))
    return head(support, [label for label, _ in task["support"]], query)


def fmmeta_row(cell: Any, model: str) -> Callable[[dict[str, Texts]], list[int]]:
    """A method of `fmmeta evaluate` on frozen features."""
    import torch

    from experiments.data import Encoder
    from fmmeta.evaluation import methods

    encode, method = Encoder(model), getattr(methods, cell.settings["method"])

    def head(support: Any, labels: list[int], query: Any) -> list[int]:
        return method(support, torch.tensor(labels), query, max(labels) + 1).argmax(1).tolist()

    return lambda task: of_features(encode, head, task)


def logistic(support: Any, labels: list[int], query: Any) -> list[int]:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=1000).fit(support, labels).predict(query).tolist()


def neighbors(support: Any, labels: list[int], query: Any) -> list[int]:
    from sklearn.neighbors import KNeighborsClassifier

    shots = len(labels) // len({*labels})
    return KNeighborsClassifier(shots).fit(support, labels).predict(query).tolist()


def sklearn_row(model: str, head: Callable) -> Callable[[dict[str, Texts]], list[int]]:
    """scikit-learn on the features of sentence-transformers, both with their defaults."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model, device="cpu")
    return lambda task: of_features(encoder.encode, head, task)


def setfit_row(model: str) -> Callable[[dict[str, Texts]], list[int]]:
    """SetFit: one epoch of the pairs of its paper, 20 per text and sign; the rest are its defaults."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments  # type: ignore[import-not-found]

    def answer(task: dict[str, Texts]) -> list[int]:
        rows = Dataset.from_list([{"text": text, "label": label} for label, text in task["support"]])
        learned = SetFitModel.from_pretrained(model, device="cpu")
        arguments = TrainingArguments(num_iterations=20, report_to="none", save_strategy="no")
        Trainer(learned, args=arguments, train_dataset=rows).train()
        return [int(one) for one in learned.predict([text for _, text in task["query"]])]

    return answer


def triplets_row(model: str) -> Callable[[dict[str, Texts]], list[int]]:
    """sentence-transformers: BatchAllTripletLoss, ten epochs; then logistic regression."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import BatchAllTripletLoss  # type: ignore[import-not-found]

    def answer(task: dict[str, Texts]) -> list[int]:
        rows = Dataset.from_list([{"text": text, "label": label} for label, text in task["support"]])
        encoder = SentenceTransformer(model, device="cpu")
        arguments = SentenceTransformerTrainingArguments(
            num_train_epochs=10,
            per_device_train_batch_size=32,
            learning_rate=2e-5,
            batch_sampler="group_by_label",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        SentenceTransformerTrainer(
            encoder, arguments, train_dataset=rows, loss=BatchAllTripletLoss(encoder)
        ).train()
        return of_features(encoder.encode, logistic, task)

    return answer


class Accuracy:
    """The share of equal numbers."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        pairs = [*zip(predictions, references, strict=True)]
        return {"accuracy": sum(int(a) == int(b) for a, b in pairs) / len(pairs)}


def fastfit_row(model: str) -> Callable[[dict[str, Texts]], list[int]]:
    """FastFit with the settings of its README; the names of classes say nothing, as for the other rows."""
    from datasets import Dataset
    from fastfit import FastFitTrainer, train  # type: ignore[import-not-found]

    train.load_metric = lambda *names, **options: Accuracy()  # it would fetch a script that counts matches

    def answer(task: dict[str, Texts]) -> list[int]:
        support, query = (
            Dataset.from_list([{"text": text, "label": f"class {label}"} for label, text in task[part]])
            for part in ("support", "query")
        )
        trainer = FastFitTrainer(
            model_name_or_path=model,
            label_column_name="label",
            text_column_name="text",
            num_train_epochs=40,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            max_text_length=64,
            num_repeats=4,
            optim="adafactor",
            clf_loss_factor=0.1,
            fp16=False,
            use_cpu=True,
            report_to="none",
            dataloader_drop_last=False,
            train_dataset=support,
            validation_dataset=support,
            test_dataset=query,
        )
        trainer.train()
        share = trainer.test()["eval_accuracy"]
        right = round(share * len(task["query"]))
        return [label if place < right else -1 for place, (label, _) in enumerate(task["query"])]

    return answer


ROWS: dict[str, Callable[[str], Callable[[dict[str, Texts]], list[int]]]] = {
    "kNN": lambda model: sklearn_row(model, neighbors),
    "logistic": lambda model: sklearn_row(model, logistic),
    "setfit": setfit_row,
    "triplets": triplets_row,
    "fastfit": fastfit_row,
}


def scores(answer: Callable[[dict[str, Texts]], list[int]], tasks: list[dict[str, Texts]]) -> dict[str, Any]:
    """Accuracy in percent and CPU seconds of each task."""
    found: dict[str, list[str]] = {"accuracy": [], "cpu_seconds": []}
    for number, task in enumerate(tasks):
        began = time.process_time()
        predicted = answer(task)
        found["cpu_seconds"].append(f"{time.process_time() - began:.2f}")
        right = sum(one == label for one, (label, _) in zip(predicted, task["query"], strict=True))
        found["accuracy"].append(f"{100 * right / len(predicted):.2f}")
        print(f"task {number + 1}/{len(tasks)}  {found['accuracy'][-1]} %", file=sys.stderr, flush=True)
    return {name: " ".join(values) for name, values in found.items()}


def mteb_scores(texts: dict[str, Texts], model: str) -> dict[str, str]:
    """Accuracy in percent of each of the ten draws of MTEB's Banking77Classification."""
    import mteb  # type: ignore[import-not-found]
    from datasets import Dataset, DatasetDict
    from sentence_transformers import SentenceTransformer

    task = mteb.get_task("Banking77Classification")
    parts: dict[Any, Dataset] = {
        part: Dataset.from_list([{"text": text, "label": label} for label, text in rows])
        for part, rows in texts.items()
    }
    task.dataset, task.data_loaded = DatasetDict(parts), True
    found = mteb.evaluate(SentenceTransformer(model, device="cpu"), task, cache=None).task_results[0]
    each = found.scores["test"][0]["scores_per_experiment"]
    return {"accuracy": " ".join(f"{100 * one['accuracy']:.2f}" for one in each)}


def measure_mteb(study: Any, cell: Any) -> dict[str, Any]:
    """`mteb_scores` of an encoder, on the texts of BANKING77."""
    from experiments.data import texts_of

    texts = {part: texts_of(study.data, "banking77", part) for part in ("train", "test")}
    places = {name: place for place, name in enumerate(sorted(texts["train"]))}
    rows = {
        part: [(places[name], text) for name, some in found.items() for text in some]
        for part, found in texts.items()
    }
    model, seconds = study.trained(cell)
    return {**in_process("mteb", study, cell, rows, model), "training_cpu_minutes": round(seconds / 60, 1)}


def in_process(row: str, study: Any, cell: Any, texts: Any, model: str) -> dict[str, Any]:
    """What this file prints as a script, with the interpreter that ROW_PYTHON names."""
    file = Path(study.folder, f"{cell.name.replace(' ', '_')}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(texts))
    python = os.environ.get(f"{row.upper()}_PYTHON", sys.executable)
    command = [python, __file__, row, str(file), model]
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )


def measure(study: Any, cell: Any) -> dict[str, Any]:
    """Accuracy and CPU seconds of each task, and CPU minutes of a training on other classes."""
    tasks = tasks_of(cell, study.data)
    if "train" in cell.settings and cell.axes["classes"] == "all":
        write_shots(Path(study.folder, f"{cell.axes['set']} {cell.axes['draw']}"), tasks[0]["support"])
    model, seconds = study.trained(cell)
    if (row := cell.settings["library"]) == "fmmeta":
        found = scores(fmmeta_row(cell, model), tasks)
    else:
        found = in_process(row, study, cell, tasks, model)
    return {**found, "training_cpu_minutes": round(seconds / 60, 1)}


if __name__ == "__main__":
    row, file, model = sys.argv[1:]
    texts = json.loads(Path(file).read_text())
    print(json.dumps(mteb_scores(texts, model) if row == "mteb" else scores(ROWS[row](model), texts)))
