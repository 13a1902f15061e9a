"""Few-shot methods in lm-evaluation-harness, for its tasks and its scores: `fmmeta lm-eval`.

    fmmeta lm-eval --model fmmeta --model_args pretrained=FOLDER,method=finetune --tasks NAME --num_fewshot 0

The arguments are those of `lm_eval`, whose registry gets the model `fmmeta`: the harness's `hf` model, whose
weights the inner loop changes for each task. The support set is `k_shot` examples of the task, drawn by
`support_seed` from those that the harness takes its few-shot prompts from. A row is what the harness writes
for an example; a loss is taken on the answer and what follows it (`fewshot_delimiter`).

    method                 the inner loop learns                   to be used with
    finetune               the examples                            --num_fewshot 0
    finetune+in_context    each example behind the others          --num_fewshot of k_shot
    in_context             nothing: the harness's prompts          --num_fewshot

Perplexities (loglikelihood_rolling) have no examples, and are those of the model before any task. With
inner_steps=0 all numbers are those of `hf`.
"""

import random
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fmmeta.adaptation.task_learner import Encoded, TaskExamples, TaskLearner
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.common.text import any_of, counted, nearest
from fmmeta.config.learners import CAUSAL_LM
from fmmeta.evaluation.settings import IN_CONTEXT, OF_ADAPT, AdaptConfig, has_inner_loop
from fmmeta.tasks.batching import Example
from fmmeta.tasks.data.encode import labelled
from fmmeta.tasks.data.rows import Table

OF_MODEL, LISTS = ("bf16", "attn_implementation"), ("lora_target_modules", "inner_parameters")
OF_LOOP = (*OF_MODEL, *LISTS, "inner_steps", "inner_lr", "inner_optimizer", "lora_r", "lora_alpha")
"""Arguments of the model that are settings of `fmmeta adapt`."""
OF_HARNESS = (
    *("batch_size", "max_batch_size", "max_length", "truncation", "add_bos_token", "prefix_token_id"),
    *("logits_cache", "think_end_token", "enable_thinking", "chat_template_args"),
)
"""Those that `hf` reads of a model that is loaded."""


HarnessModel: Any = HFLM


@cache
def known_tasks(include_path: str | None) -> TaskManager:
    """The tasks of the harness and the user's; to list them takes seconds."""
    return TaskManager(include_path=include_path)


