"""Data sets that fit in memory: digits, CIFAR-10, generated images."""

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from paceline.config.data import Data, Synthetic
from paceline.data import arrays
from paceline.data.shards import default_folder
from paceline.errors import UserError


@dataclass(frozen=True)
class Split:
    images: torch.Tensor
    """uint8, (samples, height, width, channels)."""
    labels: torch.Tensor
    """int64, (samples,)."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageSet:
    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    fingerprint: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width, channels."""
        height, width, channels = self.train.images.shape[1:]
        return height, width, channels


def load(data: Data) -> ImageSet:
    """The data set a recipe names, in memory."""
    if data.name == "digits":
        return _digits()
    if data.name == "synthetic":
        return _synthetic(data.synthetic)
    return _prepared(data)


def _digits() -> ImageSet:
    """scikit-learn's 1797 handwritten digits, 8x8; every fifth one is kept for validation."""
    package = find_spec("sklearn")
    if package is None or not package.origin:
        raise UserError("data.name=digits comes with scikit-learn, which is not installed; pip install scikit-learn")
    # its file is read without importing it, which would take longer than importing torch
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images = torch.from_numpy((table[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).round().astype(np.uint8))
    labels = torch.from_numpy(table[:, -1]).long()
    held_out = torch.arange(len(labels)) % 5 == 0
    train, val = Split(images[~held_out], labels[~held_out]), Split(images[held_out], labels[held_out])
    return ImageSet("digits", tuple("0123456789"), train, val, _fingerprint(images, labels))


def _synthetic(shape: Synthetic) -> ImageSet:
    """Noise around one random image per class, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.size, shape.size, shape.channels)
    prototypes = torch.randint(0, 256, (shape.classes, *size), generator=generator, dtype=torch.int16)

    def split(samples: int) -> Split:
        labels = torch.randint(0, shape.classes, (samples,), generator=generator)
        images = torch.randint(0, 256, (samples, *size), generator=generator, dtype=torch.uint8)
        for begin in range(0, samples, 1024):  # in pieces, so that the wider sums take little memory
            part = slice(begin, begin + 1024)
            images[part] = ((images[part] + prototypes[labels[part]]) // 2).to(torch.uint8)
        return Split(images, labels)

    try:
        train, val = split(shape.train_samples), split(shape.val_samples)
    except RuntimeError as error:  # torch's way to say that memory ran out
        raise UserError(f"data.synthetic: {shape} cannot be generated ({str(error).splitlines()[0][:120]})") from None
    names = tuple(f"class {number}" for number in range(shape.classes))
    return ImageSet("synthetic", names, train, val, hashlib.sha256(repr(shape).encode()).hexdigest()[:16])


def _prepared(data: Data) -> ImageSet:
    """Arrays that `paceline prepare` wrote."""
    folder = Path(data.path) if data.path else default_folder(data.name)
    description, found = arrays.read(folder, data.name)
    train, val = (
        Split(torch.from_numpy(images), torch.from_numpy(labels).long())
        for images, labels in (found["train"], found["val"])
    )
    return ImageSet(data.name, tuple(description["classes"]), train, val, description["fingerprint"])


def _fingerprint(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
