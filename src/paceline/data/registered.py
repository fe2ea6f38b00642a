"""Registered datasets, read through the interface of image files."""

import hashlib
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paceline import extensions
from paceline.config.data import Data, Interpolation
from paceline.data.images import UNKNOWN, Choose, crop
from paceline.data.pillow import plain, upright_size
from paceline.data.splits import TEST
from paceline.errors import UserError
from paceline.extensions import Extension


class RegisteredSplit:
    """One split of a registered dataset. Labels are known after an item has been read, or from `targets`."""

    fix = "Fix the dataset."

    def __init__(self, extension: Extension, split: str, options: dict[str, Any]):
        self._extension, self._dataset = extension, extension(split=split, **options)
        self.folder = Path(f"{extension.name} ({split})")
        self.classes = self._classes()
        try:
            length = len(self._dataset)
        except Exception as error:
            raise extension.error(f"returns {type(self._dataset).__name__}, which has no length ({error})") from None
        if not length or not hasattr(self._dataset, "__getitem__"):
            raise extension.error(
                f"returns {'an empty dataset' if not length else 'no map-style dataset'} for {split!r}"
            )
        self._labels = np.full(length, UNKNOWN, np.int64)
        if (targets := getattr(self._dataset, "targets", None)) is not None and len(targets) == length:
            self._labels[:] = [self._label(number, target) for number, target in enumerate(targets)]

    def _classes(self) -> tuple[str, ...]:
        classes = getattr(self._dataset, "classes", None)
        if not isinstance(classes, Sequence) or isinstance(classes, str) or len(classes) < 2:
            raise self._extension.error(f"has classes={classes!r:.80}, not a list of two or more names")
        return tuple(map(str, classes))

    def _label(self, number: int, label: Any) -> int:
        try:
            found = operator.index(label)  # int() would round 1.9 and parse "1"
        except TypeError:
            found = UNKNOWN
        if not 0 <= found < len(self.classes):
            expected = f"not an integer from 0 to {len(self.classes) - 1}"
            raise self._extension.error(f"has the label {label!r:.40} at index {number}, {expected}")
        return found

    def has(self, split: str) -> bool:
        """Whether the dataset says that it has a split; train and val are required."""
        return split in getattr(self._dataset, "splits", ())

    def __len__(self) -> int:
        return len(self._labels)

    def labels(self, ids: np.ndarray) -> np.ndarray:
        return self._labels[ids]

    def sizes(self, ids: np.ndarray) -> np.ndarray:
        """Return width and height, (n, 2); this reads every item."""
        return np.array([self._size(int(number)) for number in ids])

    def _size(self, number: int) -> tuple[int, int]:
        try:
            return upright_size(self._item(number))
        except OSError:  # `read` reports corrupt samples
            return 1, 1

    def digest(self) -> str:
        """Return a digest of `targets` and of the first, middle and last item. Reading all would take an epoch."""
        digest = hashlib.sha256()
        for number in sorted({0, len(self) // 2, len(self) - 1}):
            try:
                image = self._pixels(number)
                digest.update(f"{image.mode} {image.size}".encode() + image.tobytes())
            except OSError:
                digest.update(b"corrupt")
        digest.update(self._labels.tobytes())
        return digest.hexdigest()

    def where(self, number: int) -> str:
        return f"{self.folder}, index {number % len(self)}"

    @property
    def names(self) -> list[str]:
        return []

    def reader(self) -> "RegisteredSplit":
        return self

    def read(
        self, keys: np.ndarray, choose: Choose, out: np.ndarray, interpolation: Interpolation = "bilinear"
    ) -> dict[int, str]:
        failures = {}
        height, width = out.shape[2:]
        for position, key in enumerate(keys):
            try:
                image = self._pixels(int(key) % len(self))
            except OSError as error:
                failures[position] = str(error)
                continue
            box = choose(np.array([image.size]), keys[position : position + 1])[0]
            out[position] = crop(image, box, height, width, interpolation)
        return failures

    def _pixels(self, number: int) -> Image.Image:
        """Return a decoded image, gray or RGB. OSError: a corrupt file."""
        image = self._item(number)
        try:
            image.load()  # Image.open() reads no pixels
            return plain(image)
        except Exception as error:  # Pillow's decoders raise nearly anything on corrupt files
            raise OSError(str(error) or type(error).__name__) from error

    def _item(self, number: int) -> Image.Image:
        """Return an image as the dataset returns it, after its label has been stored. OSError: a corrupt file."""
        try:
            item = self._dataset[number]
        except (OSError, UserError):
            raise
        except Exception as error:
            problem = f"raised {type(error).__name__} at index {number}: {' '.join(str(error).split())[:200]}"
            raise self._extension.error(problem) from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise self._extension.error(f"has {type(item).__name__} at index {number}, not a pair of image and label")
        self._labels[number] = self._label(number, item[1])
        return self._image(number, item[0])

    def _image(self, number: int, image: Any) -> Image.Image:
        if isinstance(image, Image.Image) and image.width and image.height:
            return image
        array = np.asarray(image)
        if array.size and array.dtype == np.uint8 and (array.ndim == 2 or array.shape[2:] in ((1,), (3,))):
            return Image.fromarray(array.squeeze(2) if array.shape[2:] == (1,) else array)
        found = f"{type(image).__name__} of {array.dtype} and shape {array.shape}"
        expected = "not a PIL image or a uint8 array (height, width[, 1 or 3]) with at least one pixel"
        raise self._extension.error(f"has {found} at index {number}, {expected}")


def open_registered(data: Data) -> tuple[dict[str, RegisteredSplit], str]:
    """Return the splits of a registered dataset and its fingerprint."""
    extension = extensions.find("dataset", data.name)
    if extension is None:
        raise extensions.unknown("dataset", "data.name", data.name, ())
    splits = {split: RegisteredSplit(extension, split, data.options) for split in ("train", "val")}
    if splits["train"].has(TEST):
        splits[TEST] = RegisteredSplit(extension, TEST, data.options)
    for name, split in splits.items():
        if split.classes != splits["train"].classes:
            raise extension.error(f"has other classes for {name!r} than for 'train'")
    content = [data.name, data.options, splits["train"].classes, [split.digest() for split in splits.values()]]
    return splits, hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
