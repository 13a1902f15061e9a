"""Losses far above the recent ones, marked in metrics.jsonl."""

from __future__ import annotations

import math


class Spikes:
    """Marks losses far above the recent ones: more than `far` deviations over a running mean.

    A function of the losses alone.
    """

    def __init__(
        self, state: list[float] | None = None, far: float = 6.0, decay: float = 0.95, least: int = 20
    ) -> None:
        self.mean, self.square, self.count = state or (0.0, 0.0, 0)
        self.far, self.decay, self.least = far, decay, least

    @property
    def state(self) -> list[float]:
        return [self.mean, self.square, self.count]

    def mark(self, loss: float) -> float | None:
        """Deviations above the mean, if the loss is a spike, which then counts as an ordinary high loss."""
        if not math.isfinite(loss):
            return None
        deviation = math.sqrt(max(self.square, 1e-12))
        off = (loss - self.mean) / deviation
        spike = self.count >= self.least and off > self.far
        gap = min(off, self.far) * deviation if self.count >= self.least else loss - self.mean
        weight = max(1 - self.decay, 1 / (self.count + 1))
        self.mean += weight * gap
        self.square += weight * (gap * gap * (1 - weight) - self.square)
        self.count += 1
        return round(off, 2) if spike else None
