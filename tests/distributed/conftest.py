"""What tests of short runs share (short.py)."""

from __future__ import annotations

import pytest

from tests.distributed.short import QUICK
from tests.models import write_classes
from tests.nursery import shared


@pytest.fixture(scope="session")
def nursery():
    return shared()


@pytest.fixture(scope="session")
def short_data(tmp_path_factory):
    return write_classes(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="session")
def flags(short_data):
    """flags(folder, **settings): of a short run; without a folder the run finds one by itself."""

    def of(folder, **given):
        settings = {
            **QUICK,
            "dataset": short_data,
            **({} if folder is None else {"output_dir": folder}),
            **given,
        }
        return [f"--{key}={value}" for key, value in settings.items()]

    return of
