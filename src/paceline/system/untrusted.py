"""Files and values that strangers may have made: what is opened, and what is computed with."""

import errno
import os
import stat
import sys
from io import BufferedReader
from pathlib import Path

HUGE = 1e39
"""More than float32 holds."""
_DEEPEST = 50


def check_regular(path: Path, inside: Path | None = None) -> None:
    """Raise an OSError for a FIFO, a socket, a device, a folder, or a link that leads out of `inside`."""
    if inside is not None and leads_out(inside, path):
        reason = f"it leads out of {inside}, to {os.path.realpath(path)}; replace the link by the file"
        raise OSError(errno.EINVAL, reason, str(path))
    _require_regular(path.stat(), path)


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file; remove or replace it", str(path))


def leads_out(folder: Path, path: Path) -> bool:
    """Whether a path below a folder leaves it through symbolic links."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def open_regular(path: Path, most: int = sys.maxsize, inside: Path | None = None) -> BufferedReader:
    """A file of at most `most` bytes, to read; anything else is an OSError, and neither blocks nor fills memory."""
    check_regular(path, inside)
    # what takes its place in between must neither be followed nor waited for
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(os.path.realpath(path), flags), "rb")
    try:
        status = os.fstat(file.fileno())
        _require_regular(status, path)
        if status.st_size > most:
            reason = f"it is too large to be read: {status.st_size:,} bytes, at most {most:,} are expected"
            raise OSError(errno.EFBIG, reason, str(path))
    except OSError:
        file.close()
        raise
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
