"""Processes that share a store with earlier attempts agree on a new generation name."""

import threading
import time

import pytest

from fmmeta.parallel.network import agree_on_generation


class DictStore:
    def __init__(self):
        self.notes: dict[str, bytes] = {}

    def set(self, key, value):
        self.notes[key] = value.encode()

    def check(self, keys):
        return all(key in self.notes for key in keys)

    def multi_get(self, keys):
        return [self.notes[key] for key in keys]


def generation_names(store, delays):
    found = [""] * len(delays)

    def one(rank):
        time.sleep(delays[rank])
        found[rank] = agree_on_generation(store, rank, len(delays), 10)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(delays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_attempt_has_a_new_name_in_any_order_of_arrival():
    store, seen = DictStore(), set()
    for delays in ((0, 0, 0), (0, 0.2, 0.1), (0.3, 0, 0.1), (0.1, 0.1, 0.4)):
        (name,) = set(generation_names(store, delays))
        assert name not in seen
        seen.add(name)


def test_a_missing_rank_ends_the_wait_with_a_timeout():
    store = DictStore()
    generation_names(store, (0, 0))  # leaves entries of the other rank
    with pytest.raises(TimeoutError, match=r"rank 1 .* the other 1 ranks within 0.3 s"):
        agree_on_generation(store, 1, 2, 0.3)
