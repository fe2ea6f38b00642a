"""Files that strangers may have made: only regular files of limited size, inside their folder, are opened."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


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
