"""The settings of a run: one dataclass per subject, together the flags of the command line. Other commands
are made of the same sections.

A setting may be left open (None) in every section; `Config` alone resolves it. Owns names, defaults, help
texts and rules. It reads and starts nothing, so that `import fmmeta` is cheap.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from inspect import get_annotations
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config import algorithms, conflicts, learners
from fmmeta.config.algorithms import INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from fmmeta.config.fields import (
    RefusesUnknownNames,
    check_values,
    default_of,
    names_where,
    of_type,
    setting,
)
from fmmeta.config.json_files import label_texts_of
from fmmeta.config.learners import LearnerSpec
from fmmeta.config.peft_options import apply_peft_options

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "polynomial", "inverse_sqrt")
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""By accelerate's names; an extra of fmmeta for each. Other services take a callback."""
HEAD_INITS = ("zero", "learned", "prototype")
NO_LIMIT = "or leave it out"
GENERATED = ("rouge_l", "exact_match")  # metrics of generated answers
METRICS = (*GENERATED, "options", "rank")
MAX_NEW_TOKENS = 64  # of a generated answer


@dataclass
class LoadConfig(RefusesUnknownNames):
    """A model, and how it is loaded."""

    model_name_or_path: str = setting(
        "tiny",
        "HF folder, hub id or GGUF file; tiny: the built-in model, trained from scratch",
        common=True,
    )
    task_type: str = setting(
        None,
        f"Kind of every task: {', '.join(learners.BUILT_IN)}, or module:name of yours",
        open=learners.CLASSIFICATION.name,
        remembered=True,
        keyed=True,
        common=True,
    )
    pooling: str = setting(
        "auto",
        "Sentence vector of an encoder: the model's pooler, the mean of its token vectors, or that of [CLS];"
        " auto: as stored in the folder, else model",
        ("auto", "model", "mean", "cls"),
        of="of_classes",
        common=True,
    )
    feature_norm: float = setting(
        None,
        "Scale the sentence vectors of --pooling mean or cls to this L2 norm; 0: do not scale",
        least=0,
        open=0.0,
        remembered=True,
        of="of_classes",
    )
    load_in_4bit: bool = setting(
        None,
        "Store the base under adapters in NF4 (bitsandbytes), half a byte per weight",
        open=False,
        remembered=True,
        excludes={
            "model_name_or_path=tiny": "there is no checkpoint to read",
            "lora_merge": "there are no sums of 4-bit weights",
        },
    )
    attn_implementation: str | None = setting(
        None,
        "Attention of transformers: eager, sdpa, flash_attention_2, ... (default: its choice)",
        resume="free",
    )
    trust_remote_code: bool = setting(False, "Let transformers run Python code from the checkpoint")


@dataclass
class ModelConfig(LoadConfig):
    """The parts of a model that are trained."""

    model_revision: str | None = setting(
        None,
        "Branch, tag or commit on the hub (default: its main branch)",
        common=True,
    )
    head_init: str = setting(
        None,
        "Classifier head at the start of each task: zeros, a meta-learned head, or the class means of the"
        " support set (ProtoMAML) (default: the algorithm's, else zero)",
        HEAD_INITS,
        remembered=True,
        common=True,
    )
    gradient_checkpointing: bool = setting(
        False,
        "Store layer inputs only; compute activations twice",
        resume="free",
        common=True,
    )
    lora_r: int = setting(
        None,
        "Rank of the LoRA adapters to train; 0: train all weights",
        least=0,
        open=0,
        remembered=True,
        common=True,
    )
    lora_alpha: float = setting(
        None,
        "LoRA: adapter outputs are scaled by lora_alpha / lora_r (default: 2 x lora_r)",
        positive="such as twice lora_r",
        remembered=True,
        needs=("lora_r",),
    )
    lora_target_modules: list[str] = setting(
        [],
        "LoRA: names of the linear layers that get adapters, or all-linear (default: peft's choice for the"
        " architecture)",
        remembered=True,
        needs=("lora_r",),
    )
    peft_config: str | None = setting(
        None,
        "LoRA: JSON file of options of peft's LoraConfig: target_parameters, rank_pattern, alpha_pattern,"
        " use_rslora, layers_to_transform (-1: the last), exclude_modules, ...; r, lora_alpha and"
        " target_modules in place of the flags",
        remembered=True,
    )
    lora_merge: bool = setting(
        False,
        "LoRA: also write merged/, an ordinary model with the adapters added to its weights",
        resume="free",
        needs=("lora_r",),
    )

    @property
    def model_source(self) -> str:
        """The model with its revision, as learners/files.py reads it: `name`, or `name@revision`."""
        return (
            f"{self.model_name_or_path}@{self.model_revision}"
            if self.model_revision
            else self.model_name_or_path
        )


