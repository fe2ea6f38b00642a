"""Prepared data on disk: records in shards, an index, and dataset.json, which is written last. See docs/format.md.

    DIR/dataset.json                         what is in it; without it the folder holds no data
    DIR/VARIANT/SPLIT/shard-00000.pcl ...    records, one behind the other, and OVERRUN zero bytes
    DIR/VARIANT/SPLIT/index.npy              a row per sample: place, size and label
    DIR/VARIANT/SPLIT/names.txt              a line per sample: its file's name

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

from paceline.data import codec
from paceline.data.classes import Class
from paceline.data.description import ANEW, DESCRIPTION, MOST_BYTES, checked, parse_json, shard_name
from paceline.data.files import wrong_size
from paceline.data.images import Choose
from paceline.data.index import read_index
from paceline.errors import UserError
from paceline.system.files import printable
from paceline.system.untrusted import leads_out, open_regular, read_regular

_CURE = "prepare it with `paceline prepare`, or set data.path"


def default_folder(name: str) -> Path:
    """Where prepared data is put, and looked for, unless told otherwise."""
    return Path(os.environ.get("PACELINE_DATA", "data")) / name


@dataclass(frozen=True)
class Dataset:
    """A prepared folder, as dataset.json describes it."""

    place: str
    """A folder, or an address."""
    description: dict[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.place)

    @classmethod
    def open(cls, folder: Path) -> "Dataset":
        try:
            return cls.parse(read_regular(folder / DESCRIPTION, MOST_BYTES, folder), str(folder))
        except FileNotFoundError:
            raise UserError(f"{folder}: no prepared data here (it has no {DESCRIPTION}); {_CURE}") from None
        except OSError as error:
            raise UserError(f"{folder / DESCRIPTION} is not readable ({error.strerror}); {_CURE}") from None

    @classmethod
    def parse(cls, content: bytes, place: str) -> "Dataset":
        """From what dataset.json holds."""
        path = f"{place.rstrip('/')}/{DESCRIPTION}"
        try:
            description = parse_json(content)
        except ValueError as error:
            raise UserError(f"{path} is not readable ({error}); {_CURE}") from None
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

    def choose(self, variant: str = "") -> str:
        """The variant of this name, by default the only one."""
        if not variant and len(self.variants) > 1:
            raise UserError(
                f"{self.place} holds {', '.join(self.variants)}; choose one with data.variant, or with --variant of "
                "`paceline data`"
            )
        variant = variant or self.variants[0]
        if variant not in self.variants:
            raise UserError(f"data.variant={variant!r} is not in {self.place}; it holds {', '.join(self.variants)}")
        return variant

    def split(self, split: str, variant: str = "") -> "Split":
        """One split of a variant, by default of the only one."""
        variant = self.choose(variant)
        if split not in self.description["splits"]:
            raise UserError(f"{self.place} has no {split} split")
        folder, files = self.folder / variant / split, self.description["variants"][variant]["splits"][split]
        if leads_out(self.folder, folder):
            raise UserError(f"{folder} is a symbolic link out of {self.folder}; put a copy of the files there")
        return Split(folder, files, self.description["splits"][split]["per_class"])


class Split:
    """Records of one split, mapped into memory; everything but the records themselves is verified at opening."""

    cure = "see `paceline data DIR --check`"

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
            raise UserError(f"{path} is missing or not readable ({error.strerror}); {ANEW}") from None
        if wrong := wrong_size(file, entry["bytes"]):
            file.close()
            raise UserError(f"{path} {wrong}; {ANEW}")
        return file

    @cached_property
    def shards(self) -> codec.Shards:
        return codec.Shards([self._mapped(number) for number in range(len(self._files["shards"]))])

    def _mapped(self, number: int) -> mmap.mmap:
        with self._shard(number) as file:
            return mmap.mmap(file.fileno(), self._files["shards"][number]["bytes"], access=mmap.ACCESS_READ)

    def places(self, ids: np.ndarray) -> np.ndarray:
        """Shard, offset and length of samples, as the codec wants them."""
        rows = self.index[ids]
        return np.stack([rows[field].astype(np.int64) for field in ("shard", "offset", "length")], axis=1)

    def labels(self, ids: np.ndarray) -> np.ndarray:
        return self.index["label"][ids]

    def reader(self) -> "ShardReader":
        return ShardReader(self)

    def sizes(self, ids: np.ndarray) -> np.ndarray:
        """Width and height of samples, (n, 2)."""
        rows = self.index[ids]
        return np.stack([rows["width"], rows["height"]], axis=1)

    def record(self, number: int) -> bytes:
        with self._shard(int(self.index[number]["shard"])) as file:
            return _record(file, self.index[number])

    def records(self, shard: int) -> Iterator[tuple[int, bytes]]:
        """The samples of a shard with their records."""
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
            raise UserError(f"{path} is missing or corrupt ({error}); {ANEW}") from None
        if hashlib.sha256(content).hexdigest() != entry["sha256"] or len(names) != len(self):
            raise UserError(f"{path} does not match {DESCRIPTION}; {ANEW}")
        return names

    def where(self, number: int) -> str:
        """How a message names a sample."""
        row = self.index[number % len(self)]
        try:
            name = printable(self.names[number % len(self)])
        except UserError:  # the names are only for messages such as this one
            name = f"sample {number % len(self)}"
        return f"{self.folder / shard_name(int(row['shard']))} at byte {row['offset']} ({name})"


def _record(file: BinaryIO, row: np.void) -> bytes:
    return os.pread(file.fileno(), int(row["length"]), int(row["offset"]))


class ShardReader:
    """Crops of a split's samples; for one thread."""

    def __init__(self, split: Split):
        self._split, self._decoder = split, codec.Decoder(split.shards)

    def read(self, keys: np.ndarray, choose: Choose, out: np.ndarray) -> dict[int, str]:
        ids = keys % len(self._split)
        boxes = choose(self._split.sizes(ids), keys)
        statuses = self._decoder.crop(self._split.places(ids), boxes, out)
        return {int(position): codec.reason(int(statuses[position])) for position in np.flatnonzero(statuses)}
