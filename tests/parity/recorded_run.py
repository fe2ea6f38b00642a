"""A recorded run of the engine, with what a plain loop needs to repeat it: batches, mixing and initial weights."""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.api.runs import Run
from paceline.config.recipe import Recipe
from paceline.data.load.batch import Batch
from paceline.engine import objective, train
from paceline.engine.build import Setup


@dataclass(frozen=True)
class Mixing:
    """How the images of a batch were mixed: each with a partner, blended or inside of a box."""

    partners: list[list[int]]
    """Possible partners of each image: several if they are equal in the box, e.g. black."""
    weight: float
    """Weight of the image itself."""
    box: tuple[slice, slice] | None = None
    """Rows and columns."""

    def images(self, images: torch.Tensor) -> torch.Tensor:
        others = images[[candidates[0] for candidates in self.partners]]
        if self.box is None:
            return images * self.weight + others * (1 - self.weight)
        mixed = images.clone()
        mixed[:, :, *self.box] = others[:, :, *self.box]
        return mixed

    def targets(self, labels: torch.Tensor, classes: int) -> list[torch.Tensor]:
        """Return the probabilities of the classes for every image, one row per possible partner."""
        own = F.one_hot(labels, classes).float()
        return [own[i] * self.weight + own[others] * (1 - self.weight) for i, others in enumerate(self.partners)]


@dataclass(frozen=True)
class Step:
    """Inputs and targets of the engine in a step."""

    images: torch.Tensor
    labels: torch.Tensor
    mixed: torch.Tensor
    """The images that the network received."""
    targets: torch.Tensor
    """The targets of the loss: labels or probabilities."""

    def mixing(self) -> Mixing:
        """Find out how the images were mixed, from the images alone."""
        changed = (self.images != self.mixed).any(0).any(0)
        if not changed.any():
            return Mixing([[number] for number in range(len(self.images))], 1.0)
        rows, columns = (changed.any(side).nonzero().flatten().tolist() for side in (1, 0))
        box = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
        inside = len(range(*box[0].indices(10**6))) * len(range(*box[1].indices(10**6)))
        if inside == changed.numel():
            return self._blend()
        distances = torch.cdist(self.mixed[:, :, *box].flatten(1), self.images[:, :, *box].flatten(1))
        return Mixing([_smallest(row) for row in distances], 1 - inside / changed.numel(), box)

    def _blend(self) -> Mixing:
        """mixed = weight * image + (1 - weight) * partner: the partners with the smallest residuals."""
        partners, weights = [], []
        for image, mixed in zip(self.images, self.mixed, strict=True):
            apart, towards = (image - self.images).flatten(1), (mixed - self.images).flatten(1)
            weight = (towards * apart).sum(1) / apart.square().sum(1).clamp(min=1e-9)
            residuals = (towards - weight[:, None] * apart).norm(dim=1)
            residuals[apart.square().sum(1) == 0] = torch.inf
            partners.append(_smallest(residuals))
            weights.append(float(weight[partners[-1][0]]))
        return Mixing(partners, sorted(weights)[len(weights) // 2])


def _smallest(distances: torch.Tensor) -> list[int]:
    order: list[int] = distances.argsort().tolist()
    return [number for number in order if distances[number] <= distances[order[0]] + 0.02]


@dataclass
class Recorded:
    """A run and its steps."""

    recipe: Recipe
    run: Run
    steps: list[Step]
    states: list[dict[str, torch.Tensor]]
    """Weights and buffers before every step, and after the last."""
    setup: Setup

    @property
    def losses(self) -> list[float]:
        return [loss for _, loss in self.run.points("loss", "train", "step")]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [record for record in self.run.metrics if record["kind"] == "eval"]

    def initial_net(self) -> nn.Module:
        """Return a network with the initial weights."""
        net = deepcopy(self.setup.replica.module)
        net.load_state_dict(self.states[0])
        return net


def record(recipe: Recipe, runs: Path) -> Recorded:
    """Train a recipe in this process, and record the inputs and weights of its network."""
    prepare, step, steps = objective.Objective.prepare, train.train_step, list[Step]()
    states, setups = list[dict[str, torch.Tensor]](), list[Setup]()

    def recording_prepare(self: Any, batch: Batch, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets = prepare(self, batch, *more)
        steps.append(Step(batch.images.clone(), batch.labels.clone(), images.clone(), targets.clone()))
        return images, targets

    def recording_step(setup: Setup, *more: Any) -> Any:
        if not setups:
            setups.append(setup)
            states.append(_state(setup))
        result = step(setup, *more)
        states.append(_state(setup))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective.Objective, "prepare", recording_prepare)
        patch.setattr(train, "train_step", recording_step)
        run = pl.train(recipe, runs=runs, in_process=True)
    return Recorded(recipe, run, steps, states, setups[0])


def _state(setup: Setup) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in setup.replica.module.state_dict().items()}
