"""Crop boxes: pure functions of seed, epoch, sample id and image size.

Boxes are int32 (n, 5): x, y, width, height, mirrored.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from paceline.config.data import Augment
from paceline.data.center import center_boxes
from paceline.data.codec import RandomBoxes
from paceline.data.images import Choose
from paceline.data.load.augment import FLIP
from paceline.data.load.order import begin, uniform

_ATTEMPTS = 10
_FIRST_STREAM = 100  # of four random streams per attempt; augment.py uses lower numbers
_FILTER = _FIRST_STREAM + 4 * _ATTEMPTS


@lru_cache(maxsize=4)
def random_boxes(augment: Augment, seed: int, epoch: int) -> RandomBoxes:
    """torchvision's RandomResizedCrop: ten attempts at a random area and aspect ratio, else a center crop."""
    streams = range(_FIRST_STREAM, _FIRST_STREAM + 4 * _ATTEMPTS)
    begins = np.array([begin(seed, epoch, stream) for stream in streams], np.uint64).reshape(_ATTEMPTS, 4)
    if augment.flip == "alternating":
        mirror, mirror_begin = 1 + epoch % 2, begin(seed, 0, FLIP)
    else:
        mirror, mirror_begin = int(augment.flip == "random"), begin(seed, epoch, FLIP)
    return RandomBoxes(augment.crop_scale, augment.crop_ratio, begins, mirror, mirror_begin)


def training_boxes(augment: Augment, seed: int, epoch: int, size: int) -> Choose:
    """Return the crops for training: random ones, or center crops equal to Resize(256) and CenterCrop(224)."""
    random_crop = random_boxes(augment, seed, epoch)
    if augment.crop == "random":
        return random_crop

    def center_crop(sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
        boxes = center_boxes(sizes, 224 / 256, size, size)
        boxes[:, 4] = random_crop(sizes, keys)[:, 4]
        return boxes

    return center_crop


def random_filters(seed: int, epoch: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that tells, by key, whether a crop is resized by the bicubic filter, else the bilinear one."""

    def is_bicubic(keys: np.ndarray) -> np.ndarray:
        drawn: np.ndarray = (uniform(seed, epoch, torch.from_numpy(keys), _FILTER) < 0.5).numpy()
        return drawn

    return is_bicubic
