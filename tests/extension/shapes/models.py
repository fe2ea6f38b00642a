"""A model with everything that makes checkpoints and ranks hard, and one that fails as requested."""

import os
import sys

import numpy as np
import torch
from torch import nn

import paceline as pl


class OddNet(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.scale = nn.Parameter(torch.from_numpy(np.random.default_rng().normal(1, 0.1, 16)).float())
        self.head = nn.LazyLinear(num_classes)
        self.register_buffer("calls", torch.zeros(3, dtype=torch.int16))
        self.register_buffer("flags", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("level", torch.tensor(-1))
        self.register_buffer("constant", torch.full((5,), 0.1))
        self.register_buffer("order", torch.randperm(16), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.flags[0] = True
            self.level -= 1
        pooled = nn.functional.adaptive_avg_pool2d(images, 4).flatten(1)
        return self.head(pooled[:, self.order] * self.scale) + self.constant.sum()


@pl.register_model("odd-net")
def odd_net(num_classes: int, in_chans: int) -> nn.Module:
    return OddNet(num_classes)


class FailingNet(nn.Module):
    def __init__(self, num_classes: int, problem: str):
        super().__init__()
        self.problem, self.head = problem, nn.Linear(64, num_classes)
        if problem == "complex":
            self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        if problem == "sparse":
            self.positions = nn.Embedding(64, 8, sparse=True)

    def forward(self, images: torch.Tensor) -> object:
        logits = self.head(images.flatten(1))
        if self.problem == "name":
            return undefined  # type: ignore[name-defined]  # noqa: F821
        if self.problem == "shape":
            return logits @ logits
        if self.problem == "output":
            return logits[:, :3]
        if self.training and self.problem == "tuple":
            return logits, logits
        if self.training and self.problem == "rank 1" and os.environ.get("RANK") == "1":
            raise ValueError("bad rank")
        if self.training and self.problem == "exit":
            sys.exit(0)
        return logits


@pl.register_model("failing-net")
def failing_net(num_classes: int, in_chans: int, problem: str) -> nn.Module:
    return FailingNet(num_classes, problem)
