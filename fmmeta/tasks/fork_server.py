"""Preload of the fork server of loader processes: it ends with its trainer, and they end with it.

Without this each would keep the other alive. No other process may import this module.
"""

import os

from fmmeta.common.processes import end_with_parent

end_with_parent()
os.register_at_fork(after_in_child=end_with_parent)

import fmmeta.tasks.loader  # noqa: E402, F401  # which takes seconds
