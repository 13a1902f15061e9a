"""first_order.yaml: what a run itself measures."""

import json
from pathlib import Path
from typing import Any


def measure(study: Any, cell: Any) -> dict[str, Any]:
    """Held-out loss and accuracy before and after meta-training, and the query loss of every outer step."""
    run = Path(study.trained(cell)[0]).parent
    held_out = json.loads((run / "run.json").read_text())["held_out"]
    start, after = (held_out[f"after adaptation, {row}"] for row in ("weights at the start", "meta-trained"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "start_loss": start["loss"][0],
        "loss": after["loss"][0],
        "accuracy": 100 * after["accuracy"][0],
        "curve": " ".join(f"{line['query_loss']:.4f}" for line in lines),
    }