class FewShotLM(HarnessModel):
    """The model `fmmeta` of the harness. pretrained: a folder or hub id, also of adapters.

    k_shot, support_seed: of the support set of each task. include_path: where the harness finds the user's
    tasks, as its own flag. device: is not read, since fmmeta chooses it and the harness always gives one.
    options: settings of the inner loop (OF_LOOP; words of a list are joined by +), or arguments of `hf`
    (OF_HARNESS). Raises `UsageError`.
    """

    include_path: str | None = None

    def __init__(
        self,
        pretrained: str,
        method: str = "finetune+in_context",
        k_shot: int = 5,
        support_seed: int = 1234,
        include_path: str | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        if method not in OF_ADAPT:
            raise UsageError(f"method={method} is unknown; use {any_of(OF_ADAPT)}")
        if unread := options.keys() - {*OF_LOOP, *OF_HARNESS}:
            name, *_ = sorted(unread)
            raise UsageError(
                f"model_args={name} is no argument of the model fmmeta"
                f"{nearest(name, (*OF_LOOP, *OF_HARNESS), '; leave it out')}"
            )
        self.k_shot, self.support_seed = k_shot, support_seed
        self.tasks = known_tasks(include_path or self.include_path)
        given = {name: options.pop(name) for name in OF_LOOP if name in options}
        given |= {name: given[name].split("+") for name in LISTS if isinstance(given.get(name), str)}
        self.learns = has_inner_loop(method) and given.get("inner_steps") != 0
        if not self.learns:
            method, given = IN_CONTEXT, {name: given[name] for name in OF_MODEL if name in given}
        settings = AdaptConfig(
            model_name_or_path=pretrained,
            task_type=CAUSAL_LM.name,
            method=method,
            early_stopping=not self.learns,
            **given,
        )
        self.learner = TaskLearner(settings, 0, Progress(enabled=False))
        model = self.learner.model
        super().__init__(pretrained=model.worker.learner.hf, tokenizer=model.tokenizer, **options)

    def examples(self, name: str) -> list[Example]:
        """The support set of a task. Raises `UsageError` where its examples are documents of the test."""
        task: Any = self.tasks.load([name])["tasks"][name]
        given, fewshot = f"tasks={name} with k_shot={self.k_shot}", task.fewshot_cfg
        parts: Any = task.config  # the harness takes the first of these splits that there is
        source = fewshot.split or parts.training_split or parts.validation_split or parts.test_split
        if source == (parts.test_split or parts.validation_split) and not fewshot.samples:
            raise UsageError(f"{given}: its few-shot examples are test documents; name a fewshot_split in it")
        documents = [*task.fewshot_docs()]
        if len(documents) < self.k_shot:
            raise UsageError(f"{given}: it has {counted(len(documents), 'example')}; lower k_shot")
        texts = []
        for one in random.Random(self.support_seed).sample(documents, self.k_shot):
            choices = task.doc_to_choice(one, fewshot.doc_to_choice) if fewshot.doc_to_choice else None
            turn_of = {
                "q": task.doc_to_text(one, fewshot.doc_to_text),
                "c": choices,
                "gen_prefix": task.resolve_field(one, fewshot.gen_prefix),
                "tgt_delim": fewshot.target_delimiter,
                "few_delim": fewshot.fewshot_delimiter,
            }
            answer = task.doc_to_target(one, fewshot.doc_to_target)
            asked, answered = (
                "".join(turn.to_text() for turn in task.build_qa_turn(**turn_of, **more))
                for more in ({}, {"a": answer})
            )
            texts.append((asked, answered.removeprefix(asked)))
        rows = [self._encode_pair(asked, answer) for asked, answer in texts]
        whole = [labelled([*context, *answer], len(context)) for context, answer in rows]
        most = self.max_length
        return [Example(one.input_ids[-most:], one.token_labels[-most:]) for one in whole]

    def of_task(
        self,
        name: str,
        answer: Callable[[Sequence[Any], bool], list[Any]],
        requests: Sequence[Any],
        quiet: bool,
    ) -> list[Any]:
        """The harness's answers to the requests of a task, by a model that has learned it."""
        rows = self.examples(name)
        encoded = Encoded(TaskExamples(name, Table()), rows, self.learner.steps)
        (learned,) = self.learner.learn([encoded])
        if learned.failure:
            raise UsageError(f"tasks={name}: {learned.failure}")
        if learned.weights:
            self.learner.hold(learned.weights)
        found = answer(requests, quiet)
        self.learner.model.worker.write(self.learner.theta)
        return found

    def by_task(self, answer: Any, requests: Sequence[Any], quiet: bool) -> list[Any]:
        """The answers to all requests, in their order."""
        if not self.learns:
            return answer(requests, quiet)
        found = dict[int, Any]()
        for name in dict.fromkeys(one.task_name for one in requests):
            at = [place for place, one in enumerate(requests) if one.task_name == name]
            of_task = self.of_task(name, answer, [requests[place] for place in at], quiet)
            found |= dict(zip(at, of_task, strict=True))
        return [found[place] for place in range(len(requests))]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return self.by_task(super().loglikelihood, requests, disable_tqdm)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return self.by_task(super().generate_until, requests, disable_tqdm)


def launch(words: Sequence[str]) -> None:
    """Run `lm_eval` with these words; its registry has the model `fmmeta`."""
    FewShotLM.include_path = next(
        (value for name, value in pairwise(words) if name == "--include_path"), None
    )
    model_registry.register("fmmeta", target=FewShotLM)
    sys.argv = ["lm_eval", *words]
    cli_evaluate()
