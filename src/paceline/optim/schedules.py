"""The learning rate of a step, as a pure function."""

import math
from dataclasses import dataclass
from itertools import pairwise

from paceline.config.duration import to_steps
from paceline.config.recipe import Optim


@dataclass(frozen=True)
class LrPlan:
    """A schedule with its durations in steps."""

    name: str
    peak: float
    total: int
    warmup: int
    start: float
    end: float
    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, optim: Optim, total: int, steps_per_epoch: int) -> "LrPlan":
        schedule = optim.schedule
        points = tuple((to_steps(point.at, steps_per_epoch), point.factor) for point in schedule.points)
        warmup = min(to_steps(schedule.warmup, steps_per_epoch), total)
        return cls(schedule.name, optim.lr, total, warmup, schedule.start, schedule.end, points)


def lr_at(step: int, plan: LrPlan) -> float:
    """Learning rate for the update of step 0 .. total - 1; `end` is what step `total` would have."""
    return plan.peak * _factor(step, plan)


def _factor(step: int, plan: LrPlan) -> float:
    if plan.name == "piecewise":
        return _piecewise(step, plan.points)
    curve = _linear if plan.name == "linear" else _cosine
    if step < plan.warmup:
        rise = _cosine if plan.name == "one-cycle" else _linear
        return rise(plan.start, 1.0, step / plan.warmup)
    if plan.name == "constant":
        return 1.0
    return curve(1.0, plan.end, (step - plan.warmup) / max(1, plan.total - plan.warmup))


def _linear(begin: float, end: float, share: float) -> float:
    return begin + (end - begin) * share


def _cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * share)) / 2


def _piecewise(step: int, points: tuple[tuple[int, float], ...]) -> float:
    if step < points[0][0]:
        return points[0][1]
    for (begin, low), (end, high) in pairwise(points):
        if begin <= step < end:
            return _linear(low, high, (step - begin) / (end - begin))
    return points[-1][1]
