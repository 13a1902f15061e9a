"""Two sets of parameters: those that the inner loop changes, and those that the outer loop trains.

    phi_{k+1}[i] = phi_k[i] - alpha_k u[i]    i in the inner set;  all others keep their values in a task
    theta[i] <- theta[i] - beta g[i]          i in the outer set;  all others keep their initial values

    ANIL      inner: head                      Raghu et al. 2020 (arXiv 1909.09157)
    BOIL      inner: all except head           Oh et al. 2021 (arXiv 2008.08882)
    LoRA      both: adapters and head
    LoRA-ML   inner: adapters; outer: body     Block et al. 2024 (arXiv 2410.22264): the base is trained to be
                                               adapted by fresh adapters

A set is a list of the names below and of patterns of parameters' names; what follows `except` is taken out.
"""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from fmmeta.common.errors import UsageError
from fmmeta.common.text import any_of
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.learners.base import Learner
from fmmeta.learners.experts import router_names

EXCEPT = "except"


def named_sets(learner: Learner) -> dict[str, set[str]]:
    """Names of a learner's parameters by what they are."""
    names = {name for name, _ in learner.named_parameters()}
    adapters, head = {name for name in names if ".lora_" in name}, {*learner.head_names} & names
    norms = {
        f"{path}.{name}"
        for path, module in learner.named_modules()
        if "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False)
    }
    return {
        "all": names,
        "adapters": adapters,
        "head": head,
        "body": names - adapters - head,
        "norms": norms & names,
        "routers": {*router_names(learner)} & names,
    }


def shown_name(name: str) -> str:
    """A parameter's name as its exported folder has it: peft puts `base_layer` into that of a layer with
    adapters.
    """
    return name.removeprefix("hf.").replace(".base_layer.", ".")


def select(
    setting: str, given: Sequence[str], among: Collection[str], sets: Mapping[str, set[str]]
) -> set[str]:
    """The parameters `among` that a list names. Raises `UsageError` for a name that fits none of them."""
    begin = given.index(EXCEPT) if EXCEPT in given else len(given)
    if begin == len(given) - 1:
        raise UsageError(f"{setting}={' '.join(given)} takes nothing out; name what follows {EXCEPT}")
    parts = (given[:begin], set[str]()), (given[begin + 1 :], set[str]())
    for patterns, found in parts:
        for pattern in patterns:
            fitting = sets.get(pattern) or {name for name in among if fnmatchcase(shown_name(name), pattern)}
            if not fitting & {*among}:
                known = [name for name, fit in sets.items() if fit & {*among}]
                raise UsageError(
                    f"{setting}={pattern} fits no parameter that is trained; use {any_of(known)}, or a name"
                    f" such as '*.mlp.*'{', or give --lora_r 8' if pattern == 'adapters' else ''}"
                )
            found |= fitting & {*among}
    (_, chosen), (_, without) = parts
    if not (chosen := (chosen if begin else {*among}) - without):
        raise UsageError(f"{setting}={' '.join(given)} leaves no parameter; name one")
    return chosen


def inner_parameters(config: Config, learner: Learner) -> list[str]:
    """The list of the inner set: --inner_parameters, or by default what the algorithm adapts, without the
    routers of a mixture of experts whose weights are all trained. A router that changes with a task sends
    tokens to experts that have not seen it.
    """
    spec = find(config.algorithm)
    if config.inner_parameters or config.lora_r or "inner_parameters" not in spec.supports:
        return config.inner_parameters or spec.adapts.split()
    without = ["routers"] if router_names(learner) else []
    return [*spec.adapts.split(), *([EXCEPT] if without and EXCEPT not in spec.adapts else []), *without]


def is_base(learner: Learner, name: str) -> bool:
    """Whether a parameter belongs to the model below adapters and the layers above it."""
    return ".lora_" not in name and not name.startswith(tuple(learner.top))


def trains_base(learner: Learner) -> bool:
    """Whether weights are trained that LoRA freezes."""
    return any(param.requires_grad and is_base(learner, name) for name, param in learner.named_parameters())


def choose_parameters(learner: Learner, config: Config) -> None:
    """Set which parameters of a learner are trained, and of these `outer_only` and `inner_only`.

    Without --outer_parameters those are trained that are so now: all weights, or adapters and head. Raises
    `UsageError`.
    """
    params, sets = dict(learner.named_parameters()), named_sets(learner)
    trained = {name for name, param in params.items() if param.requires_grad}
    outer = trained
    if config.outer_parameters:
        below = {name for name in params if config.lora_r and not name.startswith(learner.unused)}
        outer = select("outer_parameters", config.outer_parameters, trained | below, sets)
        outer |= sets["head"] if config.joint_head else set()  # that of all classes begins with zeros
        if packed := [name for name in sorted(outer - trained) if not params[name].is_floating_point()]:
            raise UsageError(
                f"outer_parameters={' '.join(config.outer_parameters)} names {packed[0]}, which is quantised;"
                " leave it out, or give the full model"
            )
        for name in outer:
            params[name].requires_grad_(True)
        if config.head_init != "learned" and not outer - sets["head"]:
            raise UsageError(
                f"outer_parameters={' '.join(config.outer_parameters)} trains nothing: every task initialises"
                f" the head (head_init={config.head_init}); name other parameters, or use --head_init learned"
            )
    among = trained | outer if config.inner_parameters else trained
    inner = select("inner_parameters", inner_parameters(config, learner), among, sets)
    if config.inner_parameters and config.lora_r and any(is_base(learner, name) for name in inner):
        raise UsageError(
            f"inner_parameters={' '.join(config.inner_parameters)} has weights below the adapters, which stay"
            f" as they are in the adapters of a task; use adapters{' head' if sets['head'] else ''}, or train"
            " without --lora_r"
        )
    learner.inner_only, learner.outer_only = frozenset(trained - outer), frozenset((trained | outer) - inner)
