"""What to write instead of names of other libraries: Trainer, TRL, SetFit, lm-eval, learn2learn, higher.

`answer` is the text after an unknown flag or an unknown name in a file of settings.
"""

from fmmeta.config.fields import rules
from fmmeta.config.settings import Config

OUTER = "--outer_optimizer, --outer_lr, --weight_decay and --adam_epsilon set the outer optimizer"
PRECISION = "use --bf16; fp16 underflows in the differences that meta-gradients are made of"
LENGTH = "fmmeta counts outer steps; use --outer_steps, or --outer_epochs for as many as the rows need"
TASKS = "the batch of meta-training is a number of tasks; use --meta_batch_size"
SIZES = "of tasks per outer step; --micro_batch_size bounds the rows of a forward pass"
FIXED = "fmmeta always does this"
SPLITS = "held-out classes or tasks are the validation and test data; use --class_splits or --task_splits"
LORA = "use --lora_r, --lora_alpha and --lora_target_modules"
SHARDS = "use --deepspeed FILE.json (ZeRO 3) with --group_size"
TEST = "use `fmmeta evaluate`"

ANSWERS = {
    # transformers Trainer
    "learning_rate": "fmmeta has --outer_lr and --inner_lr",
    "lr": "fmmeta has --outer_lr and --inner_lr",
    "num_train_epochs": LENGTH,
    "num_epochs": LENGTH,
    "epochs": LENGTH,
    "per_device_train_batch_size": f"fmmeta has --meta_batch_size {SIZES}",
    "per_device_eval_batch_size": "--micro_batch_size bounds the rows of a forward pass, --eval_episodes the"
    " episodes of an evaluation",
    "batch_size": f"fmmeta has --meta_batch_size {SIZES}",
    "auto_find_batch_size": "rows of a forward pass have an upper bound; use --micro_batch_size",
    "gradient_accumulation_steps": "a task's rows are accumulated by --micro_batch_size; use"
    " --meta_accumulation_steps to accumulate meta-batches",
    "fp16": PRECISION,
    "fp16_full_eval": PRECISION,
    "half_precision_backend": PRECISION,
    "bf16_full_eval": "--bf16 holds in evaluations too",
    "tf32": "set torch.set_float32_matmul_precision, or use --bf16",
    "torch_dtype": "theta is held in fp32; use --bf16 for bf16 weights and activations",
    "dtype": "theta is held in fp32; use --bf16 for bf16 weights and activations",
    "load_in_8bit": "quantised weights cannot be meta-trained; use --lora_r with --bf16",
    "load_in_4bit": "quantised weights cannot be meta-trained; use --lora_r with --bf16",
    "adam_beta1": "the outer AdamW has the betas of torch; --inner_beta1 and --inner_beta2 are those of the"
    " inner one",
    "adam_beta2": "the outer AdamW has the betas of torch; --inner_beta1 and --inner_beta2 are those of the"
    " inner one",
    "logging_dir": "the trackers' files go into the run's folder; use --output_dir",
    "logging_strategy": "use --logging_steps",
    "logging_first_step": FIXED,
    "evaluation_strategy": "use --eval_steps; 0: none",
    "eval_strategy": "use --eval_steps; 0: none",
    "save_strategy": "use --save_steps; 0: only when a signal stops the run",
    "metric_for_best_model": "--load_best_model_at_end compares the validation accuracy",
    "greater_is_better": "--load_best_model_at_end compares the validation accuracy",
    "do_train": "`fmmeta train` always trains; leave it out",
    "do_eval": "use --eval_steps during training, or `fmmeta evaluate`",
    "do_predict": "use `fmmeta adapt`, then `fmmeta predict`",
    "overwrite_output_dir": "fmmeta overwrites no run; use another --output_dir",
    "push_to_hub": "training does not upload; use `fmmeta push` on the run's model folder",
    "hub_model_id": "training does not upload; use `fmmeta push` on the run's model folder",
    "hub_token": "a token belongs into the environment; set HF_TOKEN",
    "train_file": "files are data sets; use --dataset FILE.jsonl",
    "validation_file": SPLITS,
    "test_file": SPLITS,
    "dataset_path": "use --dataset",
    "validation_split_percentage": SPLITS,
    "max_train_samples": "use --outer_steps and --meta_batch_size: tasks are drawn, not passed through once",
    "max_eval_samples": "use --eval_episodes",
    "group_by_length": "use --max_tokens_per_micro_batch: rows of similar length share a pass",
    "remove_unused_columns": "only the columns of --text_column and --label_column, or --input_column and"
    " --output_column, are read",
    "ddp_backend": "NCCL on GPUs and gloo on CPUs are chosen by the device",
    "ddp_find_unused_parameters": "fmmeta does not use DDP; leave it out",
    "ddp_timeout": "use --step_timeout",
    "fsdp": SHARDS,
    "fsdp_config": SHARDS,
    "data_seed": "use --seed, which draws tasks and episodes too",
    "full_determinism": "the same --seed draws the same tasks on any number of ranks; leave it out",
    "neftune_noise_alpha": "write it as a transform; use --example_transforms module:name",
    "label_smoothing_factor": "the loss is plain cross-entropy; leave it out",
    # TRL, PEFT
    "dataset_text_field": "use --text_column, or --input_column and --output_column",
    "dataset_train_split": "use --dataset_split",
    "dataset_test_split": SPLITS,
    "completion_only_loss": "with --task_type causal_lm labels always cover the answer only; leave it out",
    "assistant_only_loss": "labels cover the answer only; leave it out",
    "use_peft": LORA,
    "lora_dropout": f"adapters have no dropout, as the rest of the model in meta-training; {LORA}",
    "use_lora": LORA,
    # SetFit, sentence-transformers
    "num_iterations": "use --inner_steps; --algorithm protonet needs no pairs",
    "body_learning_rate": "fmmeta has --outer_lr, and --inner_lr with --inner_lr_groups head=FACTOR",
    "head_learning_rate": "use --inner_lr with --inner_lr_groups head=FACTOR",
    "normalize_embeddings": "use --feature_norm 1 with --pooling mean or cls",
    "pooling_mode": "use --pooling",
    "num_samples": "use --k_shot, the support examples per class",
    # learn2learn, higher, few-shot benchmarks
    "shots": "use --k_shot",
    "num_shots": "use --k_shot",
    "n_shot": "use --k_shot",
    "kshot": "use --k_shot",
    "ways": "use --n_way",
    "num_ways": "use --n_way",
    "nway": "use --n_way",
    "queries": "use --num_query",
    "test_shots": "use --num_query",
    "n_query": "use --num_query",
    "adaptation_steps": "use --inner_steps",
    "num_inner_steps": "use --inner_steps",
    "fast_lr": "use --inner_lr",
    "adapt_lr": "use --inner_lr",
    "meta_lr": "use --outer_lr",
    "num_tasks": TASKS,
    "tasks_per_batch": TASKS,
    "meta_bsz": TASKS,
    "first_order": "--algorithm fomaml is first-order, --algorithm maml exact",
    "order": "--algorithm fomaml is first-order, --algorithm maml exact",
    "allow_unused": "parameters without a gradient are left as they are; leave it out",
    "num_iterations_outer": LENGTH,
    "iterations": LENGTH,
    # lm-eval
    "num_fewshot": f"use --k_shot; to score a model, {TEST}",
    "tasks": f"use --dataset; to score a model, {TEST}",
    "limit": f"use --eval_episodes; to score a model, {TEST}",
    "model": "use --model_name_or_path",
    "pretrained": "use --model_name_or_path",
    "output_path": "use --output_dir",
}
"""Name of another library -> what to do here."""


def answer(name: str) -> str | None:
    """What fmmeta has instead of a name of another library, with or without dashes; None for unknown names.

    >>> answer("--learning_rate")
    'fmmeta has --outer_lr and --inner_lr'
    >>> answer("max_steps")
    'use --outer_steps'
    """
    name = name.removeprefix("--").replace("-", "_")
    same = next((own for own, rule in rules(Config).items() if name in rule.synonyms), None)
    return ANSWERS.get(name) or (f"use --{same}" if same else None)
