"""Statistics of a few repeated measurements: mean and spread, Welch's t-test, and the required sample size.

Pure functions of numbers. scipy.special is imported when it is needed, because reports of single runs do without it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05
"""p-values below it count as significant; confidence intervals cover 1 - LEVEL."""
POWER = 0.8
"""Probability of detecting a true difference, for which the number of samples is computed."""
MAX_NEEDED = 10_000
_LEAST_P = 1e-4
_SMALLEST_STD = 1e-60


@dataclass(frozen=True)
class Spread:
    """Mean and spread of one group of measurements."""

    n: int
    mean: float
    std: float | None
    """Sample standard deviation (n - 1); None for one measurement."""
    low: float | None
    """Lower end of the 95% confidence interval of the mean (Student's t); None for one measurement."""
    high: float | None


@dataclass(frozen=True)
class WelchTest:
    """The difference between the means of two groups, which may have different variances."""

    difference: float
    """Mean of the second group minus that of the first."""
    low: float
    """Lower end of the 95% confidence interval of the difference."""
    high: float
    p: float | None
    """Two-sided p-value; None if neither group varies although their means differ, so that nothing can be tested."""
    degrees: float
    """Degrees of freedom after Welch and Satterthwaite."""


def spread(values: Sequence[float]) -> Spread:
    """Return mean, standard deviation and confidence interval of at least one measurement."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Spread(n, mean, None, None, None)
    std = _std(values)
    margin = _quantile(n - 1) * std / math.sqrt(n)
    return Spread(n, mean, std, mean - margin, mean + margin)


def welch(first: Sequence[float], second: Sequence[float]) -> WelchTest | None:
    """Return Welch's t-test of two groups; None if one of them has fewer than two measurements."""
    if min(len(first), len(second)) < 2:
        return None
    from scipy.special import stdtr

    difference = statistics.fmean(second) - statistics.fmean(first)
    parts = [_std(values) ** 2 / len(values) for values in (first, second)]
    error = math.sqrt(sum(parts))
    if not error:
        degrees = float(len(first) + len(second) - 2)
        return WelchTest(difference, difference, difference, 1.0 if difference == 0 else None, degrees)
    degrees = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True)
    )
    margin = _quantile(degrees) * error
    p = 2 * float(stdtr(degrees, -abs(difference) / error))
    return WelchTest(difference, difference - margin, difference + margin, p, degrees)


def welch_power(difference: float, stds: tuple[float, float], n: int) -> float:
    """Return the probability that a two-sided Welch test with `n` measurements per group detects a true difference.

    With the degrees of freedom of the true variances, as usual: with 5 per group the truth is about 2 points lower.
    """
    from scipy.special import chdtr, nctdtr

    variances = [std**2 for std in stds]
    degrees = (n - 1) * sum(variances) ** 2 / sum(variance**2 for variance in variances)
    center = abs(difference) / math.sqrt(sum(variances) / n)
    critical = _quantile(degrees)
    power = 1.0 - float(nctdtr(degrees, center, critical)) + float(nctdtr(degrees, center, -critical))
    if math.isfinite(power):
        return power
    return float(chdtr(degrees, degrees * (center / critical) ** 2))  # far from zero, where only the spread is random


def measurements_needed(difference: float, stds: tuple[float, float]) -> int | None:
    """Return the measurements per group that Welch's test needs to detect a difference of this size with power POWER.

    None: there is no difference or no spread to compute it from, or it takes more than MAX_NEEDED.
    """
    if not difference or not any(stds) or welch_power(difference, stds, MAX_NEEDED) < POWER:
        return None
    too_few, enough = 1, 2
    while welch_power(difference, stds, enough) < POWER:
        too_few, enough = enough, min(2 * enough, MAX_NEEDED)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if welch_power(difference, stds, middle) < POWER:
            too_few = middle
        else:
            enough = middle
    return enough


def holm(p: np.ndarray) -> np.ndarray:
    """Return p-values corrected after Holm (1979), which bounds the probability of any false positive."""
    order = np.argsort(p, kind="stable")
    scaled = p[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return corrected


def probability(p: float) -> str:
    """Return a p-value with two significant digits."""
    return f"{p:.2g}" if p >= _LEAST_P else f"< {_LEAST_P:.4f}"


def equation(p: float) -> str:
    """Return e.g. "p = 0.012" or "p < 0.0001"."""
    text = probability(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def _std(values: Sequence[float]) -> float:
    """Return the sample standard deviation, exactly 0 for equal values, and for those whose variance would be 0."""
    std = 0.0 if min(values) == max(values) else statistics.stdev(values)
    return std if std > _SMALLEST_STD else 0.0


def _quantile(degrees: float) -> float:
    """Return the t at which a two-sided test at LEVEL becomes significant."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - LEVEL / 2))
