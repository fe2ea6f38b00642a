"""Learning-rate schedules: the learning rate as a pure function of the step and, on a plateau, of past evaluations."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from numbers import Real
from typing import Any

from paceline.config.duration import parse, text_of
from paceline.config.optim import SCHEDULES, SPECIAL_FIELDS, MomentumSchedule, Optim, Schedule
from paceline.config.timeline import Timeline
from paceline.errors import UserError
from paceline.extensions import Extension, find, unknown
from paceline.optim.plateau import Plateau


@dataclass(frozen=True)
class LrPlan:
    """A schedule with its durations in steps."""

    name: str
    peak: float
    total: int
    warmup: int
    start: float
    end: float
    gamma: float
    power: float
    decay_steps: tuple[int, ...]
    points: tuple[tuple[int, float], ...]
    decay_from: int
    """First step of a cosine, linear or polynomial decay."""
    phases: tuple[tuple[int, int, float, float], ...]
    """Begin, end, first and last learning rate per phase; if empty, the schedule applies."""
    epochs: tuple[int, ...] = ()
    """First steps of the epochs, if the learning rate changes only there."""
    registered: Callable[[int], float] | None = None
    """The factor at a step, by a registered schedule, which replaces all of the above but the phases."""
    plateau: Plateau | None = None
    plateau_lr: float = 0.0
    """The learning rate after the warmup and the evaluations so far, if there is a plateau."""
    momentum: MomentumSchedule = field(default_factory=MomentumSchedule)
    momentum_points: tuple[tuple[int, float], ...] = ()

    @property
    def highest(self) -> float:
        """The largest learning rate of the run, without the decays of a plateau."""
        if self.phases:
            return max(lr for _, _, *ends in self.phases for lr in ends)
        return replace(self, plateau_lr=self.peak).highest_between(0, self.total)

    def highest_between(self, begin: int, end: int) -> float:
        """Return the largest learning rate of the steps from `begin` up to before `end`.

        Exact for built-in schedules, which are monotonic between edges; for others, of about a thousand steps and of
        those around the highest.
        """
        edges = [edge for at in (self.warmup, *(at for at, _ in self.points)) for edge in (at - 1, at)]
        if self.epochs:
            edges += self.epochs
        stride = max(1, (end - begin) // 1000)
        some = {*range(begin, end, stride), end - 1, *(edge for edge in edges if begin <= edge < end)}
        near = max(sorted(some), key=lambda step: lr_at(step, self))
        around = range(max(begin, near - stride), min(end, near + stride + 1))
        return max(lr_at(step, self) for step in around)

    @classmethod
    def of(cls, optim: Optim, timeline: Timeline) -> "LrPlan":
        """Return the plan of a recipe's optimizer over a timeline."""
        schedule, total = optim.schedule, timeline.total
        warmup = min(timeline.steps(schedule.warmup), total)
        extension = check(schedule)
        every = parse(schedule.step_size)
        decay_steps: list[int] = []
        if schedule.name == "step":
            if timeline.steps(schedule.step_size) < 1:
                raise UserError(
                    "schedule-step-too-short",
                    f"optim.schedule.step_size={schedule.step_size} is less than one step. Use a longer duration.",
                    step_size=schedule.step_size,
                )
            while not decay_steps or decay_steps[-1] < total:
                decay_steps.append(timeline.steps(text_of(every.value * (len(decay_steps) + 1), every.unit)))
        return cls(
            name=schedule.name,
            peak=optim.lr,
            total=total,
            warmup=warmup,
            start=schedule.start_factor,
            end=schedule.end_factor,
            gamma=schedule.gamma,
            power=schedule.power,
            decay_steps=tuple(decay_steps),
            points=tuple((timeline.steps(point.at), point.factor) for point in schedule.points),
            decay_from=warmup if schedule.warmup_prefix else 0,
            phases=tuple((phase.begin, phase.end, *phase.lr) for phase in timeline.phases if phase.lr),
            epochs=_epochs(timeline) if schedule.interval == "epoch" else (),
            registered=partial(_call, extension, total, schedule.options) if extension else None,
            plateau=_plateau(optim) if schedule.name == "plateau" else None,
            plateau_lr=optim.lr,
            momentum=optim.momentum_schedule,
            momentum_points=tuple(
                (timeline.steps(point.at), point.momentum) for point in optim.momentum_schedule.points
            ),
        )

    def after_evaluations(self, values: Iterable[float], lower_is_better: bool) -> "LrPlan":
        """Return the plan after the evaluations so far; `values` are those of the metric since the warmup."""
        assert self.plateau
        return replace(self, plateau_lr=self.plateau.lr_after(values, self.peak, lower_is_better))


def _epochs(timeline: Timeline) -> tuple[int, ...]:
    last, _ = timeline.position(timeline.total - 1)
    return tuple(timeline.step_at(epoch) for epoch in range(last + 1))


