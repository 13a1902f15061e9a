"""What came out of a run: strata and the confusion of one episode. Numbers are those of run.json."""

from __future__ import annotations

from typing import Any

from fmmeta.report.data import Facts


def shape_of(facts: Facts) -> str:
    """5-way 1-shot, or the shots alone for language models; ranges where episodes vary."""
    settings = facts.settings
    ways, shots = (between(settings.get(name), settings.get(f"{name}_max")) for name in ("n_way", "k_shot"))
    return f"{ways}-way {shots}-shot" if settings.get("task_type") == "classification" else f"{shots}-shot"


def between(low: Any, high: Any) -> str:
    return str(low) if high in (None, low) else f"{low} to {high}"


def strata(facts: Facts) -> list[tuple[str, float | None, float]]:
    """Accuracy after adaptation by stratum, from the start and meta-trained; the largest gain first."""
    trained = facts.held_out.get("per_stratum") or {}
    started = facts.held_out.get("per_stratum_at_start") or {}
    order = sorted(trained, key=lambda name: started.get(name, 0.0) - trained[name])
    return [(name, started.get(name), trained[name]) for name in order]


def confusion(facts: Facts) -> dict[str, Any] | None:
    """Right classes against answers on the query set of one held-out episode: counts and their looks."""
    found = facts.held_out.get("confusion")
    if not found or "counts" not in found:
        return found and {"left_out": found.get("left_out")}
    rows = []
    for i, (name, counts) in enumerate(zip(found["classes"], found["counts"], strict=True)):
        most = max(1, sum(counts))
        looks = [f"m{round(5 * count / most)}{' right' if i == j else ''}" for j, count in enumerate(counts)]
        rows.append((name, list(zip(counts, looks, strict=True))))
    return {
        "task": f"{found.get('task')}" + (f" ({found['stratum']})" if found.get("stratum") else ""),
        "right": sum(counts[i] for i, counts in enumerate(found["counts"])),
        "queries": sum(map(sum, found["counts"])),
        "rows": rows,
    }
