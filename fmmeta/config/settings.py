"""The settings of a run: one dataclass per subject, together the flags of the command line.

Owns names, defaults, help texts and the checks that need no file and no other process. It reads nothing
and starts nothing, so that `import fmmeta` stays cheap.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config import algorithms, conflicts, validate
from fmmeta.config.fields import names_where, setting
from fmmeta.config.renamed import RefusesOldNames
from fmmeta.config.values import of_type

TASK_TYPES = ("classification", "causal_lm")
POOLINGS = ("auto", "model", "mean", "cls")
HEAD_INITS = ("zero", "learned", "prototype")
INNER_OPTIMIZERS = ("sgd", "momentum", "adamw")
INNER_SCHEDULES = ("constant", "linear", "cosine")
INNER_STATES = ("reset", "kept")
LEARNED_RATES = ("no", "layer", "element")
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "polynomial", "inverse_sqrt")
REDUCE_DTYPES = ("fp32", "bf16")
BALANCES = ("parameters", "time")
ENGINES = ("auto", "deepspeed", "plain")
SHARDINGS = ("global", "node")
TRACKERS = ("none", "tensorboard", "wandb", "mlflow", "trackio")
ON_BAD_TASK = ("raise", "skip")


POSITIVE = "such as 0.1 for inner SGD"


@dataclass
class ModelConfig(RefusesOldNames):
    model_name_or_path: str = setting(
        "tiny", "HF folder or hub id; 'tiny' is the built-in model, trained from scratch"
    )
    task_type: str = setting(
        "classification", "What a task asks of the model", TASK_TYPES, remembered=True, keyed=True
    )
    pooling: str = setting(
        "auto", "Sentence vector of an encoder; auto: as the folder says, else the model's own", POOLINGS
    )
    feature_norm: float = setting(
        0.0,
        "Scale the sentence vectors of --pooling mean or cls to this length; 0: leave them alone",
        least=0,
        remembered=True,
    )
    head_init: str = setting(
        None,
        "Classifier head at the start of each task: zeros, a meta-learned one, or the class means of the"
        " support set (ProtoMAML) (default: what the algorithm needs, else zero)",
        HEAD_INITS,
        remembered=True,
    )
    gradient_checkpointing: bool = setting(
        False, "Keep layer inputs only and compute activations again in the backward pass", resume="free"
    )
    lora_r: int = setting(
        0,
        "Rank of LoRA adapters, which are then trained in place of the base's weights; 0: train all weights",
        least=0,
        remembered=True,
        synonyms=("lora_rank",),
    )
    lora_alpha: float = setting(
        None, "LoRA: the adapters' part counts alpha / r times (default: 2 x lora_r)", remembered=True
    )
    lora_target_modules: list[str] = setting(
        [],
        "LoRA: names of the linear layers that get adapters, or all-linear (default: what peft takes for the"
        " architecture)",
        remembered=True,
    )
    lora_merge: bool = setting(
        False,
        "LoRA: also write merged/, an ordinary model with the adapters added to its weights",
        resume="free",
    )
    attn_implementation: str | None = setting(
        None, "Passed to transformers: eager, sdpa, flash_attention_2, ...", resume="free"
    )
    trust_remote_code: bool = setting(False, "Let transformers run code that comes with the checkpoint")


@dataclass
class RowConfig:
    """What a row of data is, and how it becomes tokens."""

    text_column: str | None = setting(
        None, "Column of the text (default: text, sentence or utterance)", keyed=True
    )
    label_column: str | None = setting(
        None, "Column of the class (default: label, intent or class)", keyed=True
    )
    input_column: str | None = setting(
        None, "causal_lm: column of the input (default: input, prompt or question)", keyed=True
    )
    output_column: str | None = setting(
        None, "causal_lm: column of the answer (default: output, answer or target)", keyed=True
    )
    prompt_template: str = setting(
        "plain",
        "causal_lm: plain (Input: ... Output: ...), chat (the tokenizer's chat template), or a format string"
        " with {input}, and {output} where it does not follow at the end",
        remembered=True,
        keyed=True,
    )
    max_length: int = setting(
        128,
        "Longest text in tokens; the rest is cut off",
        least=4,
        remembered=True,
        keyed=True,
        synonyms=("max_seq_length", "model_max_length"),
    )


@dataclass
class TaskConfig(RowConfig):
    dataset: list[str] = setting(
        ["letters"],
        "One or more of: 'letters' and 'marks' (built-in suites), a .jsonl/.csv/.parquet file (.gz too), a"
        " folder of them, a folder of folders of them (each file a task, read when it is drawn; its folder"
        " the stratum), or a hub id. Of several, each is a stratum",
        synonyms=("dataset_name", "train_file"),
    )
    mix_weights: list[float] = setting(
        [], "Share of the tasks of each data set (default: in proportion to its tasks)"
    )
    mix_temperature: float = setting(
        1.0,
        "A stratum of n tasks comes up in proportion to n ** (1 / T): 1 as they are, more for rare strata,"
        " inf all alike",
    )
    task_sharding: str = setting(
        "global",
        "global: meta-batches of all tasks; node: each node draws from a stratified part of its own",
        SHARDINGS,
    )
    dataset_config_name: str | None = setting(None, "Configuration of a hub data set")
    stratum_column: str | None = setting(
        None,
        "Column of the category that meta-batches are balanced by (default: stratum, category or domain,"
        " where there is one)",
        keyed=True,
    )
    task_column: str | None = setting(
        None, "Column of the task's name (default: task, where there is one)", keyed=True
    )
    class_splits: str | None = setting(
        None,
        'JSON file of class splits: {"01": {"train": [...], "valid": [...], '
        '"test": [...]}} (default: the folder\'s class_splits.json, where there is one)',
    )
    class_split: str | None = setting(None, "Which of the class splits (default: the first)")
    task_splits: str | None = setting(
        None,
        'JSON file of task splits: {"train": [...], "valid": [...], "test": [...]} '
        "(default: the folder's task_splits.json, where there is one)",
    )
    n_way: int = setting(5, "Classes per episode", least=2)
    k_shot: int = setting(5, "Support examples per class; per task for causal_lm", least=1)
    num_query: int = setting(5, "Query examples per class; per task for causal_lm", least=1)
    n_way_max: int | None = setting(None, "Episodes of n_way to this many classes, as many as chance has it")
    k_shot_max: int | None = setting(
        None, "k_shot to this many support examples, for each class as chance has it"
    )
    packing: bool = setting(
        False,
        "causal_lm: lay short rows behind each other into sequences of up to max_length tokens; none sees"
        " another",
        resume="free",
    )
    example_transforms: list[str] = setting(
        [], "Callables module:name on each example of training episodes; see fmmeta/tasks/augment.py"
    )
    episode_transforms: list[str] = setting(
        [], "Callables module:name on whole training episodes, after the others"
    )
    num_workers: str = setting(
        "auto",
        "Loader processes per rank; auto: none, or as many as a measurement asks for",
        resume="free",
        synonyms=("dataloader_num_workers",),
    )
    prefetch_factor: int = setting(
        4,
        "Episodes that each loader process prepares ahead",
        least=1,
        resume="free",
        synonyms=("dataloader_prefetch_factor",),
    )
    on_bad_task: str = setting(
        "raise",
        "What cannot be read or drawn: raise stops the run, naming file and line; skip retries, then leaves"
        " the task out",
        ON_BAD_TASK,
        resume="free",
        keyed=True,
    )
    max_bad_fraction: float = setting(
        0.05, "skip: stop when more than this share of rows or tasks is bad", resume="free", keyed=True
    )
    max_file_gib: float = setting(
        16.0,
        "Most that a compressed data file may hold when it is unpacked",
        positive="or leave it out",
        resume="free",
        keyed=True,
    )
    prepare_timeout: int = setting(
        1800,
        "Seconds that ranks wait for the one of their node that downloads and tokenises",
        least=1,
        resume="free",
    )


@dataclass
class InnerConfig:
    """How a task is learned from its support set."""

    inner_steps: int = setting(
        None, "Gradient steps on the support set (default: 5; 0 for protonet)", least=0, remembered=True
    )
    inner_lr: float = setting(0.1, "Step size of the inner optimizer", positive=POSITIVE, remembered=True)
    inner_optimizer: str = setting(
        "sgd",
        "Optimizer of the inner loop; its state begins anew in every task",
        INNER_OPTIMIZERS,
        remembered=True,
    )
    inner_momentum: float = setting(0.9, "Momentum of inner_optimizer=momentum", below=1, remembered=True)
    inner_beta1: float = setting(
        0.9,
        "Decay of the first moment of inner_optimizer=adamw (Reptile's authors use 0)",
        below=1,
        remembered=True,
    )
    inner_beta2: float = setting(
        0.999, "Decay of the second moment of inner_optimizer=adamw", below=1, remembered=True
    )
    inner_epsilon: float = setting(
        1e-8, "Epsilon of inner_optimizer=adamw", positive=POSITIVE, remembered=True
    )
    inner_weight_decay: float = setting(
        0.0, "Decoupled weight decay of inner_optimizer=adamw", least=0, remembered=True
    )
    inner_lr_schedule: str = setting(
        "constant",
        "inner_lr over the inner steps: step k of K takes 1, 1 - k/K or a half cosine of it",
        INNER_SCHEDULES,
        remembered=True,
    )
    inner_lr_groups: list[str] = setting(
        [],
        "Factors of inner_lr by layer, PATTERN=FACTOR with the wildcards of a shell; the first that fits"
        " counts: head=10 '*embed*=0'",
        remembered=True,
    )


@dataclass
class MetaConfig:
    algorithm: str = setting(
        "fomaml",
        f"Meta-gradient rule, or a baseline: {', '.join(algorithms.BUILT_IN)}; or module:spec of another"
        " (docs/algorithms.md)",
    )
    meta_batch_size: int = setting(
        4, "Tasks per meta-batch over all groups", least=1, synonyms=("train_batch_size",)
    )
    meta_accumulation_steps: int = setting(
        1,
        "Meta-batches per outer step, reduced across groups once",
        least=1,
        synonyms=("gradient_accumulation_steps",),
    )
    proximal_weight: float = setting(
        2.0, "imaml: weight of |phi - theta|^2 / 2 in the inner loss", positive=POSITIVE
    )
    cg_steps: int = setting(5, "imaml: steps of conjugate gradients, each a Hessian-vector product", least=1)
    cg_damping: float = setting(
        0.0,
        "imaml: added to the identity in the system that is solved; more is safer and less exact",
        least=0,
    )
    inner_optimizer_state: str = setting(
        "reset",
        "Adam's moments at the start of a task: zeros, or kept from one outer step to the next as in"
        " Reptile's code (the mean over the tasks of a meta-batch, so that it does not matter which group ran"
        " which task)",
        INNER_STATES,
    )
    inner_lr_learned: str = setting(
        None,
        "Meta-learn the inner rates, beginning at inner_lr: no, one per layer and step (LSLR), or one per"
        " element (Meta-SGD) (default: element for meta_sgd, else no)",
        LEARNED_RATES,
    )
    inner_lr_outer_lr: float = setting(
        1e-3,
        "Outer learning rate of learned inner rates; schedule and optimizer are the outer ones",
        positive=POSITIVE,
    )
    first_order_steps: int = setting(
        0, "Outer steps with first-order meta-gradients before exact ones (MAML++'s annealing)", least=0
    )
    multi_step_loss_steps: int = setting(
        0,
        "Outer steps over which the query loss counts after every inner step, at first equally, at last after"
        " the last only (MAML++)",
        least=0,
    )
    prototype_gradient: bool = setting(
        False, "head_init=prototype: let the meta-gradient flow through the class means"
    )
    trajectory_memory_gib: float = setting(
        None,
        "Device memory for the steps of an inner loop that exact meta-gradients need; the rest waits in host"
        " memory (default: all)",
        resume="free",
    )
    check_meta_gradient: bool = setting(
        False,
        "Before training, compare the meta-gradient of a task with that of a halved difference step",
        resume="free",
    )
    outer_lr: float = setting(
        None,
        "Peak outer learning rate (default: SGD 1.0; AdamW 2e-3 for the built-in model, else 2e-4 with LoRA,"
        " 2e-5 without)",
        positive=POSITIVE,
        synonyms=("learning_rate",),
    )
    outer_optimizer: str = setting(
        "adamw", f"Optimizer of theta: {', '.join(conflicts.OUTER_OPTIMIZERS)}", synonyms=("optim",)
    )
    outer_momentum: float = setting(0.9, "Momentum of outer_optimizer=nesterov", below=1)
    weight_decay: float = setting(0.01, "Weight decay of theta; never on norms and biases", least=0)
    adam_epsilon: float = setting(
        None,
        "Epsilon of AdamW; it holds down rounding noise (default: 1e-3 for the built-in model, 1e-6 for a"
        " checkpoint)",
        positive=POSITIVE,
        synonyms=("adam_eps",),
    )
    outer_delay: int = setting(
        0,
        "1: reduce across groups behind the inner loops of the next outer step, and move theta after them;"
        " see docs/delay.md",
        least=0,
    )
    reduce_dtype: str = setting(
        "fp32", "What travels across groups; bf16 halves the bytes, shards stay fp32", REDUCE_DTYPES
    )
    outer_steps: int = setting(150, "Outer steps of the run", least=1, synonyms=("max_steps",))
    warmup_steps: int = setting(0, "Outer steps of linear warm-up", least=0)
    lr_scheduler_type: str = setting(
        "cosine", "Schedule of the outer learning rate, as transformers names it", SCHEDULES
    )
    max_grad_norm: float = setting(
        1.0, "Clip the meta-gradient to this norm over the whole model; 0 leaves it alone", least=0
    )
    max_bad_steps: int = setting(
        3, "Stop after this many outer steps in a row without one finite task", least=1, resume="free"
    )
    max_task_loss: float = setting(
        None,
        "Drop a task whose support or query loss is above this, as if it were not finite",
        positive="or leave it out",
    )
    max_task_norm: float = setting(
        None,
        "Drop a task whose direction has a larger norm than this, as if it were not finite",
        positive="or leave it out",
    )
    init_interpolation: float = setting(
        1.0,
        "alpha of WiSE-FT: export and validate the weights (1 - alpha) * initial + alpha * trained; 1: the"
        " trained weights alone, 0.6 keeps much of both (0.6 is what start_share 0.4 was)",
    )
    seed: int = setting(42, "Seed of the tasks, the episodes and every fresh weight", least=0)


@dataclass
class ParallelConfig:
    deepspeed: str | None = setting(
        None, "DeepSpeed JSON, as HF users have it; see ds_configs/", resume="free"
    )
    group_size: str = setting(
        "auto", "Ranks that hold one model together; auto: the fewest that hold it by estimate", resume="free"
    )
    pipeline_stages: int = setting(
        1, "Cut the model into this many pipeline stages inside each group", least=1, resume="free"
    )
    pipeline_balance: str = setting(
        "parameters",
        "What the stages get equal parts of; time: of a pass through each layer, tried on the first rank",
        BALANCES,
        resume="free",
    )
    tensor_parallel_size: int = setting(
        1,
        "Cut the weight matrices of each layer over this many ranks of each group",
        least=1,
        resume="free",
        synonyms=("tp_size",),
    )
    micro_batch_size: int = setting(
        32,
        "Most examples of one forward pass on one rank",
        least=1,
        resume="free",
        synonyms=("per_device_train_batch_size", "per_device_eval_batch_size"),
    )
    max_tokens_per_micro_batch: int = setting(
        0,
        "Most tokens of one forward pass on one rank, padding included: rows of like length share it, more of"
        " short ones; 0: any",
        least=0,
        resume="free",
    )
    tasks_per_pass: str = setting(
        "1",
        "With anil, protonet or --lora_r: tasks of a group whose rows go through the body together, each with"
        " a head and adapters of its own; auto: as many as fit into micro_batch_size rows",
        resume="free",
    )
    elastic: bool = setting(
        False,
        "This launch is one group of a run whose groups come and go (`fmmeta elastic` starts them;"
        " docs/elastic.md)",
        resume="free",
    )
    lighthouse: str | None = setting(
        None, "elastic: http://HOST:PORT of `fmmeta lighthouse` (default: TORCHFT_LIGHTHOUSE)", resume="free"
    )
    group_name: str | None = setting(
        None, "elastic: what the others call this group (default: host and process)", resume="free"
    )
    engine: str = setting(
        "auto",
        "What runs the model inside a group; auto: DeepSpeed wherever a group "
        "shares or offloads a model, plain PyTorch in a group of one that does not",
        ENGINES,
        resume="free",
    )
    compile: bool = setting(
        False,
        "torch.compile of the model, where one rank holds all of it in plain PyTorch; rows of any length",
        resume="free",
        synonyms=("torch_compile",),
    )
    bf16: bool = setting(
        False, "bf16 weights and activations over fp32 shards (where the DeepSpeed file says auto or nothing)"
    )
    offload_outer: bool = setting(
        False,
        "Keep theta, meta-gradient and outer moments in host memory during the inner loop",
        resume="free",
    )
    show_layout: bool = setting(
        False,
        "Show at the start on which node each rank of each group is, and which links carry what",
        resume="free",
    )
    local_rank: int = setting(-1, "Passed by launchers; leave it alone", resume="hidden")


@dataclass
class RunConfig:
    output_dir: str | None = setting(
        None, "Folder of the run (default: runs/<date>-<algorithm>-<dataset>)", resume="hidden"
    )
    save_steps: int = setting(
        100,
        "Outer steps between checkpoints; 0: none but when a signal stops the run",
        least=0,
        resume="free",
    )
    save_total_limit: int = setting(2, "Checkpoints to keep", least=1, resume="free")
    save_async: bool = setting(
        True, "Write checkpoints from a copy in host memory while training goes on", resume="free"
    )
    max_failed_saves: int = setting(
        3, "Stop after this many checkpoints in a row that could not be written", least=1, resume="free"
    )
    resume_from_checkpoint: str = setting(
        "latest", "A checkpoint folder, latest (of output_dir, if there is one), or never", resume="hidden"
    )
    accept_changed_settings: list[str] = setting(
        [],
        "Names of settings that change theta and that a continuation may have otherwise than the run it"
        " continues",
        resume="hidden",
    )
    step_timeout: float = setting(
        None,
        "Seconds that an outer step may take before the watchdog names who keeps it and ends the job"
        " (default: ten times the slowest so far, 300 at least, 1800 for the first)",
        positive="or leave it out",
        resume="free",
    )
    check_replicas_steps: int = setting(
        100,
        "Outer steps between checks that the groups hold the same theta; 0: before saves only",
        least=0,
        resume="free",
    )
    eval_steps: int = setting(
        0, "Outer steps between evaluations on validation tasks; 0: none", least=0, resume="free"
    )
    load_best_model_at_end: bool = setting(
        False,
        "Export the weights with the highest validation accuracy (of equals, the lowest loss) instead of the"
        " last ones",
    )
    eval_episodes: int = setting(
        100, "Episodes of each evaluation; 0: evaluate nothing", least=0, resume="free"
    )
    test_episodes: int = setting(
        None,
        "Episodes of the table on held-out tasks at the end (default: eval_episodes); 0: no table",
        least=0,
        resume="free",
    )
    logging_steps: int = setting(10, "Outer steps between lines of metrics.jsonl", least=1, resume="free")
    profile: bool = setting(
        False,
        "Look at one outer step: a trace per rank in output_dir, and a table of where its time went",
        resume="free",
    )
    report_to: list[str] = setting(
        ["none"], "One or more trackers that get the lines of metrics.jsonl as well", TRACKERS, resume="free"
    )


@dataclass
class Config(ModelConfig, TaskConfig, InnerConfig, MetaConfig, ParallelConfig, RunConfig):
    """Every setting of a run. Raises `UsageError` in one line where values contradict each other."""

    def __post_init__(self) -> None:
        """Fill in what was left open, then refuse what cannot work."""
        for item in fields(self):
            setattr(self, item.name, of_type(type(self), item.name, getattr(self, item.name)))
        for problem in validate.of_choices(self, fields(self)):
            raise UsageError(problem)
        for name, value in validate.resolved(self).items():
            setattr(self, name, value)
        for problem in validate.problems(self):
            raise UsageError(problem)

    @property
    def most_classes(self) -> int:
        """Classes of the largest episode, and so of the head; 0 for causal_lm."""
        return (self.n_way_max or self.n_way) if self.task_type == "classification" else 0

    @property
    def joint_head(self) -> bool:
        """Whether the model has one head for the classes of all training tasks, not one per task."""
        return algorithms.find(self.algorithm).all_classes and self.task_type == "classification"

    @property
    def most_shots(self) -> int:
        return self.k_shot_max or self.k_shot

    @property
    def builtin_model(self) -> bool:
        return self.model_name_or_path == "tiny"

    def as_dict(self) -> dict[str, Any]:
        """Every setting by its name."""
        return asdict(self)


REMEMBERED = names_where(Config, lambda rule: rule.remembered)
"""What an exported model stores in fmmeta.json, so that it is adapted as it was trained to be."""
FREE_ON_RESUME = {*names_where(Config, lambda rule: rule.resume != "fixed")}
"""Settings that may differ between a run and its continuation: they do not change theta."""
HIDDEN_ON_RESUME = {*names_where(Config, lambda rule: rule.resume == "hidden")}
"""Those of them that differ between any two starts."""
KEYED = names_where(Config, lambda rule: rule.keyed)
"""What decides how the rows of a data set become tokens, beside the tokenizer."""


def changed_settings(before: dict[str, Any], now: dict[str, Any], free: bool = False) -> dict[str, str]:
    """Settings that would make a continuation another run, by name, as `name: before -> now`; with `free`
    those that do not.

    What was resolved is not compared where one side does not know it: runs of 0.1.0.
    """
    known = {name for name in validate.RESOLVED if name in before and name in now}
    unbound = FREE_ON_RESUME | {"deepspeed_layout"} | ({"bf16"} if "precision" in known else set())
    keys = unbound - HIDDEN_ON_RESUME if free else (set(before) | set(now)) - unbound
    keys -= set(validate.RESOLVED) - known
    return {
        key: f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(keys)
        if before.get(key) != now.get(key)
    }
