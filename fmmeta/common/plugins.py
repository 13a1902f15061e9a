"""Code that the user names as `module:name` in a flag or a `--config` file.

Such names are never read from a model folder, a checkpoint or a data set.
"""

import importlib
import os
import sys
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.security import one_line


def import_named(setting: str, name: str, what: str) -> Any:
    """The object `module:name`; modules in the current folder are found.

    setting, what: name of the setting and kind of object, for the message. Raises `UsageError` in one line.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise UsageError(
            f"{setting}={name} cannot be imported ({one_line(error)}); write module:name of {what}"
        ) from None
