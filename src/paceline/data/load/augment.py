"""Batch augmentation on the device, as index arithmetic: select, flip and translate take one gather."""

import math

import torch

from paceline.config.data import Augment
from paceline.data.load.order import uniform

# streams of random numbers, one per decision
FLIP, _SHIFT_ROWS, _SHIFT_COLUMNS, _CUT_ROW, _CUT_COLUMN, _ERASE, _ERASE_NOISE = range(1, 8)

_ERASED = {"const": ((0.02, 0.33), (0.3, 3.3)), "pixel": ((0.02, 1 / 3), (0.3, 1 / 0.3))}
"""Fractions of the area, and aspect ratios, of erased rectangles by mode: those of torchvision and of timm."""
_ERASE_ATTEMPTS = 10
_NOISY_IMAGES = 16  # images whose noise is computed at once, since it takes 8 bytes per value


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


def erase_(images: torch.Tensor, ids: torch.Tensor, augment: Augment, seed: int, epoch: int) -> torch.Tensor:
    """Erase a random rectangle of normalized images: torchvision's RandomErasing, or timm's in its mode `pixel`."""
    height, width = images.shape[-2:]
    mode = augment.random_erasing_mode
    areas, ratios = _ERASED[mode]
    # one column per attempt
    attempts = ids[:, None] * _ERASE_ATTEMPTS + torch.arange(_ERASE_ATTEMPTS, device=ids.device)
    area, ratio, across, down = (uniform(seed, epoch, attempts, _ERASE + 1000 * part) for part in range(1, 5))
    area = (areas[0] + area * (areas[1] - areas[0])) * height * width
    ratio = torch.exp(math.log(ratios[0]) + ratio * math.log(ratios[1] / ratios[0]))
    rows, columns = torch.sqrt(area * ratio).round(), torch.sqrt(area / ratio).round()
    fits = (rows < height) & (columns < width)
    first = fits.int().argmax(1, keepdim=True)  # the first attempt that fits
    fits, rows, columns, across, down = (
        values.gather(1, first)[:, 0] for values in (fits, rows, columns, across, down)
    )
    chosen = (uniform(seed, epoch, ids, _ERASE) < augment.random_erasing) & fits
    inside_rows = _within((down * (height - rows + 1)).floor(), rows, height) & chosen[:, None]
    inside_columns = _within((across * (width - columns + 1)).floor(), columns, width)
    inside = (inside_rows[:, :, None] & inside_columns[:, None, :])[:, None]
    if mode == "const":
        return images.masked_fill_(inside, 0)
    for part, where, keys in zip(*(values.split(_NOISY_IMAGES) for values in (images, inside, ids)), strict=True):
        part.copy_(torch.where(where, _noise(keys, part.shape, seed, epoch).to(part.dtype), part))
    return images


def _noise(ids: torch.Tensor, shape: torch.Size, seed: int, epoch: int) -> torch.Tensor:
    """Return normal random numbers, a function of seed, epoch, id and place."""
    values = shape[1:].numel()
    places = ids[:, None] * values + torch.arange(values, device=ids.device)
    numbers = 2 * uniform(seed, epoch, places, _ERASE_NOISE) - 1 + 2**-24  # never -1 or 1, where erfinv is infinite
    return numbers.erfinv_().mul_(math.sqrt(2)).view(shape)


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
