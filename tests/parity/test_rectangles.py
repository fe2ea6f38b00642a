"""Crops, flips and erased rectangles equal those of torchvision and timm for the same random numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from drawn_numbers import record_numbers

from paceline.config.data import Augment
from paceline.data.load import augment as augment_module
from paceline.data.load.augment import FLIP, erase_
from paceline.data.load.crops import random_boxes
from paceline.data.load.order import uniform
from paceline.system.torchvision_compat import allow_torchvision

allow_torchvision()

from timm.data import random_erasing  # noqa: E402
from torchvision import transforms  # noqa: E402

SEED, EPOCH = 3, 5


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The random numbers that augmentation draws, in this order."""
    return record_numbers(augment_module, monkeypatch)


class _Attempts:
    """Returns the numbers of one image: for each attempt the area, aspect ratio, column and row of a rectangle."""

    def __init__(self, values: Sequence[Sequence[float]], chance: float = 0.0):
        self._values, self._chance = values, chance
        self.sizes, self._places = 0, 0

    def random(self) -> float:
        return self._chance

    def uniform(self, low: float, high: float) -> float:
        attempt, part = divmod(self.sizes, 2)
        self.sizes += 1
        return float(low) + (float(high) - float(low)) * self._values[attempt][part]

    def randint(self, low: int, high: int) -> int:
        """Return the row, then the column, from `low` to `high`."""
        self._places += 1
        return low + int(self._values[(self.sizes - 1) // 2][4 - self._places] * (high - low + 1))

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the random functions of torchvision."""
        monkeypatch.setattr(torch.Tensor, "uniform_", lambda tensor, *limits: tensor.fill_(self.uniform(*limits)))
        monkeypatch.setattr(torch, "randint", lambda low, high, **_: torch.tensor(self.randint(low, high - 1)))


@pytest.mark.parametrize("limits", [((0.08, 1.0), (0.75, 4 / 3)), ((0.35, 1.0), (0.75, 4 / 3)), ((0.9, 1.0), (3, 4))])
@pytest.mark.parametrize("shape", [(500, 375), (200, 640), (33, 31)])
def test_crops_and_flips_are_those_of_torchvision(
    shape: tuple[int, int], limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, (scale, ratio) = 400, limits
    ids = torch.arange(number)
    augment = Augment(flip="random", crop_scale=scale, crop_ratio=ratio)
    found = random_boxes(augment, SEED, EPOCH)(np.tile(shape, (number, 1)), ids.numpy())
    draws = torch.stack([uniform(SEED, EPOCH, ids, stream) for stream in range(100, 140)], 1).view(number, 10, 4)
    image, same = torch.zeros(3, *shape[::-1]), 0
    for values, box in zip(draws.tolist(), found.tolist(), strict=True):
        with monkeypatch.context() as patched:
            _Attempts(values).patch(patched)
            top, left, height, width = transforms.RandomResizedCrop.get_params(image, list(scale), list(ratio))
        same += box[:4] == [left, top, width, height]
    assert same > 0.99 * number  # all but for rounding
    assert np.array_equal(found[:, 4], (uniform(SEED, EPOCH, ids, FLIP) < 0.5).int().numpy())


@pytest.mark.parametrize("shape", [(160, 160), (224, 176), (9, 30)])
@pytest.mark.parametrize("mode", ["const", "pixel"])
def test_erased_rectangles_are_those_of_torchvision_and_timm(
    mode: Any, shape: tuple[int, int], drawn: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    number, probability = 400, 0.4
    augment = Augment(random_erasing=probability, random_erasing_mode=mode)
    found = erase_(torch.full((number, 3, *shape), 9.0), torch.arange(number), augment, SEED, EPOCH)
    *parts, chances = drawn[:5]
    same, retried = 0, 0
    for position, values in enumerate(torch.stack(parts, 2).tolist()):
        attempts = _Attempts(values, chance := float(chances[position]))
        image = torch.full((3, *shape), 9.0)
        with monkeypatch.context() as patched:
            if mode == "pixel":
                patched.setattr(random_erasing, "random", attempts)
                patched.setattr(random_erasing, "_get_pixels", lambda *_, **__: torch.zeros(()))
                random_erasing.RandomErasing(probability, mode="pixel", device="cpu")(image)
            else:
                attempts.patch(patched)
                patched.setattr(torch, "rand", lambda *_, chance=chance: torch.tensor(chance))
                image = transforms.RandomErasing(probability)(image)
        same += torch.equal(found[position] != 9, image != 9)
        retried += bool((image != 9).any()) and attempts.sizes > 2
    assert same > 0.99 * number  # all but for rounding
    assert retried
    erased = (found != 9).flatten(1).any(1)
    assert abs(erased.float().mean() - probability) < 0.1
    values = found[found != 9]
    if mode == "const":
        assert not values.any()
    else:
        assert abs(values.mean()) < 0.02
        assert values.std().item() == pytest.approx(1, abs=0.02)
        assert values.unique().numel() > 0.8 * values.numel()  # not the same in channels or images
