"""Phases: parts of a run with their own settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from paceline.config.fields import STRICT, CountOrZero, NotNegative, Side
from paceline.errors import Problem


@dataclass(frozen=True)
class Phase:
    """A part of a run. Settings left at 0 or empty come from the recipe."""

    __pydantic_config__ = STRICT

    epochs: tuple[NotNegative, NotNegative]
    """Begin and end, in epochs from the start of training."""
    size: Side = 0
    """Side of training images in pixels; 0: data.size."""
    global_batch: CountOrZero = 0
    """Images per optimizer step over all ranks; 0: train.global_batch. It can only change at a whole epoch."""
    lr: Annotated[tuple[NotNegative, ...], Field(max_length=2)] = ()
    """Learning rate: [constant], or [first, last], linear per step. In all phases or in none (optim.schedule)."""
    min_crop: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Image files: minimum fraction of the area that a random crop covers; 0: data.augment.crop_scale."""
    variant: str = ""
    """Which size of prepared images; empty: data.variant."""
    evaluate_size: Side = 0
    """Side of validation images in this phase; 0: evaluate.size, or the size of the phase."""
    rectangular: bool = False
    """Validate this phase on batches of similar aspect ratio, as evaluate.rectangular does for all phases."""


@dataclass(frozen=True)
class Ramp:
    """Progressive resizing: image sizes that grow linearly, with one phase per size."""

    __pydantic_config__ = STRICT

    epochs: tuple[NotNegative, NotNegative] = (0.0, 0.0)
    """Epochs between which the size grows; it is constant within an epoch."""
    sizes: tuple[Side, Side] = (0, 0)
    """First and last side in pixels; 0: no ramp."""
    multiple: Annotated[int, Field(ge=1)] = 32
    """Sides are multiples of this."""

    def phases(self, duration: float) -> tuple[Phase, ...]:
        """One phase per size, from epoch 0 to `duration`."""
        (begin, end), (low, high) = self.epochs, self.sizes
        sizes = []
        for epoch in range(max(1, -int(-duration // 1))):
            progress = min(1.0, max(0.0, (epoch - begin) / max(end - begin, 1e-9)))
            sizes.append(round((low + progress * (high - low)) / self.multiple) * self.multiple)
        edges = [0, *(epoch for epoch in range(1, len(sizes)) if sizes[epoch] != sizes[epoch - 1])]
        ends = [*(float(edge) for edge in edges[1:]), duration]
        return tuple(Phase((float(first), last), size=sizes[first]) for first, last in zip(edges, ends, strict=True))


def ramp_problems(ramp: Ramp) -> Iterator[Problem]:
    """Problems of a ramp."""
    if not any(ramp.sizes):
        return
    for size in ramp.sizes:
        if size == 0 or size % ramp.multiple:
            yield Problem(
                "ramp-size-multiple",
                f"ramp.sizes={ramp.sizes[0]}, {ramp.sizes[1]}: {size} is not a positive multiple of "
                f"ramp.multiple={ramp.multiple}.",
            )
    if ramp.epochs[0] > ramp.epochs[1]:
        yield Problem(
            "range-reversed",
            f"ramp.epochs={ramp.epochs[0]:g}, {ramp.epochs[1]:g}: the ramp ends before it begins. Swap them.",
        )


def problems(phases: tuple[Phase, ...], duration: float, global_batch: int) -> Iterator[Problem]:
    """Problems of a list of phases; `duration`: of the training in epochs; `global_batch`: the recipe's default."""
    if not phases:
        return
    if phases[0].epochs[0]:
        yield Problem(
            "phase-start", f"phases.0 begins at epoch {phases[0].epochs[0]:g}. The first phase must begin at 0."
        )
    for number, phase in enumerate(phases):
        begin, end = phase.epochs
        if begin >= end:
            yield Problem(
                "phase-empty",
                f"phases.{number}.epochs={begin:g}, {end:g}: the end must be after the beginning. Swap them.",
            )
        if bool(phase.lr) != bool(phases[0].lr):
            with_lr, without = (number, 0) if phase.lr else (0, number)
            yield Problem(
                "phase-lr-partial",
                f"phases.{with_lr} sets lr, but phases.{without} does not. Set it in all phases or in none.",
            )
    for number, (before, phase) in enumerate(pairwise(phases), start=1):
        yield from _transition_problems(number, before, phase, global_batch)
    if phases[-1].epochs[1] < duration:
        yield Problem(
            "phases-too-short",
            f"phases end at epoch {phases[-1].epochs[1]:g}, but train.duration is {duration:g}ep. Add a phase, or set "
            f"train.duration to {phases[-1].epochs[1]:g}ep.",
        )


def _transition_problems(number: int, before: Phase, phase: Phase, global_batch: int) -> Iterator[Problem]:
    begin, previous_end = phase.epochs[0], before.epochs[1]
    if begin != previous_end:
        code, verb = ("phase-gap", "leaves a gap after") if begin > previous_end else ("phase-overlap", "overlaps")
        yield Problem(
            code,
            f"phases.{number} begins at epoch {begin:g} and {verb} phases.{number - 1}, which ends at epoch "
            f"{previous_end:g}. Make the two epochs equal.",
        )
    if (phase.global_batch or global_batch) != (before.global_batch or global_batch) and begin % 1:
        yield Problem(
            "phase-batch-mid-epoch",
            f"phases.{number} changes the batch size at epoch {begin:g}. It can only change at a whole epoch: "
            f"{int(begin)} or {int(begin) + 1}.",
        )