@dataclass
class TokenConfig:
    """How rows become tokens."""

    prompt_template: str = setting(
        None,
        "causal_lm: plain (Input: ... Output: ...), chat (the tokenizer's chat template), or a format string"
        " with {input}, names of other columns in braces, and {output} unless it is the end",
        open="plain",
        remembered=True,
        keyed=True,
        of="generates",
        common=True,
    )
    max_length: int = setting(
        None,
        "Tokens of a text at most; longer texts are truncated (default: 128)",
        least=4,
        remembered=True,
        keyed=True,
        common=True,
    )


@dataclass
class RowConfig(TokenConfig):
    """The columns of a row."""

    text_column: str | None = setting(
        None,
        "Column of the text (default: text, sentence, utterance, or sentence1 with sentence2)",
        keyed=True,
        of="of_classes",
        common=True,
    )
    label_column: str | None = setting(
        None,
        "Column of the class (default: label, intent or class)",
        keyed=True,
        of="of_classes",
        common=True,
    )
    image_column: str | None = setting(
        None,
        "Image models: column of the image, a path beside the file, or bytes (default: image or img)",
        keyed=True,
        of="of_classes",
    )
    input_column: str | None = setting(
        None,
        "causal_lm: column of the input (default: instruction and input, a line break between them, or one of"
        " input, prompt, question, instruction, messages and conversations)",
        keyed=True,
        of="generates",
        common=True,
    )
    output_column: str | None = setting(
        None,
        "causal_lm: column of the answer (default: output, answer, target, answers or completion, or the last"
        " turn of messages or conversations)",
        keyed=True,
        of="generates",
        common=True,
    )
    label_names: str | None = setting(
        None,
        "The name of each class is one more support example of it. names: the names in the data, with spaces"
        ' for _ and -; or a JSON file of texts by class: {"card_arrival": "when will my card arrive"}',
        keyed=True,
        of="of_classes",
        common=True,
    )


@dataclass
class TaskConfig(RowConfig):
    """Data sets, their splits and the episodes that are drawn from them."""

    dataset: list[str] = setting(
        ["letters"],
        "One or more, each a stratum: letters, words, digits, ciphers, tables (built-in suites), a"
        " .jsonl/.json/.csv/.tsv/.parquet file (.gz too), a folder of such files, a folder of folders of them"
        " (each file is a task, read when it is drawn; its folder is the stratum), a folder of a folder of"
        " images per class, module:name of your Tasks, or a hub id",
        common=True,
    )
    dataset_config_name: str | None = setting(None, "Configuration of a hub data set")
    dataset_split: str = setting(
        "train",
        "Rows of a hub data set, by the name of its split: train, or train+validation for several; all: every"
        " one, its test split included. --class_splits and --task_splits divide these rows",
        resume="free",
        common=True,
    )
    dataset_revision: str | None = setting(
        None,
        "Branch, tag or commit of a hub data set (default: its main branch)",
        resume="free",
    )
    stratum_column: str | None = setting(
        None,
        "Column of the category that meta-batches are balanced by (default: stratum, category or domain, if"
        " the data have one)",
        keyed=True,
    )
    stratify_by: str | None = setting(
        None,
        "Function module:name from a row (a dictionary of its columns) to the category that meta-batches are"
        " balanced by; instead of --stratum_column",
        excludes={"stratum_column": "both set the strata"},
    )
    task_column: str | None = setting(
        None,
        "Column of the task's name (default: task, if the data have it)",
        keyed=True,
        common=True,
    )
    class_splits: str | None = setting(
        None,
        'JSON file of class splits: {"01": {"train": [...], "valid": [...], '
        '"test": [...]}} (default: the folder\'s class_splits.json, if it exists)',
        common=True,
    )
    class_split: str | None = setting(None, "Name of the class split (default: the first of the file)")
    task_splits: str | None = setting(
        None,
        'JSON file of task splits: {"train": [...], "valid": [...], "test": [...]} '
        "(default: the folder's task_splits.json, if it exists)",
    )
    n_way: int = setting(
        None,
        "Classes, tags or targets (default: 5; 3 for digits, 1 for regression)",
        least=1,
        common=True,
    )
    k_shot: int = setting(
        5,
        "Support examples per class, or of a task without classes",
        least=1,
        common=True,
    )
    num_query: int = setting(
        5,
        "Query examples per class, or of a task without classes",
        least=1,
        common=True,
    )
    n_way_max: int | None = setting(
        None,
        "Draw the number of classes of an episode uniformly from n_way to this value (default: n_way)",
        of="draws_classes",
    )
    k_shot_max: int | None = setting(
        None,
        "Draw the support examples of each class uniformly from k_shot to this value (default: k_shot)",
        of="draws_classes",
    )
    class_weights: str | None = setting(
        None,
        'JSON file of positive weights of classes in the loss, support and query: {"rare": 3.0}; other'
        " classes have weight 1. A set's loss is the weighted mean over its rows",
        of="of_classes",
    )
    answers: str | None = setting(
        None,
        "causal_lm: tasks of --n_way classes, whose answers are the names of the classes, words of one token"
        " that each episode draws (symbols), or the names of other classes of the episode (flipped); none:"
        " tasks of pairs, also where the model stores another value",
        ("none", "names", "symbols", "flipped"),
        keyed=True,  # without a column of tasks
        remembered=True,
        of="generates",
    )
    chunk: int = setting(
        None,
        "Streams: tokens that an inner step learns, in the order of the document",
        least=2,
        open=256,
        remembered=True,
        of="ordered",
    )
    context: int = setting(
        None,
        "Streams: tokens before each chunk that the model sees and takes no loss on",
        least=2,
        open=256,
        remembered=True,
        of="ordered",
    )
    chunks: int = setting(
        None,
        "Streams: chunks of a task, and so inner steps; each is scored before the step on it",
        least=1,
        open=8,
        remembered=True,
        of="ordered",
    )
    packing: bool = setting(
        False,
        "causal_lm: pack short rows into sequences of up to max_length tokens; rows do not attend to each"
        " other",
        resume="free",
        of="generates",
    )
    on_bad_task: str = setting(
        "raise",
        "If a row or task cannot be read. raise: stop the run with file and line; skip: retry, then skip the"
        " row or task",
        ("raise", "skip"),
        resume="free",
        keyed=True,
    )
    max_bad_fraction: float = setting(
        0.05,
        "on_bad_task=skip: stop if more than this fraction of the rows or tasks cannot be read, from 0 to 1",
        least=0,
        most=1,
        resume="free",
        keyed=True,
        needs=("on_bad_task", "skip"),
    )
    max_file_gib: float = setting(
        16.0,
        "GiB of a compressed data file after decompression at most; larger files are refused",
        positive=NO_LIMIT,
        resume="free",
        keyed=True,
    )
    load_timeout: float = setting(
        None,
        "Seconds after which a task that is still loading is left out or ends the run, as on_bad_task says;"
        " also for the trial of the transforms at the start, which prepare_timeout limits otherwise (default:"
        " no limit)",
        positive=NO_LIMIT,
        resume="free",
    )
    prepare_timeout: int = setting(
        1800,
        "Seconds that ranks wait for the rank of their node that downloads and tokenises",
        least=1,
        resume="free",
    )


