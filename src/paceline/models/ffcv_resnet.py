"""The ResNets of ffcv-imagenet: those of torchvision with blurred inputs of strided convolutions (arXiv 1904.11486).

timm's resnetblur models blur the output of a convolution without stride instead, which costs several times as much.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from paceline.system.torchvision_compat import allow_torchvision

_MIN_CHANNELS = 16


class _BlurredConv2d(nn.Conv2d):
    """A convolution whose input is blurred with the binomial filter 1, 2, 1; it has the weights of a plain one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        line = torch.tensor([0.25, 0.5, 0.25], dtype=input.dtype, device=input.device)
        kernel = (line[:, None] * line).expand(self.in_channels, 1, 3, 3)
        return super().forward(F.conv2d(input, kernel, padding=1, groups=self.in_channels))


def _create(name: str, num_classes: int = 1000, in_chans: int = 3, **options: Any) -> nn.Module:
    allow_torchvision()
    import timm  # imported late because it takes seconds

    model: nn.Module = timm.create_model(
        name, num_classes=num_classes, in_chans=in_chans, **({"zero_init_last": False} | options)
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and max(module.stride) > 1 and module.in_channels >= _MIN_CHANNELS:
            module.__class__ = _BlurredConv2d
    return model


FFCV_RESNETS = {f"ffcv_{name}": partial(_create, name) for name in ("resnet18", "resnet50")}
"""How each of them is created."""
