"""The operations of RandAugment and TrivialAugment: those of torchvision and timm, drawn from given random numbers.

Both libraries draw from the global generators of random numbers. Here the numbers are functions of seed, epoch and key,
and only the operations are theirs, on PIL images as in their training scripts.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from statistics import NormalDist
from typing import Any

from PIL import Image

from paceline.config.data import TIMM_MAX_MAGNITUDE, Augment, Interpolation
from paceline.data.images import RESAMPLING
from paceline.system.torch_internals import augmentation_op, augmentation_space

Draw = Callable[[int], list[float]]
"""Returns one number in [0, 1) per image; the argument is the stream of random numbers."""
Operation = Callable[[Image.Image], Image.Image]
Chosen = Iterator[Operation | None]
"""One operation per image, None for images that stay as they are."""

_TORCHVISION_STREAM, _TIMM_STREAM = 10, 110
_TORCHVISION_LEVELS = 31
# the largest magnitude of timm's operations with a random sign; its functions for them draw the sign themselves
_SIGNED = {
    "Rotate": 30.0,
    **dict.fromkeys(("ShearX", "ShearY"), 0.3),
    **dict.fromkeys(("TranslateXRel", "TranslateYRel"), 0.45),
    **dict.fromkeys(("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing"), 0.9),
}
_SMALLEST_FACTOR = 0.1
_HALF_STEP = 2.0**-25  # moves random numbers, multiples of 2**-24, away from 0, whose quantile is infinite

_space = lru_cache(maxsize=16)(augmentation_space)


def torchvision_operations(
    augment: Augment, draw: Draw, height: int, width: int, interpolation: Interpolation
) -> Iterator[Chosen]:
    """Yield, one after the other, the operations of torchvision's RandAugment or TrivialAugmentWide.

    `interpolation` is the filter of the geometric ones; the uncovered area is black, as in torchvision's script.
    """
    space = _space(augment.policy, height, width)
    names = list(space)
    wide = augment.policy == "trivialaugment"

    def choose(choice: float, level: int, sign: float) -> Operation | None:
        name = names[int(choice * len(names))]
        magnitudes, signed = space[name]
        if name == "Identity":
            return None
        magnitude = magnitudes[min(level, len(magnitudes) - 1)]
        if signed and sign < 0.5:
            magnitude = -magnitude
        return lambda image: augmentation_op(image, name, magnitude, interpolation)

    for first in range(_TORCHVISION_STREAM, _TORCHVISION_STREAM + 3 * (1 if wide else augment.num_ops), 3):
        choices, signs = draw(first), draw(first + 1)
        levels = [int(number * _TORCHVISION_LEVELS) for number in draw(first + 2)] if wide else None
        yield map(choose, choices, levels or [augment.magnitude] * len(choices), signs)


def timm_operations(
    augment: Augment, draw: Draw, interpolation: Interpolation, fill: tuple[int, ...]
) -> Iterator[Chosen]:
    """Yield, one after the other, the operations of timm's RandAugment. `fill` is the color of the uncovered area."""
    from timm.data.auto_augment import NAME_TO_OP, rand_augment_choices

    names = rand_augment_choices("", augment.increasing)
    operations: dict[str, Any] = NAME_TO_OP

    def choose(choice: float, chance: float, noise: float, sign: float, bicubic: float) -> Operation | None:
        if chance >= augment.op_probability:
            return None
        name = names[int(choice * len(names))]
        magnitude = augment.magnitude + augment.magnitude_std * NormalDist().inv_cdf(noise + _HALF_STEP)
        arguments = timm_arguments(name, min(max(magnitude, 0.0), TIMM_MAX_MAGNITUDE), negative=sign < 0.5)
        if name.startswith("Posterize") and arguments == (0,):
            return _black
        resample = interpolation
        if augment.random_interpolation:
            resample = "bicubic" if bicubic < 0.5 else "bilinear"
        return lambda image: operations[name](image, *arguments, fillcolor=fill, resample=RESAMPLING[resample])

    for first in range(_TIMM_STREAM, _TIMM_STREAM + 5 * augment.num_ops, 5):
        yield map(choose, *(draw(first + number) for number in range(5)))


def timm_arguments(name: str, magnitude: float, negative: bool) -> tuple[float, ...]:
    """Return the arguments of one of timm's operations at a magnitude from 0 to 10."""
    from timm.data.auto_augment import LEVEL_TO_ARG

    if name not in _SIGNED:
        function: Any = LEVEL_TO_ARG[name]
        arguments: tuple[float, ...] = function(magnitude, {}) if function else ()
        return arguments
    value = magnitude / TIMM_MAX_MAGNITUDE * _SIGNED[name]
    value = -value if negative else value
    return (max(_SMALLEST_FACTOR, 1 + value) if name.endswith("Increasing") else value,)


def _black(image: Image.Image) -> Image.Image:
    """Keep no bits. timm asks Pillow for that at an extreme magnitude, which Pillow 13 refuses."""
    return Image.new("RGB", image.size)
