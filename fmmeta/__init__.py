"""fmmeta: meta-train foundation models that do not fit on one GPU.

`import fmmeta` imports neither torch nor transformers: attributes are imported when they are first used.

>>> import fmmeta
>>> fmmeta.Config(algorithm="reptile", n_way=5, k_shot=1).inner_steps
5
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmmeta.adaptation.python_api import adapt as adapt
    from fmmeta.adaptation.python_api import adapt_many as adapt_many
    from fmmeta.adaptation.python_api import evaluate as evaluate
    from fmmeta.adaptation.python_api import load as load
    from fmmeta.common.errors import UsageError as UsageError
    from fmmeta.config.settings import Config as Config
    from fmmeta.learners.base import Learner as Learner
    from fmmeta.learners.base import RowLosses as RowLosses
    from fmmeta.tasks.sources.own import Tasks as Tasks
    from fmmeta.train import MetaTrainer as MetaTrainer
    from fmmeta.train import prepare as prepare
    from fmmeta.training.callbacks import Callback as Callback

__version__ = "0.2.0"
__all__ = [
    "Callback",
    "Config",
    "Learner",
    "MetaTrainer",
    "RowLosses",
    "Tasks",
    "UsageError",
    "adapt",
    "adapt_many",
    "evaluate",
    "load",
    "prepare",
]

_MODULES = {
    "Callback": "fmmeta.training.callbacks",
    "Config": "fmmeta.config.settings",
    "UsageError": "fmmeta.common.errors",
    "Learner": "fmmeta.learners.base",
    "RowLosses": "fmmeta.learners.base",
    "Tasks": "fmmeta.tasks.sources.own",
    "MetaTrainer": "fmmeta.train",
    "adapt": "fmmeta.adaptation.python_api",
    "adapt_many": "fmmeta.adaptation.python_api",
    "evaluate": "fmmeta.adaptation.python_api",
    "load": "fmmeta.adaptation.python_api",
    "prepare": "fmmeta.train",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fmmeta' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
