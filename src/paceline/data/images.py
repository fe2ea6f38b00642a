"""The interface between loaders and encoded images, and its implementation for ordinary image files."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from paceline.data.pillow import FORMATS, check_size, open_image
from paceline.data.splits import LabeledFile
from paceline.system.untrusted import Unreadable

Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Maps sizes (n, 2) and keys of images to the crop of each: (n, 5) of x, y, width, height, mirrored."""

Change = Callable[[np.ndarray, np.ndarray], None]
"""Changes decoded pixels, uint8 (n, 3, height, width), in place; the second argument is their keys."""

UNKNOWN = -1
"""The label of a sample whose label is known only after it has been read."""


class Reader(Protocol):
    """Reads samples, one instance per thread. A key is a sample's id plus a multiple of the number of samples."""

    def read(self, keys: np.ndarray, choose: Choose, out: np.ndarray) -> dict[int, str]:
        """Fill `out`, uint8 (n, 3, height, width). Returns the reason for each position that failed."""


class ImageSplit(Protocol):
    folder: Path
    fix: str
    """How to fix corrupt samples, as a sentence."""

    def __len__(self) -> int: ...

    def labels(self, ids: np.ndarray) -> np.ndarray:
        """Return the labels; UNKNOWN for samples that must be read first."""

    def sizes(self, ids: np.ndarray) -> np.ndarray:
        """Return width and height, (n, 2)."""

    def where(self, number: int) -> str:
        """Return the name of a sample for messages."""

    def reader(self) -> Reader: ...


class ImageFiles:
    """One split of an image folder, decoded by Pillow on every use."""

    fix = "Replace or remove those files."

    def __init__(self, folder: Path, entries: list[LabeledFile]):
        self.folder, self._entries = folder, entries
        self._labels = np.array([label for label, _ in entries], np.int64)

    def __len__(self) -> int:
        return len(self._entries)

    def labels(self, ids: np.ndarray) -> np.ndarray:
        return self._labels[ids]

    def sizes(self, ids: np.ndarray) -> np.ndarray:
        """Return width and height, (n, 2); this opens every file."""
        return np.array([_size(self._entries[number][1]) for number in ids])

    def where(self, number: int) -> str:
        return str(self._entries[number % len(self)][1])

    def reader(self) -> "ImageFiles":
        return self

    def read(self, keys: np.ndarray, choose: Choose, out: np.ndarray) -> dict[int, str]:
        failures = {}
        height, width = out.shape[2:]
        for position, key in enumerate(keys):
            path = self._entries[key % len(self)][1]
            try:
                check_size(path.stat().st_size)
                image, _ = open_image(path.read_bytes())
            except (Unreadable, OSError) as error:
                failures[position] = str(error)
                continue
            box = choose(np.array([image.size]), keys[position : position + 1])[0]
            out[position] = crop(image, box, height, width)
        return failures


def crop(image: Image.Image, box: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return a crop (x, y, width, height, mirrored) of an image, resized: uint8 (3, height, width)."""
    x, y, w, h, mirrored = (int(value) for value in box)
    part = image.convert("RGB").crop((x, y, x + w, y + h)).resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(part).transpose(2, 0, 1)
    return pixels[..., ::-1] if mirrored else pixels


def _size(path: Path) -> tuple[int, int]:
    try:
        with Image.open(path, formats=FORMATS) as image:
            return image.size
    except Exception:  # Pillow raises nearly anything; `read` reports corrupt files
        return 1, 1
