"""Packs several short rows into one sequence to reduce padding.

Attention must not cross rows; models/forward_options.py checks it. A packed sequence is an Example with
`position_ids`, which start at 0 with each row. The loss is unchanged: the first token of a row is not
predicted.
"""

from collections.abc import Sequence

from fmmeta.tasks.batching import IGNORE, Example


def pack(rows: Sequence[Example], least: int, length: int) -> list[Example]:
    """Pack `rows` (longest first) into sequences of at most `length` tokens, at least `least` of them if
    there are as many rows.

    Each row joins the shortest sequence if it has room, so that sequences are about equally long (Graham
    1969, longest processing time first). The same rows give the same sequences on every rank.
    """
    tokens = sum(len(row.input_ids) for row in rows)
    bins: list[list[Example]] = [[] for _ in range(max(-(-tokens // length), min(least, len(rows))))]
    filled = [0] * len(bins)
    for row in rows:
        shortest = min(range(len(bins)), key=filled.__getitem__)
        if filled[shortest] and filled[shortest] + len(row.input_ids) > length:
            shortest = len(bins)
            bins.append([])
            filled.append(0)
        bins[shortest].append(row)
        filled[shortest] += len(row.input_ids)
    packed = [concat_rows(members) for members in bins if members]
    return sorted(packed, key=lambda sequence: len(sequence.input_ids), reverse=True)


def concat_rows(rows: Sequence[Example]) -> Example:
    """One sequence; no loss is taken on the first token of a row."""
    ids = [token for row in rows for token in row.input_ids]
    position_ids = [position for row in rows for position in range(len(row.input_ids))]
    labels = [label for row in rows for label in (IGNORE, *row.labels[1:])]  # type: ignore[index]
    return Example(ids, labels, position_ids)
