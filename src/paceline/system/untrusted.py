"""Safe handling of untrusted files and values: what is opened, and what is computed with."""

import errno
import os
import stat
import sys
from io import BufferedReader
from pathlib import Path

HUGE = 1e39
"""More than the maximum of float32."""
_MAX_DEPTH = 50


class Unreadable(Exception):
    """A file cannot be decoded; the message gives the reason."""


def check_regular(path: Path, inside: Path | None = None) -> None:
    """Raise an OSError for a FIFO, a socket, a device, a folder, or a link to outside of `inside`."""
    if inside is not None and leads_out(inside, path):
        reason = f"it is a link that leads out of {inside}, to {os.path.realpath(path)}; replace the link by the file"
        raise OSError(errno.EINVAL, reason, str(path))
    _require_regular(path.stat(), path)


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file; remove or replace it", str(path))


def leads_out(folder: Path, path: Path) -> bool:
    """Whether a path below a folder leads out of it through symbolic links."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def open_regular(path: Path, max_bytes: int = sys.maxsize, inside: Path | None = None) -> BufferedReader:
    """Open a regular file of at most `max_bytes` for reading. Raises an OSError for anything else, without blocking."""
    check_regular(path, inside)
    # the file may be replaced by a link or a FIFO after the check
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(os.path.realpath(path), flags), "rb")
    try:
        status = os.fstat(file.fileno())
        _require_regular(status, path)
        if status.st_size > max_bytes:
            reason = f"it is too large to be read: {status.st_size:,} bytes, more than the maximum of {max_bytes:,}"
            raise OSError(errno.EFBIG, reason, str(path))
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, max_bytes: int, inside: Path | None = None) -> bytes:
    """Return the content of a regular file of at most `max_bytes`. Raises an OSError for anything else."""
    with open_regular(path, max_bytes, inside) as file:
        return file.read()


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether it is a JSON value that is not nested too deeply and has no NaN or huge numbers."""
    if isinstance(value, dict | list):
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return depth < _MAX_DEPTH and all(is_plain(item, depth + 1) for item in inner)
    if isinstance(value, int | float):
        return -HUGE <= value <= HUGE  # false for NaN
    return value is None or isinstance(value, str)
