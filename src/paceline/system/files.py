"""Files that are either the old or the new version, never half of one, also after a power cut or on a full disk."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import UserError

_FIXES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "mount it read-write, or use another disk",
    errno.EIO: "the disk fails: see dmesg, and use another one",
}


def is_disk_error(error: OSError) -> bool:
    """Whether the disk refuses writes: it is full, read-only or broken."""
    return error.errno in _FIXES


def disk_error(error: OSError, needed: int = 0) -> str:
    """Which file cannot be written, why, how much room there is, and the fix."""
    where = f"{error.filename}: " if error.filename else ""
    room = ""
    if error.errno == errno.ENOSPC and error.filename:
        folder = next(path for path in Path(error.filename).absolute().parents if path.exists())
        room = f" ({size_text(shutil.disk_usage(folder).free)} free{f', {size_text(needed)} needed' if needed else ''})"
    fix = f"; {_FIXES[error.errno]}" if error.errno in _FIXES else ""
    return f"{where}{error.strerror or error}{room}{fix}"


@contextmanager
def _naming(path: Path, *temporary: Path) -> Iterator[None]:
    """Errors name the file that the user knows; the system names none, or a temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, *map(str, temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync(path: Path) -> None:
    """Bring the content of a file, or the names in a folder, to disk, where it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync(path)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it, if they are missing, so that they survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def private_folder(folder: Path) -> None:
    """Make a folder that is its user's alone; refuse one that others could have put something into."""
    make_folder(folder, 0o700)
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
        with _naming(path, temporary):
            with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        sync(path.parent)
    finally:
        with suppress(OSError):  # the first error says more
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    with replacing(path, mode) as file:
        file.write(text.encode(errors="backslashreplace"))  # file names need not be Unicode; JSON reads such escapes


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", mode)


class GrowingFile:
    """A file to append to. What finds no room is kept in memory, and written before what comes next."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = bytearray()
        self._lock = threading.Lock()

    def write(self, content: bytes) -> None:
        with self._lock, _naming(self._path):
            self._unwritten += content
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]

    def flush(self) -> None:
        """Write what was kept."""
        self.write(b"")

    def close(self) -> None:
        try:
            if not self._file.closed:
                self.flush()
        finally:
            self._file.close()


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
    """Text for terminals and pages, whatever a file or folder was called: control characters are made visible."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def printable_lines(text: str) -> str:
    """Of several lines, which stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def say(text: str, error: bool = False) -> None:
    """Print text that may hold what strangers wrote."""
    print(printable_lines(text), file=sys.stderr if error else sys.stdout, flush=True)


def printable_tree(value: Any) -> Any:
    """A value of JSON or YAML with every text in it made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_tree(key): printable_tree(own) for key, own in value.items()}
    return [printable_tree(own) for own in value] if isinstance(value, list) else value


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

    def __init__(self, folder: Path, wait: Callable[[], object] | None = None, grace: float = 0.0):
        """With `wait`, which is called before, other processes' end is waited for; else for `grace` seconds at most."""
        self._file = (folder / LOCK_NAME).open("a+")
        deadline = time.monotonic() + grace
        while not self._take():
            if wait:
                wait()
                fcntl.flock(self._file, fcntl.LOCK_EX)
                return
            if time.monotonic() >= deadline:
                self._file.close()
                raise UserError(f"{folder} is in use by another process; wait for it, or choose another place")
            time.sleep(0.05)

    def _take(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            self._file.close()
            raise
        return True

    def release(self) -> None:
        self._file.close()
