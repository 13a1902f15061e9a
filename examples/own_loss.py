"""Focal loss (Lin et al. 2017, arXiv 1708.02002, equation 4): rows that are right already count less.

L = -(1 - p)^GAMMA log p, p the probability of the right class, or of the right token. From this folder:

fmmeta train --task_type own_loss:classes
fmmeta train --task_type own_loss:answers
"""

from dataclasses import replace

import torch.nn.functional as F

from fmmeta.config.learners import CAUSAL_LM, CLASSIFICATION

GAMMA = 2


def focal(logits, targets):
    """Losses [N] of logits [N, C] and targets [N]."""
    log_p = F.log_softmax(logits, dim=1).gather(1, targets[:, None])[:, 0]
    return -((1 - log_p.exp()) ** GAMMA) * log_p


classes = replace(CLASSIFICATION, loss=focal)
answers = replace(CAUSAL_LM, loss=focal)
