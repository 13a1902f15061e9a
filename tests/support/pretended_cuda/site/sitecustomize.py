"""Python runs this at its start where this folder is on PYTHONPATH: `import torch` then brings the device.

The library comes before torch's own, which asks once whether there is an accelerator.
"""

import ctypes
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder


class TorchWithDevice(MetaPathFinder):
    """Finds torch as the other finders do. Some callers only ask where it is."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        sys.meta_path.insert(0, self)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_install(module):
            sys.meta_path.remove(self)
            ctypes.CDLL(os.environ["FMMETA_PRETENDED_CUDA"], ctypes.RTLD_GLOBAL)
            run(module)
            from tests.support.pretended_cuda import process

            process.install()

        spec.loader.exec_module = run_and_install
        return spec


if os.environ.get("FMMETA_PRETENDED_CUDA"):
    sys.meta_path.insert(0, TorchWithDevice())
