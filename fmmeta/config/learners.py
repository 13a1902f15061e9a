"""`LearnerSpec`, which describes a kind of task to the rest of the package, and the registry.

No other module compares the name of a kind of task: all read the fields of `find(name)`. Your spec is
a copy of one of these with another loss or other inputs (examples/own_loss.py, own_inputs.py), or your
`fmmeta.Learner` (examples/own_module.py): `--task_type my_module:name`, or an entry point of the group
`fmmeta.learners` of an installed package. torch is imported to check a loss alone.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.text import any_of
from fmmeta.config.registry import find_spec, resolved


@dataclass(frozen=True)
class LearnerSpec:
    """A kind of task: what its rows are, and the loss that a model learns them by.

    name: of a built-in kind, whatever the loss: an exported model stores it.
    of_classes: a row has a class; an episode has n_way classes, and a head has an output for each.
    generates: a row has an answer, which the model writes token by token; an episode is of one task.
    ordered: a task is a document; inner step k learns from its chunk k, which is scored before.
    loss: (logits [N, C], targets [N]) -> losses [N], one for each row or, where the model writes answers, for
    each token of them; fp32 or fp64. None: cross-entropy. The loss of a row depends on this row alone, and
    is differentiable, for exact meta-gradients twice. Classes that a row's episode does not have are logits
    of -inf.
    learner: the class of the learner, or module:name of it: it reads rows, makes batches and says what an
    answer is (learners/base.py).
    make: returns the module, of a learner without a Hugging Face model.
    has_head: whether a head has an output for each of --n_way classes, tags or targets.
    reads: settings of other kinds that this one uses too. defaults: of settings that are left open.
    loss_unit: the unit of the loss, where `loss` is None.
    """

    name: str
    of_classes: bool = False
    generates: bool = False
    ordered: bool = False
    loss: Callable[[Any, Any], Any] | None = None
    learner: Any = None
    make: Callable[[], Any] | None = None
    has_head: bool = False
    reads: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    loss_unit: str = "nats"

    @property
    def kind(self) -> Any:
        """The class of the learner; None if it is not known. Its module imports torch."""
        return resolved(self.learner) if isinstance(self.learner, str) else self.learner

    @property
    def plain(self) -> bool:
        """Whether the learner is that of texts, images, answers or documents, which stages and tensor ranks
        know.
        """
        return self.learner in (CLASSIFICATION.learner, CAUSAL_LM.learner, STREAM.learner)

    @property
    def auto(self) -> str:
        """transformers' class of its model; "" where that depends on the model."""
        return CAUSAL if self.generates else "" if self.of_classes else getattr(self.kind, "auto", "")

    @property
    def writes(self) -> bool:
        """Whether its model writes tokens: a text has an end token, and generation settings name it."""
        return self.auto in (CAUSAL, SEQ2SEQ_LM)

    @property
    def by_loss(self) -> bool:
        """Whether models of this kind are compared by their loss, where others are by accuracy."""
        return self.generates or self.ordered

    @property
    def unit(self) -> str:
        """The unit of the loss."""
        return self.loss_unit if self.loss is None else "units of loss"

    def noun(self, images: bool = False) -> str:
        """What a model of this kind does; "" for a user's. images: whether it reads images."""
        if self.of_classes:
            return f"{'image' if images else 'text'} classification"
        return "text generation" if self.generates else self.name.replace("_", " ").removeprefix(OWN.name)

    @property
    def pools(self) -> bool:
        """Whether the head of a model is on the vector of a text (--pooling)."""
        return self.of_classes or getattr(self.kind, "pooled", None) is not None


CAUSAL, SEQ2SEQ_LM = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
CLASSIFICATION = LearnerSpec(
    "classification",
    learner="fmmeta.learners.classification:NativeClassifier",
    of_classes=True,
    has_head=True,
)
CAUSAL_LM = LearnerSpec("causal_lm", learner="fmmeta.learners.causal_lm:CausalLearner", generates=True)
SEQ2SEQ = LearnerSpec(
    "seq2seq",
    learner="fmmeta.learners.seq2seq:Seq2SeqLearner",
    reads=("input_column", "output_column", "prompt_template"),
)
PREFERENCE = LearnerSpec(
    "preference",
    learner="fmmeta.learners.preference:PreferenceLearner",
    reads=("input_column", "prompt_template"),
)
REWARD = replace(
    PREFERENCE,
    name="reward",
    learner="fmmeta.learners.preference:RewardLearner",
    has_head=True,
    defaults={"n_way": 1},
)
TOKEN_CLASSIFICATION = LearnerSpec(
    "token_classification",
    learner="fmmeta.learners.token_classification:TokenClassifier",
    has_head=True,
    reads=("text_column", "label_column"),
)
REGRESSION = LearnerSpec(
    "regression",
    learner="fmmeta.learners.regression:Regressor",
    has_head=True,
    reads=("text_column", "label_column", "pooling", "feature_norm"),
    defaults={"n_way": 1, "inner_lr": 0.01},
    loss_unit="squared standard deviations",
)
STREAM = LearnerSpec(
    "stream",
    learner="fmmeta.learners.stream:StreamLearner",
    ordered=True,
    reads=("text_column",),
    defaults={"algorithm": "ttt"},
)
SPECS = (
    "CLASSIFICATION",
    "CAUSAL_LM",
    "SEQ2SEQ",
    "PREFERENCE",
    "REWARD",
    "TOKEN_CLASSIFICATION",
    "REGRESSION",
    "STREAM",
)
OWN = LearnerSpec("own", loss_unit="units of loss")
"""Of a module whose code a stored model names, and which is given again."""
BUILT_IN = {
    "classification": "fmmeta.config.learners:CLASSIFICATION",
    "causal_lm": "fmmeta.config.learners:CAUSAL_LM",
    "token_classification": "fmmeta.config.learners:TOKEN_CLASSIFICATION",
    "regression": "fmmeta.config.learners:REGRESSION",
    "seq2seq": "fmmeta.config.learners:SEQ2SEQ",
    "preference": "fmmeta.config.learners:PREFERENCE",
    "reward": "fmmeta.config.learners:REWARD",
    "stream": "fmmeta.config.learners:STREAM",
}
"""Name -> module:spec."""
GIVEN = dict[str, LearnerSpec]()
"""Of modules that were given in Python, by what a message calls them."""


