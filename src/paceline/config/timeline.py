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
class Stage:
    """A phase in steps, its settings resolved."""

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
    """All stages of a recipe on a training set of known size."""

    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, recipe: Recipe, num_samples: int) -> "Timeline":
        """Stages up to train.duration; phases beyond it are left out."""
        stages: list[Stage] = []
        length = parse(recipe.train.duration)
        most_epochs = length.value if length.unit == "ep" else float("inf")
        most_steps = round(length.value) if length.unit == "ba" else sys.maxsize
        for number, phase in enumerate(recipe.all_phases()):
            batch = phase.global_batch or recipe.train.global_batch
            per_epoch = max(1, num_samples // batch)
            first, last = phase.epochs[0], min(phase.epochs[1], most_epochs)
            begin = stages[-1].end if stages else 0
            if stages and (first >= most_epochs or begin >= most_steps):
                break
            # within a stretch of one batch, edges are rounded from its own start, so that errors do not add up
            origin_step, origin_epoch = _origin(stages, batch, begin, first)
            whole_end = _edge(phase.epochs[1], origin_epoch, origin_step, per_epoch)
            end = min(_edge(last, origin_epoch, origin_step, per_epoch), most_steps)
            clipped = end < whole_end
            size = phase.size or recipe.data.size
            low, high = recipe.data.augment.crop_scale
            stages.append(
                Stage(
                    number=number,
                    begin=begin,
                    end=end,
                    epochs=(first, first + (end - begin) / per_epoch if end == most_steps and clipped else last),
                    global_batch=batch,
                    steps_per_epoch=per_epoch,
                    size=size,
                    # a training that ends within a phase goes along its line, but not to its end
                    lr=_line(phase.lr, (end - begin) / (whole_end - begin) if clipped else 1.0),
                    crop_scale=(phase.min_crop or low, high),
                    variant=phase.variant or recipe.data.variant,
                    evaluate_size=phase.evaluate_size or recipe.evaluate.size or size,
                    rectangular=phase.rectangular or recipe.evaluate.rectangular,
                )
            )
        if stages[-1].end == 0:
            per_epoch = stages[0].steps_per_epoch
            raise UserError(f"train.duration={recipe.train.duration} is less than one step; an epoch has {per_epoch}")
        if length.unit == "ba" and stages[-1].end < most_steps:
            raise UserError(
                f"train.duration={recipe.train.duration}, but phases end at step {stages[-1].end}; add a phase, or set "
                f"train.duration to {stages[-1].end}ba"
            )
        return cls(tuple(stages))

    @property
    def total(self) -> int:
        """Steps of the whole training."""
        return self.stages[-1].end

    def stage_at(self, step: int) -> Stage:
        """The stage of a step; of the last one for steps behind the end."""
        return self.stages[max(0, bisect_right(self.stages, step, key=lambda stage: stage.begin) - 1)]

    @cached_property
    def _spans(self) -> list[Stage]:
        """Stretches of one batch: their first stages."""
        spans: list[Stage] = []
        for stage in self.stages:
            if not spans or spans[-1].global_batch != stage.global_batch:
                spans.append(stage)
        return spans

    def _span(self, step: int) -> Stage:
        return next((span for span in reversed(self._spans) if step >= span.begin), self._spans[0])

    def position(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and its number within the epoch."""
        span = self._span(step)
        epochs, within = divmod(step - span.begin, span.steps_per_epoch)
        return round(span.epochs[0]) + epochs, within

    def epoch_at(self, step: int) -> float:
        """Epochs gone before a step."""
        span = self._span(step)
        return span.epochs[0] + (step - span.begin) / span.steps_per_epoch

    def step_at(self, epoch: float) -> int:
        """The step nearest to a point in epochs."""
        span = next((span for span in reversed(self._spans) if epoch >= span.epochs[0]), self._spans[0])
        return span.begin + round((epoch - span.epochs[0]) * span.steps_per_epoch)

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


def _origin(stages: list[Stage], batch: int, begin: int, first: float) -> tuple[int, float]:
    origin_step, origin_epoch = begin, first
    for stage in reversed(stages):
        if stage.global_batch != batch:
            break
        origin_step, origin_epoch = stage.begin, stage.epochs[0]
    return origin_step, origin_epoch


def phase_table(timeline: Timeline, ranks: int, accumulation: int, lr: Callable[[int], float]) -> list[list[str]]:
    """A row for each stage, under a header: what is seen, in which batches, for how long, and the learning rate."""
    rows = [["phase", "epochs", "size", "validated at", "data", "batch = ranks x per rank", "steps", "images", "lr"]]
    for stage in timeline.stages:
        first, last = stage.lr or (lr(stage.begin), lr(stage.end))
        each = stage.global_batch // (ranks * accumulation)
        parts = f"{ranks} x {each}" + (f" x {accumulation}" if accumulation > 1 else "")
        rows.append(
            [
                str(stage.number),
                f"{stage.epochs[0]:g} - {stage.epochs[1]:g}",
                f"{stage.size} px" if stage.size else "own",
                (f"{stage.evaluate_size} px" if stage.evaluate_size else "own")
                + (" rectangular" if stage.rectangular else ""),
                stage.variant or "-",
                f"{stage.global_batch} = {parts}",
                f"{stage.begin} - {stage.end}",
                f"{stage.images:,}",
                f"{first:.4g} -> {last:.4g}" if first != last else f"{first:.4g}",
            ]
        )
    return rows


def columns(rows: list[list[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
