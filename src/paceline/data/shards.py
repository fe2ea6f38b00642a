"""Prepared data on disk: records in shards, an index, and dataset.json, which is written last. See docs/format.md.

    DIR/dataset.json                         what is in it; without it the folder holds no data
    DIR/VARIANT/SPLIT/shard-00000.pcl ...    records, one behind the other, and OVERRUN zero bytes
    DIR/VARIANT/SPLIT/index.npy              a row per sample: place, size and label
    DIR/VARIANT/SPLIT/names.txt              a line per sample: its file's name

A variant is one size of the same images; all variants have the same samples in the same order.
"""

import json
import mmap
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.base.files import sha256
from paceline.data import codec
from paceline.data.classes import Class
from paceline.data.description import problem
from paceline.data.photographs import Choose
from paceline.errors import UserError

FORMAT = 1
DESCRIPTION = "dataset.json"
LISTS = ("index.npy", "names.txt")
ANEW = "remove the folder and prepare the data again"
_CURE = "prepare it with `paceline prepare`, or set data.path"
INDEX = np.dtype(
    [("offset", "<u8"), ("length", "<u4"), ("shard", "<u2"), ("label", "<u2"), ("width", "<u2"), ("height", "<u2")]
)


def default_folder(name: str) -> Path:
    """Where prepared data is put, and looked for, unless told otherwise."""
    return Path(os.environ.get("PACELINE_DATA", "data")) / name


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.pcl"


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
            return cls.parse((folder / DESCRIPTION).read_bytes(), str(folder))
        except FileNotFoundError:
            raise UserError(f"{folder}: no prepared data here (it has no {DESCRIPTION}); {_CURE}") from None
        except OSError as error:
            raise UserError(f"{folder / DESCRIPTION} is not readable ({error}); {_CURE}") from None

    @classmethod
    def parse(cls, content: bytes, place: str) -> "Dataset":
        """From what dataset.json holds."""
        path = f"{place.rstrip('/')}/{DESCRIPTION}"
        try:
            description = json.loads(content)
        except ValueError as error:
            raise UserError(f"{path} is not readable ({error}); {_CURE}") from None
        if not isinstance(description, dict) or description.get("kind") != "shards":
            raise UserError(f"{path} does not describe shards; {_CURE}")
        if description.get("format") != FORMAT:
            raise UserError(
                f"{path} has format {description.get('format')}; this version reads format {FORMAT}: upgrade paceline, "
                f"or {ANEW}"
            )
        if wrong := problem(description):
            raise UserError(f"{path} is damaged ({wrong}); {ANEW}")
        return cls(place, description)

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
        if split not in self.description["variants"][variant]["splits"]:
            raise UserError(f"{self.place} has no {split} split")
        return Split(self.folder / variant / split, self.description["variants"][variant]["splits"][split])


class Split:
    """Records of one split, mapped into memory; the index is shared between processes and costs no time to open."""

    cure = "see `paceline data DIR --check`"

    def __init__(self, folder: Path, files: dict[str, Any]):
        self.folder = folder
        self._expected = shards = files["shards"]
        expected = {entry["file"]: entry["sha256"] for entry in files["lists"]}
        try:
            self.index: np.ndarray = np.load(folder / "index.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{folder / 'index.npy'} is missing or damaged ({error}); {ANEW}") from None
        sound = sha256(folder / "index.npy") == expected.get("index.npy")  # labels have no other checksum
        if not sound or self.index.dtype != INDEX or len(self.index) != sum(shard["samples"] for shard in shards):
            raise UserError(f"{folder / 'index.npy'} does not match {DESCRIPTION}; {ANEW}")

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def shards(self) -> codec.Shards:
        return codec.Shards([self._mapped(entry) for entry in self._expected])

    def _mapped(self, entry: dict[str, Any]) -> mmap.mmap:
        path = self.folder / entry["file"]
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is missing or empty ({error}); {ANEW}") from None
        if len(mapped) != entry["bytes"]:
            raise UserError(f"{path} has {len(mapped)} bytes instead of {entry['bytes']}; {ANEW}")
        return mapped

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
        row = self.index[number]
        with (self.folder / shard_name(int(row["shard"]))).open("rb") as file:
            file.seek(int(row["offset"]))
            return file.read(int(row["length"]))

    @cached_property
    def names(self) -> list[str]:
        return (self.folder / "names.txt").read_text(encoding="utf-8").splitlines()

    def where(self, number: int) -> str:
        """How a message names a sample."""
        row, name = self.index[number % len(self)], self.names[number % len(self)]
        return f"{self.folder / shard_name(int(row['shard']))} at byte {row['offset']} ({name})"


class ShardReader:
    """Crops of a split's samples; for one thread."""

    def __init__(self, split: Split):
        self._split, self._decoder = split, codec.Decoder(split.shards)

    def read(self, keys: np.ndarray, choose: Choose, out: np.ndarray) -> dict[int, str]:
        ids = keys % len(self._split)
        boxes = choose(self._split.sizes(ids), keys)
        statuses = self._decoder.crop(self._split.places(ids), boxes, out)
        return {int(position): codec.reason(int(statuses[position])) for position in np.flatnonzero(statuses)}
