"""Registered augmentations. They run on the CPU, image by image."""

import numpy as np

from paceline import extensions
from paceline.config.data import Augment
from paceline.data.load.order import begin

_FIRST_STREAM = 1000


def apply_custom_(images: np.ndarray, keys: np.ndarray, augment: Augment, seed: int, epoch: int) -> None:
    """Apply the registered augmentations of a recipe in place: uint8, (n, height, width, channels).

    The generator of an augmentation depends only on seed, epoch and key, so the result is the same on any number of
    ranks and after a resume.
    """
    for number, (name, options) in enumerate(augment.custom.items()):
        extension = extensions.find("augmentation", name)
        if extension is None:
            raise extensions.unknown("augmentation", "data.augment.custom", name, ())
        stream = begin(seed, epoch, _FIRST_STREAM + number)
        for image, key in zip(images, keys, strict=True):
            rng = np.random.Generator(np.random.Philox(key=[stream, int(key)]))
            changed = np.asarray(extension(image.copy(), rng, **options))
            if changed.shape != image.shape or changed.dtype != np.uint8:
                found = f"{changed.dtype} {changed.shape}"
                raise extension.error(f"returns {found} for an image of uint8 {image.shape}")
            image[...] = changed
