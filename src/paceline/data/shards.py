"""Prepared data on disk: records in shards, an index, and dataset.json. See docs/reference/format.md.

    DIR/dataset.json                         the description; written last, so incomplete data has none
    DIR/VARIANT/SPLIT/shard-00000.pcl ...    concatenated records, then OVERRUN zero bytes
    DIR/VARIANT/SPLIT/index.npy              one row per sample: position, size and label
    DIR/VARIANT/SPLIT/names.txt              one line per sample: its file name

A variant is one size of the same images; all variants have the same samples in the same order.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paceline.config.data import Interpolation
from paceline.data import codec
from paceline.data.classes import Class
from paceline.data.description import (
    DESCRIPTION,
    MAX_DESCRIPTION_BYTES,
    PREPARE_AGAIN,
    checked,
    parse_json,
    shard_name,
)
from paceline.data.files import unusable, wrong_size
from paceline.data.images import Choose
from paceline.data.index import read_index
from paceline.errors import UserError
from paceline.system.files import printable
from paceline.system.untrusted import leads_out, open_regular, read_regular

ORIGINAL = "original"
"""The variant of images at their own size, which are not re-encoded if possible."""
_FIX = 'Run "paceline prepare", or set data.path.'


def default_folder(name: str) -> Path:
    """Return the default folder of prepared data, below $PACELINE_DATA or ./data."""
    return Path(os.environ.get("PACELINE_DATA", "data")) / name


@dataclass(frozen=True)
class Dataset:
    """A prepared folder, as dataset.json describes it."""

    place: str
    """A folder or a URL."""
    description: dict[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.place)

    @classmethod
    def open(cls, folder: Path) -> "Dataset":
        """Return the dataset in a folder, its dataset.json checked."""
        path = folder / DESCRIPTION
        try:
            return cls.parse(read_regular(path, MAX_DESCRIPTION_BYTES, folder), str(folder))
        except FileNotFoundError:
            message = f"{folder} does not contain prepared data: it has no {DESCRIPTION}. {_FIX}"
            raise UserError("data-not-prepared", message, path=folder) from None
        except OSError as error:
            message = f"{path} is not readable ({error.strerror}). {_FIX}"
            raise UserError("dataset-unreadable", message, path=path) from None

    @classmethod
    def parse(cls, content: bytes, place: str) -> "Dataset":
        """Return the dataset that the content of a dataset.json describes."""
        path = f"{place.rstrip('/')}/{DESCRIPTION}"
        try:
            description = parse_json(content)
        except ValueError as error:
            raise UserError("dataset-unreadable", f"{path} is not readable ({error}). {_FIX}", path=path) from None
        return cls(place, checked(description, "shards", path))

    @property
    def name(self) -> str:
        return str(self.description["name"])

    @property
    def classes(self) -> list[Class]:
        return [Class(entry["id"], entry["name"]) for entry in self.description["classes"]]

    @property
    def variants(self) -> list[str]:
        return list(self.description["variants"])

    @property
    def fingerprint(self) -> str:
        return str(self.description["fingerprint"])

    def choose(self, variant: str = "", field: str = "data.variant") -> str:
        """Return the name of a variant that exists; an empty name means the only one. `field`: where it comes from."""
        if not variant and len(self.variants) > 1:
            raise UserError(
                "variant-required",
                f"{self.place} has the variants {', '.join(self.variants)}. "
                'Choose one with data.variant, or with --variant of "paceline data".',
                variants=self.variants,
            )
        variant = variant or self.variants[0]
        if variant not in self.variants:
            raise UserError(
                "unknown-variant",
                f"{field} {variant!r} does not exist in {self.place}. It has {', '.join(self.variants)}.",
                variant=variant,
            )
        return variant

    def choose_for_evaluation(self, wanted: str, trained: str) -> str:
        """Return the variant to evaluate on: `wanted`, else the original images if there are any, else `trained`."""
        if wanted:
            return self.choose(wanted, "evaluate.variant")
        return ORIGINAL if ORIGINAL in self.variants else self.choose(trained)

    def split(self, split: str, variant: str = "") -> "Split":
        """Return one split of a variant; an empty variant means the only one."""
        variant = self.choose(variant)
        if split not in self.description["splits"]:
            known = ", ".join(self.description["splits"])
            raise UserError("unknown-split", f"{self.place} has no split {split!r}. It has {known}.", split=split)
        folder, files = self.folder / variant / split, self.description["variants"][variant]["splits"][split]
        if leads_out(self.folder, folder):
            message = f"{folder} is a symbolic link to outside of {self.folder}. Replace the link with the files."
            raise UserError("link-outside-folder", message, path=folder)
        return Split(folder, files, self.description["splits"][split]["per_class"])


class Split:
    """Records of one split, memory-mapped. Opening verifies everything except the records themselves."""

    fix = 'Run "paceline data DIR --check" for details.'

    def __init__(self, folder: Path, files: dict[str, Any], per_class: list[int]):
        self.folder, self._files = folder, files
        self.index = read_index(folder / "index.npy", files, per_class)
        for number in range(len(files["shards"])):
            self._shard(number).close()

    def __len__(self) -> int:
        return len(self.index)

    def _shard(self, number: int) -> BinaryIO:
        path, entry = self.folder / shard_name(number), self._files["shards"][number]
        try:
            file = open_regular(path, inside=self.folder)
        except OSError as error:
            raise unusable(path, error, PREPARE_AGAIN) from None
        if problem := wrong_size(file, entry["bytes"]):
            file.close()
            raise UserError("dataset-corrupt", f"{path} {problem}. {PREPARE_AGAIN}", path=path)
        return file

    @cached_property
    def shards(self) -> codec.Shards:
        return codec.Shards([self._mapped(number) for number in range(len(self._files["shards"]))])

    def _mapped(self, number: int) -> mmap.mmap:
        with self._shard(number) as file:
            return mmap.mmap(file.fileno(), self._files["shards"][number]["bytes"], access=mmap.ACCESS_READ)

    def places(self, ids: np.ndarray) -> np.ndarray:
        """Return shard, offset and length of samples: int64 (n, 3), the layout that the codec expects."""
        rows = self.index[ids]
        return np.stack([rows[field].astype(np.int64) for field in ("shard", "offset", "length")], axis=1)

    def labels(self, ids: np.ndarray) -> np.ndarray:
        return self.index["label"][ids]

    def reader(self) -> "ShardReader":
        return ShardReader(self)

    def sizes(self, ids: np.ndarray) -> np.ndarray:
        """Return width and height of samples, (n, 2)."""
        rows = self.index[ids]
        return np.stack([rows["width"], rows["height"]], axis=1)

    def record(self, number: int) -> bytes:
        with self._shard(int(self.index[number]["shard"])) as file:
            return _record(file, self.index[number])

    def records(self, shard: int) -> Iterator[tuple[int, bytes]]:
        """Yield the id and record of every sample of a shard."""
        with self._shard(shard) as file:
            for number in np.flatnonzero(self.index["shard"] == shard):
                yield int(number), _record(file, self.index[number])

    @cached_property
    def names(self) -> list[str]:
        path, entry = self.folder / "names.txt", self._files["lists"][1]
        try:
            content = read_regular(path, entry["bytes"], self.folder)
            names = content.decode().splitlines()
        except (OSError, ValueError) as error:
            raise unusable(path, error, PREPARE_AGAIN) from None
        if hashlib.sha256(content).hexdigest() != entry["sha256"] or len(names) != len(self):
            raise UserError("dataset-corrupt", f"{path} does not match {DESCRIPTION}. {PREPARE_AGAIN}", path=path)
        return names

    def where(self, number: int) -> str:
        """Return the position and name of a sample for messages."""
        row = self.index[number % len(self)]
        try:
            name = printable(self.names[number % len(self)])
        except UserError:  # names only appear in messages
            name = f"sample {number % len(self)}"
        return f"{self.folder / shard_name(int(row['shard']))} at byte {row['offset']} ({name})"


def _record(file: BinaryIO, row: np.void) -> bytes:
    return os.pread(file.fileno(), int(row["length"]), int(row["offset"]))


class ShardReader:
    """Reads crops of a split's samples. Not thread-safe."""

    def __init__(self, split: Split):
        self._split, self._decoder = split, codec.Decoder(split.shards)

    def read(
        self, keys: np.ndarray, choose: Choose, out: np.ndarray, interpolation: Interpolation = "bilinear"
    ) -> dict[int, str]:
        ids = keys % len(self._split)
        boxes = choose(self._split.sizes(ids), keys)
        statuses = self._decoder.crop(self._split.places(ids), boxes, out, interpolation=interpolation)
        return {int(position): codec.reason(int(statuses[position])) for position in np.flatnonzero(statuses)}
