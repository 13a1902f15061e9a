"""The planted defects: which text of which file is replaced by what, and which tests run first.

All of them were written from the code of the package, without looking at the tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One defect, or (`equivalent`) a rewrite that must not be noticed.

    file: path below fmmeta/; `old` occurs in it exactly once. tests: files below tests/ that run before the
    rest of the fast suite.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...] = ()
    equivalent: bool = False


RULES = ("unit/test_algorithms.py", "unit/test_more_algorithms.py", "unit/test_inner_outer.py")
WORKERS = ("workers/test_conformance.py",)
TASKS = ("unit/test_source.py", "unit/test_schedule.py", "unit/test_stratified_order.py")
BATCHES = ("unit/test_batching.py", "unit/test_pack.py")
CHECKPOINTS = ("unit/test_checkpoint_saving.py", "unit/test_checkpoint_export.py")
SCORES = ("unit/test_evaluate.py",)

MUTANTS = (
    # rules and the inner loop
    Mutant(
        "theta is not restored after Reptile",
        "meta/algorithms/reptile.py",
        "        worker.write(meta.theta)\n",
        "",
        "the next task of the group starts at phi_K of the one before",
        RULES,
    ),
    Mutant(
        "query gradient at phi_0",
        "meta/algorithms/unrolled.py",
        "        query = worker.gradient(episode.query, v, weight)",
        "        worker.write(theta)\n        query = worker.gradient(episode.query, v, weight)",
        "the meta-gradient ignores the inner loop",
        RULES,
    ),
    Mutant(
        "momentum is left out of the backward recursion",
        "meta/algorithms/unrolled.py",
        "w.mul_(momentum).sub_(",
        "w.zero_().sub_(",
        "exact MAML with inner momentum differentiates another inner loop",
        RULES,
    ),
    Mutant(
        "sign of the second-order term",
        "meta/algorithms/unrolled.py",
        "v += hessian.times(path.phi(k), w)",
        "v -= hessian.times(path.phi(k), w)",
        "I + alpha H instead of I - alpha H",
        RULES,
    ),
    Mutant(
        "Hessian at the wrong point",
        "meta/algorithms/unrolled.py",
        "hessian.times(path.phi(k), w)",
        "hessian.times(path.phi(0), w)",
        "second derivatives are taken at phi_0 for every step",
        RULES,
    ),
    Mutant(
        "multi-step loss weights do not sum to 1",
        "meta/algorithms/unrolled.py",
        "1 - early * (inner_steps - 1))",
        "1 - early * inner_steps)",
        "the query losses are weighted by less than 1 in total",
        RULES,
    ),
    Mutant(
        "first-order steps last one step longer",
        "meta/algorithms/unrolled.py",
        "order = 1 if outer_step < config.first_order_steps",
        "order = 1 if outer_step <= config.first_order_steps",
        "the first exact outer step is of first order",
        RULES,
    ),
    Mutant(
        "damping of iMAML is dropped",
        "meta/algorithms/imaml.py",
        "alpha=1 + self.damping",
        "alpha=1",
        "--cg_damping has no effect",
        RULES,
    ),
    Mutant(
        "conjugate gradients restart at every step",
        "meta/algorithms/imaml.py",
        "search.mul_(size / before).add_(residual)",
        "search.copy_(residual)",
        "steepest descent: the system is not solved in the given steps",
        RULES,
    ),
    Mutant(
        "one-sided difference",
        "meta/hessian.py",
        "restore=torch.sub(phi, d, alpha=h)",
        "restore=phi",
        "half of each Hessian-vector product",
        RULES,
    ),
    Mutant(
        "the proximal term is anchored at the origin",
        "meta/inner_optimizers.py",
        "grad = grad + proximal * (shard - anchor[where])",
        "grad = grad + proximal * shard",
        "the inner loop of iMAML is weight decay",
        RULES,
    ),
    Mutant(
        "second moment without bias correction",
        "meta/inner_optimizers.py",
        "(second / (1 - b2**count))",
        "second.clone()",
        "inner AdamW is not that of the paper",
        RULES,
    ),
    Mutant(
        "learned rates of another inner step",
        "meta/inner_optimizers.py",
        "into[k] -= worker.dot_by_layer",
        "into[0] -= worker.dot_by_layer",
        "the gradients of all rates are added to those of the first step",
        RULES,
    ),
    Mutant(
        "prototypes divided by all rows",
        "meta/classifier_head.py",
        "return ClassMeans(sums[:, :-1] / counts, counts)",
        "return ClassMeans(sums[:, :-1] / counts.sum() * len(counts), counts)",
        "class means are wrong where classes have different numbers of rows",
        (*RULES, "unit/test_batching.py"),
    ),
    Mutant(
        "the prototype head has no bias",
        "meta/classifier_head.py",
        "return 2 * means, -(means**2).sum(1)",
        "return 2 * means, 0 * (means**2).sum(1)",
        "the initial head is no nearest-mean classifier",
        RULES,
    ),
    Mutant(
        "the head is not reset",
        "meta/classifier_head.py",
        "                phi[fragment.here] = 0\n",
        "                pass\n",
        "joint training adapts to a task from a head of other classes",
        ("unit/test_joint.py",),
    ),
    Mutant(
        "filling rows count in class means",
        "meta/classifier_head.py",
        "return (batch.weights > 0).to(like.device, like.dtype)[:, None]",
        "return (batch.weights >= 0).to(like.device, like.dtype)[:, None]",
        "a rank without rows adds a copy of a row of another rank",
        WORKERS,
    ),
    # the outer step
    Mutant(
        "weight of a skipped task is counted",
        "training/run_log.py",
        "            self.skipped += 1\n            return\n",
        "            self.skipped += 1\n            self.weight += task.weight\n            return\n",
        "the mean is divided by tasks that added nothing",
        ("distributed/test_nonfinite.py",),
    ),
    Mutant(
        "mean over groups instead of tasks",
        "training/run_log.py",
        '"weight": self.weight,',
        '"weight": float(self.weight > 0),',
        "theta moves too far when a group has several tasks",
        ("distributed/test_parity.py",),
    ),
    Mutant(
        "the delayed meta-gradient is applied twice",
        "meta/outer_step.py",
        "        pending, self.pending = self.pending, None\n",
        "        pending = self.pending\n",
        "with --outer_delay the last meta-gradient is applied again",
        ("unit/test_delayed_update.py",),
    ),
    Mutant(
        "delay off by one at the end",
        "meta/outer_step.py",
        "if self.spare_buffer is None or last:",
        "if self.spare_buffer is None:",
        "the last meta-gradient of a delayed run is lost",
        ("unit/test_delayed_update.py",),
    ),
    Mutant(
        "clipping by the norm of one rank",
        "meta/outer_step.py",
        "return math.sqrt(float(over_group(self.worker, square)))",
        "return math.sqrt(float(square))",
        "ranks of a group clip differently",
        ("unit/test_inner_outer.py", "distributed/test_parity.py"),
    ),
    Mutant(
        "weight decay on norms and biases",
        "meta/outer_step.py",
        'config.weight_decay if name == "decay" else 0.0',
        "config.weight_decay",
        "vectors are decayed too",
        ("unit/test_inner_outer.py",),
    ),
    Mutant(
        "the schedule is one step ahead",
        "meta/outer_step.py",
        "return self.config.outer_lr * self.factor(outer_step)",
        "return self.config.outer_lr * self.factor(outer_step + 1)",
        "the learning rate of a warm-up begins at its second value",
        ("unit/test_inner_outer.py",),
    ),
    Mutant(
        "moments are not restored",
        "meta/outer_step.py",
        "            for name in self.spec.moments\n            if name in state.vectors\n",
        "            for name in self.spec.moments[:0]\n",
        "a resumed run restarts AdamW with zero moments",
        ("unit/test_inner_outer.py", *CHECKPOINTS),
    ),
    # shards and workers
    Mutant(
        "copies count in sums over the model",
        "parallel/param_map.py",
        "for fragment in self.fragments if not fragment.owned]",
        "for fragment in self.fragments[:0]]",
        "tied weights and replicated parameters are counted twice in norms",
        (*WORKERS, "unit/test_pipeline_split.py"),
    ),
    Mutant(
        "wrong slice at a shard border",
        "parallel/param_map.py",
        "return slice(self.offset, self.offset + self.length)",
        "return slice(0, self.length)",
        "a rank that holds the end of a parameter takes its beginning",
        (*WORKERS, *CHECKPOINTS),
    ),
    Mutant(
        "mean over data ranks",
        "parallel/workers/zero.py",
        "self.engine.backward(loss * self.coordinates.data, scale_wrt_gas=False)",
        "self.engine.backward(loss, scale_wrt_gas=False)",
        "gradients are divided by the number of data ranks",
        WORKERS,
    ),
    Mutant(
        "bf16 rounds the start",
        "parallel/workers/zero.py",
        "        if bf16 and read is not None:\n            self.set_exactly(read)\n",
        "",
        "theta starts at the checkpoint's weights rounded to bf16",
        WORKERS,
    ),
    Mutant(
        "padding is not zeroed",
        "parallel/workers/zero.py",
        "                tensor[gap] = 0  # padding\n",
        "                pass\n",
        "norms contain whatever memory held before",
        ("distributed/test_nonfinite.py", *WORKERS),
    ),
    Mutant(
        "ranks disagree about a gradient that is not finite",
        "parallel/workers/zero.py",
        "optimizer.reject_nonfinite = lambda bad: self.group.sum_(bad.to(self.device, torch.float32)) > 0",
        "optimizer.reject_nonfinite = lambda bad: bad.to(self.device)",
        "one rank of ZeRO 0 skips an inner step, the other takes it",
        (*WORKERS, "distributed/test_nonfinite.py"),
    ),
    # tasks
    Mutant(
        "query rows are support rows",
        "tasks/sources/base.py",
        "return drawn[:shots], drawn[shots:]",
        "return drawn[:shots], drawn[-num_query - 1 : -1]",
        "the query set shares rows with the support set",
        TASKS,
    ),
    Mutant(
        "labels follow the order of the file",
        "tasks/sources/base.py",
        "classes = [chosen[i] for i in rng.permutation(n_way)]",
        "classes = sorted(chosen)",
        "a class tends to have the same label in all episodes, which a learned head can memorise",
        TASKS,
    ),
    Mutant(
        "other episodes after a resume",
        "tasks/schedule/meta_batches.py",
        "number = self.orders[node].at(outer_step * self.per_node + turn)",
        "number = self.orders[node].at(max(outer_step - 1, 0) * self.per_node + turn)",
        "the tasks of the first meta-batch are trained on twice, the last ones never",
        TASKS,
    ),
    Mutant(
        "groups run the same tasks",
        "tasks/schedule/meta_batches.py",
        "return shares[group_index]",
        "return shares[0]",
        "the other groups repeat the tasks of the first",
        (*TASKS, "distributed/test_parity.py"),
    ),
    Mutant(
        "the balance of strata forgets earlier steps",
        "tasks/schedule/meta_batches.py",
        "        seen[g][task.stratum] += 1\n",
        "",
        "a group may get all tasks of a stratum",
        TASKS,
    ),
    Mutant(
        "test classes in training",
        "tasks/data/splits.py",
        '"train": units[2 * held_out :],',
        '"train": units[held_out:],',
        "the validation classes are trained on",
        ("unit/test_splits.py", *TASKS),
    ),
    Mutant(
        "a class may be in two splits",
        "tasks/data/splits.py",
        "if split_of.setdefault(unit, split) != split:",
        "if split_of.setdefault(unit, split) == 0:",
        "a split file that leaks test classes into training is accepted",
        ("unit/test_splits.py", "unit/test_source.py"),
    ),
    Mutant(
        "mean of means over micro-batches",
        "tasks/batching.py",
        "collate(part or ordered[-1:], 1 / total if part",
        "collate(part or ordered[-1:], 1 / len(parts) / len(part) if part",
        "rows of short micro-batches weigh more",
        BATCHES,
    ),
    Mutant(
        "packed rows predict the first token of the next row",
        "tasks/batching.py",
        "for label in (IGNORE, *row.labels[1:])",
        "for label in row.labels",
        "a loss is taken across the border of two rows",
        BATCHES,
    ),
    Mutant(
        "packed rows share positions",
        "tasks/batching.py",
        "for row in rows for position in range(len(row.input_ids))]",
        "for row in rows for position in range(1, 1 + len(row.input_ids))]",
        "attention crosses rows of a packed sequence",
        BATCHES,
    ),
    # checkpoints, runs, scores
    Mutant(
        "checkpoints are not compared with their checksums",
        "checkpoint/read.py",
        'if checksum.hexdigest() != entry["sha256"]:',
        'if not entry["sha256"]:',
        "a run resumes from a damaged file",
        CHECKPOINTS,
    ),
    Mutant(
        "the newest checkpoints are removed",
        "checkpoint/write.py",
        "for old in list_complete(folder.parent)[:-keep]:",
        "for old in list_complete(folder.parent)[keep:]:",
        "--save_total_limit keeps the oldest",
        CHECKPOINTS,
    ),
    Mutant(
        "an interval over the wrong count",
        "metrics/scores.py",
        "math.sqrt(variance / n)",
        "math.sqrt(variance / (n + 1))",
        "intervals are too narrow",
        SCORES,
    ),
    Mutant(
        "differences are not paired by slot",
        "metrics/scores.py",
        "pairs = [(score, by_slot[score.slot]) for score in scores if score.slot in by_slot]",
        "pairs = list(zip(scores, others))",
        "episodes of different tasks are compared",
        SCORES,
    ),
    Mutant(
        "a group leaves its tasks and the others finish the step",
        "training/loop.py",
        "        return left > 0\n",
        "        return left_tasks\n",
        "after a stop signal groups disagree about the outer step: some save another theta",
        ("unit/test_reliability.py", "distributed/test_signals.py"),
    ),
    Mutant(
        "a step without data counts as applied",
        "training/state.py",
        "        elif outcome is Outcome.SKIPPED_NONFINITE:\n            self.bad_steps += 1\n",
        "",
        "a run whose every step diverges is never ended",
        ("distributed/test_nonfinite.py", "unit/test_callbacks.py"),
    ),
    Mutant(
        "a collective is skipped on some ranks",
        "meta/classifier_head.py",
        "    worker.group.sum_(sums if worker.counts_rows else sums.zero_())\n",
        "    if worker.counts_rows:\n        worker.group.sum_(sums)\n",
        "tensor-parallel ranks other than the first do not take part in the sum of the class means",
        WORKERS,
    ),
    Mutant(
        "the worst validated weights are exported",
        "training/state.py",
        "if (accuracy, -loss) > (self.accuracy, -self.loss):",
        "if (accuracy, loss) > (self.accuracy, self.loss):",
        "at equal accuracy --load_best_model_at_end prefers the higher loss",
        ("unit/test_train.py",),
    ),
    Mutant(
        "changed settings are accepted on resume",
        "training/run_folder.py",
        "refused = [text for name, text in changed.items() if name not in config.accept_changed_settings]",
        "refused = [text for name, text in changed.items() if name in ()]",
        "a run continues with another learning rate or seed without a word",
        ("unit/test_resume_settings.py", *CHECKPOINTS),
    ),
    Mutant(
        "a loss is taken on the prompt",
        "tasks/data/encode.py",
        "return Example(ids, [IGNORE] * prompt + ids[prompt:])",
        "return Example(ids, [IGNORE] + ids[1:])",
        "causal_lm learns to repeat its inputs",
        ("unit/test_prompts.py",),
    ),
    Mutant(
        "groups that disagree are not noticed",
        "elastic/controller.py",
        "        if tasks != expected:\n",
        "        if tasks > expected:\n",
        "a meta-batch without the tasks of a lost group is applied",
        ("unit/test_elastic.py",),
    ),
    # rewrites that compute the same up to rounding
    Mutant(
        "norm as a sum of squares in another order",
        "tasks/batching.py",
        "total = sum(example.label_tokens for example in examples)",
        "total = sum(example.label_tokens for example in reversed(examples))",
        "nothing",
        BATCHES,
        equivalent=True,
    ),
    Mutant(
        "momentum in one expression",
        "meta/inner_optimizers.py",
        "u.div_((second / (1 - b2**count)).sqrt_()",
        "u.div_((second.div(1 - b2**count)).pow(0.5)",
        "nothing",
        RULES,
        equivalent=True,
    ),
    Mutant(
        "backward minus forward",
        "meta/hessian.py",
        "product = forward.sub_(backward).div_(2 * h)",
        "product = backward.sub_(forward).div_(-2 * h)",
        "nothing",
        RULES,
        equivalent=True,
    ),
    Mutant(
        "class means by multiplication",
        "meta/classifier_head.py",
        "return ClassMeans(sums[:, :-1] / counts, counts)",
        "return ClassMeans(sums[:, :-1] * counts.reciprocal(), counts)",
        "nothing",
        RULES,
        equivalent=True,
    ),
    Mutant(
        "the mean gradient by multiplication",
        "meta/outer_step.py",
        "gradient[bucket].div_(mean.weight)",
        "gradient[bucket].mul_(1 / mean.weight)",
        "nothing",
        ("unit/test_inner_outer.py", "unit/test_delayed_update.py"),
        equivalent=True,
    ),
)
"""First the defects, then at least five rewrites that must pass."""
