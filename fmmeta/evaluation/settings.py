"""Settings of `evaluate`, `tune`, `adapt` and `predict`: those shared with training, and those of a command.

A setting that an exported model stores in fmmeta.json is None unless the user sets it. The stored value is
then used, so that a model is adapted as it was meta-trained; without one, the default of training.
"""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import is_inside
from fmmeta.common.text import any_of
from fmmeta.config.algorithms import INNER_OPTIMIZERS, find_inner
from fmmeta.config.fields import check_values, refuse_first, setting, unset_of
from fmmeta.config.json_files import PEFT_EXAMPLE, label_texts_of, text_of
from fmmeta.config.learners import OWN, find, stored_kind
from fmmeta.config.settings import (
    GENERATED,
    HEAD_INITS,
    MAX_NEW_TOKENS,
    REMEMBERED,
    Config,
    InnerConfig,
    LoadConfig,
    ModelConfig,
    OfStoredModel,
    ParallelConfig,
    RowConfig,
    TaskConfig,
    TokenConfig,
    WorkerConfig,
)
from fmmeta.learners.files import SETTINGS_FILE, remembered
from fmmeta.learners.from_gguf import is_gguf
from fmmeta.learners.load import fitted_to_model
from fmmeta.tasks.data.files import ENDINGS, ending, is_document
from fmmeta.tasks.data.images import IMAGE_ENDINGS
from fmmeta.tasks.data.splits import few

METHODS = (
    "finetune",
    "prototype",
    "linear",
    "knn",
    "soft_kmeans",
    "sinkhorn",
    "in_context",
    "finetune+in_context",
    "zero_shot",
)
OF_ADAPT = ("finetune", "in_context", "finetune+in_context")
_, IN_CONTEXT, _ = OF_ADAPT
OF_TUNE = ("finetune", "finetune+in_context")
OF_LANGUAGE_MODELS = (*OF_ADAPT, "zero_shot")
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)  # that tune tries with sgd; a hundredth with adamw
MODEL_FILES = (  # that an output may not replace in a model's folder
    "*.safetensors",
    "*.gguf",
    "*config.json",
    "*.jinja",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "README.md",
)
SPLIT_FILES = ("class_splits.json", "task_splits.json")
EVAL_SPLITS = ("train", "valid", "test")
BELONG_TO = {  # by setting, the stored ones that are not used where it has another value than the stored
    "inner_optimizer": {
        "inner_lr",
        "inner_momentum",
        "inner_epsilon",
        "inner_weight_decay",
    },
    "chunks": {"inner_steps"},
    "chunk": {"max_length"},
    "context": {"max_length"},
    "lora_r": {"lora_alpha", "lora_target_modules", "peft_config", "inner_parameters"},
    "peft_config": {"lora_r", "lora_alpha", "lora_target_modules", "inner_parameters"},
}


def has_inner_loop(methods: str) -> bool:
    """Whether one of the methods takes gradient steps on the support set."""
    return "finetune" in methods


def has_prompts(methods: str) -> bool:
    """Whether one of the methods puts the support set into the prompt of a query."""
    return "in_context" in methods


def refuse_input_as_output(settings: Any) -> None:
    """Raise `UsageError` if the file `output` is an input: of another setting, or in a folder of data or of a
    model.
    """
    output = settings.output or ""
    if not os.path.isfile(output):
        return

    def is_output(path: str) -> bool:
        with suppress(OSError, ValueError):  # of a text that is no path
            return os.path.samefile(path, output)
        return False

    file = Path(output).name
    is_data = (
        ending(Path(file)) not in (None, ".json")
        or file in SPLIT_FILES
        or file.lower().endswith(IMAGE_ENDINGS)
    )
    of_model = MODEL_FILES if isinstance(settings, TuneConfig) else (*MODEL_FILES, SETTINGS_FILE)
    is_of_model = any(fnmatch(file, pattern) for pattern in of_model)
    in_folders = {
        "dataset": is_data,
        **dict.fromkeys(("model_name_or_path", "adapters", "compare"), is_of_model),
    }
    for name, values in vars(settings).items():
        for value in map(str, values if isinstance(values, list) else [values]):
            in_folder = in_folders.get(name) and os.path.isdir(value) and is_inside(Path(value), Path(output))
            if name != "output" and (is_output(value) or in_folder):
                raise UsageError(f"output={output} is an input too, of {name}={value}; give another file")


