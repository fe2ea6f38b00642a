"""The batch that loaders yield, and its normalization."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Batch:
    images: torch.Tensor
    """float32, normalized, (samples, channels, height, width)."""
    labels: torch.Tensor
    ids: torch.Tensor


class Normalize:
    """Moves uint8 pixels to the device and normalizes them there."""

    def __init__(self, mean: torch.Tensor, std: torch.Tensor, device: torch.device):
        self.mean, self.std, self._device = mean, std, device
        self._scale = (1 / (255 * std)).to(device).view(-1, 1, 1)
        self._shift = (-mean / std).to(device).view(-1, 1, 1)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return normalized float32 images in channels_last format; pixels (N, C, H, W) may have either format."""
        moved = pixels.to(self._device, non_blocking=True)
        return moved.to(torch.float32, memory_format=torch.channels_last).mul_(self._scale).add_(self._shift)

    def batch(self, pixels: torch.Tensor, labels: np.ndarray, ids: np.ndarray) -> Batch:
        numbers = torch.from_numpy(labels.astype(np.int64)).to(self._device, non_blocking=True)
        return Batch(self(pixels), numbers, torch.from_numpy(ids))
