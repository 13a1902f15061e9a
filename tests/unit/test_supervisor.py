"""What `fmmeta elastic` does with processes of its groups."""

from __future__ import annotations

import subprocess

from fmmeta.elastic.supervisor import Group
from fmmeta.signals import born
from tests.distributed.short import until


def test_a_rank_that_is_dead_leaves_no_process_behind():
    """Its session is ended too, as that of a rank that lives."""
    commands = ["sleep 100 & echo $!; exit 1", "sleep 100 & echo $!; wait"]
    ranks = [subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True)
             for command in commands]  # fmt: skip
    below = [int(rank.stdout.readline()) for rank in ranks if rank.stdout]
    assert ranks[0].wait() == 1
    assert all(born(pid) for pid in below)
    Group("a", processes=list(ranks)).kill()
    assert ranks[1].wait() < 0
    until(lambda: all(born(pid)[:1] in ("", "Z") for pid in below), 5)
