"""Color jitter, RandAugment, TrivialAugment and registered augmentations of decoded crops.

The choice and strength of operations are pure functions of seed, epoch and key, like all augmentation here. They run in
the decoding threads.
"""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from paceline.config.data import Augment, Interpolation
from paceline.data.images import Change
from paceline.data.load.custom import apply_custom_
from paceline.data.load.operations import Chosen, Draw, timm_operations, torchvision_operations
from paceline.data.load.order import uniform
from paceline.system.torchvision_compat import allow_torchvision

_FIRST_STREAM = 200


def policy(
    augment: Augment, seed: int, epoch: int, interpolation: Interpolation, mean: Sequence[float]
) -> Change | None:
    """Return the augmentation of decoded crops in an epoch, or None.

    `interpolation` is the filter of geometric operations; `mean` (0-1) is the color with which timm's fill the area
    that they uncover.
    """
    if augment.policy == "none" and not augment.color_jitter and not augment.custom:
        return None
    allow_torchvision()
    fill = tuple(min(255, round(255 * value)) for value in mean)

    def change(pixels: np.ndarray, keys: np.ndarray) -> None:
        ids = torch.from_numpy(keys)

        def draw(stream: int) -> list[float]:
            numbers: list[float] = uniform(seed, epoch, ids, _FIRST_STREAM + stream).tolist()
            return numbers

        if augment.color_jitter:
            _jitter(pixels, augment.color_jitter, draw)
        if augment.policy == "timm-randaugment":
            _operate(pixels, list(timm_operations(augment, draw, interpolation, fill)))
        elif augment.policy != "none":
            height, width = pixels.shape[2:]
            _operate(pixels, list(torchvision_operations(augment, draw, height, width, interpolation)))
        if augment.custom:
            apply_custom_(pixels.transpose(0, 2, 3, 1), keys, augment, seed, epoch)

    return change


def _operate(pixels: np.ndarray, operations: Sequence[Chosen]) -> None:
    """Apply operations to images, one after the other."""
    for image, *chosen in zip(pixels, *operations, strict=True):
        if steps := [operation for operation in chosen if operation]:
            changed = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
            for step in steps:
                changed = step(changed)
            image[:] = np.asarray(changed).transpose(2, 0, 1)


def _jitter(pixels: np.ndarray, strength: float, draw: Draw) -> None:
    from torchvision.transforms import functional as F

    changes = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)
    factors = [[max(0.0, 1 + (2 * number - 1) * strength) for number in draw(stream)] for stream in range(3)]
    for image, *chosen in zip(pixels, *factors, strict=True):
        view = torch.from_numpy(image)
        for change, factor in zip(changes, chosen, strict=True):
            view.copy_(change(view, factor))
