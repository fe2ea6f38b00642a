"""Batch augmentation on the device, as index arithmetic: select, flip and translate take one gather."""

import math

import torch

from paceline.config.data import Augment
from paceline.data.load.order import uniform

# streams of random numbers, one per decision
FLIP, _SHIFT_ROWS, _SHIFT_COLUMNS, _CUT_ROW, _CUT_COLUMN, _ERASE = range(1, 7)


def gather(
    pixels: torch.Tensor,
    shape: tuple[int, int, int],
    ids: torch.Tensor,
    keys: torch.Tensor,
    augment: Augment,
    seed: int,
    epoch: int,
) -> torch.Tensor:
    """Return images `ids` of a tensor of pixels, flipped and translated: uint8, (N, height, width, channels)."""
    height, width, channels = shape
    rows = torch.arange(height, device=ids.device).expand(len(ids), height)
    columns = torch.arange(width, device=ids.device).expand(len(ids), width)
    if augment.flip != "none":
        columns = torch.where(mirrored(keys, augment, seed, epoch)[:, None], width - 1 - columns, columns)
    if augment.translate:
        rows = _reflect(rows + _offset(keys, augment.translate, seed, epoch, _SHIFT_ROWS), height)
        columns = _reflect(columns + _offset(keys, augment.translate, seed, epoch, _SHIFT_COLUMNS), width)
    index = ((ids[:, None] * height + rows) * width)[:, :, None] + columns[:, None, :]
    return pixels.index_select(0, index.flatten()).view(len(ids), height, width, channels)


def cut_out_(images: torch.Tensor, ids: torch.Tensor, side: int, seed: int, epoch: int) -> torch.Tensor:
    """Zero a random square inside of normalized images (N, C, H, W); zero is the mean color."""
    height, width = images.shape[-2:]
    inside_rows = _span(uniform(seed, epoch, ids, _CUT_ROW), side, height)
    inside_columns = _span(uniform(seed, epoch, ids, _CUT_COLUMN), side, width)
    return images.masked_fill_((inside_rows[:, :, None] & inside_columns[:, None, :])[:, None], 0)


def erase_(images: torch.Tensor, ids: torch.Tensor, probability: float, seed: int, epoch: int) -> torch.Tensor:
    """torchvision's RandomErasing on normalized images: zeroes a rectangle of 2 to 33 % of the area at random."""
    height, width = images.shape[-2:]
    wanted, area, ratio, across, down = (uniform(seed, epoch, ids, _ERASE + 1000 * part) for part in range(5))
    area, ratio = (0.02 + area * 0.31) * height * width, torch.exp((2 * ratio - 1) * math.log(3.3))
    rows = torch.sqrt(area * ratio).round().clamp(1, height)
    columns = torch.sqrt(area / ratio).round().clamp(1, width)
    chosen = (wanted < probability)[:, None]
    inside_rows = _within((down * (height - rows + 1)).floor(), rows, height) & chosen
    inside_columns = _within((across * (width - columns + 1)).floor(), columns, width)
    return images.masked_fill_((inside_rows[:, :, None] & inside_columns[:, None, :])[:, None], 0)


def _within(first: torch.Tensor, length: torch.Tensor, size: int) -> torch.Tensor:
    positions = torch.arange(size, device=first.device)
    return (positions >= first[:, None]) & (positions < (first + length)[:, None])


def mirrored(ids: torch.Tensor, augment: Augment, seed: int, epoch: int) -> torch.Tensor:
    """Return which samples are flipped in an epoch."""
    if augment.flip == "random":
        return uniform(seed, epoch, ids, FLIP) < 0.5
    even_epochs = uniform(seed, 0, ids, FLIP) < 0.5
    return even_epochs if epoch % 2 == 0 else ~even_epochs


def _offset(ids: torch.Tensor, most: int, seed: int, epoch: int, stream: int) -> torch.Tensor:
    return (uniform(seed, epoch, ids, stream) * (2 * most + 1)).long()[:, None] - most


def _reflect(index: torch.Tensor, size: int) -> torch.Tensor:
    """Reflect positions outside of the border, as np.pad's mode "reflect" does."""
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)


def _span(place: torch.Tensor, side: int, size: int) -> torch.Tensor:
    """Return, per sample, which of `size` positions lie within `side` from a random one on."""
    first = (place * max(1, size - side + 1)).long()
    return _within(first, torch.full_like(first, side), size)
