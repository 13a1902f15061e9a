"""Classifiers on frozen features: fit on the support set, return log-probabilities of the query set.

    prototype  log softmax (cos(f, mu_c) / tau), mu_c the mean of class c (Snell et al. 2017, with cosine)
    linear     logistic regression (scikit-learn)
    knn        share of each class among the nearest support rows, weighted by cosine (scikit-learn)

Features are first scaled to unit length. S support rows, Q query rows, D features, C classes.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TEMPERATURE = 0.05  # of cosines; it changes probabilities, not the order of the classes
FLOOR = 1e-6  # least probability of a class without neighbours

Classifier = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Support features [S, D] and labels [S], query features [Q, D], C -> log-probabilities [Q, C]."""


def prototype(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """Scaled cosines to the mean of each class."""
    sums = torch.zeros(classes, support.shape[1]).index_add_(0, labels, F.normalize(support))
    return F.log_softmax(F.normalize(query) @ F.normalize(sums).T / TEMPERATURE, dim=1)


@contextmanager
def ignore_regression_warning() -> Iterator[None]:
    """Suppress scikit-learn's warning that many distinct classes look like a regression."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%", UserWarning)
        yield


@ignore_regression_warning()
def linear(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """Logistic regression, C = 1."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=1000).fit(F.normalize(support).numpy(), labels.numpy())
    scores = torch.from_numpy(model.predict_log_proba(F.normalize(query).numpy())).float()
    return add_missing_classes(model, scores, classes)


@ignore_regression_warning()
def knn(support: Tensor, labels: Tensor, query: Tensor, classes: int) -> Tensor:
    """Nearest neighbours by cosine, weighted by 1 / distance."""
    from sklearn.neighbors import KNeighborsClassifier

    nearest = max(1, len(labels) // classes)  # mean number of support rows per class
    model = KNeighborsClassifier(nearest, metric="cosine", weights="distance")
    model.fit(F.normalize(support).numpy(), labels.numpy())
    scores = torch.from_numpy(model.predict_proba(F.normalize(query).numpy())).float().clamp(min=FLOOR)
    return add_missing_classes(model, scores.log(), classes).log_softmax(1)


def add_missing_classes(model: Any, scores: Tensor, classes: int) -> Tensor:
    """Add columns for the classes without support rows, which scikit-learn leaves out."""
    out = torch.full((len(scores), classes), torch.log(torch.tensor(FLOOR)).item())
    out[:, torch.from_numpy(model.classes_)] = scores
    return out


CLASSIFIERS: dict[str, Classifier] = {"prototype": prototype, "linear": linear, "knn": knn}
