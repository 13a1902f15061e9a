"""Sinusoid regression (Finn et al. 2017, arXiv 1703.03400, section 5.1) with a module of this file.

A task is a sine of an amplitude in [0.1, 5] and a phase in [0, pi]; support and query have K points with x in
[-5, 5]. The regressor is an MLP of two hidden layers of 40 units. From this folder:

fmmeta train --task_type own_module:Sine --dataset own_module:tasks --algorithm maml --inner_lr 0.01
"""

import numpy as np
import torch
from torch import nn

from fmmeta import Learner, RowLosses, Tasks

K = 10


class Sine(Learner):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))

    def forward(self, x):
        """x [B, 1] -> y [B, 1]."""
        return self.net(x)

    @classmethod
    def collate(cls, rows, pad_token_id):
        points = torch.tensor([example.values["row"] for example in rows])
        return {"x": points[:, :1]}, {"y": points[:, 1:]}

    def losses(self, outputs, batch):
        losses = (outputs - batch.targets["y"]).square().sum(-1)
        return RowLosses.of(losses)


def draw(number):
    """K support and K query points (x, y) of task `number`."""
    rng = np.random.default_rng(number)
    amplitude, phase = rng.uniform(0.1, 5.0), rng.uniform(0.0, np.pi)
    x = rng.uniform(-5.0, 5.0, 2 * K)
    points = np.stack([x, amplitude * np.sin(x - phase)], axis=1).astype("float32").tolist()
    return points[:K], points[K:]


tasks = Tasks(draw, train=100_000, valid=100, test=600)
