"""A classifier of texts and its fine-tuning in plain PyTorch and transformers, as an oracle."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel

from fmmeta.learners.tiny import byte_tokenizer


class PlainClassifier(torch.nn.Module):
    """An encoder under a linear layer of zeros. pooling: by the model itself, or the mean over tokens."""

    def __init__(self, folder: Path, classes: int, pooling: str = "model") -> None:
        super().__init__()
        self.encoder, self.pooling = AutoModel.from_pretrained(folder).eval(), pooling
        self.head = torch.nn.Linear(self.encoder.config.hidden_size, classes)
        for param in self.head.parameters():
            param.data.zero_()

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        found = self.encoder(**inputs)
        if self.pooling == "model":
            return found.pooler_output
        mask = inputs["attention_mask"][..., None]
        return (found.last_hidden_state * mask).sum(1) / mask.sum(1)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.head(self.features(inputs))

    def learn(
        self, inputs: Mapping[str, Tensor], labels: Tensor, rates: Iterable[float], trained: str = ""
    ) -> None:
        """A step of SGD at each rate, over the parameters whose names begin with `trained`."""
        params = [param for name, param in self.named_parameters() if name.startswith(trained)]
        for rate in rates:
            optimizer = torch.optim.SGD(params, rate)
            optimizer.zero_grad()
            F.cross_entropy(self(inputs), labels).backward()
            optimizer.step()


def batch(texts: Sequence[str]) -> Mapping[str, Tensor]:
    return byte_tokenizer()(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
