"""Uninitialised memory that is no numbers, for processes that must not depend on it."""


def fill() -> None:
    """Called first in a process: torch.empty gives NaN from here on."""
    import torch.utils.deterministic

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