def give(learner: Any) -> str:
    """The name of a learner that is given in Python, a module whose weights are theta_0."""
    name = f"{type(learner).__module__}:{type(learner).__qualname__}"
    GIVEN[name] = replace(OWN, learner=type(learner), make=partial(copy.deepcopy, learner))
    return name


def find(name: str) -> LearnerSpec:
    """The spec of a built-in name, of an installed package's entry point, or of `module:name`, which names a
    spec or the class of a learner.

    Raises `UsageError` in one line.
    """
    if name in GIVEN:
        return GIVEN[name]
    example = "examples/own_loss.py"
    found = find_spec("task_type", name, BUILT_IN, "fmmeta.learners", LearnerSpec, example, of_class)
    if found.name not in BUILT_IN and found.learner is None:
        raise UsageError(
            f"task_type={name} is a LearnerSpec with the name {found.name!r}, and yours keeps the"
            f" name of its kind of task; write replace({any_of(SPECS)}, loss=...)"
        )
    return found


def usual_algorithm(task_type: str | None) -> str | None:
    """The algorithm of a run that names none, where a kind of task has its own."""
    return find(task_type).defaults.get("algorithm") if task_type in BUILT_IN else None


def of_class(found: Any) -> Any:
    """The spec of the class of a learner; anything else as it is."""
    is_learner = isinstance(found, type) and hasattr(found, "losses") and hasattr(found, "collate")
    return own(found) if is_learner else found


@cache
def own(learner: type) -> LearnerSpec:
    """The spec of the class of a user's learner."""
    return replace(OWN, learner=learner, make=None if getattr(learner, "auto", "") else learner)


def stored_kind(facts: Mapping[str, Any]) -> LearnerSpec:
    """The kind of task of an exported model. facts: the checked content of its fmmeta.json."""
    name = facts.get("task_type", CLASSIFICATION.name)
    return OWN if name == OWN.name else find(name)


def check_loss(task_type: str) -> None:
    """Refuse an own loss that is not one of rows. Raises `UsageError` in one line.

    It is computed for 4 rows of random logits of 3 classes, and for each row alone.
    """
    import torch

    given, spec = f"task_type={task_type}", find(task_type)
    if (loss := spec.loss) is None:
        return
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.tensor([0, 1, 2, 0])
    if spec.kind.of_numbers:
        logits, targets = logits.detach()[:, 0].requires_grad_(), targets.float()
    with usage_errors(
        f"{given} cannot compute a loss",
        f"give a loss of (outputs {'[N]' if logits.ndim == 1 else '[N, C]'}, targets [N]) that returns [N]",
    ):
        whole = loss(logits, targets)
        alone = [loss(row[None], target[None]) for row, target in zip(logits, targets, strict=True)]
        if whole.shape != (4,):
            raise UsageError(
                f"{given}: its loss of 4 rows has the shape {[*whole.shape]}; return one number for each row"
            )
        same = torch.allclose(whole, torch.cat(alone), rtol=1e-4, atol=1e-6)
        (gradient,) = torch.autograd.grad(whole.sum(), logits)
    if not same:
        raise UsageError(
            f"{given}: its loss of a row depends on the other rows, and these are divided over micro-batches"
            " and ranks; use a loss of each row alone, or a learner with rows_are_independent = False"
        )
    if not gradient.isfinite().all():
        raise UsageError(f"{given}: the gradient of its loss is not finite at random logits; correct it")
    if spec.has_head and logits.ndim > 1:
        fewer = logits.detach()[:2].index_fill(1, torch.tensor(2), -torch.inf).requires_grad_()
        (gradient,) = torch.autograd.grad(loss(fewer, targets[:2]).sum(), fewer)
        if not (gradient.isfinite().all() and loss(fewer, targets[:2]).isfinite().all()):
            raise UsageError(
                f"{given}: its loss or gradient is not finite where a logit is -inf, as those of classes are"
                " that an episode does not have; leave these out of sums"
            )
