"""Accuracy, precision, recall and F1 with confidence intervals, overall, per class and per slice."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.analysis.details.scores import SampleScores

_Z = 1.959963984540054  # of a two-sided 95% interval


def wilson(successes: int, trials: int) -> tuple[float, float] | None:
    """Return the 95% confidence interval of a proportion after Wilson (1927); None without trials."""
    if not trials:
        return None
    p, z2 = successes / trials, _Z * _Z
    middle = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials))
    # at 0% and 100% rounding could leave the proportion outside of its interval
    return min(p, max(0.0, middle - half)), max(p, min(1.0, middle + half))


def overall(scores: SampleScores) -> dict[str, Any]:
    """Return accuracy with its interval, top-5 and mean loss of all samples."""
    return _proportions(scores.correct, scores.correct5, scores.loss)


def _proportions(correct: np.ndarray, correct5: np.ndarray, loss: np.ndarray) -> dict[str, Any]:
    samples, right, right5 = len(correct), int(correct.sum()), int(correct5.sum())
    return {
        "samples": samples,
        "correct": right,
        "top1": right / samples,
        "interval": wilson(right, samples),
        "correct5": right5,
        "top5": right5 / samples,
        "loss": float(loss.mean()),
    }


def per_class(scores: SampleScores, num_classes: int) -> list[dict[str, Any]]:
    """Return support, accuracy (recall) with its interval, precision and F1 of every class.

    A figure without samples is None: the recall of a class without images, the precision of one never predicted.
    """
    support = np.bincount(scores.labels, minlength=num_classes)
    predicted = np.bincount(scores.predicted, minlength=num_classes)
    hits = np.bincount(scores.labels[scores.correct], minlength=num_classes)
    rows = []
    for number, (images, times, right) in enumerate(
        zip(support.tolist(), predicted.tolist(), hits.tolist(), strict=True)
    ):
        rows.append(
            {
                "class": number,
                "support": images,
                "predicted": times,
                "correct": right,
                "recall": _ratio(right, images),
                "interval": wilson(right, images),
                "precision": _ratio(right, times),
                "precision_interval": wilson(right, times),
                "f1": _ratio(2 * right, images + times),
            }
        )
    return rows


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def macro(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the unweighted means over the classes that have images: balanced accuracy, precision and F1.

    A class that is never predicted counts with a precision of 0.
    """
    present = [row for row in rows if row["support"]]
    return {
        "balanced_accuracy": _mean([row["recall"] for row in present]),
        "precision": _mean([row["precision"] or 0.0 for row in present]),
        "f1": _mean([row["f1"] for row in present]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def per_slice(scores: SampleScores, values: Sequence[str | None]) -> list[dict[str, Any]]:
    """Return the figures of every group of samples with the same value, by value; None (no value) comes last."""
    groups: dict[str | None, list[int]] = {}
    for position, value in enumerate(values):
        groups.setdefault(value, []).append(position)
    ordered = sorted(groups, key=lambda value: (value is None, value or ""))
    return [
        {"slice": value}
        | _proportions(scores.correct[rows], scores.correct5[rows], scores.loss[rows])
        | {"mean_confidence": float(scores.confidence[rows].mean())}
        for value in ordered
        if (rows := groups[value])
    ]
