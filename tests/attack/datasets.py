"""Prepared data to attack, and the ways a failing disk or an attacker changes it."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sample_images import tree

from paceline.data import arrays, codec
from paceline.data.description import DESCRIPTION, sealed
from paceline.data.files import file_entry
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.data.shards import Dataset

FILES = ("index.npy", "names.txt", "shard-00000.pcl")
Change = Callable[[dict[str, Any]], object]


def make_shards(folder: Path) -> Path:
    """Prepare two variants of 12 training and 12 validation images of 3 classes, with files of equal sizes."""
    images = tree(folder / "in") / "val" / "n00000000"
    (images / "val_0.JPEG").rename(images / "val_9.JPEG")  # another order than in the training split
    prepare(source(folder / "in", "folder"), folder / "out", [Variant(), Variant(max_side=32)], 2)
    return folder / "out"


def train(folder: Path) -> tuple[object, ...]:
    """Return the arguments that train from shards."""
    data = {"name": "", "path": str(folder), "variant": "original", "size": 24, "augment": None}
    return "train", "digits", "--data", json.dumps(data), "--train.global_batch", 12


def make_arrays(folder: Path) -> Path:
    """Write arrays like those of CIFAR-10, but few and small."""
    rng = np.random.default_rng(0)
    pairs = {
        split: (rng.integers(0, 256, (20, 4, 4, 3), np.uint8), np.arange(20, dtype=np.uint8) % 10)
        for split in ("train", "val")
    }
    arrays.write(folder, "cifar10", [f"class {number}" for number in range(10)], pairs, {"source": "a test"})
    return folder


def flips(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield copies, each with a different bit flipped."""
    for bit in random.Random(seed).sample(range(8 * len(content)), count):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def truncations(content: bytes, count: int) -> list[bytes]:
    """Return truncated copies, and one with an extra byte."""
    lengths = {round(number * len(content) / count) for number in range(count)} | {len(content) - 1}
    return [*(content[:length] for length in sorted(lengths)), content + b"\0"]


def change(folder: Path, how: Change) -> None:
    """Change a description and update its digests, as an attacker can."""
    path = folder / DESCRIPTION
    description = json.loads(path.read_text())
    how(description)
    path.write_text(json.dumps(sealed(description)))


def describe_files(folder: Path) -> Change:
    """Return a change that sets sizes and checksums in a description to those of the files."""

    def how(description: dict[str, Any]) -> None:
        for variant, content in description["variants"].items():
            for split, files in content["splits"].items():
                for entry in (*files["lists"], *files["shards"]):
                    entry |= file_entry(folder / variant / split / entry["file"])

    return how


def crops(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return pixels, labels and statuses of all training images."""
    split = Dataset.open(folder).split("train", "original")
    ids, pixels = np.arange(len(split)), np.zeros((len(split), 3, 16, 16), np.uint8)
    boxes = np.zeros((len(ids), 5), np.int32)
    boxes[:, 2:4] = split.sizes(ids)
    statuses = codec.Decoder(split.shards).crop(split.places(ids), boxes, pixels)
    return pixels, split.labels(ids), statuses
