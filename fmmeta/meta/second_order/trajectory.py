"""Stores phi_k and, for learned rates, u_k of an inner loop, for the backward recursion.

Vectors are a rank's shards. Those beyond a budget of bytes on the device wait in host memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Trajectory:
    """phi_0 is the caller's own vector and costs nothing; phi_K is not kept, since nothing is differentiated
    there again.
    """

    def __init__(self, phi0: Tensor, budget_bytes: int, keeps_directions: bool) -> None:
        self.keeps_directions = keeps_directions
        self.device, self.left = phi0.device, budget_bytes
        self.phis: list[Tensor | None] = [phi0]
        self.directions: list[Tensor | None] = []
        self.host_bytes = 0

    def add(self, phi: Tensor | None, direction: Tensor | None) -> None:
        """After inner step k: phi_{k+1} (None for phi_K) and u_k, both given away."""
        self.phis.append(None if phi is None else self._keep(phi))
        self.directions.append(None if direction is None else self._keep(direction))

    def phi(self, k: int) -> Tensor:
        """phi_k on the device."""
        return self._fetch(self.phis[k])

    def take_direction(self, k: int) -> Tensor:
        """u_k on the device; its storage here is released."""
        vector, self.directions[k] = self.directions[k], None
        return self._fetch(vector)

    def drop(self, k: int) -> None:
        """Release phi_k."""
        self.phis[k] = None

    def _keep(self, vector: Tensor) -> Tensor:
        size = vector.numel() * vector.element_size()
        if size <= self.left:
            self.left -= size
            return vector
        self.host_bytes += size
        host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=vector.is_cuda)
        return host.copy_(vector)

    def _fetch(self, vector: Tensor | None) -> Tensor:
        assert vector is not None, "kept, and not yet dropped"
        return vector.to(self.device)