def _plateau(optim: Optim) -> Plateau:
    schedule = optim.schedule
    return Plateau(
        factor=schedule.gamma,
        patience=schedule.patience,
        threshold=schedule.threshold,
        relative=schedule.threshold_mode == "rel",
        cooldown=schedule.cooldown,
        min_lr=optim.lr * schedule.end_factor,
    )


_CURVE_FIELDS = ("interval", "warmup", "start_factor", "end_factor", "step_size", "gamma", *SPECIAL_FIELDS)


def check(schedule: Schedule) -> Extension | None:
    """Return the registered schedule of a recipe, None for a built-in one. Refuses unknown names and unused fields."""
    extension = find("schedule", schedule.name)
    if extension:
        for name in _CURVE_FIELDS:
            value, default = getattr(schedule, name), getattr(Schedule(), name)
            is_duration = name in ("warmup", "step_size")
            if _durations_differ(value, default) if is_duration else value != default:
                message = (
                    f"optim.schedule.{name}={value} has no effect, because the registered schedule "
                    f"{schedule.name!r} sets the whole curve. Remove it."
                )
                raise UserError("schedule-field-unused", message, field=f"optim.schedule.{name}")
    elif schedule.name not in SCHEDULES:
        raise unknown("schedule", "optim.schedule.name", schedule.name, SCHEDULES)
    return extension


def _durations_differ(value: str, default: str) -> bool:
    """Return whether a duration is not the default. Zero is the same in any unit."""
    given, usual = parse(value), parse(default)
    return given != usual and bool(given.value or usual.value)


def _call(extension: Extension, total: int, options: dict[str, Any], step: int) -> float:
    """Return the factor of a registered schedule at a step."""
    factor = extension(step, total, **options)
    if isinstance(factor, bool) or not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
        raise extension.error(f"returned {factor!r} at step {step}, which is not a finite number >= 0")
    return float(factor)


def lr_at(step: int, plan: LrPlan) -> float:
    """Return the learning rate of step 0 .. total - 1.

    The end factor is reached at step `total`, by the schedule one-cycle at the step before it.
    """
    for begin, end, first, last in reversed(plan.phases):
        if step >= begin:
            return _linear(first, last, (step - begin) / (end - begin))
    if plan.epochs:
        step = plan.epochs[bisect_right(plan.epochs, step) - 1]
    if plan.plateau and step >= plan.warmup:
        return plan.plateau_lr
    return plan.peak * _factor(step, plan)


def _factor(step: int, plan: LrPlan) -> float:
    if plan.registered:
        return plan.registered(step)
    if plan.name == "piecewise":
        return _piecewise(step, plan.points)
    if plan.name == "one-cycle":
        rising, fraction = _cycle(step, plan)
        return _cosine(plan.start, 1.0, fraction) if rising else _cosine(1.0, plan.end, fraction)
    if step < plan.warmup:
        return _linear(plan.start, 1.0, step / plan.warmup)
    if plan.name == "constant":
        return 1.0
    if plan.name == "step":
        return plan.gamma ** bisect_right(plan.decay_steps, step)
    done = (step - plan.decay_from) / max(1, plan.total - plan.decay_from)
    if plan.name == "polynomial":
        return _linear(plan.end, 1.0, max(0.0, 1 - done) ** plan.power)
    return (_linear if plan.name == "linear" else _cosine)(1.0, plan.end, done)


def _cycle(step: int, plan: LrPlan) -> tuple[bool, float]:
    """Return whether a one-cycle schedule rises at a step, and which fraction of the rise or fall is done.

    As in torch's OneCycleLR, the last step of the warmup has the peak, and the last step of the run the end.
    """
    peak = plan.warmup - 1
    if step < peak:
        return True, step / peak
    return False, min(1.0, (step - peak) / max(1, plan.total - plan.warmup))


def momentum_at(step: int, plan: LrPlan) -> float | None:
    """Return the momentum of step 0 .. total - 1; None if it is constant."""
    if plan.momentum.name == "constant":
        return None
    if plan.momentum.name == "piecewise":
        return _piecewise(step, plan.momentum_points)
    low, high = plan.momentum.low, plan.momentum.high
    rising, fraction = _cycle(step, plan)
    return _cosine(high, low, fraction) if rising else _cosine(low, high, fraction)


def _linear(begin: float, end: float, fraction: float) -> float:
    return begin + (end - begin) * fraction


def _cosine(begin: float, end: float, fraction: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * fraction)) / 2


def _piecewise(step: int, points: tuple[tuple[int, float], ...]) -> float:
    if step < points[0][0]:
        return points[0][1]
    for (begin, low), (end, high) in pairwise(points):
        if begin <= step < end:
            return _linear(low, high, (step - begin) / (end - begin))
    return points[-1][1]
