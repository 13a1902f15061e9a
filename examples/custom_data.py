"""Own data: rows from anywhere become a file of tasks, and a model is meta-trained on it.

    python examples/custom_data.py

A row is a text and its label; a task is to tell n_way classes apart. For a language model a row has task,
input and output (data/pairs.jsonl). docs/how-to/data.md has the other forms: folders of files, strata, files
of splits.
"""

import os
from pathlib import Path

from datasets import Dataset

import fmmeta

HERE = Path(__file__).parent


def rows() -> Dataset:
    """Texts with labels, all at once; here from a file, yours from a spreadsheet or the hub. `fmmeta.Tasks`
    asks for the rows of each task alone.
    """
    lines = Dataset.from_json(str(HERE / "data/intents.jsonl"))
    return lines.filter(lambda row: len(row["text"]) > 15)


def main(folder: str = "runs/custom_data"):
    Path(folder).mkdir(parents=True, exist_ok=True)
    data = Path(folder) / "intents.jsonl"
    if int(os.environ.get("RANK", "0")) == 0:  # with a launcher, only one process writes
        rows().to_json(str(data))
    config = fmmeta.Config(
        model_name_or_path="tiny",  # an encoder from the hub: sentence-transformers/all-MiniLM-L6-v2
        dataset=[str(data)],
        n_way=2,
        k_shot=2,
        num_query=2,
        outer_steps=20,
        eval_episodes=20,
        output_dir=f"{folder}/run",
    )
    return fmmeta.MetaTrainer(config).train()


if __name__ == "__main__":
    result = main()
    print(f"accuracy on held-out classes: {result.after:.2f}; model in {result.output_dir / 'model'}")
