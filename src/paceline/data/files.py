"""Files of prepared data. They are untrusted: only regular files of the expected size are read."""

import hashlib
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paceline.errors import UserError
from paceline.system.files import sha256
from paceline.system.untrusted import open_regular

_HEADER_BYTES = 256  # fixed, so that files do not depend on the NumPy version; enough for any shape


def file_entry(path: Path) -> dict[str, Any]:
    """Return the entry of a file in dataset.json."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def mismatch(path: Path, entry: dict[str, Any]) -> str:
    """Return how a file differs from its entry in dataset.json, or an empty string."""
    try:
        with open_regular(path, inside=path.parent) as file:
            if problem := wrong_size(file, entry["bytes"]):
                return f"{path} {problem}"
            same = hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]
    except OSError as error:
        return f"{path} is missing or not readable ({error.strerror})"
    return "" if same else f"{path} does not match its checksum"


def wrong_size(file: BinaryIO, expected: int) -> str:
    """Return how the size of an open file differs from the expected one, or an empty string."""
    found = os.fstat(file.fileno()).st_size
    return "" if found == expected else f"has {found:,} bytes instead of {expected:,}"


def unusable(path: Path, error: Exception, fix: str) -> UserError:
    """Return the error for a file that cannot be read (OSError) or does not match its entry in dataset.json."""
    if isinstance(error, OSError):
        message = f"{path} is missing or not readable ({error.strerror}). {fix}"
        return UserError("dataset-unreadable", message, path=path)
    return UserError("dataset-corrupt", f"{path} is corrupt ({str(error) or type(error).__name__}). {fix}", path=path)


# ---- arrays ----


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the header of a .npy file: version 1.0, C order."""
    descr = dtype.descr if dtype.names else dtype.str
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".ljust(_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def write_array(file: BinaryIO, array: np.ndarray) -> None:
    file.write(npy_header(array.dtype, array.shape))
    file.write(np.ascontiguousarray(array).data)


def read_array(path: Path, dtype: np.dtype, shape: tuple[int, ...], entry: dict[str, Any]) -> np.ndarray:
    """Return an array that `write_array` wrote, in memory, so that the verified bytes are the ones in use.

    Raises ValueError or OSError if the file does not match `entry`. The header is compared, never parsed.
    """
    header = npy_header(dtype, shape)
    expected = len(header) + math.prod(shape) * dtype.itemsize
    if entry["bytes"] != expected:
        raise ValueError(f"dataset.json lists {entry['bytes']:,} bytes, but {dtype} {shape} takes {expected:,}")
    with open_regular(path, inside=path.parent) as file:
        if problem := wrong_size(file, expected):
            raise ValueError(f"it {problem}")
        content = bytearray(expected)
        file.readinto(content)
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise ValueError("it does not match its checksum in dataset.json")
    if not content.startswith(header):
        raise ValueError(f"its header does not describe an array of {dtype} {shape}")
    return np.frombuffer(content, dtype, offset=len(header)).reshape(shape)
