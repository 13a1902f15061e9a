"""A metric outside the package: macro F1, and the share of right answers."""


def f1(predictions: list[str], references: list[str]) -> dict[str, float]:
    pairs = list(zip(predictions, references, strict=True))
    found = []
    for name in sorted(set(references)):
        right = sum(p == r == name for p, r in pairs)
        found.append(2 * right / (predictions.count(name) + references.count(name)))
    return {"f1": sum(found) / len(found), "share": sum(p == r for p, r in pairs) / len(pairs)}


def broken(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Raises for some episodes: groups see it at different times."""
    if len(predictions[0]) % 2:
        raise ValueError("odd")
    return {}
