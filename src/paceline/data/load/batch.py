"""The batch that loaders yield, and its normalization."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.system.device import has_streams


@dataclass(frozen=True)
class Batch:
    source: torch.Tensor | Callable[[], torch.Tensor]
    """The images, or a function that computes them."""
    labels: torch.Tensor
    ids: torch.Tensor
    """In host memory."""
    owner: object = None
    """Holds the memory of the pixels, which is reused when it is deleted."""

    @property
    def images(self) -> torch.Tensor:
        """Normalized images, (samples, channels, height, width), computed at each access.

        Until then a micro-batch takes one byte per value.
        """
        return self.source if isinstance(self.source, torch.Tensor) else self.source()


class Normalize:
    """Normalizes uint8 pixels on the device."""

    def __init__(self, mean: torch.Tensor, std: torch.Tensor, device: torch.device, dtype: torch.dtype = torch.float32):
        self.mean, self.std, self.dtype = mean, std, dtype
        self._one_pass = has_streams(device)
        self._scale = (1 / (255 * std)).to(device).view(-1, 1, 1)
        self._shift = (-mean / std).to(device).view(-1, 1, 1)

    def __call__(self, pixels: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normalized images in channels_last format; pixels (N, C, H, W) may have either format."""
        dtype = dtype or self.dtype
        if self._one_pass:  # a single kernel reads bytes and writes the compute dtype
            images = torch.empty_like(pixels, dtype=dtype, memory_format=torch.channels_last)
            return torch.addcmul(self._shift, pixels, self._scale, out=images)
        images = pixels.to(torch.float32, memory_format=torch.channels_last).mul_(self._scale).add_(self._shift)
        return images.to(dtype)

    def clamp_(self, images: torch.Tensor) -> torch.Tensor:
        """Limit normalized fp32 images to the values that pixels can have, in place."""
        return images.clamp_(self._shift, 255 * self._scale + self._shift)


def shortest_decimals(values: torch.Tensor) -> list[float]:
    """Return float32 values as the shortest numbers that are read as them: 0.485, not 0.48500001430511475."""
    return [float(str(value)) for value in values.cpu().numpy()]