@dataclass
class FewShotConfig(OfStoredModel, ModelConfig, RowConfig, InnerConfig):
    """Settings of a model that learns a task: shared by `evaluate`, `tune` and `adapt`."""

    model_name_or_path: str = setting("tiny", "HF folder, hub id or GGUF file")
    seed: int = setting(42, "Seed of the episodes and of newly initialised weights")

    def run_config(self, *, labels: Sequence[str] = (), **values: Any) -> Config:
        """The `Config` of a run without training: `values`, then set flags, then what the model stores.

        labels: names of the classes of the task, where there is one task only.
        """
        shared = vars(self).keys() & Config.__dataclass_fields__.keys()
        given = {name: getattr(self, name) for name in shared if getattr(self, name) not in (None, [])}
        memory = remembered(self.model_source)
        changed = [owner for owner in BELONG_TO if owner in given and given[owner] != memory.get(owner)]
        replaced = set(given).union(*(BELONG_TO[owner] for owner in changed))
        if "own_task_type" in memory and "task_type" not in replaced:
            raise UsageError(
                f"task_type={memory['own_task_type']} is code that fmmeta.json of {self.model_name_or_path}"
                f" names; no code is imported from there: give --task_type {memory['own_task_type']} to use"
                f" yours{'' if memory['task_type'] == OWN.name else ', or ' + memory['task_type']}"
            )
        named = memory.get("inner_optimizer", "sgd")
        if ":" in named and "inner_optimizer" not in replaced:
            if self.finetunes:
                raise UsageError(
                    f"inner_optimizer={named} is code that fmmeta.json of {self.model_name_or_path} names; no"
                    f" code is imported from there: give --inner_optimizer {named} to use yours, or sgd"
                )
            replaced |= {"inner_optimizer", *BELONG_TO["inner_optimizer"]}
        stored = {name: memory[name] for name in REMEMBERED if name in memory and name not in replaced}
        if "answers" not in shared:  # a command that learns the answers that its file has
            stored.pop("answers", None)
        if (find(given["task_type"]) if "task_type" in given else stored_kind(memory)).ordered:
            given["n_way"] = values["n_way"] = None
        config = Config(**{**stored, **given, "algorithm": "none", **values})
        if "head_init" in stored and self.unusable_head(config, labels):
            config = replace(config, head_init="zero")
        return config if config.builtin_model else fitted_to_model(config, self.finetunes)

    def unusable_head(self, config: Config, labels: Sequence[str] = ()) -> str:
        """See `misfit_of_head`; empty if the model's learned head would not be used."""
        learned = not self.head_init and remembered(self.model_source).get("head_init") == "learned"
        return self.misfit_of_head(config, labels) if config.learner.has_head and learned else ""

    def misfit_of_head(self, config: Config, labels: Sequence[str] = ()) -> str:
        """A message if the stored head is for another number of classes than `config` has, or, in a folder
        that `adapt` wrote, for other classes than `labels`.
        """
        memory = remembered(self.model_source)
        classes, own = memory.get("classes", memory.get("n_way")), memory.get("labels", labels)
        if list(own) != list(labels):
            return f"the model's head is for the classes {few(own)}; those of these tasks begin with zeros"
        if classes == config.most_classes:
            return ""
        return f"the model's head is for {classes} classes; those of {config.most_classes} begin with zeros"

    @property
    def stored_method(self) -> str:
        """The method that the model was trained for."""
        stored = remembered(self.model_source).get("method")
        return stored if stored in METHODS else "finetune"

    @property
    def finetunes(self) -> bool:
        """Whether a method has an inner loop: of the command, or else that of the model."""
        method = vars(self)["method"] or [self.stored_method]
        return any(map(has_inner_loop, [method] if isinstance(method, str) else method))

    def read_json_files(self) -> None:
        """Replace paths by texts: what is stored beside a result identifies it. Raises `UsageError`."""
        self.label_names = label_texts_of(self.label_names)
        self.peft_config = text_of("peft_config", self.peft_config, PEFT_EXAMPLE)

    def refuse_methods(self, methods: Sequence[str], config: Config) -> None:
        """Raise `UsageError` for a prompt of a classifier, and for a setting of the inner loop if none of the
        methods has one.
        """
        named = " ".join(methods)
        refuse_first(
            [
                *(
                    (
                        has_prompts(method) and not config.learner.generates,
                        f"method={method} puts the support set into the prompt, and"
                        f" task_type={config.task_type} has none; use finetune",
                    )
                    for method in methods
                ),
                *(
                    (
                        methods and not has_inner_loop(named) and getattr(self, name) not in (None, []),
                        f"{name}={getattr(self, name)} is of the inner loop, and method={named} has none;"
                        " leave it out, or use finetune",
                    )
                    for name in ("head_init", *InnerConfig.__dataclass_fields__)
                ),
            ]
        )

    @property
    def sets_inner_lr(self) -> bool:
        """Whether the learned rates of the model are not used: the user sets rates, or another optimizer."""
        stored = remembered(self.model_source).get("inner_optimizer", "sgd")
        another = self.inner_optimizer is not None and self.inner_optimizer != stored
        return another or self.inner_lr is not None or bool(self.inner_lr_groups)


