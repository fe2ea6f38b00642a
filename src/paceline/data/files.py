"""Files of prepared data, which may come from strangers: only regular files of the expected size are read."""

import errno
import hashlib
import math
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paceline.base.files import sha256

_HEADER_BYTES = 256  # enough for any shape, so that a header's length never depends on NumPy's version


def open_regular(path: Path) -> BufferedReader:
    """A regular file, open for reading; OSError for links, pipes and devices, which are not even opened."""
    _require_regular(path.lstat(), path)
    # what takes its place in between must neither be followed nor waited for
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        what = "it is a symbolic link" if stat.S_ISLNK(status.st_mode) else "it is not a regular file"
        raise OSError(errno.EINVAL, what, str(path))


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; OSError for anything else."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return content


def leads_out(folder: Path, path: Path) -> bool:
    """Whether a path below a folder leaves it through symbolic links."""
    return not path.resolve().is_relative_to(folder.resolve())


def file_entry(path: Path) -> dict[str, Any]:
    """A file as dataset.json describes it."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def mismatch(path: Path, entry: dict[str, Any]) -> str:
    """What tells a file from its description in dataset.json; empty where nothing does."""
    try:
        with open_regular(path) as file:
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
    with open_regular(path) as file:
        if wrong := wrong_size(file, expected):
            raise ValueError(f"it {wrong}")
        content = bytearray(expected)
        file.readinto(content)
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise ValueError("it does not match its checksum in dataset.json")
    if not content.startswith(header):
        raise ValueError(f"its header is not that of an array of {dtype} {shape}")
    return np.frombuffer(content, dtype, offset=len(header)).reshape(shape)