@dataclass
class SamplingConfig:
    """In which shares training tasks are drawn, and how their examples are changed and loaded."""

    mix_weights: list[float] = setting(
        [],
        "Share of each data set in the tasks, one positive number each (default: in proportion to its tasks);"
        " excludes --mix_temperature",
    )
    mix_temperature: float = setting(
        1.0,
        "T: a stratum of n tasks is drawn in proportion to n ** (1 / T). 1: by size; above 1: small strata"
        " more often; inf: all strata equally often",
        positive="such as 1, or more to draw small strata more often",
        most=math.inf,
        excludes={"mix_weights": "both set the shares"},
    )
    task_sharding: str = setting(
        "global",
        "global: meta-batches are drawn from all tasks; node: each node draws from its stratified share",
        ("global", "node"),
    )
    example_transforms: list[str] = setting(
        [], "Callables module:name, applied to each example of training episodes (fmmeta/tasks/augment.py)"
    )
    episode_transforms: list[str] = setting(
        [], "Callables module:name, applied to training episodes after --example_transforms"
    )
    num_workers: str = setting(
        "auto",
        "Loader processes per rank; auto: as many as the measured loading time needs, possibly none",
        or_auto=0,
        resume="free",
    )
    prefetch_factor: int = setting(
        4,
        "Episodes that each loader process prefetches",
        least=1,
        resume="free",
    )


