"""Settings of `evaluate`, `adapt`, `predict` and `tune`: those shared with training, and their own.

What is left open comes from the model's fmmeta.json, so that a model is adapted as it was meta-trained to be;
what that does not say is as in a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config.fields import setting
from fmmeta.config.settings import (
    POOLINGS,
    REMEMBERED,
    Config,
    InnerConfig,
    ModelConfig,
    ParallelConfig,
    RowConfig,
    TaskConfig,
)
from fmmeta.config.validate import check_values
from fmmeta.models.lengths import fitted
from fmmeta.models.load import describe
from fmmeta.models.stored_settings import remembered
from fmmeta.tasks.data.rows import ENDINGS, ending

METHODS = ("finetune", "prototype", "linear", "knn", "in_context")
METRICS = ("rouge_l", "options")
EVAL_SPLITS = ("train", "valid", "test")
OF_OPTIMIZER = ("inner_momentum", "inner_beta1", "inner_beta2", "inner_epsilon", "inner_weight_decay")
OPEN = " (default: as the model was meta-trained)"


@dataclass
class FewShotConfig(ModelConfig, RowConfig, InnerConfig):
    """What the commands share."""

    model_name_or_path: str = setting("tiny", "HF folder or hub id")
    task_type: str = setting(None, "classification or causal_lm" + OPEN)
    head_init: str = setting(
        None, "Classifier head at the start of a task: zero, learned or prototype" + OPEN
    )
    feature_norm: float = setting(None, "Length that sentence vectors are scaled to; 0: as they are" + OPEN)
    max_length: int = setting(None, "Longest text in tokens; the rest is cut off" + OPEN)
    prompt_template: str = setting(None, "causal_lm: plain, chat or a format string" + OPEN)
    lora_r: int = setting(None, "Rank of LoRA adapters; 0: all weights" + OPEN)
    lora_target_modules: list[str] = setting([], "LoRA: which linear layers get adapters" + OPEN)
    inner_steps: int = setting(None, "Gradient steps on the support set" + OPEN)
    inner_lr: float = setting(None, "Step size of the inner optimizer" + OPEN)
    inner_optimizer: str = setting(None, "sgd, momentum or adamw" + OPEN)
    inner_momentum: float = setting(None, "Momentum of inner_optimizer=momentum" + OPEN)
    inner_beta1: float = setting(None, "Decay of AdamW's first moment" + OPEN)
    inner_beta2: float = setting(None, "Decay of AdamW's second moment" + OPEN)
    inner_epsilon: float = setting(None, "Epsilon of AdamW" + OPEN)
    inner_weight_decay: float = setting(None, "Decoupled weight decay of AdamW" + OPEN)
    inner_lr_schedule: str = setting(None, "constant, linear or cosine" + OPEN)
    seed: int = setting(42, "Seed of the episodes and of fresh weights")

    def remembered(self) -> dict[str, Any]:
        """fmmeta.json of the model, empty for a model that never met fmmeta."""
        return remembered(self.model_name_or_path)

    def run_config(self, **values: Any) -> Config:
        """The settings of a run that trains nothing, this command's values and the model's memory in it."""
        names = {item.name for item in fields(Config)}
        mine = {item.name: getattr(self, item.name) for item in fields(self) if item.name in names}
        given = {name: value for name, value in mine.items() if value is not None and value != []}
        memory = self.remembered()
        kept = {name: memory[name] for name in REMEMBERED if name in memory and name not in given}
        if "inner_optimizer" in given:  # what belongs to the model's own optimizer goes with it
            kept = {name: value for name, value in kept.items() if name not in OF_OPTIMIZER}
        if "lora_r" in given:
            kept = {name: value for name, value in kept.items() if not name.startswith("lora_")}
        config = Config(**{**kept, **given, "algorithm": "none", **values})
        if "head_init" in kept and self.lost_head(config):
            config = replace(config, head_init="zero")
        return config if config.builtin_model else fitted(config, describe(config).hf_config)

    def lost_head(self, config: Config) -> str | None:
        """What to say where the model's learned head has outputs for other tasks, and a task's begins with
        zeros instead.
        """
        memory = self.remembered()
        classes = memory.get("classes", memory.get("n_way"))
        if config.task_type != "classification" or self.head_init or memory.get("head_init") != "learned":
            return None
        asked = config.most_classes
        return (
            None
            if classes == asked
            else f"the model's head is for {classes} classes; those of {asked} begin with zeros"
        )

    def own_rates(self) -> bool:
        """Whether the user sets the inner rates, and the model's learned ones are left alone."""
        return self.inner_lr is not None or bool(self.inner_lr_groups)


