"""Maps steps to epochs and phases. Pure arithmetic, no torch."""

import sys
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from paceline.config.duration import parse
from paceline.config.recipe import Recipe
from paceline.errors import UserError


@dataclass(frozen=True)
class ResolvedPhase:
    """A phase in steps, with defaults from the recipe filled in."""

    number: int
    begin: int
    """First step."""
    end: int
    """One past the last step."""
    epochs: tuple[float, float]
    global_batch: int
    steps_per_epoch: int
    size: int
    """0: the original size."""
    lr: tuple[float, float] | None
    """First and last learning rate; None: optim.schedule."""
    crop_scale: tuple[float, float]
    variant: str
    evaluate_size: int
    """0: the original size."""
    evaluate_variant: str
    """Empty: `original` if the data has it, else the variant of training."""
    rectangular: bool

    @property
    def images(self) -> int:
        return (self.end - self.begin) * self.global_batch


def evaluation_phase(size: int, rectangular: bool) -> ResolvedPhase:
    """Return a phase without steps, for the use of a trained model."""
    return ResolvedPhase(0, 0, 0, (0.0, 0.0), 1, 1, size, None, (1.0, 1.0), "", size, "", rectangular)


@dataclass(frozen=True)
class Timeline:
    """The phases of a recipe on a training set of known size."""

    phases: tuple[ResolvedPhase, ...]

    @classmethod
    def of(cls, recipe: Recipe, num_samples: int) -> "Timeline":
        """The phases up to train.duration; later ones are dropped."""
        phases: list[ResolvedPhase] = []
        length = parse(recipe.train.duration)
        max_epochs = length.value if length.unit == "ep" else float("inf")
        max_steps = round(length.value) if length.unit == "ba" else sys.maxsize
        for number, given in enumerate(recipe.all_phases()):
            batch = given.global_batch or recipe.train.global_batch
            per_epoch = max(1, num_samples // batch)
            first, last = given.epochs[0], min(given.epochs[1], max_epochs)
            begin = phases[-1].end if phases else 0
            if phases and (first >= max_epochs or begin >= max_steps):
                break
            # rounded from where this batch size began, so that rounding errors do not accumulate over phases
            origin_step, origin_epoch = _origin(phases, batch, begin, first)
            whole_end = _edge(given.epochs[1], origin_epoch, origin_step, per_epoch)
            end = min(_edge(last, origin_epoch, origin_step, per_epoch), max_steps)
            clipped = end < whole_end
            size, variant = given.size or recipe.data.size, given.variant or recipe.data.variant
            low, high = recipe.data.augment.crop_scale
            phases.append(
                ResolvedPhase(
                    number=number,
                    begin=begin,
                    end=end,
                    epochs=(first, first + (end - begin) / per_epoch if end == max_steps and clipped else last),
                    global_batch=batch,
                    steps_per_epoch=per_epoch,
                    size=size,
                    # a run that ends within a phase stops part of the way along its learning rate line
                    lr=_line(given.lr, (end - begin) / (whole_end - begin) if clipped else 1.0),
                    crop_scale=(given.min_crop or low, high),
                    variant=variant,
                    evaluate_size=given.evaluate_size or recipe.evaluate.size or size,
                    evaluate_variant=recipe.evaluate.variant_for(variant),
                    rectangular=given.rectangular or recipe.evaluate.rectangular,
                )
            )
        if phases[-1].end == 0:
            per_epoch = phases[0].steps_per_epoch
            raise UserError(
                "duration-too-short",
                f"train.duration={recipe.train.duration} is less than one step. An epoch has {per_epoch} steps.",
                steps_per_epoch=per_epoch,
            )
        if length.unit == "ba" and phases[-1].end < max_steps:
            raise UserError(
                "phases-too-short",
                f"phases end at step {phases[-1].end}, but train.duration is {recipe.train.duration}. Add a phase, or "
                f"set train.duration to {phases[-1].end}ba.",
                end=phases[-1].end,
            )
        return cls(tuple(phases))

    @property
    def total(self) -> int:
        """Number of steps of the run."""
        return self.phases[-1].end

    def phase_at(self, step: int) -> ResolvedPhase:
        """The phase of a step; the last phase for steps after the end."""
        return self.phases[max(0, bisect_right(self.phases, step, key=lambda phase: phase.begin) - 1)]

    @cached_property
    def _segments(self) -> list[ResolvedPhase]:
        """The first phase of every sequence of phases with the same batch size."""
        segments: list[ResolvedPhase] = []
        for phase in self.phases:
            if not segments or segments[-1].global_batch != phase.global_batch:
                segments.append(phase)
        return segments

    def _segment(self, step: int) -> ResolvedPhase:
        return next((segment for segment in reversed(self._segments) if step >= segment.begin), self._segments[0])

    def position(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and its index within the epoch."""
        segment = self._segment(step)
        epochs, within = divmod(step - segment.begin, segment.steps_per_epoch)
        return round(segment.epochs[0]) + epochs, within

    def epoch_at(self, step: int) -> float:
        """Epochs completed before a step, as a fraction."""
        segment = self._segment(step)
        return segment.epochs[0] + (step - segment.begin) / segment.steps_per_epoch

    def step_at(self, epoch: float) -> int:
        """The step nearest to a time in epochs."""
        segment = next(
            (segment for segment in reversed(self._segments) if epoch >= segment.epochs[0]), self._segments[0]
        )
        return segment.begin + round((epoch - segment.epochs[0]) * segment.steps_per_epoch)

    def steps(self, text: str) -> int:
        """The step at a time given in epochs or steps, e.g. "10ep"."""
        value, unit = parse(text)
        return self.step_at(value) if unit == "ep" else round(value)


def _edge(epoch: float, origin_epoch: float, origin_step: int, per_epoch: int) -> int:
    """The step at an epoch, counted from an origin."""
    return sys.maxsize if epoch == float("inf") else origin_step + round((epoch - origin_epoch) * per_epoch)


def _line(lr: tuple[float, ...], progress: float) -> tuple[float, float] | None:
    """First and last learning rate of a phase of which only this fraction is trained."""
    if not lr:
        return None
    return lr[0], lr[-1] if progress == 1 else lr[0] + progress * (lr[-1] - lr[0])


def _origin(phases: list[ResolvedPhase], batch: int, begin: int, first: float) -> tuple[int, float]:
    """Step and epoch from which this batch size is in use without a change."""
    origin_step, origin_epoch = begin, first
    for phase in reversed(phases):
        if phase.global_batch != batch:
            break
        origin_step, origin_epoch = phase.begin, phase.epochs[0]
    return origin_step, origin_epoch


def phase_table(
    timeline: Timeline,
    ranks: int,
    accumulation: int,
    lr: Callable[[int], float],
    highest_lr: Callable[[int, int], float],
    evaluated_on: Callable[[ResolvedPhase], str],
) -> list[list[str]]:
    """One row per phase below a header: epochs, image size, data, batch size, steps and learning rate.

    `highest_lr`: the largest from one step up to before another. `evaluated_on`: the variant that a phase is validated
    on, empty if the data has none.
    """
    heads = ("phase", "epochs", "size", "eval size", "data", "eval data")
    rows = [[*heads, "batch = ranks x per rank", "steps", "images", "lr"]]
    for phase in timeline.phases:
        first, last = phase.lr or (lr(phase.begin), lr(phase.end))
        peak = max(first, last) if phase.lr else highest_lr(phase.begin, phase.end)
        rates = [first, peak, last] if peak > max(first, last) else [first, last][: 1 + (first != last)]
        per_rank = phase.global_batch // (ranks * accumulation)
        parts = f"{ranks} x {per_rank}" + (f" x {accumulation}" if accumulation > 1 else "")
        rows.append(
            [
                str(phase.number),
                f"{phase.epochs[0]:g} - {phase.epochs[1]:g}",
                f"{phase.size} px" if phase.size else "original",
                (f"{phase.evaluate_size} px" if phase.evaluate_size else "original")
                + (" rectangular" if phase.rectangular else ""),
                phase.variant or "-",
                evaluated_on(phase) or "-",
                f"{phase.global_batch} = {parts}",
                f"{phase.begin} - {phase.end}",
                f"{phase.images:,}",
                " -> ".join(f"{rate:.4g}" for rate in rates),
            ]
        )
    return rows