@dataclass
class InnerConfig:
    """The inner loop, which learns a task from its support set."""

    inner_steps: int = setting(
        None,
        "Gradient steps on the support set (default: 5; 0 for protonet and meta_icl)",
        least=0,
        remembered=True,
        common=True,
    )
    inner_lr: float = setting(
        None,
        "Learning rate of the inner optimizer (default: 0.1; causal_lm: 0.003 with adamw; a hundredth of it"
        " for all weights of a causal_lm checkpoint)",
        positive="such as 0.1 for inner SGD",
        remembered=True,
        common=True,
    )
    inner_optimizer: str = setting(
        None,
        f"Optimizer of the inner loop: {', '.join(INNER_OPTIMIZERS)}, or module:name; every task"
        " starts with zero moments",
        open="sgd",
        remembered=True,
        common=True,
    )
    support_batch_size: int = setting(
        None,
        "Support examples of an inner step at most: parts of a seeded shuffle of the support set, epoch by"
        " epoch; 0: all of them in every step",
        least=0,
        open=0,
        remembered=True,
        common=True,
        excludes={"tasks_per_pass": "this is not implemented"},
    )
    inner_max_grad_norm: float = setting(
        None,
        "Streams: clip the gradient of each inner step to this norm, over the parameters that the step moves;"
        " meta-gradients go through it. 0: do not clip",
        least=0,
        open=0.0,
        remembered=True,
        of="ordered",
        excludes={
            "inner_lr_learned=element": "a rate per element says nothing of which parameters a step moves",
            "tasks_per_pass": "this is not implemented",
        },
    )
    inner_momentum: float = setting(
        None,
        "Momentum of inner_optimizer=momentum",
        below=1,
        open=0.9,
        remembered=True,
        needs=("inner_optimizer", "momentum"),
    )
    inner_epsilon: float = setting(
        None,
        "Epsilon of inner_optimizer=adamw",
        positive=True,
        open=1e-8,
        remembered=True,
        needs=("inner_optimizer", "adamw"),
    )
    inner_weight_decay: float = setting(
        None,
        "Decoupled weight decay of inner_optimizer=adamw",
        least=0,
        open=0.0,
        remembered=True,
        needs=("inner_optimizer", "adamw"),
    )
    inner_parameters: list[str] = setting(
        [],
        "Parameters that the inner loop changes: all, adapters, head, body, norms, routers, or names with"
        " shell wildcards; what follows `except` is taken out: all except '*.norm.weight' (default: the"
        " algorithm's, without the routers of a mixture of experts whose weights are all trained)",
        remembered=True,
        per_algorithm=True,
    )
    inner_lr_groups: list[str] = setting(
        [],
        "Factors of inner_lr by layer, PATTERN=FACTOR with shell wildcards in the layer's name; the first"
        " pattern that matches counts: head=10 '*embed*=0'",
        remembered=True,
    )


