"""Prepared data that fits in memory: arrays of images and labels, and dataset.json.

DIR/dataset.json            the description; written last, so incomplete data has none
DIR/SPLIT_images.npy        uint8, (samples, height, width, channels)
DIR/SPLIT_labels.npy        uint8, (samples,)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.description import DESCRIPTION, FORMAT, checked, read_json, sealed
from paceline.data.files import file_entry, read_array, unusable, write_array
from paceline.errors import UserError
from paceline.system.files import replacing, write_json

Arrays = dict[str, tuple[np.ndarray, np.ndarray]]
"""Images and labels by split."""
_PARTS = ("images", "labels")
_BYTES = np.dtype(np.uint8)


def _path(folder: Path, split: str, part: str) -> Path:
    return folder / f"{split}_{part}.npy"


def write(out: Path, kind: str, classes: Sequence[str], arrays: Arrays, prepared: Mapping[str, Any]) -> None:
    """Write the splits train and val. `prepared` records where they came from."""
    splits: dict[str, Any] = {}
    for split, pair in arrays.items():
        splits[split] = {"samples": len(pair[1])}
        for part, array in zip(_PARTS, pair, strict=True):
            with replacing(_path(out, split, part)) as file:
                write_array(file, array)
            splits[split][part] = file_entry(_path(out, split, part))
    description = {
        "kind": kind,
        "format": FORMAT,
        "name": kind,
        "classes": list(classes),
        "shape": list(arrays["train"][0].shape[1:]),
        "splits": splits,
        "prepared": dict(prepared),
    }
    write_json(out / DESCRIPTION, sealed(description))


def read(folder: Path, kind: str) -> tuple[dict[str, Any], Arrays]:
    """Return the description and the arrays, with all checksums and labels verified."""
    path = folder / DESCRIPTION
    fix = f'Remove {folder} and run "paceline prepare {kind} --out {folder}".'
    try:
        description = checked(read_json(folder), kind, str(path), fix)
    except (OSError, ValueError) as error:
        raise UserError("dataset-unreadable", f"{path} is not readable ({error}). {fix}", path=path) from None
    arrays: Arrays = {}
    for split, entry in description["splits"].items():
        shapes = (entry["samples"], *description["shape"]), (entry["samples"],)
        images, labels = (
            _array(_path(folder, split, part), shape, entry[part], fix)
            for part, shape in zip(_PARTS, shapes, strict=True)
        )
        if (highest := labels.max()) >= len(description["classes"]):
            path = _path(folder, split, "labels")
            message = f"{path} has the label {highest}, but there are {len(description['classes'])} classes. {fix}"
            raise UserError("dataset-corrupt", message, path=path)
        arrays[split] = images, labels
    return description, arrays


def _array(path: Path, shape: tuple[int, ...], entry: dict[str, Any], fix: str) -> np.ndarray:
    try:
        return read_array(path, _BYTES, shape, entry)
    except (OSError, ValueError, MemoryError) as error:
        raise unusable(path, error, fix) from None
