"""The schedule `plateau`: torch's ReduceLROnPlateau as a pure function of the evaluations so far.

A resumed run computes the same learning rate from the same evaluations, on any number of ranks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

_EPS = 1e-8
"""Smaller decays are left out, as by torch's `eps`."""


@dataclass(frozen=True)
class Plateau:
    """The arguments of ReduceLROnPlateau."""

    factor: float
    patience: int
    threshold: float
    relative: bool
    cooldown: int
    min_lr: float

    def lr_after(self, values: Iterable[float], lr: float, lower_is_better: bool) -> float:
        """Return what is left of a learning rate after evaluations with these values of the metric."""
        best, bad, cooling = math.inf if lower_is_better else -math.inf, 0, 0
        for value in values:
            if self._is_better(value, best, lower_is_better):
                best, bad = value, 0
            else:
                bad += 1
            if cooling:
                cooling, bad = cooling - 1, 0
            if bad > self.patience:
                reduced = max(lr * self.factor, self.min_lr)
                lr = reduced if lr - reduced > _EPS else lr
                cooling, bad = self.cooldown, 0
        return lr

    def _is_better(self, value: float, best: float, lower_is_better: bool) -> bool:
        if lower_is_better:
            return value < (best * (1.0 - self.threshold) if self.relative else best - self.threshold)
        return value > (best * (self.threshold + 1.0) if self.relative else best + self.threshold)
