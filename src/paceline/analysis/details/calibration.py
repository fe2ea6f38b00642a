"""Whether probabilities are right: the expected calibration error (ECE), and the temperature that corrects them."""

from typing import Any

import numpy as np

from paceline.analysis.details.scores import chunks, log_softmax

BINS = 15
TEMPERATURES = (0.001, 1000.0)
"""The range of temperatures, that of `paceline predict --temperature`."""


def reliability(confidence: np.ndarray, correct: np.ndarray) -> list[dict[str, Any]]:
    """Return count, mean confidence and accuracy of 15 bins of equal width: ((i - 1) / 15, i / 15]."""
    numbers = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    counts = np.bincount(numbers, minlength=BINS)
    sums = np.bincount(numbers, confidence, BINS)
    hits = np.bincount(numbers, correct, BINS)
    return [
        {
            "count": int(count),
            "confidence": float(total / count) if count else None,
            "accuracy": float(right / count) if count else None,
        }
        for count, total, right in zip(counts, sums, hits, strict=True)
    ]


def expected_error(bins: list[dict[str, Any]]) -> float:
    """Return the ECE: the mean of |accuracy - confidence| over bins, weighted by their counts."""
    total = sum(each["count"] for each in bins)
    gaps = (each["count"] * abs(each["accuracy"] - each["confidence"]) for each in bins if each["count"])
    return float(sum(gaps) / total)


def negative_log_likelihood(labels: np.ndarray, logits: np.ndarray, temperature: float) -> float:
    """Return the mean cross entropy of logits divided by a temperature."""
    total = 0.0
    for part in chunks(logits):
        log_p = _divided(logits[part], temperature)
        total -= float(np.take_along_axis(log_p, labels[part, None], 1).sum())
    return total / len(labels)


def _divided(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return log probabilities at a temperature; large fp32 logits would overflow if they were divided in fp32."""
    return log_softmax(logits.astype(np.float64) / temperature)


def best_temperature(labels: np.ndarray, logits: np.ndarray) -> float | None:
    """Return the temperature that minimizes the loss of these samples; None if none of TEMPERATURES does.

    There is none if all predictions are right, since the loss then falls towards temperature 0, or if the logits of
    labels are no higher than others on average.
    """
    from scipy.optimize import minimize_scalar

    of_labels = np.take_along_axis(logits, labels[:, None], 1)[:, 0]
    if (of_labels >= logits.max(1)).all():
        return None
    low, high = np.log(TEMPERATURES)
    found = minimize_scalar(
        lambda value: negative_log_likelihood(labels, logits, float(np.exp(value))),
        bounds=(low, high),
        method="bounded",
        options={"xatol": 1e-4},
    )
    inside = low + 1e-2 < found.x < high - 1e-2
    return float(np.exp(found.x)) if inside else None


def calibrated(labels: np.ndarray, logits: np.ndarray, confidence: np.ndarray, correct: np.ndarray) -> dict[str, Any]:
    """Return reliability bins, ECE and loss, before and after division of the logits by the best temperature."""
    bins = reliability(confidence, correct)
    found: dict[str, Any] = {"bins": bins, "ece": expected_error(bins), "temperature": None}
    if (temperature := best_temperature(labels, logits)) is None:
        return found
    after = np.empty(len(labels))
    for part in chunks(logits):
        after[part] = np.exp(_divided(logits[part], temperature).max(1))
    bins = reliability(after, correct)
    loss = negative_log_likelihood(labels, logits, temperature)
    return found | {
        "temperature": temperature,
        "bins_after": bins,
        "ece_after": expected_error(bins),
        "loss_after": loss,
    }
