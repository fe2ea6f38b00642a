"""The learning-rate range test (Smith, arXiv 1506.01186): its learning rates, when it stops, and what it suggests.

Pure arithmetic, no torch: ranks stop by it, and the command that started them reads the losses with it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MIN_STEPS = 20
"""With fewer steps, a trend cannot be told from noise."""
_DIVERGED = 4.0
_MEMORY = 0.02  # of the running mean that stops the test, as a fraction of its steps
_WIDTH = 0.02  # standard deviation of the smoothing kernel, as a fraction of the steps
_MIN_FALL = 9.0  # standard errors of a smoothed loss; of 1000 tests with 100 losses of noise alone, 4 fall as much


@dataclass(frozen=True)
class LrRange:
    """The learning rates of a test."""

    low: float = 1e-6
    high: float = 10.0
    steps: int = 100
    linear: bool = False
    """Grow by the same difference per step, not by the same factor."""

    def lr_at(self, step: int) -> float:
        """Return the learning rate of step 0 .. steps - 1; the first is `low`, the last is `high`."""
        fraction = step / (self.steps - 1)
        if self.linear:
            return self.low + (self.high - self.low) * fraction
        return math.exp(math.log(self.low) + (math.log(self.high) - math.log(self.low)) * fraction)


@dataclass
class StopRule:
    """Stops the test when the loss diverges: its running mean is above 4 x its minimum, and above the first loss."""

    steps: int
    _mean: float = 0.0
    _weight: float = 0.0
    _first: float = field(default=math.nan)
    _best: float = math.inf

    def diverged(self, loss: float) -> bool:
        """Return whether the test ends after a step with this loss."""
        if not math.isfinite(loss):
            return True
        if not self._weight:
            self._first = loss
        keep = 1 - 1 / max(2.0, _MEMORY * self.steps)
        self._mean = keep * self._mean + (1 - keep) * loss
        self._weight = keep * self._weight + (1 - keep)
        mean = self._mean / self._weight
        self._best = min(self._best, mean)
        return mean > max(self._first, _limit(self._best))


def _limit(best: float) -> float:
    """Return 4 x the best loss; the loss of a recipe may also be negative."""
    return best + (_DIVERGED - 1) * abs(best)


@dataclass(frozen=True)
class LrSuggestion:
    """The results of the losses of a test."""

    smoothed: list[float]
    """The mean of each loss and its neighbors, weighted by a Gaussian; no delay, unlike a running mean."""
    noise: float
    """Standard deviation of the loss of a single step, up to the minimum."""
    lowest: int
    """Step with the lowest smoothed loss."""
    steepest: int | None
    """Step at which the smoothed loss falls fastest; None if it does not fall by more than its noise."""


def suggest(losses: Sequence[float]) -> LrSuggestion:
    """Return the results of the finite losses of a test."""
    assert losses
    # a few huge losses at the end must not reach the smoothed losses before them
    most = max(losses[0], _limit(min(losses)))
    clipped = [min(loss, most) for loss in losses]
    width = max(1.0, _WIDTH * len(losses))
    smoothed = _smoothed(clipped, width)
    lowest = min(range(len(losses)), key=smoothed.__getitem__)
    noise = _noise(clipped[: lowest + 1])
    fall = max(smoothed[: lowest + 1]) - smoothed[lowest]
    standard_error = noise / math.sqrt(2 * math.sqrt(math.pi) * width)
    if lowest < 2 or fall <= max(_MIN_FALL * standard_error, 1e-3 * abs(losses[0])):
        return LrSuggestion(smoothed, noise, lowest, None)
    steepest = min(range(1, lowest), key=lambda step: smoothed[step + 1] - smoothed[step - 1])
    return LrSuggestion(smoothed, noise, lowest, steepest)


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation of noise on a smooth curve, from second differences without the largest 10%."""
    slopes = [after - before for before, after in pairwise(values)]
    bends = sorted((after - before) ** 2 for before, after in pairwise(slopes))
    kept = bends[: max(1, round(0.9 * len(bends)))]
    # of Gaussian noise, these have 0.62 of the variance, which is 6 times that of the values
    return math.sqrt(sum(kept) / len(kept) / (0.62 * 6)) if kept else 0.0


def _smoothed(values: Sequence[float], width: float) -> list[float]:
    reach = math.ceil(3 * width)
    kernel = [math.exp(-0.5 * (offset / width) ** 2) for offset in range(-reach, reach + 1)]
    found = []
    for center in range(len(values)):
        near = [
            (kernel[position - center + reach], values[position])
            for position in range(max(0, center - reach), min(len(values), center + reach + 1))
        ]
        found.append(sum(weight * value for weight, value in near) / sum(weight for weight, _ in near))
    return found
