"""What tests of short runs share (short_runs.py)."""

import pytest

from harness.fork_server import shared
from tests.support.models import write_classes
from tests.support.short_runs import QUICK, QUICK_PAIRS


@pytest.fixture(scope="session")
def fork_server():
    return shared()


@pytest.fixture(scope="session")
def short_data(tmp_path_factory):
    return write_classes(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="session")
def flags(short_data):
    """flags(folder, **settings): of a short run; without a folder the run finds one by itself."""

    def of(folder, **given):
        settings = {
            **(QUICK if given.get("task_type") in (None, "classification") else QUICK_PAIRS),
            "dataset": short_data,
            **({} if folder is None else {"output_dir": folder}),
            **given,
        }
        return [f"--{key}={value}" for key, value in settings.items()]

    return of
