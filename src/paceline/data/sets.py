"""Datasets that fit in memory: digits, CIFAR and synthetic images."""

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
from paceline.system.packages import missing_package


@dataclass(frozen=True)
class TensorSplit:
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
    train: TensorSplit
    val: TensorSplit
    fingerprint: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width, channels."""
        height, width, channels = self.train.images.shape[1:]
        return height, width, channels


def load(data: Data) -> ImageSet:
    """Return the dataset that a recipe names."""
    if data.name == "digits":
        return _digits()
    if data.name == "synthetic":
        return _synthetic(data.synthetic)
    return _prepared(data)


def _digits() -> ImageSet:
    """scikit-learn's 1797 handwritten digits, 8x8. Every fifth one is used for validation."""
    package = find_spec("sklearn")
    if package is None or not package.origin:
        raise missing_package("scikit-learn", "data.name=digits")
    # importing scikit-learn would take longer than importing torch
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images = torch.from_numpy((table[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).round().astype(np.uint8))
    labels = torch.from_numpy(table[:, -1]).long()
    held_out = torch.arange(len(labels)) % 5 == 0
    train, val = TensorSplit(images[~held_out], labels[~held_out]), TensorSplit(images[held_out], labels[held_out])
    return ImageSet("digits", tuple("0123456789"), train, val, _fingerprint(images, labels))


def _synthetic(shape: Synthetic) -> ImageSet:
    """Noise around one random image per class, so that the task can be learned."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.size, shape.size, shape.channels)
    prototypes = torch.randint(0, 256, (shape.classes, *size), generator=generator, dtype=torch.int16)

    def split(samples: int) -> TensorSplit:
        labels = torch.randint(0, shape.classes, (samples,), generator=generator)
        images = torch.randint(0, 256, (samples, *size), generator=generator, dtype=torch.uint8)
        for begin in range(0, samples, 1024):  # in chunks, since the sums are int16
            part = slice(begin, begin + 1024)
            images[part] = ((images[part] + prototypes[labels[part]]) // 2).to(torch.uint8)
        return TensorSplit(images, labels)

    try:
        train, val = split(shape.train_samples), split(shape.val_samples)
    except RuntimeError as error:  # torch raises this when out of memory
        reason = str(error).splitlines()[0][:120]
        raise UserError(
            "synthetic-too-large",
            f"data.synthetic: {shape} cannot be generated ({reason}). Use fewer or smaller images.",
        ) from None
    names = tuple(f"class {number}" for number in range(shape.classes))
    return ImageSet("synthetic", names, train, val, hashlib.sha256(repr(shape).encode()).hexdigest()[:16])


def _prepared(data: Data) -> ImageSet:
    """Arrays that `paceline prepare` wrote."""
    folder = Path(data.path) if data.path else default_folder(data.name)
    description, found = arrays.read(folder, data.name)
    train, val = (
        TensorSplit(torch.from_numpy(images), torch.from_numpy(labels).long())
        for images, labels in (found["train"], found["val"])
    )
    return ImageSet(data.name, tuple(description["classes"]), train, val, description["fingerprint"])


def _fingerprint(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
