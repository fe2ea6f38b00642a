"""Which part of an image is seen: pure functions of seed, epoch, sample id and the image's size.

Boxes are int32 (n, 5): x, y, width, height, mirrored.
"""

import numpy as np
import torch

from paceline.config.data import Augment
from paceline.data.load.augment import mirrored
from paceline.data.load.order import uniforms

_ATTEMPTS = 10
_FIRST_STREAM = (
    100  # a stream of random numbers for each of four decisions of each attempt; other decisions have lower numbers
)


def random_boxes(sizes: np.ndarray, ids: np.ndarray, augment: Augment, seed: int, epoch: int) -> np.ndarray:
    """torchvision's RandomResizedCrop: ten attempts at a random share of the area and aspect ratio, else the middle.

    `sizes`: (n, 2) of width and height. All attempts are computed at once, which costs less than asking who needs them.
    """
    width, height = sizes[:, 0].astype(np.int64), sizes[:, 1].astype(np.int64)
    streams = range(_FIRST_STREAM, _FIRST_STREAM + 4 * _ATTEMPTS)
    share, aspect, across, down = uniforms(seed, epoch, ids, streams).reshape(4, _ATTEMPTS, len(ids))
    least, most = augment.crop_scale
    low, high = np.log(augment.crop_ratio[0]), np.log(augment.crop_ratio[1])
    area = width * height * (least + share * (most - least))
    ratio = np.exp(low + aspect * (high - low))
    crop_width = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    crop_height = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (crop_width > 0) & (crop_width <= width) & (crop_height > 0) & (crop_height <= height)
    x = (across * (width - crop_width + 1)).astype(np.int64)
    y = (down * (height - crop_height + 1)).astype(np.int64)
    attempt, sample = fits.argmax(0), np.arange(len(ids))
    boxes = _middle(width, height, augment)
    found = np.stack([part[attempt, sample] for part in (x, y, crop_width, crop_height)], axis=1)
    boxes[:, :4] = np.where(fits.any(0)[:, None], found, boxes[:, :4])
    if augment.flip != "none":
        boxes[:, 4] = mirrored(torch.from_numpy(ids), augment, seed, epoch).numpy()
    return boxes


def _middle(width: np.ndarray, height: np.ndarray, augment: Augment) -> np.ndarray:
    """The largest part in the middle whose aspect ratio is allowed."""
    least, most = augment.crop_ratio
    crop_width = np.where(width > height * most, np.rint(height * most), width).astype(np.int64)
    crop_height = np.where(width < height * least, np.rint(width / least), height).astype(np.int64)
    return _centred(width, height, crop_width, crop_height)


def centre_boxes(sizes: np.ndarray, share: float, out_width: int, out_height: int) -> np.ndarray:
    """The middle part with the output's aspect ratio, `share` of the largest such part in each direction."""
    width, height = sizes[:, 0].astype(np.int64), sizes[:, 1].astype(np.int64)
    scale = np.minimum(width / out_width, height / out_height) * share
    crop_width = np.clip(np.rint(out_width * scale), 1, width).astype(np.int64)
    crop_height = np.clip(np.rint(out_height * scale), 1, height).astype(np.int64)
    return _centred(width, height, crop_width, crop_height)


def _centred(width: np.ndarray, height: np.ndarray, crop_width: np.ndarray, crop_height: np.ndarray) -> np.ndarray:
    x, y = (width - crop_width) // 2, (height - crop_height) // 2
    return np.stack([x, y, crop_width, crop_height, np.zeros_like(x)], axis=1).astype(np.int32)
