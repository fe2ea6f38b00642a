"""RandAugment, TrivialAugment and color jitter are those of torchvision and timm, pixel by pixel.

Their code runs here with the random numbers that ours drew, in place of those of the global generators.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from drawn_numbers import record_numbers
from PIL import Image
from sample_images import sample_image

from paceline.config.data import Augment
from paceline.data.load import operations as operations_module
from paceline.data.load import policy as policy_module
from paceline.data.load.policy import policy
from paceline.system.torchvision_compat import allow_torchvision

allow_torchvision()

from timm.data import auto_augment  # noqa: E402
from torchvision import transforms  # noqa: E402
from torchvision.transforms import InterpolationMode  # noqa: E402

MEAN = (0.485, 0.456, 0.406)
SEED, EPOCH = 3, 5


def _images(count: int, size: int) -> np.ndarray:
    """Return uint8 (count, 3, size, size); a few different images, repeated."""
    few = [np.asarray(sample_image(size, size, seed)).transpose(2, 0, 1) for seed in range(8)]
    few[0] = few[0] // 3 + 60  # low contrast
    return np.stack([few[number % len(few)] for number in range(count)])


def _pillow(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def _planes(image: Image.Image) -> np.ndarray:
    return np.asarray(image).transpose(2, 0, 1)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The random numbers that augmentation draws, in this order."""
    return record_numbers(policy_module, monkeypatch)


def _augmented(augment: Augment, images: np.ndarray, interpolation: Any = "bilinear") -> np.ndarray:
    changed = images.copy()
    change = policy(augment, SEED, EPOCH, interpolation, MEAN)
    assert change
    change(changed, np.arange(len(images), dtype=np.int64))
    return changed


# ---- torchvision's policies ----

POLICIES: dict[str, tuple[Augment, Callable[..., Any]]] = {
    "trivialaugment": (Augment(policy="trivialaugment"), transforms.TrivialAugmentWide),
    "randaugment": (Augment(policy="randaugment"), transforms.RandAugment),
    **{
        f"randaugment {magnitude}": (
            Augment(policy="randaugment", num_ops=3, magnitude=magnitude),
            lambda magnitude=magnitude, **more: transforms.RandAugment(3, magnitude, **more),
        )
        for magnitude in (0, 17, 30)
    },
}


class _Randint:
    """Replaces torch.randint: returns the index of an operation (of 14), its level (of 31) and its sign (of 2)."""

    def __init__(self, operations: list[list[float]], seen: set[tuple[int, int, int]]):
        """`operations`: choice, sign and, with TrivialAugment, level of each. `seen` collects what was returned."""
        self._operations, self._seen = iter(operations), seen

    def __call__(self, high: int, *_: Any, **__: Any) -> torch.Tensor:
        if high == 14:
            choice, sign, *level = next(self._operations)
            self._numbers = {14: choice, 2: 0.5 if sign < 0.5 else 0.0, 31: level[0] if level else 0.0}
        value = int(self._numbers[high] * high)
        self._seen.add((int(self._numbers[14] * 14), high, value))
        return torch.tensor([value])


