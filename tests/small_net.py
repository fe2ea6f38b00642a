"""A small network and its training steps, for tests of optimizers."""

import math
from typing import Any

import torch
from torch import nn

from paceline.config.optim import Optim, ParamGroup
from paceline.optim.groups import set_lr


def config(name: str, **more: Any) -> Optim:
    """Settings with which all parts of an update matter."""
    return Optim(name=name, lr=0.01, weight_decay=0.05, groups=(ParamGroup(("1.bias",), lr_factor=2.0),), **more)


def net(layout: torch.memory_format = torch.contiguous_format) -> nn.Module:
    """A filter and a matrix that are large enough to be factored, and layers for Muon and for its fallback."""
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 20, 3, bias=False), nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 18, 3, stride=2))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(18, 17), nn.Linear(17, 3))
    return nn.Sequential(*body, *head).to(memory_format=layout)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    """Take training steps; each depends only on its number."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        set_lr(optimizer, 0.01 * math.cos(step / 20))
        nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
        optimizer.zero_grad()
