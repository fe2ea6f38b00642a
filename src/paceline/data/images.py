"""The interface between loaders and encoded images, and its implementation for ordinary image files."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from paceline.config.data import Interpolation
from paceline.data import codec
from paceline.data.listing import relative_name
from paceline.data.pillow import FORMATS, check_file, is_rotated_jpeg, open_image, upright_size
from paceline.data.splits import LabeledFile
from paceline.system.untrusted import Unreadable

Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Maps sizes (n, 2) and keys of images to the crop of each: (n, 5) of x, y, width, height, mirrored."""

Change = Callable[[np.ndarray, np.ndarray], None]
"""Changes decoded pixels, uint8 (n, 3, height, width), in place; the second argument is their keys."""

RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
"""Pillow's filters by data.interpolation; both are antialiased."""

UNKNOWN = -1
"""The label of a sample whose label is known only after it has been read."""


class Reader(Protocol):
    """Reads samples, one instance per thread. A key is a sample's id plus a multiple of the number of samples."""

    def read(
        self, keys: np.ndarray, choose: Choose, out: np.ndarray, interpolation: Interpolation = "bilinear"
    ) -> dict[int, str]:
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

    @property
    def names(self) -> list[str]:
        """The relative paths of all samples; empty if they come from no files."""

    def reader(self) -> Reader: ...


def all_labels(split: ImageSplit) -> np.ndarray | None:
    """Return the labels of all images, int64; None if images must be read first."""
    labels = split.labels(np.arange(len(split))).astype(np.int64)
    return None if UNKNOWN in labels else labels


class ImageFiles:
    """One split of an image folder, decoded on every use."""

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
        return np.array([_size(self.path(number)) for number in ids])

    def where(self, number: int) -> str:
        return str(self.path(number))

    def path(self, number: int) -> Path:
        """Return the file of a sample."""
        return self._entries[number % len(self)][1]

    @property
    def names(self) -> list[str]:
        return [relative_name(path, self.folder) for _, path in self._entries]

    def reader(self) -> "ImageFiles":
        return self

    def read(
        self, keys: np.ndarray, choose: Choose, out: np.ndarray, interpolation: Interpolation = "bilinear"
    ) -> dict[int, str]:
        failures = {}
        for position in range(len(keys)):
            path = self.path(keys[position])
            try:
                check_file(path)
                key = keys[position : position + 1]
                decode(path.read_bytes(), choose, key, out[position], interpolation)
            except OSError as error:
                failures[position] = f"cannot be read ({error.strerror or error})"
            except Unreadable as error:
                failures[position] = str(error)
        return failures


class UnlabeledFiles(ImageFiles):
    """Image files without labels. Holds their names only, because there may be millions."""

    def __init__(self, names: list[str]):
        self.folder, self._names = Path(), names

    @property
    def names(self) -> list[str]:
        return self._names

    def __len__(self) -> int:
        return len(self._names)

    def labels(self, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), UNKNOWN)

    def path(self, number: int) -> Path:
        return Path(self._names[number % len(self)])


def decode(content: bytes, choose: Choose, key: np.ndarray, out: np.ndarray, interpolation: Interpolation) -> None:
    """Write a crop of an encoded image to `out`, uint8 (3, height, width). Raises Unreadable.

    An upright baseline JPEG has the same pixels as after its preparation, bit for bit. Pillow decodes other files.
    """
    if not content:
        raise Unreadable("the file is empty")
    try:
        record = None if is_rotated_jpeg(content) else codec.pack(content)
    except codec.CodecError:
        record = None
    if record is None:
        image, _ = open_image(content)
        height, width = out.shape[1:]
        out[:] = crop(image, choose(np.array([image.size]), key)[0], height, width, interpolation)
        return
    boxes = choose(np.array([codec.describe(record)[:2]]), key)
    decoder = codec.Decoder(codec.Shards([record + bytes(codec.OVERRUN)]))
    if status := decoder.crop(np.array([[0, 0, len(record)]]), boxes, out[None], interpolation=interpolation)[0]:
        raise Unreadable(codec.reason(int(status)))


def crop(image: Image.Image, box: np.ndarray, height: int, width: int, interpolation: Interpolation) -> np.ndarray:
    """Return a crop (x, y, width, height, mirrored) of an image, resized: uint8 (3, height, width)."""
    x, y, w, h, mirrored = (int(value) for value in box)
    part = image.convert("RGB").crop((x, y, x + w, y + h)).resize((width, height), RESAMPLING[interpolation])
    pixels = np.asarray(part).transpose(2, 0, 1)
    return pixels[..., ::-1] if mirrored else pixels


def _size(path: Path) -> tuple[int, int]:
    try:
        check_file(path)
        with Image.open(path, formats=FORMATS) as image:
            return upright_size(image)
    except Exception:  # Pillow raises nearly anything; `read` reports corrupt files
        return 1, 1