@dataclass
class MetaConfig:
    algorithm: str = setting(
        None,
        f"Meta-gradient rule, or a baseline: {', '.join(algorithms.BUILT_IN)}; or module:spec of your rule"
        " (docs/how-to/choose-an-algorithm.md)",
        open="fomaml",
        common=True,
    )
    meta_batch_size: int = setting(
        4,
        "Tasks per meta-batch over all groups",
        least=1,
        common=True,
    )
    meta_accumulation_steps: int = setting(
        1,
        "Meta-batches per outer step, with one reduction across groups",
        least=1,
    )
    proximal_weight: float = setting(
        2.0,
        "imaml: weight of |phi - theta|^2 / 2 in the inner loss",
        positive=True,
        per_algorithm=True,
    )
    loss_on_support: bool = setting(
        False,
        "meta_icl: take the loss on the answers of the support examples too, except the first of each prompt;"
        " the n-th query has them in an order rotated by n",
        per_algorithm=True,
    )
    cg_steps: int = setting(
        5,
        "imaml: steps of conjugate gradients, each a Hessian-vector product",
        least=1,
        per_algorithm=True,
    )
    inner_lr_learned: str = setting(
        None,
        "Meta-learn the inner learning rates from inner_lr on: no, one per layer and step (LSLR), or one per"
        " element (Meta-SGD) (default: element for meta_sgd, else no)",
        ("no", "layer", "element"),
        per_algorithm=True,
    )
    inner_lr_outer_lr: float = setting(
        1e-3,
        "Outer learning rate of learned inner rates; schedule and optimizer are those of theta",
        positive=True,
        needs=("inner_lr_learned", "layer", "element"),
    )
    first_order_steps: int = setting(
        0,
        "Outer steps with first-order meta-gradients before exact ones (MAML++'s annealing)",
        least=0,
        per_algorithm=True,
    )
    multi_step_loss_steps: int = setting(
        0,
        "Outer steps with a query loss after every inner step; its weight moves to the last inner step"
        " (MAML++)",
        least=0,
        per_algorithm=True,
    )
    outer_parameters: list[str] = setting(
        [],
        "Parameters that the outer loop trains, named as inner_parameters; a task begins with the initial"
        " values of all others. body with --lora_r 4 --inner_parameters adapters head is LoRA-ML (default:"
        " all weights, or adapters and head)",
        per_algorithm=True,
    )
    prototype_gradient: bool = setting(
        False, "head_init=prototype: propagate the meta-gradient through the class means"
    )
    second_order: str = setting(
        "auto",
        "Second derivatives of exact meta-gradients. autograd: exact, one inner step's graph at a time, on"
        " ranks that hold the whole model; differences: of gradients, on every layout, in fp32; auto:"
        " autograd for LoRA, heads and modules of yours where it works, else differences",
        ("auto", "autograd", "differences"),
        per_algorithm=True,
    )
    truncate_steps: int = setting(
        None,
        "Inner steps, counted from the last, that an exact meta-gradient is taken back through; those before"
        " count as of first order (default: all)",
        least=1,
        per_algorithm=True,
    )
    trajectory_memory_gib: float = setting(
        None,
        "GiB of device memory for the inner steps that exact meta-gradients need; the others are stored in"
        " host memory (default: all on the device; 0: all on the host)",
        least=0,
        resume="free",
    )
    check_meta_gradient: bool = setting(
        False,
        "Before training, log the error of a task's meta-gradient: differences against those at half the"
        " step, autograd against differences",
        per_algorithm=True,
        resume="free",
    )
    outer_lr: float = setting(
        None,
        "Peak outer learning rate (default: SGD 1.0; Nesterov 0.7; others 2e-3 for the built-in model, else"
        " 2e-4 with LoRA, 2e-5 without)",
        positive="such as 2e-5 for all weights of a checkpoint",
        common=True,
    )
    base_meta_batch_size: int = setting(
        None,
        "Tasks of an outer step for which outer_lr and inner_lr_outer_lr were chosen: both are multiplied by"
        " r, the tasks of an outer step over these (outer_optimizer=sgd and nesterov), or by its root"
        " (others). --warmup_steps ends at the multiplied rate (default: no scaling)",
        least=1,
    )
    gradient_noise_scale: bool = setting(
        False,
        "Estimate the noise scale of the meta-gradient, and so a meta_batch_size, from the norms of the"
        " gradients of tasks and of their mean (docs/how-to/choose-an-algorithm.md); takes one more vector of"
        " the shard",
        resume="free",
    )
    outer_optimizer: str = setting(
        "adamw",
        f"Optimizer of theta: {', '.join(OUTER_OPTIMIZERS)}, or module:name"
        " (docs/how-to/own-learner-source-rule.md)",
    )
    outer_momentum: float = setting(
        0.9, "Momentum of outer_optimizer=nesterov", below=1, needs=("outer_optimizer", "nesterov")
    )
    weight_decay: float = setting(0.01, "Decoupled weight decay of theta, except norms and biases", least=0)
    adam_epsilon: float = setting(
        None,
        "Epsilon of outer optimizers that divide by a root of moments, as AdamW; damps rounding noise"
        " (default: 1e-3 for the built-in model, 1e-6 for a checkpoint)",
        positive="such as 1e-6 for a checkpoint",
    )
    max_staleness: int = setting(
        0,
        "Outer steps that a gradient may be behind theta: groups do not wait for slower ones; 0: each outer"
        " step waits for all of its tasks (docs/explanation/waiting.md)",
        least=0,
        excludes={
            "elastic": "a lost group would take its gradients with it",
            "task_sharding": "there is one queue of tasks for all groups",
            "tasks_per_pass": "a task is claimed and counted alone",
            "tensor_parallel_size": "tensor ranks are not tested with it",
            "gradient_noise_scale": "the gradients of an outer step are not of one theta",
        },
    )
    drop_stale: bool = setting(
        False,
        "max_staleness: drop a gradient that is too old; without it the other groups wait for it",
        needs=("max_staleness",),
    )
    reduce_dtype: str = setting(
        "fp32",
        "Type of the meta-gradient in the reduction across groups; bf16 halves the bytes, shards stay fp32",
        ("fp32", "bf16"),
    )
    outer_steps: int = setting(
        150,
        "Outer steps of the run",
        least=1,
        common=True,
    )
    outer_epochs: float = setting(
        None,
        "Outer steps by the data, at most outer_steps: as many as draw each training row this often, in the"
        " mean (default: outer_steps)",
        positive="or leave it out",
    )
    warmup_steps: float = setting(
        0,
        "Outer steps of linear warm-up; below 1: their share of outer_steps",
        least=0,
        common=True,
    )
    lr_scheduler_type: str = setting(
        "cosine",
        "Schedule of the outer learning rate, by its name in transformers",
        SCHEDULES,
        common=True,
    )
    max_grad_norm: float = setting(
        1.0, "Clip the meta-gradient to this L2 norm over the whole model; 0: do not clip", least=0
    )
    max_bad_steps: int = setting(
        3, "Stop after this many outer steps in a row without a finite task", least=1, resume="free"
    )
    init_interpolation: float = setting(
        1.0,
        "alpha of WiSE-FT in [0, 1]: export and validate the weights (1 - alpha) * initial + alpha * trained;"
        " 1: the trained weights; 0: nothing is trained",
        least=0,
        most=1,
    )
    seed: int = setting(
        42,
        "Seed of tasks, episodes and new weights",
        least=0,
        most=2**64 - 1,
        common=True,
    )