@dataclass
class EvaluateConfig(FewShotConfig, TaskConfig, ParallelConfig):
    """`fmmeta evaluate`."""

    method: list[str] = setting(["finetune"], f"How a task is learned, one or more of: {', '.join(METHODS)}")
    n_way: str = setting("5", "Classes per episode, or all: every class of the split, or of the task")
    k_shot: list[int] = setting([5], "Support examples per class; per task for causal_lm; one or more")
    episodes: int = setting(600, "Episodes; the same ones for every model, by --seed", least=1)
    eval_split: str = setting("test", "Which of the train, valid and test splits", EVAL_SPLITS)
    metrics: list[str] = setting(
        [],
        "causal_lm: also rouge_l (of greedy answers) and options (is the right one of the episode's "
        "answers the likeliest?)",
    )
    max_new_tokens: int = setting(64, "rouge_l: longest generated answer", least=1)
    compare: str | None = setting(
        None, "Another model, or the results.json of an earlier evaluation: the paired difference"
    )
    output: str | None = setting(None, "JSON file for the results")

    def __post_init__(self) -> None:
        self.n_way = str(self.n_way)
        for name, known in (("method", METHODS), ("metrics", METRICS)):
            for value in getattr(self, name):
                if value not in known:
                    raise UsageError(f"{name}={value} is unknown; use {', '.join(known)}")
        if not self.method or not self.k_shot:
            raise UsageError(f"{'k_shot' if self.method else 'method'} names nothing; give one or more")
        if self.n_way != "all" and not self.n_way.isdigit():
            raise UsageError(f"n_way={self.n_way} is neither a number nor all; use 5, say")
        if self.eval_split not in EVAL_SPLITS:
            raise UsageError(f"eval_split={self.eval_split} is unknown; use {', '.join(EVAL_SPLITS)}")
        check_values(self)
        if self.n_way == "all" and self.n_way_max is not None:
            raise UsageError(f"n_way_max={self.n_way_max} means nothing for n_way=all; leave it out")
        if self.k_shot_max is not None and len(self.k_shot) > 1:
            raise UsageError(
                f"k_shot_max={self.k_shot_max} goes with one k_shot, and here are {len(self.k_shot)};"
                " give one"
            )


@dataclass
class TuneConfig(EvaluateConfig):
    """`fmmeta tune`. Of what `evaluate` has, method, compare and metrics mean nothing here."""

    eval_split: str = setting("valid", "The split that the choice is made on", EVAL_SPLITS)
    episodes: int = setting(40, "Episodes; the same ones for every choice", least=1)
    inner_lrs: list[float] = setting(
        [0.01, 0.03, 0.1, 0.3, 1.0], "Rates to try; for optuna the least and the greatest"
    )
    max_steps: int = setting(10, "Most inner steps", least=1)
    head_inits: list[str] = setting(
        [], "Heads to try (default: zero, and prototype where the model can use it)"
    )
    tuner: str = setting(
        "grid", "grid: every head with every rate; optuna: as many --trials as asked", ("grid", "optuna")
    )
    trials: int = setting(20, "optuna: trials", least=1)
    output: str | None = setting(None, "JSON file for the choice (default: the model's own fmmeta.json)")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "method",
            "compare",
            "metrics",
            "inner_lr",
            "inner_steps",
            "head_init",
            "inner_lr_groups",
        ):
            value = getattr(self, name)
            if value not in (None, [], ["finetune"]):
                raise UsageError(f"{name}={value} means nothing for tune; leave it out")
        if len(self.k_shot) != 1:
            raise UsageError(
                f"k_shot={' '.join(map(str, self.k_shot))}: tune chooses for one number of shots; give one"
            )
        for rate in self.inner_lrs:
            if not 0 < rate < math.inf:
                raise UsageError(f"inner_lrs={rate} is no positive number; use some such as 0.01 0.1 1")
        for head in self.head_inits:
            if head not in ("zero", "prototype", "learned"):
                raise UsageError(f"head_inits={head} is unknown; use zero, prototype or learned")
        if not self.inner_lrs:
            raise UsageError("inner_lrs names nothing to try; give one or more")
        if self.tuner not in ("grid", "optuna"):
            raise UsageError(f"tuner={self.tuner} is unknown; use grid or optuna")


