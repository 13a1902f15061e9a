"""An outer optimizer outside the package: averaged gradients with bias correction.

m <- b m + (1 - b) g;  theta <- theta - lr m / (1 - b^t)
"""

import torch

from fmmeta.config.algorithms import OuterOptimizerSpec


class Averaged(torch.optim.Optimizer):
    """A vector and a number in its state."""

    def __init__(self, params, lr, beta=0.5):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, beta = self.state[param], group["beta"]
                state["step"] = state.get("step", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.mul_(beta).add_(param.grad, alpha=1 - beta)
                param.sub_(mean / (1 - beta ** state["step"]) * group["lr"])


spec = OuterOptimizerSpec(Averaged, ("mean",), {"beta": "outer_momentum"})
