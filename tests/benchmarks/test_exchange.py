"""The exchanges of benchmarks/exchange.py among real processes: bytes by the counts, results by the mean."""

from pathlib import Path

import pytest

from benchmarks import exchange
from harness.namespaces import Hosts
from tests.support.launch import run_ranks


def check(rows: list[dict], tolerance: float, count_received: bool) -> None:
    for row in rows:
        if row["way"] == exchange.FLOOR:
            continue
        wanted = row["counted"]["sent"]
        assert wanted <= row["sent"] <= wanted * (1 + tolerance), row
        if count_received:
            assert wanted <= row["received"] <= wanted * (1 + tolerance), row
        is_mean = row["counted"]["left"] == 0
        assert row["equal_bits"] == is_mean, row
        assert (row["off"] < 1e-6) == is_mean, row


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no /proc/self/io")
@pytest.mark.parametrize("groups", [2, 4])
def test_ranks_over_gloo_send_the_counted_bytes(groups, tmp_path):
    """Bytes that each process writes, on loopback: payload and gloo's headers."""
    words = ["-m", "benchmarks.exchange", "rank", "--values", str(2**18), "--repeats", "1"]
    run_ranks([*words, "--folder", str(tmp_path)], groups).ok()
    rows = exchange.summary(tmp_path, groups, 2**18)
    assert len(rows) == 7
    check(rows, 0.01, False)


@pytest.mark.cluster
@pytest.mark.parametrize("groups", [2, 4])
def test_hosts_send_the_counted_bytes(groups):
    """Bytes of the interfaces: headers and acknowledgements too."""
    try:
        Hosts().close()
    except OSError as error:
        pytest.skip(f"no hosts here: {error}")
    check(exchange.measure(groups, 40, 2**18, 1), 0.15, True)