@dataclass
class WorkerConfig:
    """The engine, the group and the micro-batches of a model."""

    deepspeed: str | None = setting(
        None,
        "DeepSpeed JSON file as for transformers, or a shipped one: zero0, zero1, zero2, zero3, zero3_offload"
        " (default: ZeRO 0)",
        resume="free",
        common=True,
    )
    group_size: str = setting(
        "auto",
        "Ranks that hold one model together; auto: the fewest that hold it by the memory estimate",
        or_auto=1,
        resume="free",
        common=True,
    )
    micro_batch_size: int = setting(
        32,
        "Examples of one forward pass on one rank at most",
        least=1,
        resume="free",
        common=True,
    )
    bf16: bool = setting(
        None,
        "bf16 weights over fp32 shards; auto: if all GPUs have it, except for finite differences; a DeepSpeed"
        " file's value wins (default: auto)",
        common=True,
    )
    float32_matmul_precision: str = setting(
        None,
        "torch's precision of matrix products in fp32; high: TF32, on GPUs that have it (default: torch's own"
        " setting, highest)",
        ("highest", "high", "medium"),
    )


@dataclass
class ParallelConfig(WorkerConfig):
    """How the ranks of a launch share models and tasks."""

    pipeline_stages: int = setting(
        1,
        "Pipeline stages of a group; --tensor_parallel_size splits the layers of each",
        least=1,
        resume="free",
        common=True,
        excludes={"engine=plain": "it holds a whole model on one rank"},
    )
    pipeline_balance: str = setting(
        "parameters",
        "Balance the stages by parameters, or by the time of each layer, measured on rank 0",
        ("parameters", "time"),
        resume="free",
    )
    tensor_parallel_size: int = setting(
        1,
        "Split the weight matrices of each layer over this many ranks of a group (of each pipeline stage)",
        least=1,
        resume="free",
        excludes={"engine=plain": "it holds a whole model on one rank"},
    )
    max_tokens_per_micro_batch: int = setting(
        0,
        "Tokens of one forward pass on one rank at most, with padding; rows of similar length share a pass;"
        " 0: no limit",
        least=0,
        resume="free",
    )
    tasks_per_pass: str = setting(
        "1",
        "With anil, protonet or --lora_r: tasks of a group that share a forward pass of the body, each with"
        " a separate head and adapters; auto: as many as fit into micro_batch_size rows",
        or_auto=1,
        resume="free",
    )
    task_schedule: str = setting(
        "static",
        "Which group runs a task of a meta-batch. static: assigned by expected size before the outer step;"
        " dynamic: a group that is free takes the largest task that no group has taken"
        " (docs/explanation/waiting.md). Or module:class of yours",
        resume="free",
    )
    elastic: bool = setting(
        False,
        "This launch is one group of a run whose groups join and leave (`fmmeta elastic` starts them;"
        " docs/how-to/elastic.md)",
        resume="free",
        excludes={
            "task_sharding": "its meta-batches depend on the number of nodes",
            "pipeline_stages": "stages are not tested with groups that rejoin",
            "tensor_parallel_size": "tensor ranks are not tested with groups that rejoin",
            "load_best_model_at_end": "the best weights are not in the state that a group receives",
            "accept_changed_settings": "groups that are running cannot change theirs",
            "resume_from_checkpoint": "a group that rejoins takes the newest state",
            "tune": "this is not implemented, so choose without elastic, and set what was chosen",
        },
    )
    lighthouse: str | None = setting(
        None,
        "elastic: http://HOST:PORT of `fmmeta lighthouse` (default: TORCHFT_LIGHTHOUSE)",
        resume="free",
        needs=("elastic",),
    )
    group_name: str | None = setting(
        None,
        "elastic: name of this group (default: host and process)",
        resume="free",
        needs=("elastic",),
    )
    engine: str = setting(
        "auto",
        "Engine of a group; auto: plain PyTorch in a group of one that does not offload from a GPU, else"
        " DeepSpeed",
        ("auto", "deepspeed", "plain"),
        resume="free",
    )
    compile: bool = setting(
        False,
        "Compile the model with torch.compile for rows of any length; needs a group of one without DeepSpeed",
        resume="free",
        excludes={
            "pipeline_stages": "a stage is no whole model",
            "tensor_parallel_size": "tensor ranks communicate inside layers",
            "engine=deepspeed": "it hooks into modules",
            "gradient_checkpointing": "it computes layers again",
            "packing": "this is not implemented",
            "second_order=autograd": "compiled layers have no second derivative",
        },
    )
    offload_outer: bool = setting(
        False,
        "Store theta, meta-gradient and outer moments in host memory during the inner loop",
        per_algorithm=True,
        resume="free",
    )


