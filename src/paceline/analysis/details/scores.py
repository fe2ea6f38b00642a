"""Figures of single samples: prediction, probabilities, loss and uncertainty."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_CHUNK_VALUES = 1 << 22  # float64 values at a time: 32 MB


@dataclass(frozen=True)
class SampleScores:
    """One value per sample, in the order of the logits."""

    labels: np.ndarray
    predicted: np.ndarray
    """The class with the highest logit."""
    confidence: np.ndarray
    """The probability of the predicted class."""
    p_label: np.ndarray
    """The probability of the label."""
    loss: np.ndarray
    """Cross entropy in nats."""
    entropy: np.ndarray
    """Of the predicted distribution, in nats."""
    margin: np.ndarray
    """Probability of the predicted class minus that of the second."""
    top_ids: np.ndarray
    """The five most probable classes, (n, 5), or all if there are fewer."""
    top_probabilities: np.ndarray

    @property
    def correct(self) -> np.ndarray:
        return self.predicted == self.labels

    @property
    def correct5(self) -> np.ndarray:
        return np.asarray((self.top_ids == self.labels[:, None]).any(1))


def score(labels: np.ndarray, logits: np.ndarray, ids: np.ndarray) -> SampleScores:
    """Return the figures of samples from their labels, logits (n, classes) and most probable classes (n, 5).

    The latter are given, because programs order equal logits differently, and bf16 has many equal ones.
    """
    count, top = ids.shape
    columns = {name: np.empty(count) for name in ("p_label", "loss", "entropy")}
    probabilities = np.empty((count, top))
    for part in chunks(logits):
        log_p = log_softmax(logits[part])
        p = np.exp(log_p)
        of_label = np.take_along_axis(log_p, labels[part, None], 1)[:, 0]
        columns["loss"][part], columns["p_label"][part] = -of_label, np.exp(of_label)
        columns["entropy"][part] = -(p * np.maximum(log_p, -1e9)).sum(1)  # 0 * -inf would be NaN
        probabilities[part] = np.take_along_axis(p, ids[part], 1)
    second = probabilities[:, 1] if top > 1 else np.zeros(count)
    confidence, margin = probabilities[:, 0], probabilities[:, 0] - second
    return SampleScores(
        labels, ids[:, 0], confidence, **columns, margin=margin, top_ids=ids, top_probabilities=probabilities
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log probabilities in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, keepdims=True))
    return shifted


def chunks(logits: np.ndarray) -> Iterator[slice]:
    """Yield slices of rows that are small enough to be computed in float64."""
    rows = max(1, _CHUNK_VALUES // logits.shape[1])
    for begin in range(0, len(logits), rows):
        yield slice(begin, begin + rows)
