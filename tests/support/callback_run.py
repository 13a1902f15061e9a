"""Trains with a callback that fails on one rank: `python -m tests.support.callback_run RANK FLAGS`."""

from __future__ import annotations

import os
import sys

from fmmeta import Callback, MetaTrainer, UsageError
from fmmeta.cli import parse


class FailsOn(Callback):
    def __init__(self, rank: str) -> None:
        self.rank = rank

    def on_step_end(self, run, outcome):
        if os.environ.get("FMMETA_GLOBAL_RANK", "0") == self.rank and run.state.outer_step == 2:
            raise RuntimeError("disk is missing\nsecond line")


def main(rank: str, *flags: str) -> None:
    try:
        MetaTrainer(parse(list(flags)), callbacks=[FailsOn(rank)]).train()
    except UsageError as error:
        print(f"refused: {error}", flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