@dataclass
class RunConfig:
    output_dir: str | None = setting(
        None,
        "Folder of the run (default: runs/<run_name>, else runs/<date>-<algorithm>-<dataset>)",
        resume="hidden",
        common=True,
    )
    run_name: str | None = setting(
        None,
        "Name of the run in runs/ and in trackers (default: that of its folder)",
        resume="hidden",
        common=True,
    )
    tune: str | None = setting(
        None,
        "What is chosen on validation tasks before training, as JSON, in a recipe a section: with settings of"
        " `fmmeta tune` the inner loop; with init_interpolations the interpolation to export",
    )
    save_steps: int = setting(
        100,
        "Outer steps between checkpoints; 0: only when a signal stops the run",
        least=0,
        resume="free",
        common=True,
    )
    save_total_limit: int = setting(2, "Checkpoints to keep", least=1, resume="free")
    resume_from_checkpoint: str = setting(
        "latest",
        "A checkpoint folder to begin from, once: the same command again resumes from what was saved since;"
        " latest: the newest of output_dir, if any; never: start from the beginning",
        resume="hidden",
        common=True,
    )
    accept_changed_settings: list[str] = setting(
        [],
        "Names of settings that change theta and may differ on resume all the same",
        resume="hidden",
    )
    step_timeout: float = setting(
        None,
        "Seconds of an outer step after which the watchdog logs the ranks that block it and ends the job"
        " (default: ten times the slowest step so far, at least 300; 1800 for the first)",
        positive=NO_LIMIT,
        resume="free",
    )
    check_replicas_steps: int = setting(
        100,
        "Outer steps between checks that all groups have the same theta; 0: only before saves",
        least=0,
        resume="free",
    )
    eval_steps: int = setting(
        0,
        "Outer steps between evaluations on validation tasks; 0: none",
        least=0,
        resume="free",
        needs=("eval_episodes",),
        common=True,
    )
    metrics: list[str] = setting(
        [],
        "Metrics of validation and held-out episodes, as of fmmeta evaluate: module:name of functions"
        " (predictions, references) -> numbers by name (docs/how-to/own-learner-source-rule.md); causal_lm:"
        f" also {', '.join(METRICS)}",
        resume="free",
        needs=("eval_episodes",),
    )
    load_best_model_at_end: bool = setting(
        False,
        "Export the weights with the highest validation accuracy (at a tie, the lowest loss) instead of the"
        " last ones",
        needs=("eval_steps",),
    )
    eval_episodes: int = setting(
        100,
        "Episodes of each evaluation; 0: no evaluation",
        least=0,
        resume="free",
        common=True,
    )
    test_episodes: int = setting(
        None,
        "Episodes of the final table on held-out tasks (default: eval_episodes); 0: no table",
        least=0,
        resume="free",
    )
    logging_steps: int = setting(
        10,
        "Outer steps between lines of metrics.jsonl",
        least=1,
        resume="free",
        common=True,
    )
    profile: bool = setting(
        False,
        "Profile one outer step: a trace per rank in output_dir, and a table of its time by region",
        resume="free",
    )
    report_to: list[str] = setting(
        ["none"],
        "One or more trackers that log the lines of metrics.jsonl, all (that are installed), or none: "
        + ", ".join(TRACKERS),
        ("none", "all", *TRACKERS),
        resume="free",
        common=True,
    )
    log_level: str = setting(
        "info",
        "Least severe messages that are logged; debug: also on which node each rank is, and what each link"
        " carries",
        ("debug", "info", "warning", "error"),
        resume="hidden",
        common=True,
    )


class OfStoredModel:
    """Base of settings of commands for a model that is there: what is left open has the value that its
    fmmeta.json stores.
    """