@dataclass
class AdaptConfig(FewShotConfig):
    """`fmmeta adapt`."""

    support: str = setting("", "File of the examples to learn from: .jsonl, .csv or .parquet (.gz too)")
    query: str | None = setting(None, "File of labelled examples to be tested on")
    output_dir: str = setting("", "Folder of the adapted model")
    early_stopping: bool = setting(
        True,
        "Choose the inner steps (up to twice inner_steps) by leaving out an example of each "
        "class in turn, where each class has two or more",
    )
    micro_batch_size: int = setting(32, "Most examples of one forward pass", least=1)
    bf16: bool = setting(False, "bf16 weights and activations over fp32 master weights")
    max_new_tokens: int = setting(64, "causal_lm: longest generated answer to a query", least=1)

    def __post_init__(self) -> None:
        for name in ("support", "query"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise UsageError(f"{name}={path} is not a file; give a .jsonl, .csv or .parquet file")
            if path and not ending(Path(path)):
                raise UsageError(
                    f"{name}={path} is no {', '.join(ENDINGS)} file (.gz too); convert it to one of them"
                )
        check_values(self)


@dataclass
class PredictConfig:
    """`fmmeta predict`."""

    model_name_or_path: str = setting(
        "", "Folder that `fmmeta adapt` wrote, or any classifier or language model"
    )
    task_type: str = setting(None, "classification or causal_lm" + OPEN)
    pooling: str = setting(
        "auto", "Sentence vector of an encoder; auto: as the folder says, else the model's own", POOLINGS
    )
    feature_norm: float = setting(None, "Length that sentence vectors are scaled to; 0: as they are" + OPEN)
    input: str = setting(
        "-",
        "File of inputs, or - for standard input: a text or a JSON object with text (input) on every "
        "line, or a .csv or .parquet file (.gz too) with such a column",
    )
    output: str = setting("-", "File for the answers, or - for standard output: one JSON object per line")
    text_column: str | None = setting(
        None, "Key or column of the text (default: text, sentence, utterance or input)"
    )
    max_length: int = setting(None, "Longest text in tokens; the rest is cut off" + OPEN)
    prompt_template: str = setting(None, "causal_lm: plain, chat or a format string" + OPEN)
    micro_batch_size: int = setting(
        32, "Most inputs of one forward pass, when they come from a file", least=1
    )
    max_new_tokens: int = setting(64, "causal_lm: longest answer", least=1)
    attn_implementation: str | None = setting(
        None, "Passed to transformers: eager, sdpa, flash_attention_2, ..."
    )
    trust_remote_code: bool = setting(False, "Let transformers run code that comes with the checkpoint")

    def __post_init__(self) -> None:
        if not self.model_name_or_path:
            raise UsageError("model_name_or_path is missing; give the folder that fmmeta adapt wrote")
        check_values(self)
        if self.input != "-" and not Path(self.input).is_file():
            raise UsageError(f"input={self.input} is not a file; give one, or - for standard input")
        if self.input != "-" and Path(self.output).is_file() and Path(self.output).samefile(self.input):
            raise UsageError(f"output={self.output} is the input too; give another file")
