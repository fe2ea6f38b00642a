"""Phases: stretches of training with settings of their own."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from paceline.config.fields import STRICT, CountOrZero, NotNegative, Side


@dataclass(frozen=True)
class Phase:
    """A stretch of training; what it leaves at 0 or empty is the recipe's own."""

    __pydantic_config__ = STRICT

    epochs: tuple[NotNegative, NotNegative]
    """Where it begins and ends, in epochs from the start of training."""
    size: Side = 0
    """Side of training images in pixels; 0: data.size."""
    global_batch: CountOrZero = 0
    """Images per optimizer step over all ranks; 0: train.global_batch. It can change between whole epochs only."""
    lr: Annotated[tuple[NotNegative, ...], Field(max_length=2)] = ()
    """Learning rate: [constant], or [first, last], linear per step; in all phases or in none (then optim.schedule)."""
    min_crop: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Image files: smallest share of the area that a random crop sees; 0: data.augment.crop_scale."""
    variant: str = ""
    """Which size of prepared images; empty: data.variant."""
    evaluate_size: Side = 0
    """Side of validation images in this phase; 0: evaluate.size, or the phase's own size."""
    rectangular: bool = False
    """Validate this phase on batches of like aspect ratio, as evaluate.rectangular does for all."""


@dataclass(frozen=True)
class Ramp:
    """Image sizes that grow evenly, from which a list of phases is made: one for each size."""

    __pydantic_config__ = STRICT

    epochs: tuple[NotNegative, NotNegative] = (0.0, 0.0)
    """From when to when the size grows; each epoch has one size."""
    sizes: tuple[Side, Side] = (0, 0)
    """Side in pixels before and after; 0: no ramp."""
    multiple: Annotated[int, Field(ge=1)] = 32
    """Sides are multiples of this."""

    def phases(self, duration: float) -> tuple[Phase, ...]:
        """A phase for each stretch of one size, from epoch 0 to `duration`."""
        (begin, end), (low, high) = self.epochs, self.sizes
        sizes = []
        for epoch in range(max(1, -int(-duration // 1))):
            share = min(1.0, max(0.0, (epoch - begin) / max(end - begin, 1e-9)))
            sizes.append(round((low + share * (high - low)) / self.multiple) * self.multiple)
        edges = [0, *(epoch for epoch in range(1, len(sizes)) if sizes[epoch] != sizes[epoch - 1])]
        ends = [*(float(edge) for edge in edges[1:]), duration]
        return tuple(Phase((float(first), last), size=sizes[first]) for first, last in zip(edges, ends, strict=True))


def ramp_problems(ramp: Ramp) -> Iterator[str]:
    if not any(ramp.sizes):
        return
    for size in ramp.sizes:
        if size == 0 or size % ramp.multiple:
            yield f"ramp.sizes={ramp.sizes[0]}, {ramp.sizes[1]}: {size} is no multiple of ramp.multiple={ramp.multiple}"
    if ramp.epochs[0] > ramp.epochs[1]:
        yield f"ramp.epochs={ramp.epochs[0]:g}, {ramp.epochs[1]:g}: it ends before it begins; swap them"


def problems(phases: tuple[Phase, ...], duration: float, global_batch: int) -> Iterator[str]:
    """What is wrong with a list of phases; `duration`: of the training, in epochs; `global_batch`: the recipe's own."""
    if not phases:
        return
    if phases[0].epochs[0]:
        yield f"phases.0 begins at epoch {phases[0].epochs[0]:g}; the first one begins at 0"
    for number, phase in enumerate(phases):
        begin, end = phase.epochs
        if begin >= end:
            yield f"phases.{number}.epochs={begin:g}, {end:g}: it ends before it has begun; swap them"
        if bool(phase.lr) != bool(phases[0].lr):
            with_lr, without = (number, 0) if phase.lr else (0, number)
            yield f"phases.{with_lr} has a learning rate and phases.{without} has none; give it in all or in none"
    for number, (before, phase) in enumerate(pairwise(phases), start=1):
        gap = phase.epochs[0] - before.epochs[1]
        if gap:
            kind = "leaves a gap after" if gap > 0 else "overlaps"
            yield (
                f"phases.{number} begins at epoch {phase.epochs[0]:g}, which {kind} phases.{number - 1}, whose end is "
                f"epoch {before.epochs[1]:g}; make them the same"
            )
        if (phase.global_batch or global_batch) != (before.global_batch or global_batch) and phase.epochs[0] % 1:
            yield (
                f"phases.{number} changes the batch at epoch {phase.epochs[0]:g}; it can change between whole epochs "
                f"only, at {int(phase.epochs[0])} or {int(phase.epochs[0]) + 1}"
            )
    if phases[-1].epochs[1] < duration:
        yield (
            f"phases end at epoch {phases[-1].epochs[1]:g}, but train.duration is {duration:g}ep; add a phase, or set "
            f"train.duration to {phases[-1].epochs[1]:g}ep"
        )