@dataclass
class Config(ModelConfig, TaskConfig, SamplingConfig, InnerConfig, MetaConfig, ParallelConfig, RunConfig):
    """Every setting of a run. Raises `UsageError` in one line where values contradict each other."""

    def __post_init__(self) -> None:
        """Resolve settings that were left open, then refuse values that cannot work."""
        if usual := learners.usual_algorithm(self.task_type):
            self.algorithm = self.algorithm or usual
        for item in fields(self):
            value = of_type(type(self), item.name, getattr(self, item.name))
            setattr(self, item.name, default_of(item) if value is None else value)
        self.answers = None if self.answers == "none" else self.answers
        self.label_names = label_texts_of(self.label_names)
        if self.peft_config:
            apply_peft_options(self)
        check_values(self)
        found = conflicts.resolved(self)
        self._left_open = dict.fromkeys(found)
        for name, value in found.items():
            setattr(self, name, value)
        for problem in conflicts.problems(self):
            raise UsageError(problem)

    def but(self, **changes: Any) -> "Config":
        """A copy with changes, in which defaults of settings that were left open are chosen again."""
        return replace(self, **{**self._left_open, **changes})

    def to_remember(self) -> dict[str, Any]:
        """What an exported model stores in its fmmeta.json. own_task_type: names the user's code, which is
        not imported from there.
        """
        stored = {name: getattr(self, name) for name in REMEMBERED} | {"task_type": self.learner.name}
        return stored if self.task_type in learners.BUILT_IN else {**stored, "own_task_type": self.task_type}

    @property
    def learner(self) -> LearnerSpec:
        """The kind of task."""
        return learners.find(self.task_type)

    @property
    def shape(self) -> str:
        """The episodes in words, such as 5 to 20-way 1-shot.

        >>> Config(n_way=5, n_way_max=20).shape
        '5 to 20-way 5-shot'
        """
        if self.learner.ordered:
            return f"{self.chunks}-chunk"
        sizes = [(self.k_shot, self.k_shot_max, "shot")]
        if self.draws_classes:
            sizes.insert(0, (self.n_way, self.n_way_max, "way"))
        return " ".join(
            f"{least}{f' to {most}' if most not in (None, least) else ''}-{what}"
            for least, most, what in sizes
        )

    @property
    def draws_classes(self) -> bool:
        """Whether an episode has --n_way classes."""
        return self.learner.of_classes or self.answers is not None

    @property
    def most_classes(self) -> int:
        """Classes of the largest episode, and so outputs of the head; 0 without a head."""
        return (self.n_way_max or self.n_way) if self.learner.has_head else 0

    @property
    def largest_way(self) -> int:
        """Classes of the largest episode; 1 where an episode is of one task."""
        return (self.n_way_max or self.n_way) if self.draws_classes else 1

    @property
    def joint_head(self) -> bool:
        """Whether the model has one head for the classes of all training tasks, not one per task."""
        return algorithms.find(self.algorithm).all_classes and self.learner.of_classes

    @property
    def warmup(self) -> int:
        """Outer steps of linear warm-up."""
        share = self.warmup_steps < 1
        # rounded first: 0.07 * 100 is above 7 in floating point
        steps = round(self.warmup_steps * self.outer_steps, 6)
        return math.ceil(steps) if share else int(self.warmup_steps)

    @property
    def tasks_per_step(self) -> int:
        """Tasks of an outer step over all groups."""
        return self.meta_batch_size * self.meta_accumulation_steps

    @property
    def outer_lr_factor(self) -> float:
        """Factor of the outer learning rates by `base_meta_batch_size` (Goyal et al. 2017, arXiv 1706.02677,
        for SGD; Malladi et al. 2022, arXiv 2205.10287, for Adam).
        """
        ratio = self.tasks_per_step / (self.base_meta_batch_size or self.tasks_per_step)
        return ratio if self.outer_optimizer in ("sgd", "nesterov") else math.sqrt(ratio)

    @property
    def most_shots(self) -> int:
        return self.k_shot_max or self.k_shot

    @property
    def most_support(self) -> int:
        """Support rows of a class at most: its shots, and its name with --label_names."""
        return self.most_shots + (self.label_names is not None)

    @property
    def builtin_model(self) -> bool:
        return self.model_name_or_path == "tiny"

    @property
    def builtin_images(self) -> bool:
        """Whether the model is the built-in one of the suite digits."""
        return self.builtin_model and "digits" in self.dataset

    def as_dict(self) -> dict[str, Any]:
        """Every setting by its name."""
        return asdict(self)


GROUPS = {
    "model": ("Model", (LoadConfig, ModelConfig)),
    "data": ("Data and episodes", (TaskConfig, SamplingConfig, RowConfig, TokenConfig)),
    "algorithm": ("Algorithm and outer loop", (MetaConfig,)),
    "inner": ("Inner loop", (InnerConfig,)),
    "parallel": ("Parallelism and precision", (WorkerConfig, ParallelConfig)),
    "run": ("Run: folder, checkpoints, evaluation, logging", (RunConfig,)),
}
"""Groups of --help and of a stored recipe, in their order: title, and the sections whose own settings they
hold.
"""


def names_of(group: str) -> list[str]:
    """The settings of a group."""
    return [name for section in GROUPS[group][1] for name in get_annotations(section)]


REMEMBERED = names_where(Config, lambda rule: rule.remembered)
"""Settings that an exported model stores in fmmeta.json, so that it is adapted as it was trained."""
KEYED = names_where(Config, lambda rule: rule.keyed)
"""Settings that decide, with the tokenizer, how the rows of a data set become tokens."""
