"""Which images to look at: the worst, the least certain, and those that may have a wrong label."""

import numpy as np

from paceline.analysis.details.scores import SampleScores, chunks, log_softmax

_ROUNDING = 1e-9


def worst(scores: SampleScores, most: int) -> np.ndarray:
    """Return the positions of the wrong predictions with the highest loss."""
    return _first(-scores.loss, ~scores.correct, most)


def least_certain(scores: SampleScores, most: int) -> np.ndarray:
    """Return the positions of the samples with the smallest margin between the two most probable classes."""
    return _first(scores.margin, np.ones(len(scores.labels), bool), most)


def _first(keys: np.ndarray, eligible: np.ndarray, most: int) -> np.ndarray:
    positions = np.flatnonzero(eligible)
    return positions[np.argsort(keys[positions], kind="stable")[:most]]


def likely_label_errors(scores: SampleScores, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positions of samples that are confidently another class than their label, and that class.

    Confident learning (Northcutt et al., 2021): the threshold of a class is the mean probability that its images have
    for it. A sample belongs confidently to the most probable class among those whose threshold it reaches. It is
    listed if neither that class nor its prediction is its label; largest probability gap first.
    """
    classes = logits.shape[1]
    support = np.bincount(scores.labels, minlength=classes)
    totals = np.bincount(scores.labels, scores.p_label, classes)
    # the mean of equal probabilities may be rounded to slightly more than each of them
    thresholds = np.where(support > 0, totals / np.maximum(support, 1) * (1 - _ROUNDING), np.inf)
    found, gap = np.full(len(logits), -1), np.zeros(len(logits))
    for part in chunks(logits):
        p = np.exp(log_softmax(logits[part]))
        reached = np.where(p >= thresholds, p, -1.0)
        best = reached.argmax(1)
        value = np.take_along_axis(reached, best[:, None], 1)[:, 0]
        listed = (value >= 0) & (best != scores.labels[part]) & ~scores.correct[part]
        found[part] = np.where(listed, best, -1)
        gap[part] = value - scores.p_label[part]
    positions = _first(-gap, found >= 0, len(found))
    return positions, found[positions]