@dataclass
class EvaluateConfig(FewShotConfig, TaskConfig, ParallelConfig):
    """`fmmeta evaluate`."""

    method: list[str] = setting(
        [],
        "One or more methods of learning a task; soft_kmeans, sinkhorn: means of the support set and"
        " all queries of the episode (transductive);"
        " finetune+in_context: the support set is in the prompt of every query, and in the inner loop the"
        " other examples are in that of each support example (default: that of the model, which is in_context"
        " after meta_icl; else finetune)",
        METHODS,
    )
    n_way: str = setting(
        None,
        "Classes per episode, or all: every class of the split, or of the task (default: 5; 3 for the suite"
        " digits)",
    )
    k_shot: list[int] = setting([5], "Support examples per class; per task for causal_lm; one or more")
    episodes: int = setting(600, "Episodes; the same ones for every model, by --seed", least=1)
    eval_split: str = setting("test", "Which of the train, valid and test splits", EVAL_SPLITS)
    metrics: list[str] = setting(
        [],
        "module:name of functions (predictions, references) -> numbers by name, as in training; causal_lm:"
        " also rouge_l and exact_match (of greedy answers), options (is the right one of the row's options,"
        " or of the episode's answers, the likeliest?) and rank (its place among them, from 1)",
    )
    max_new_tokens: int = setting(MAX_NEW_TOKENS, "rouge_l, exact_match: longest generated answer", least=1)
    compare: str | None = setting(
        None, "Another model, or the results.json of an earlier evaluation: the paired difference"
    )
    output: str | None = setting(None, "JSON file for the results", writes=(".json",))

    def __post_init__(self) -> None:
        if self.n_way is None:
            names = [self.dataset] if isinstance(self.dataset, str) else self.dataset
            self.n_way = "3" if "digits" in names else "5"
        self.n_way = str(self.n_way)
        refuse_input_as_output(self)
        self.read_json_files()
        self.method, self.k_shot = list(dict.fromkeys(self.method)), list(dict.fromkeys(self.k_shot))
        check_values(self)
        refuse_first(
            [
                (not self.dataset, "dataset=[] names no data set; give one or more"),
                (not self.k_shot, "k_shot names nothing; give one or more"),
                (
                    self.lora_merge,
                    "lora_merge=True is of training, and no model is written here; leave it out",
                ),
                (
                    self.n_way != "all" and not self.n_way.isdecimal(),
                    f"n_way={self.n_way} is neither a number nor all; use 5, say",
                ),
                (
                    self.n_way == "all" and self.n_way_max is not None,
                    f"n_way_max={self.n_way_max} means nothing for n_way=all; leave it out",
                ),
                (
                    self.k_shot_max is not None and len(self.k_shot) > 1,
                    f"k_shot_max={self.k_shot_max} goes with one k_shot, and here are {len(self.k_shot)};"
                    " give one",
                ),
            ]
        )

    def with_method(self) -> "EvaluateConfig":
        """These settings with the method that the model was trained for, if they name none."""
        return self if self.method else replace(self, method=[self.stored_method])

    @property
    def compare_model(self) -> str | None:
        """The other model of a comparison; None where `compare` is a file of results."""
        compare = self.compare or ""
        results = compare.endswith(".json") or (os.path.isfile(compare) and not is_gguf(compare))
        return None if results else self.compare

    def run_config(self, **values: Any) -> Config:
        """See `FewShotConfig`. n_way=all counts as 2 until the data are read; k_shot is the largest. Without
        classes n_way is the number of outputs, by default that of the model.
        """
        n_way, k_shot = 2 if self.n_way == "all" else int(self.n_way), max(self.k_shot)
        config = super().run_config(**{"n_way": n_way, "k_shot": k_shot, **values})
        if self.n_way == "5" and config.learner.has_head and not config.learner.of_classes:
            stored = remembered(self.model_source).get("classes")
            config = super().run_config(**{"n_way": stored, "k_shot": k_shot, **values})
        return config

    def check_run(self, config: Config) -> None:
        """Raise `UsageError` for settings that have no effect on these methods or this kind of task."""
        causal = config.learner.generates
        self.refuse_methods(self.method, config)
        refuse_first(
            [
                *(
                    (
                        not config.learner.of_classes and method not in OF_LANGUAGE_MODELS,
                        f"method={method} classifies features, and task_type={config.task_type} has no"
                        f" classes; use {any_of(OF_LANGUAGE_MODELS) if causal else 'finetune'}",
                    )
                    for method in self.method
                ),
                (
                    "zero_shot" in self.method and config.learner.has_head,
                    "method=zero_shot answers without a support set, and a classifier of"
                    f" task_type={config.task_type} has no head then; use finetune",
                ),
                (
                    self.class_weights is not None and not self.finetunes,
                    f"class_weights={self.class_weights} weighs the loss of an inner loop, and"
                    f" method={' '.join(self.method)} has none; leave it out, or use finetune",
                ),
                (
                    self.max_new_tokens != MAX_NEW_TOKENS and not {*GENERATED} & {*self.metrics},
                    f"max_new_tokens={self.max_new_tokens} bounds generated answers, and none are scored;"
                    " leave it out, or give --metrics exact_match or rouge_l",
                ),
                (
                    config.answers is not None and self.n_way == "all",
                    f"n_way=all with answers={config.answers}: the answers of an episode are those of a few"
                    " classes; give a number",
                ),
                (
                    not (config.learner.has_head or config.answers)
                    and self.n_way not in ("5", "all" if not config.learner.ordered else "")
                    and "digits" not in self.dataset,
                    f"n_way={self.n_way} means nothing for task_type={config.task_type}; leave it out",
                ),
            ]
        )


