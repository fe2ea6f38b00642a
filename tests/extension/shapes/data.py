"""Circles, squares and triangles of random size, place and color."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

import paceline as pl


class Shapes:
    """Each image is a function of its index alone."""

    classes: Sequence[str] = ("circle", "square", "triangle")

    def __init__(self, samples: int, first: int, size: int):
        self._samples, self._first, self._size = samples, first, size

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        rng, label = np.random.default_rng(self._first + index), index % len(self.classes)
        image = Image.new("RGB", (self._size, self._size), tuple(rng.integers(0, 80, 3).tolist()))
        draw, color = ImageDraw.Draw(image), tuple(rng.integers(128, 256, 3).tolist())
        side = int(rng.integers(self._size // 3, self._size // 2))
        x, y = rng.integers(0, self._size - side, 2).tolist()
        if self.classes[label] == "triangle":
            draw.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=color)
        else:
            shape = draw.ellipse if self.classes[label] == "circle" else draw.rectangle
            shape((x, y, x + side, y + side), fill=color)
        return (image, label) if index % 2 else (np.asarray(image), label)  # both are allowed


@pl.register_dataset("shapes")
def shapes(split: str, samples: int = 96, size: int = 40) -> Shapes:
    return Shapes(samples if split == "train" else samples // 2 + 1, 0 if split == "train" else 10_000, size)


@pl.register_augmentation("brightness")
def brightness(image: np.ndarray, rng: np.random.Generator, strength: float = 0.2) -> np.ndarray:
    return (image * rng.uniform(1 - strength, 1)).astype(np.uint8)
