"""Files of prepared data, which may come from strangers: only regular files of the expected size are read."""

import hashlib
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paceline.system.files import sha256
from paceline.system.untrusted import open_regular

_HEADER_BYTES = 256  # enough for any shape, so that a header's length never depends on NumPy's version


def file_entry(path: Path) -> dict[str, Any]:
    """A file as dataset.json describes it."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def mismatch(path: Path, entry: dict[str, Any]) -> str:
    """What tells a file from its description in dataset.json; empty where nothing does."""
    try:
        with open_regular(path, inside=path.parent) as file:
            if wrong := wrong_size(file, entry["bytes"]):
                return f"{path} {wrong}"
            same = hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]
    except OSError as error:
        return f"{path} is missing or not readable ({error.strerror})"
    return "" if same else f"{path} does not match its checksum"


def wrong_size(file: BinaryIO, expected: int) -> str:
    found = os.fstat(file.fileno()).st_size
    return "" if found == expected else f"has {found:,} bytes instead of {expected:,}"


# ---- arrays ----


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """What a .npy file begins with, version 1.0, in C order."""
    descr = dtype.descr if dtype.names else dtype.str
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".ljust(_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def write_array(file: BinaryIO, array: np.ndarray) -> None:
    file.write(npy_header(array.dtype, array.shape))
    file.write(np.ascontiguousarray(array).data)


def read_array(path: Path, dtype: np.dtype, shape: tuple[int, ...], entry: dict[str, Any]) -> np.ndarray:
    """An array that `write_array` wrote, read into memory so that what was verified is what is used.

    ValueError or OSError where the file is not the one described. Its header must be the expected one, byte by byte,
    and so is never parsed.
    """
    header = npy_header(dtype, shape)
    expected = len(header) + math.prod(shape) * dtype.itemsize
    if entry["bytes"] != expected:
        raise ValueError(f"dataset.json says {entry['bytes']:,} bytes, but {dtype} {shape} takes {expected:,}")
    with open_regular(path, inside=path.parent) as file:
        if wrong := wrong_size(file, expected):
            raise ValueError(f"it {wrong}")
        content = bytearray(expected)
        file.readinto(content)
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise ValueError("it does not match its checksum in dataset.json")
    if not content.startswith(header):
        raise ValueError(f"its header is not that of an array of {dtype} {shape}")
    return np.frombuffer(content, dtype, offset=len(header)).reshape(shape)
