"""Where a step lies: its epoch, its place in it, and the settings of its phase. Pure arithmetic, no torch."""

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
    """A phase in steps, with its settings filled in from the recipe."""

    number: int
    begin: int
    """First step."""
    end: int
    """The step behind its last one."""
    epochs: tuple[float, float]
    global_batch: int
    steps_per_epoch: int
    size: int
    """0: the data's own."""
    lr: tuple[float, float] | None
    """None: the recipe's schedule."""
    crop_scale: tuple[float, float]
    variant: str
    evaluate_size: int
    """0: the data's own."""
    rectangular: bool

    @property
    def images(self) -> int:
        return (self.end - self.begin) * self.global_batch


@dataclass(frozen=True)
class Timeline:
    """The phases of a recipe on a training set of known size."""

    phases: tuple[ResolvedPhase, ...]

    @classmethod
    def of(cls, recipe: Recipe, num_samples: int) -> "Timeline":
        """Phases up to train.duration; those beyond it are left out."""
        phases: list[ResolvedPhase] = []
        length = parse(recipe.train.duration)
        most_epochs = length.value if length.unit == "ep" else float("inf")
        most_steps = round(length.value) if length.unit == "ba" else sys.maxsize
        for number, given in enumerate(recipe.all_phases()):
            batch = given.global_batch or recipe.train.global_batch
            per_epoch = max(1, num_samples // batch)
            first, last = given.epochs[0], min(given.epochs[1], most_epochs)
            begin = phases[-1].end if phases else 0
            if phases and (first >= most_epochs or begin >= most_steps):
                break
            # while the batch size stays the same, edges are rounded from where it began: errors must not add up
            origin_step, origin_epoch = _origin(phases, batch, begin, first)
            whole_end = _edge(given.epochs[1], origin_epoch, origin_step, per_epoch)
            end = min(_edge(last, origin_epoch, origin_step, per_epoch), most_steps)
            clipped = end < whole_end
            size = given.size or recipe.data.size
            low, high = recipe.data.augment.crop_scale
            phases.append(
                ResolvedPhase(
                    number=number,
                    begin=begin,
                    end=end,
                    epochs=(first, first + (end - begin) / per_epoch if end == most_steps and clipped else last),
                    global_batch=batch,
                    steps_per_epoch=per_epoch,
                    size=size,
                    # a training that ends within a phase goes along its line, but not to its end
                    lr=_line(given.lr, (end - begin) / (whole_end - begin) if clipped else 1.0),
                    crop_scale=(given.min_crop or low, high),
                    variant=given.variant or recipe.data.variant,
                    evaluate_size=given.evaluate_size or recipe.evaluate.size or size,
                    rectangular=given.rectangular or recipe.evaluate.rectangular,
                )
            )
        if phases[-1].end == 0:
            per_epoch = phases[0].steps_per_epoch
            raise UserError(f"train.duration={recipe.train.duration} is less than one step; an epoch has {per_epoch}")
        if length.unit == "ba" and phases[-1].end < most_steps:
            raise UserError(
                f"train.duration={recipe.train.duration}, but phases end at step {phases[-1].end}; add a phase, or set "
                f"train.duration to {phases[-1].end}ba"
            )
        return cls(tuple(phases))

    @property
    def total(self) -> int:
        """Steps of the whole training."""
        return self.phases[-1].end

    def phase_at(self, step: int) -> ResolvedPhase:
        """The phase of a step; of the last one for steps behind the end."""
        return self.phases[max(0, bisect_right(self.phases, step, key=lambda phase: phase.begin) - 1)]

    @cached_property
    def _segments(self) -> list[ResolvedPhase]:
        """The first phase of every run of phases with one batch size."""
        segments: list[ResolvedPhase] = []
        for phase in self.phases:
            if not segments or segments[-1].global_batch != phase.global_batch:
                segments.append(phase)
        return segments

    def _segment(self, step: int) -> ResolvedPhase:
        return next((segment for segment in reversed(self._segments) if step >= segment.begin), self._segments[0])

    def position(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and its number within the epoch."""
        segment = self._segment(step)
        epochs, within = divmod(step - segment.begin, segment.steps_per_epoch)
        return round(segment.epochs[0]) + epochs, within

    def epoch_at(self, step: int) -> float:
        """Epochs gone before a step."""
        segment = self._segment(step)
        return segment.epochs[0] + (step - segment.begin) / segment.steps_per_epoch

    def step_at(self, epoch: float) -> int:
        """The step nearest to a point in epochs."""
        segment = next(
            (segment for segment in reversed(self._segments) if epoch >= segment.epochs[0]), self._segments[0]
        )
        return segment.begin + round((epoch - segment.epochs[0]) * segment.steps_per_epoch)

    def steps(self, text: str) -> int:
        """The step at a point in time given in epochs or steps."""
        value, unit = parse(text)
        return self.step_at(value) if unit == "ep" else round(value)


def _edge(epoch: float, origin_epoch: float, origin_step: int, per_epoch: int) -> int:
    return sys.maxsize if epoch == float("inf") else origin_step + round((epoch - origin_epoch) * per_epoch)


def _line(lr: tuple[float, ...], share: float) -> tuple[float, float] | None:
    if not lr:
        return None
    return lr[0], lr[-1] if share == 1 else lr[0] + share * (lr[-1] - lr[0])


def _origin(phases: list[ResolvedPhase], batch: int, begin: int, first: float) -> tuple[int, float]:
    origin_step, origin_epoch = begin, first
    for phase in reversed(phases):
        if phase.global_batch != batch:
            break
        origin_step, origin_epoch = phase.begin, phase.epochs[0]
    return origin_step, origin_epoch


def phase_table(timeline: Timeline, ranks: int, accumulation: int, lr: Callable[[int], float]) -> list[list[str]]:
    """A row for each phase, under a header: what is seen, in which batches, for how long, and the learning rate."""
    rows = [["phase", "epochs", "size", "validated at", "data", "batch = ranks x per rank", "steps", "images", "lr"]]
    for phase in timeline.phases:
        first, last = phase.lr or (lr(phase.begin), lr(phase.end))
        each = phase.global_batch // (ranks * accumulation)
        parts = f"{ranks} x {each}" + (f" x {accumulation}" if accumulation > 1 else "")
        rows.append(
            [
                str(phase.number),
                f"{phase.epochs[0]:g} - {phase.epochs[1]:g}",
                f"{phase.size} px" if phase.size else "own",
                (f"{phase.evaluate_size} px" if phase.evaluate_size else "own")
                + (" rectangular" if phase.rectangular else ""),
                phase.variant or "-",
                f"{phase.global_batch} = {parts}",
                f"{phase.begin} - {phase.end}",
                f"{phase.images:,}",
                f"{first:.4g} -> {last:.4g}" if first != last else f"{first:.4g}",
            ]
        )
    return rows


def columns(rows: list[list[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
