"""Stores phi_k and, for learned rates, u_k of an inner loop, for the backward recursion.

Vectors are a rank's shards, fp32 [S]. Those that exceed a budget of bytes on the device are stored in host
memory.
"""

import torch
from torch import Tensor


class Trajectory:
    """phi_0 to phi_{K-1}; phi_K is not needed, since nothing is differentiated there again."""

    def __init__(self, budget_bytes: int, keeps_directions: bool) -> None:
        self.keeps_directions, self.left = keeps_directions, budget_bytes
        self.phis: list[Tensor | None] = []
        self.directions: list[Tensor | None] = []
        self.host_bytes = 0

    def begin(self, phi0: Tensor) -> None:
        """phi_0 is the caller's vector and costs nothing."""
        self.device = phi0.device
        self.phis.append(phi0)

    def add(self, phi: Tensor | None, direction: Tensor | None) -> None:
        """After inner step k: store phi_{k+1} (None for phi_K) and u_k without a copy."""
        self.phis.append(self._store(phi))
        self.directions.append(self._store(direction))

    def phi(self, k: int) -> Tensor:
        """phi_k on the device."""
        return self._load(self.phis[k])

    def take_direction(self, k: int) -> Tensor:
        """u_k on the device; its storage here is released."""
        vector, self.directions[k] = self.directions[k], None
        return self._load(vector)

    def drop(self, k: int) -> None:
        """Release phi_k."""
        self.phis[k] = None

    def _store(self, vector: Tensor | None) -> Tensor | None:
        size = 0 if vector is None else vector.nbytes
        if vector is None or size <= self.left:
            self.left -= size
            return vector
        self.host_bytes += size
        host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=vector.is_cuda)
        return host.copy_(vector)

    def _load(self, vector: Tensor | None) -> Tensor:
        assert vector is not None, "stored, and not yet dropped"
        return vector.to(self.device)
