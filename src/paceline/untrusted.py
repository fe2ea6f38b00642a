"""Files and values that strangers may have made: what is opened, and what is computed with."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

HUGE = 1e39
"""More than float32 holds."""
_DEEPEST = 50


def check_regular(path: Path, inside: Path | None = None) -> None:
    """Raise an OSError for a FIFO, a socket, a device, a folder, or a link that leads out of `inside`."""
    target = os.path.realpath(path)
    if inside is not None and not Path(target).is_relative_to(os.path.realpath(inside)):
        raise OSError(errno.EINVAL, f"leads out of {inside}, to {target}; replace the link by the file", str(path))
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a regular file; remove or replace it", str(path))


def open_regular(path: Path, most: int, inside: Path | None = None) -> BinaryIO:
    """A file of at most `most` bytes, to read; anything else is an OSError, and neither blocks nor fills memory."""
    check_regular(path, inside)
    file = path.open("rb")
    size = os.fstat(file.fileno()).st_size
    if size > most:
        file.close()
        raise OSError(errno.EFBIG, f"is too large to be read: {size:,} bytes, at most {most:,} are expected", str(path))
    return file


def read_regular(path: Path, most: int, inside: Path | None = None) -> bytes:
    with open_regular(path, most, inside) as file:
        return file.read()


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether it is what JSON holds, not nested too deep, and its numbers can be computed with and printed."""
    if isinstance(value, dict | list):
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return depth < _DEEPEST and all(is_plain(own, depth + 1) for own in inner)
    if isinstance(value, int | float):
        return -HUGE <= value <= HUGE  # not so NaN
    return value is None or isinstance(value, str)