@dataclass
class TuneConfig(EvaluateConfig):
    """`fmmeta tune`: the settings of `evaluate` but compare and metrics, and what is tried."""

    method: list[str] = setting(
        [],
        "The method whose inner loop is chosen (default: finetune; finetune+in_context for a model of"
        " meta_icl, or one that was tuned for it)",
        OF_TUNE,
    )
    eval_split: str = setting("valid", "The split that the choice is made on", EVAL_SPLITS)
    episodes: int = setting(40, "Episodes; the same ones for every choice", least=1)
    inner_lrs: list[float] = setting(
        [],
        "Rates to try with each optimizer; for optuna the least and the greatest (default: 0.01 0.03 0.1 0.3"
        " 1.0; a hundredth of each for adamw)",
    )
    inner_optimizers: list[str] = setting(
        [], "Inner optimizers to try (default: --inner_optimizer; for causal_lm without it sgd and adamw)"
    )
    max_steps: int = setting(10, "Most inner steps", least=1)
    head_inits: list[str] = setting(
        [],
        "Heads to try (default: zero, prototype if the model can use it, and the model's learned one)",
        HEAD_INITS,
    )
    tuner: str = setting(
        "grid",
        "grid: every head and optimizer with every rate; optuna: as many --trials as requested",
        ("grid", "optuna"),
    )
    trials: int = setting(20, "optuna: trials", least=1)
    minutes: float | None = setting(
        None,
        "Try no further choices after this many minutes; the first is always completed, and the same command"
        " continues with the others (default: no limit)",
        positive="or leave it out",
    )
    output: str | None = setting(
        None, "JSON file for the choice (default: the model's own fmmeta.json)", writes=(".json",)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = ("compare", "metrics", "inner_lr", "inner_steps", "head_init", "inner_lr_groups")
        refuse_first(
            [
                *(
                    (
                        getattr(self, name) not in (None, []),
                        f"{name}={getattr(self, name)} means nothing for tune; leave it out",
                    )
                    for name in unused
                ),
                (
                    self.trials != TuneConfig.trials and self.tuner == "grid",
                    f"trials={self.trials} means nothing for tuner=grid, which tries every choice; leave it"
                    " out, or use --tuner optuna",
                ),
                (
                    self.max_new_tokens != MAX_NEW_TOKENS,
                    f"max_new_tokens={self.max_new_tokens} means nothing for tune, which generates no"
                    " answers; leave it out",
                ),
                (
                    len(self.k_shot) > 1,
                    f"k_shot={' '.join(map(str, self.k_shot))}: tune chooses for one number of shots; give"
                    " one",
                ),
                *(
                    (
                        not 0 < rate < math.inf,
                        f"inner_lrs={rate} is no positive number; use some such as 0.01 0.1 1",
                    )
                    for rate in self.inner_lrs
                ),
                (
                    len(self.method) > 1,
                    f"method={' '.join(self.method)}: tune chooses for one method; give one",
                ),
            ]
        )
        for name in self.inner_optimizers:
            if ":" not in name and name not in INNER_OPTIMIZERS:
                find_inner(name)

    def with_method(self) -> "TuneConfig":
        """See `EvaluateConfig`."""
        return self if self.method else replace(self, method=[OF_TUNE[has_prompts(self.stored_method)]])

    def rates(self, optimizer: str) -> list[float]:
        """The rates to try with an inner optimizer."""
        return self.inner_lrs or [rate / 100 if optimizer == "adamw" else rate for rate in RATES]

    def optimizers(self, config: Config) -> list[str]:
        """The inner optimizers to try. config: the run's."""
        both = config.learner.generates and not self.inner_optimizer
        found = self.inner_optimizers or (["sgd", "adamw"] if both else [config.inner_optimizer])
        return list(dict.fromkeys(found))


@dataclass
class AdaptConfig(FewShotConfig, WorkerConfig):
    """`fmmeta adapt`."""

    support: str = setting(
        "",
        "File of the examples to learn from: .jsonl, .json, .csv, .tsv, .parquet (.gz too); or a directory of"
        " such files, each the examples of a task with the file's name",
    )
    query: str | None = setting(None, "File of labelled examples to test the adapted model on")
    output_dir: str | None = setting(
        None, "Folder of the adapted model; of a folder for each task, where support is a directory"
    )
    method: str | None = setting(
        None,
        "in_context: no inner loop, but the examples in the prompt of every input; finetune+in_context: both"
        " (default: that of the model, which is in_context after meta_icl; else finetune)",
        OF_ADAPT,
    )
    early_stopping: bool = setting(
        True,
        "Choose the inner steps (up to twice inner_steps) by leaving out an example of each "
        "class in turn, where each class has two or more",
    )
    micro_batch_size: int = setting(32, "Most examples of one forward pass", least=1)
    max_new_tokens: int = setting(MAX_NEW_TOKENS, "causal_lm: longest generated answer to a query", least=1)
    tokens_per_pass: int = setting(
        4096,
        "Support directory with LoRA: most tokens, with padding, of a forward pass in which several tasks are"
        " learned; finetune+in_context: of any forward pass of several rows",
        least=1,
    )
    group_size: str = setting(
        "auto",
        "Support directory: ranks that hold one model together; auto: all ranks with ZeRO 3, else one",
        or_auto=1,
    )

    def method_of(self, config: Config) -> str:
        """The method of the command, or that of the model if it has one for `adapt`. config: of the run.

        Raises `UsageError` for examples in the prompts of a classifier, and for settings without an effect on
        the method or the kind of task.
        """
        causal, stored = config.learner.generates, self.stored_method
        method = self.method or (stored if causal and stored in OF_ADAPT else "finetune")
        self.refuse_methods([method], config)
        refuse_first(
            [
                (
                    config.learner.of_classes and self.max_new_tokens != MAX_NEW_TOKENS,
                    f"max_new_tokens={self.max_new_tokens} bounds generated answers, and a classifier gives"
                    " classes; leave it out",
                ),
                (
                    not has_inner_loop(method) and not self.early_stopping,
                    f"early_stopping=False is of the inner loop, and method={method} has none; leave it out",
                ),
                (
                    not has_inner_loop(method) and bool(self.lora_r),
                    f"lora_r={self.lora_r} adapters are trained by an inner loop, and method={method} has"
                    " none; leave it out, or use finetune+in_context",
                ),
            ]
        )
        return method

    def __post_init__(self) -> None:
        self.read_json_files()
        is_folder = bool(self.support) and Path(self.support).is_dir()
        files = {} if is_folder else {"support": self.support, "query": self.query}
        for name, path in files.items():
            refuse_first(
                [
                    (
                        bool(path) and not Path(str(path)).is_file(),
                        f"{name}={path} is not a file; give a {', '.join(ENDINGS)} file",
                    ),
                    (
                        bool(path)
                        and not ending(Path(str(path)))
                        and not (name == "support" and is_document(Path(str(path)))),
                        f"{name}={path} is no {', '.join(ENDINGS)} file (.gz too); convert it to one of them",
                    ),
                ]
            )
        check_values(self)
        if is_folder and self.query:
            raise UsageError(
                f"query={self.query} goes with one support file, and support={self.support} is a"
                " directory; leave it out, and answer with fmmeta predict --adapters"
            )


SHARED_BY_BASE = (
    "task_type",
    "pooling",
    "feature_norm",
    "max_length",
    "prompt_template",
    "load_in_4bit",
)
"""Settings that adapters of one pass have in common; their folders store them."""
SHARED_BY_PREDICT = (
    *LoadConfig.__dataclass_fields__,
    *TokenConfig.__dataclass_fields__,
    "micro_batch_size",
)


@dataclass
class PredictConfig(OfStoredModel, TokenConfig, LoadConfig):
    """`fmmeta predict`."""

    model_name_or_path: str = setting(
        "", "Folder that `fmmeta adapt` wrote, or any classifier or language model"
    )
    adapters: str | None = setting(
        None,
        "Instead of a model: directory with folders of adapters (`fmmeta adapt --support DIRECTORY --lora_r"
        " N`); each input names its folder",
    )
    adapter_column: str = setting("adapter", "adapters: key or column of the folder's name")
    adapters_in_memory: int = setting(64, "adapters: most that stay in memory", least=1)
    input: str = setting(
        "-",
        "File of inputs, or - for standard input: a text or a JSON object with text (input, image) on every"
        " line, or a .jsonl, .json, .csv, .tsv or .parquet file (.gz too) with such a column, as for adapt",
    )
    output: str = setting(
        "-",
        "File for the answers: a table in a .csv file, in others one JSON object per line; - is standard"
        " output",
        writes=(".jsonl", ".json", ".csv"),
    )
    text_column: str | None = setting(
        None,
        "Key or column of the input (default: the one that adapt reads: text, sentence or utterance; input,"
        " prompt or question for causal_lm; image or img for images)",
    )
    micro_batch_size: int = setting(
        32, "Most inputs of one forward pass, when they come from a file", least=1
    )
    max_new_tokens: int = setting(64, "causal_lm: longest answer; stream: continuation", least=1)
    equal_classes: bool = setting(
        False,
        "Answer all inputs together, on the assumption that every class has equally many of them"
        " (transductive; wrong classes where it does not hold)",
    )

    def __post_init__(self) -> None:
        refuse_input_as_output(self)
        check_values(self)
        refuse_first(
            [
                (
                    not self.model_name_or_path and not self.adapters,
                    "model_name_or_path is missing; give the folder that fmmeta adapt wrote",
                ),
                (
                    bool(self.model_name_or_path and self.adapters),
                    f"model_name_or_path={self.model_name_or_path} with adapters={self.adapters}: adapters"
                    " name their base; leave one out",
                ),
                *(
                    (
                        bool(self.adapters) and self._is_set(name),
                        f"{name}={getattr(self, name)} with adapters={self.adapters}: adapters store theirs;"
                        " leave it out",
                    )
                    for name in SHARED_BY_BASE
                ),
                *(
                    (
                        not self.adapters and self._is_set(name),
                        f"{name}={getattr(self, name)} is for --adapters, and"
                        f" model_name_or_path={self.model_name_or_path} is one model; leave it out",
                    )
                    for name in ("adapter_column", "adapters_in_memory")
                ),
                (
                    bool(self.adapters and self.equal_classes),
                    "equal_classes=True with adapters: their inputs have different classes; leave it out",
                ),
                (
                    bool(self.adapters) and not Path(str(self.adapters)).is_dir(),
                    f"adapters={self.adapters} is no directory; give the output_dir of fmmeta adapt",
                ),
                (
                    self.input != "-" and not Path(self.input).is_file(),
                    f"input={self.input} is not a file; give one, or - for standard input",
                ),
            ]
        )

    def _is_set(self, name: str) -> bool:
        """Whether a setting differs from its default."""
        return getattr(self, name) != unset_of(self.__dataclass_fields__[name])
