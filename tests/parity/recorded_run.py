"""A run of the engine with everything that a plain loop needs to repeat it: batches, mixing, and initial weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.api.runs import Run
from paceline.config.recipe import Recipe
from paceline.distributed.world import World
from paceline.engine import objective
from paceline.engine.build import Setup, build


@dataclass(frozen=True)
class Mixing:
    """How the images of a batch were mixed: each with its partner, blended or inside of a box."""

    partners: torch.Tensor
    weight: float
    """Of the image itself."""
    box: tuple[int, int, int, int] | None = None
    """top, bottom, left, right"""

    def images(self, images: torch.Tensor) -> torch.Tensor:
        if self.box is None:
            return images * self.weight + images[self.partners] * (1 - self.weight)
        top, bottom, left, right = self.box
        mixed = images.clone()
        mixed[..., top:bottom, left:right] = images[self.partners][..., top:bottom, left:right]
        return mixed

    def targets(self, labels: torch.Tensor, classes: int) -> torch.Tensor:
        own = F.one_hot(labels, classes).float()
        return own * self.weight + own[self.partners] * (1 - self.weight)


@dataclass(frozen=True)
class Step:
    """What the engine trained on in a step."""

    images: torch.Tensor
    labels: torch.Tensor
    mixed: torch.Tensor
    """The images that the network saw."""
    targets: torch.Tensor
    """What its outputs were compared with: labels or probabilities."""

    def mixing(self) -> Mixing:
        """Find out how the images were mixed, from the images alone."""
        changed = (self.images != self.mixed).any(0).any(0)
        if not changed.any():
            return Mixing(torch.arange(len(self.images)), 1.0)
        rows, columns = changed.any(1).nonzero().flatten(), changed.any(0).nonzero().flatten()
        box = (int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1)
        height, width = changed.shape
        area = (box[1] - box[0]) * (box[3] - box[2]) / (height * width)
        if area < 1:
            inside = self.mixed[..., box[0] : box[1], box[2] : box[3]]
            return Mixing(_nearest(inside, self.images[..., box[0] : box[1], box[2] : box[3]]), 1 - area, box)
        return self._blend()

    def _blend(self) -> Mixing:
        """mixed = weight * image + (1 - weight) * partner: the pair of both with the smallest residual."""
        found = []
        for image, mixed in zip(self.images, self.mixed, strict=True):
            apart = (image - self.images).flatten(1)
            towards = (mixed - self.images).flatten(1)
            weights = (towards * apart).sum(1) / apart.square().sum(1).clamp(min=1e-9)
            residuals = (towards - weights[:, None] * apart).norm(dim=1)
            residuals[apart.square().sum(1) == 0] = torch.inf
            partner = int(residuals.argmin())
            found.append((float(residuals[partner]), partner, float(weights[partner])))
        partners = torch.tensor([partner for _, partner, _ in found])
        weight = sorted(weight for *_, weight in found)[len(found) // 2]
        return Mixing(partners, weight)


def _nearest(parts: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return torch.stack([(part - images).flatten(1).norm(dim=1).argmin() for part in parts])


@dataclass
class Recorded:
    """A run and its steps."""

    recipe: Recipe
    run: Run
    steps: list[Step]
    setup: Setup
    """Built again: data for evaluation, and a model with the initial weights."""
    losses: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.losses = [loss for _, loss in self.run.points("loss", "train", "step")]

    @property
    def initial(self) -> nn.Module:
        """The network with its initial weights."""
        return self.setup.replica.module

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [record for record in self.run.metrics if record["kind"] == "eval"]


def record(recipe: Recipe, runs: Path) -> Recorded:
    """Train a recipe in this process and record what its network saw."""
    with _recording() as steps:
        run = pl.train(recipe, runs=runs, in_process=True)
    return Recorded(recipe, run, steps, build(recipe, World()))


@contextmanager
def _recording() -> Iterator[list[Step]]:
    prepare, steps = objective.Objective.prepare, []

    def recorded(self: Any, batch: Any, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets = prepare(self, batch, *more)
        steps.append(Step(batch.images.clone(), batch.labels.clone(), images.clone(), targets.clone()))
        return images, targets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective.Objective, "prepare", recorded)
        yield steps
