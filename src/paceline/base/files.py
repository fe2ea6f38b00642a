"""Files that are either the old or the new version, never half of one."""

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import UserError


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_folder(folder: Path) -> None:
    """Make a folder that is its user's alone; refuse one that others could have put something into."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        cure = f"remove it, or run: chown {os.geteuid()} {folder}"
        raise UserError(f"{folder} belongs to another user (number {found.st_uid}); {cure}")
    if found.st_mode & 0o022:
        mode = stat.filemode(found.st_mode)
        raise UserError(f"{folder} can be written to by others ({mode}); run: chmod go-w {folder}")


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` only when everything is on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    with replacing(path, mode) as file:
        file.write(text.encode(errors="backslashreplace"))  # file names need not be Unicode; JSON reads such escapes


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", mode)


def sha256(path: Path, advance: Callable[[int], object] = lambda _: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def size_text(count: int) -> str:
    """Bytes as people write them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def ignoring_a_full_disk(action: Callable[[], None]) -> Callable[[], None]:
    """The action, whose last words may find no room; what matters has been checked by then."""

    def attempt() -> None:
        with suppress(OSError):
            action()

    return attempt


def printable(text: str) -> str:
    """Text for terminals and pages, whatever a file or folder was called."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


LOCK_NAME = ".lock"


def is_locked(folder: Path) -> bool:
    """Whether some process of this machine holds the folder's lock; asking must not hold it, even for a moment.

    Of the place only the inode is compared: layered file systems tell another device number there than to stat.
    """
    try:
        inode = (folder / LOCK_NAME).stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any("FLOCK" in line and f":{inode} " in line for line in lines)


class FolderLock:
    """At most one process writes to a folder; the kernel frees the lock however its holder ends."""

    def __init__(self, folder: Path, wait: Callable[[], object] | None = None):
        """With `wait`, which is called before, other processes' end is waited for."""
        self._file = (folder / LOCK_NAME).open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if wait and error.errno in (errno.EAGAIN, errno.EACCES):
                wait()
                fcntl.flock(self._file, fcntl.LOCK_EX)
                return
            self._file.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise UserError(f"{folder} is in use by another process; wait for it, or choose another place") from None

    def release(self) -> None:
        self._file.close()
