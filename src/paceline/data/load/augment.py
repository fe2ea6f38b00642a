"""Whole-batch augmentation on the device, as index arithmetic: selecting, mirroring and shifting cost one gather."""

import torch

from paceline.config.data import Augment
from paceline.data.load.order import uniform

# streams of random numbers, one per decision
FLIP, _SHIFT_ROWS, _SHIFT_COLUMNS, _CUT_ROW, _CUT_COLUMN = range(1, 6)


def gather(
    pixels: torch.Tensor, shape: tuple[int, int, int], ids: torch.Tensor, augment: Augment, seed: int, epoch: int
) -> torch.Tensor:
    """Images `ids` of a set stored as rows of pixels, mirrored and shifted: uint8, (N, height, width, channels)."""
    height, width, channels = shape
    rows = torch.arange(height, device=ids.device).expand(len(ids), height)
    columns = torch.arange(width, device=ids.device).expand(len(ids), width)
    if augment.flip != "none":
        columns = torch.where(mirrored(ids, augment, seed, epoch)[:, None], width - 1 - columns, columns)
    if augment.translate:
        rows = _reflect(rows + _offset(ids, augment.translate, seed, epoch, _SHIFT_ROWS), height)
        columns = _reflect(columns + _offset(ids, augment.translate, seed, epoch, _SHIFT_COLUMNS), width)
    index = ((ids[:, None] * height + rows) * width)[:, :, None] + columns[:, None, :]
    return pixels.index_select(0, index.flatten()).view(len(ids), height, width, channels)


def cut_out_(images: torch.Tensor, ids: torch.Tensor, side: int, seed: int, epoch: int) -> torch.Tensor:
    """Set a square, which may reach over the border, to zero: the mean colour of normalised images (N, C, H, W)."""
    height, width = images.shape[-2:]
    inside_rows = _span(uniform(seed, epoch, ids, _CUT_ROW), side, height)
    inside_columns = _span(uniform(seed, epoch, ids, _CUT_COLUMN), side, width)
    return images.masked_fill_((inside_rows[:, :, None] & inside_columns[:, None, :])[:, None], 0)


def mirrored(ids: torch.Tensor, augment: Augment, seed: int, epoch: int) -> torch.Tensor:
    if augment.flip == "random":
        return uniform(seed, epoch, ids, FLIP) < 0.5
    at_first = uniform(seed, 0, ids, FLIP) < 0.5
    return at_first if epoch % 2 == 0 else ~at_first


def _offset(ids: torch.Tensor, most: int, seed: int, epoch: int, stream: int) -> torch.Tensor:
    return (uniform(seed, epoch, ids, stream) * (2 * most + 1)).long()[:, None] - most


def _reflect(index: torch.Tensor, size: int) -> torch.Tensor:
    """Mirror positions beyond the border back inside, the border pixel itself not repeated."""
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)


def _span(place: torch.Tensor, side: int, size: int) -> torch.Tensor:
    """Which of `size` positions lie within `side` around a random centre, for each sample."""
    first = (place * size).long()[:, None] - side // 2
    positions = torch.arange(size, device=place.device)
    return (positions >= first) & (positions < first + side)
