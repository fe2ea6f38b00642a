"""The index of a split: one row per sample with its position in the shards, its size and its label."""

from pathlib import Path
from typing import Any

import numpy as np

from paceline.data import codec
from paceline.data.description import PREPARE_AGAIN
from paceline.data.files import read_array, unusable
from paceline.errors import UserError

INDEX = np.dtype(
    [("offset", "<u8"), ("length", "<u4"), ("shard", "<u2"), ("label", "<u2"), ("width", "<u2"), ("height", "<u2")]
)
_MAX_PIXELS = 1 << 27  # MAX_BLOCKS of native/codec.h
_MAX_RECORD = 1 << 29  # bytes; more than _MAX_PIXELS can take


def read_index(path: Path, files: dict[str, Any], per_class: list[int]) -> np.ndarray:
    """Return the rows of a split. All of them are checked to lie inside their shards and to have valid labels."""
    try:
        index = read_array(path, INDEX, (sum(per_class),), files["lists"][0])
    except (OSError, ValueError, MemoryError) as error:
        raise unusable(path, error, PREPARE_AGAIN) from None
    if problem := _problem(index, files["shards"], per_class):
        raise UserError("dataset-corrupt", f"{path} is corrupt ({problem}). {PREPARE_AGAIN}", path=path)
    return index


def _problem(index: np.ndarray, shards: list[dict[str, Any]], per_class: list[int]) -> str:
    """Return the first problem of an index, or an empty string. A matching checksum does not make it trusted."""
    labels = np.bincount(index["label"], minlength=len(per_class))
    if len(labels) > len(per_class):
        return f"a sample has the label {len(labels) - 1}, but there are {len(per_class)} classes"
    if (wrong := np.flatnonzero(labels != per_class)).size:
        first = wrong[0]
        return f"{labels[first]} samples have the label {first} instead of {per_class[first]}"
    samples = np.bincount(index["shard"], minlength=len(shards))
    if samples.tolist() != [shard["samples"] for shard in shards]:
        return "its samples per shard do not match dataset.json"
    room = np.array([max(shard["bytes"] - codec.OVERRUN, 0) for shard in shards], np.uint64)[index["shard"]]
    offset, length = index["offset"], index["length"]
    outside = (length > np.minimum(room, _MAX_RECORD)) | (offset > room - np.minimum(room, length))  # cannot overflow
    if outside.any():
        return f"sample {outside.argmax()} lies outside its shard"
    pixels = index["width"].astype(np.uint32) * index["height"]
    if (wrong := np.flatnonzero((pixels == 0) | (pixels > _MAX_PIXELS))).size:
        row = index[wrong[0]]
        return f"sample {wrong[0]} has {row['width']} x {row['height']} pixels"
    return ""
