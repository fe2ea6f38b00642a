"""RandAugment, TrivialAugment and color jitter on decoded crops.

The operations are torchvision's. Their choice and strength are pure functions of seed, epoch and key, like all
augmentation here. They run in the decoding threads.
"""

from collections.abc import Callable

import numpy as np
import torch

from paceline.config.data import Augment
from paceline.data.images import Change
from paceline.data.load.custom import apply_custom_
from paceline.data.load.order import uniform
from paceline.system.torch_internals import augmentation_op
from paceline.system.torchvision_compat import allow_torchvision

_FIRST_STREAM = 200
_LEVELS = 31

# the search spaces of both policies: maximum magnitude, and whether the sign is random
_RAND = {
    "Identity": (0.0, False),
    "AutoContrast": (0.0, False),
    "Equalize": (0.0, False),
    "ShearX": (0.3, True),
    "ShearY": (0.3, True),
    "Rotate": (30.0, True),
    "TranslateX": (150 / 331, True),
    "TranslateY": (150 / 331, True),
    "Brightness": (0.9, True),
    "Color": (0.9, True),
    "Contrast": (0.9, True),
    "Sharpness": (0.9, True),
    "Posterize": (4.0, False),
    "Solarize": (1.0, False),
}
_TRIVIAL = _RAND | {
    **dict.fromkeys(("ShearX", "ShearY", "Brightness", "Color", "Contrast", "Sharpness"), (0.99, True)),
    **dict.fromkeys(("TranslateX", "TranslateY"), (32 / 224, True)),
    "Rotate": (135.0, True),
    "Posterize": (6.0, False),
}


def policy(augment: Augment, seed: int, epoch: int) -> Change | None:
    """Return the augmentation of decoded crops in an epoch, or None."""
    if augment.policy == "none" and not augment.color_jitter and not augment.custom:
        return None
    allow_torchvision()

    def change(pixels: np.ndarray, keys: np.ndarray) -> None:
        ids = torch.from_numpy(keys)

        def draw(stream: int) -> list[float]:
            numbers: list[float] = uniform(seed, epoch, ids, _FIRST_STREAM + stream).tolist()
            return numbers

        if augment.color_jitter:
            _jitter(pixels, augment.color_jitter, draw)
        if augment.policy == "randaugment":
            for number in range(augment.num_ops):
                levels = [augment.magnitude / (_LEVELS - 1)] * len(keys)
                _operate(pixels, _RAND, draw(10 + 3 * number), levels, draw(11 + 3 * number))
        elif augment.policy == "trivialaugment":
            levels = [int(number * _LEVELS) / (_LEVELS - 1) for number in draw(12)]
            _operate(pixels, _TRIVIAL, draw(10), levels, draw(11))
        if augment.custom:
            apply_custom_(pixels.transpose(0, 2, 3, 1), keys, augment, seed, epoch)

    return change


def _operate(
    pixels: np.ndarray,
    space: dict[str, tuple[float, bool]],
    choices: list[float],
    levels: list[float],
    signs: list[float],
) -> None:
    names = list(space)
    for image, choice, level, sign in zip(pixels, choices, levels, signs, strict=True):
        name = names[int(choice * len(names))]
        maximum, signed = space[name]
        magnitude = level * maximum
        if name.startswith("Translate"):
            magnitude *= image.shape[-1]
        elif name == "Posterize":
            magnitude = 8 - round(magnitude)
        elif name == "Solarize":
            magnitude = 255 * (1 - magnitude)
        if signed and sign < 0.5:
            magnitude = -magnitude
        view = torch.from_numpy(image)
        view.copy_(augmentation_op(view, name, magnitude))


def _jitter(pixels: np.ndarray, strength: float, draw: Callable[[int], list[float]]) -> None:
    from torchvision.transforms import functional as F

    changes = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)
    factors = [[max(0.0, 1 + (2 * number - 1) * strength) for number in draw(stream)] for stream in range(3)]
    for image, *chosen in zip(pixels, *factors, strict=True):
        view = torch.from_numpy(image)
        for change, factor in zip(changes, chosen, strict=True):
            view.copy_(change(view, factor))
