from tests.distributed import matrix
from tests.distributed.matrix import tolerance
from tests.distributed.test_spread import round_trip


def test(tmp_path):
    bench = matrix.Bench(tmp_path)
    chosen = [c for c in matrix.spread() if c.algorithm in ("protonet", "joint", "anil") and c.layout[0] * c.layout[1] < 6 and "bert" in c.model]
    kinds = sorted({(c.layout, c.stages) for c in chosen})
    bad = []
    for kind in kinds:
        mine = [c for c in chosen if (c.layout, c.stages) == kind]
        out = bench.run(mine)
        for c in mine:
            e = bench.error(c, out[c.id][0])
            print(c.id, e, tolerance(c), flush=True)
            bad += [c.id] if not e < tolerance(c) else []
            round_trip(bench, c, out[c.id][0])
    assert not bad