@pytest.mark.parametrize(("size", "number"), [(32, 6000), (160, 100), (224, 100)])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_those_of_the_preset_of_torchvision(
    name: str, size: int, number: int, drawn: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """references/classification/presets.py passes InterpolationMode.BILINEAR, and PIL images."""
    augment, theirs = POLICIES[name]
    wide = name == "trivialaugment"
    number = number if wide else min(number, 600)
    images = _images(number, size)
    found = _augmented(augment, images)
    reference = theirs(interpolation=InterpolationMode.BILINEAR)
    seen: set[tuple[int, int, int]] = set()
    for position, image in enumerate(images):
        values, parts = [float(numbers[position]) for numbers in drawn], 3 if wide else 2
        operations = [values[first : first + parts] for first in range(0, len(values), parts)]
        with monkeypatch.context() as patched:
            patched.setattr(torch, "randint", _Randint(operations, seen))
            expected = reference(_pillow(image))
        assert np.array_equal(found[position], _planes(expected)), (name, position)
    assert {choice for choice, _, _ in seen} == set(range(14))  # every operation
    if number >= 600:
        assert sum(high == 2 for _, high, _ in seen) == 2 * 9  # both signs of those that have one
    if wide and number == 6000:
        assert sum(high == 31 for _, high, _ in seen) == 31 * 11  # every level of those that have levels


def test_identity_and_levels_are_drawn_equally_often(drawn: list[torch.Tensor]) -> None:
    _augmented(Augment(policy="trivialaugment"), np.zeros((20_000, 3, 1, 1), np.uint8))
    choices, signs, levels = drawn
    for values, bins in ((choices, 14), (levels, 31), (signs, 2)):
        counts = torch.bincount((values * bins).long(), minlength=bins).double()
        expected = len(values) / bins
        assert ((counts - expected).square().sum() / expected) < bins + 5 * (2 * bins) ** 0.5  # chi-squared
    assert abs(np.corrcoef(torch.stack(drawn))[np.triu_indices(3, 1)]).max() < 0.03


# ---- timm's policy ----


class _Numbers:
    """Replaces Python's module `random` in timm: returns given numbers."""

    def __init__(self, uniforms: list[float], noise: float = 0.0, bicubic: bool = False):
        self._uniforms, self._noise, self._bicubic = iter(uniforms), noise, bicubic

    def random(self) -> float:
        return next(self._uniforms)

    def gauss(self, mean: float, std: float) -> float:
        return mean + std * self._noise

    def choice(self, options: tuple[Any, Any]) -> Any:
        assert options == (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
        return options[self._bicubic]


A3 = Augment(policy="timm-randaugment", magnitude=6, magnitude_std=0.5, increasing=True, random_interpolation=True)
TIMM = {
    "rand-m6-mstd0.5-inc1": A3,
    "rand-m9-mstd0.5-inc1": Augment(policy="timm-randaugment", magnitude=9, magnitude_std=0.5, increasing=True),
    "rand-m5-n3-p0.8-mstd9-inc1": Augment(
        policy="timm-randaugment", num_ops=3, magnitude=5, magnitude_std=9, op_probability=0.8, increasing=True
    ),
    "rand-m5-n1-p1-mstd9": Augment(
        policy="timm-randaugment", num_ops=1, magnitude=5, magnitude_std=9, op_probability=1.0
    ),
    "rand-m10-n2": Augment(policy="timm-randaugment", magnitude=10),
}


def _posterize(image: Image.Image, bits: int) -> Image.Image:
    """ImageOps.posterize of earlier versions of Pillow, which also keeps 0 bits."""
    return image.point([value & ~(2 ** (8 - bits) - 1) for value in range(256)] * 3)


@pytest.mark.parametrize(("size", "number"), [(32, 1500), (160, 100), (224, 100)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("text", TIMM)
def test_randaugment_is_that_of_timm(
    text: str,
    interpolation: str,
    size: int,
    number: int,
    drawn: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """create_transform passes the mean color, and the filter of the crops unless that is random."""
    augment, images = TIMM[text], _images(number, size)
    found = _augmented(augment, images, interpolation)
    params = {"img_mean": tuple(min(255, round(255 * value)) for value in MEAN)}
    if not augment.random_interpolation:
        params["interpolation"] = getattr(Image.Resampling, interpolation.upper())
    reference = auto_augment.rand_augment_transform(text, params)
    assert (reference.num_layers, reference.choice_weights) == (augment.num_ops, None)
    assert len(reference.ops) == 15
    monkeypatch.setattr(auto_augment.ImageOps, "posterize", _posterize)
    seen = set()
    for position, pixels in enumerate(images):
        image = _pillow(pixels)
        for step in range(augment.num_ops):
            choice, chance, noise, sign, bicubic = (float(each[position]) for each in drawn[5 * step : 5 * step + 5])
            operation = reference.ops[int(choice * 15)]
            numbers = [1 - sign] if operation.prob == 1 else [chance, 1 - sign]
            noise = NormalDist().inv_cdf(noise + 2**-25)
            monkeypatch.setattr(auto_augment, "random", _Numbers(numbers, noise, bicubic < 0.5))
            image = operation(image)
            seen.add((operation.name, sign < 0.5))
        assert np.array_equal(found[position], _planes(image)), (text, position)
    if number == 1500:
        assert len(seen) == 2 * 15


def test_magnitudes_have_timms_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the operations are applied, all equally often, with a normal magnitude, and independently."""
    found: list[tuple[str, float, bool]] = []

    def arguments(name: str, magnitude: float, negative: bool) -> tuple[float, ...]:
        found.append((name, magnitude, negative))
        return operations_module_arguments(name, magnitude, negative)

    operations_module_arguments = operations_module.timm_arguments
    monkeypatch.setattr(operations_module, "timm_arguments", arguments)
    number = 20_000
    _augmented(A3, np.zeros((number, 3, 2, 2), np.uint8))
    assert abs(len(found) - number) < 5 * (number / 2) ** 0.5
    names, magnitudes, negatives = zip(*found, strict=True)
    counts = np.array([names.count(name) for name in auto_augment.rand_augment_choices("", True)])
    assert counts.sum() == len(found)
    assert ((counts - len(found) / 15) ** 2).sum() / (len(found) / 15) < 15 + 5 * 30**0.5
    deviations = (np.array(magnitudes) - 6) / 0.5
    assert abs(deviations.mean()) < 0.05
    assert abs(deviations.std() - 1) < 0.03
    for limit in (0.5, 1, 2, 3):
        assert (abs(deviations) < limit).mean() == pytest.approx(2 * NormalDist().cdf(limit) - 1, abs=0.02)
    assert abs(np.mean(negatives) - 0.5) < 0.02
    assert abs(np.corrcoef(deviations, negatives)[0, 1]) < 0.04


def test_magnitudes_stay_within_timms_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []
    monkeypatch.setattr(
        operations_module, "timm_arguments", lambda _name, magnitude, negative: found.append(magnitude) or (0.0,)
    )
    monkeypatch.setattr(
        auto_augment, "NAME_TO_OP", dict.fromkeys(auto_augment.NAME_TO_OP, lambda image, *_, **__: image)
    )
    augment = Augment(policy="timm-randaugment", magnitude=9, magnitude_std=5, increasing=True)
    _augmented(augment, np.zeros((2000, 3, 2, 2), np.uint8))
    assert (min(found), max(found)) == (0, 10)
    assert np.mean(np.array(found) == 10) == pytest.approx(
        NormalDist(9, 5).cdf(20) - NormalDist(9, 5).cdf(10), abs=0.05
    )


# ---- color jitter ----


@pytest.mark.parametrize("strength", [0.4, 1.0])
@pytest.mark.parametrize("size", [32, 160])
def test_color_jitter_is_that_of_torchvision_in_a_fixed_order(
    size: int, strength: float, drawn: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = _images(60, size)
    found = _augmented(Augment(color_jitter=strength), images)
    reference = transforms.ColorJitter(strength, strength, strength)
    ranges = (reference.brightness, reference.contrast, reference.saturation)
    assert len(drawn) == 3
    assert found.tobytes() != images.tobytes()
    for position, image in enumerate(images):
        factors = [
            low + (high - low) * float(numbers[position]) for (low, high), numbers in zip(ranges, drawn, strict=True)
        ]
        monkeypatch.setattr(reference, "get_params", lambda *_, factors=factors: (range(3), *factors, None))
        expected = reference(torch.from_numpy(image)).numpy()
        assert np.abs(found[position].astype(int) - expected).max() <= 1  # the factors differ in the last bits
        assert (found[position] == expected).mean() > 0.999
        pillow = _planes(reference(_pillow(image))).astype(int)
        assert np.abs(pillow - found[position]).mean() < 2  # Pillow rounds between the steps
