"""Atomic and durable file writes, error messages for disks that refuse them, folder locks, and printable text."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
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

# code and fix of each error
_DISK_ERRORS: dict[int | None, tuple[str, str]] = {
    errno.ENOSPC: ("disk-full", "free some space"),
    errno.EDQUOT: ("disk-quota-exceeded", "free some space, or raise the quota"),
    errno.EFBIG: ("file-size-limit", "raise the limit on file sizes (ulimit -f)"),
    errno.EROFS: ("disk-read-only", "mount it read-write, or use another disk"),
    errno.EIO: ("disk-failure", "the disk is failing: see dmesg, and use another disk"),
}
_FILE_ERROR = ("file-error", "check the path and its permissions")


def is_disk_error(error: OSError) -> bool:
    """Whether the disk refuses writes because it is full, read-only or failing."""
    return error.errno in _DISK_ERRORS


def disk_error_code(error: OSError) -> str:
    """Return the code for a UserError about an OSError: "disk-full" and the like, otherwise "file-error"."""
    return _DISK_ERRORS.get(error.errno, _FILE_ERROR)[0]


def disk_error(error: OSError, needed: int = 0) -> str:
    """Return a message with the file that cannot be written, the reason, the free space and the fix."""
    where = f"{error.filename}: " if error.filename else ""
    room = ""
    if error.errno == errno.ENOSPC and error.filename:
        folder = next(path for path in Path(error.filename).absolute().parents if path.exists())
        room = f" ({size_text(shutil.disk_usage(folder).free)} free{f', {size_text(needed)} needed' if needed else ''})"
    fix = _DISK_ERRORS.get(error.errno, _FILE_ERROR)[1]
    return f"{where}{error.strerror or error}{room}; {fix}"


@contextmanager
def naming(path: Path, *temporary: Path) -> Iterator[None]:
    """Let errors name the file that the user knows, instead of none or a temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, *map(str, temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents, so that they survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def private_folder(folder: Path) -> None:
    """Create a folder that only its user can read; refuse one that another user owns or can write to."""
    make_folder(folder, 0o700)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise UserError(
            "folder-not-owned",
            f"{folder} belongs to another user (UID {status.st_uid}). Remove it, or run: chown {os.geteuid()} {folder}",
            path=folder,
        )
    if status.st_mode & 0o022:
        raise UserError(
            "folder-writable-by-others",
            f"{folder} is writable by other users ({stat.filemode(status.st_mode)}). Run: chmod go-w {folder}",
            path=folder,
        )


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file to write to, which replaces `path` once everything is on disk."""
    # unpredictable, because an untrusted folder may contain a link with that name
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    only_new = os.O_EXCL | os.O_NOFOLLOW
    try:
        with naming(path, temporary):
            with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags | only_new, mode)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        sync(path.parent)
    finally:
        with suppress(OSError):  # keep the first error
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a text file atomically."""
    with replacing(path, mode) as file:
        file.write(text.encode(errors="backslashreplace"))  # file names may contain invalid Unicode


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", mode)


class GrowingFile:
    """A file to append to. Content that does not fit on the disk is kept in memory, and written before the next."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = bytearray()
        self._lock = threading.Lock()

    def write(self, content: bytes) -> None:
        """Append content; an OSError if some of it does not fit."""
        with self._lock, naming(self._path):
            self._unwritten += content
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]

    def flush(self) -> None:
        """Write what is kept in memory."""
        self.write(b"")

    def close(self) -> None:
        try:
            if not self._file.closed:
                self.flush()
        finally:
            self._file.close()


def sha256(path: Path, advance: Callable[[int], object] = lambda _: None) -> str:
    """Return the checksum of a file in hexadecimal; `advance` is called with the bytes of each block."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def size_text(count: int) -> str:
    """Return a number of bytes in kB, MB or GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def suppress_os_errors(action: Callable[[], None]) -> Callable[[], None]:
    """Return the action without its OSErrors: a full disk does not matter once everything important is written."""

    def attempt() -> None:
        with suppress(OSError):
            action()

    return attempt


def is_file_name(text: str) -> bool:
    """Return whether a text is the printable name of a file or folder, without a path."""
    return Path(text).name == text and text.isprintable() and text not in ("", ".", "..")


def printable(text: str) -> str:
    """Return text that is safe to print: control characters, e.g. of file names, are escaped."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def printable_lines(text: str) -> str:
    """Return text with control characters escaped, except line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def say(text: str, error: bool = False) -> None:
    """Print text that may contain untrusted parts."""
    print(printable_lines(text), file=sys.stderr if error else sys.stdout, flush=True)


def printable_tree(value: Any) -> Any:
    """Return a JSON or YAML value with all strings made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_tree(key): printable_tree(item) for key, item in value.items()}
    return [printable_tree(item) for item in value] if isinstance(value, list) else value


LOCK_NAME = ".lock"


def is_locked(folder: Path) -> bool:
    """Whether a process on this host holds the folder's lock. Checks without taking the lock.

    Compares only the inode, because layered file systems report different device numbers in /proc/locks and stat.
    """
    try:
        inode = (folder / LOCK_NAME).stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any("FLOCK" in line and f":{inode} " in line for line in lines)


class FolderLock:
    """Allows one process at a time to write to a folder. The kernel releases the lock however its holder ends."""

    def __init__(
        self, folder: Path, wait: Callable[[], object] | None = None, grace: float = 0.0, name: str = LOCK_NAME
    ):
        """Wait for the lock: without limit if `wait` is given, which is called first, otherwise for `grace` seconds.

        `name`: another lock in the folder.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(folder / name, flags, 0o666), "a+")
        deadline = time.monotonic() + grace
        while not self._acquire():
            if wait:
                wait()
                fcntl.flock(self._file, fcntl.LOCK_EX)
                return
            if time.monotonic() >= deadline:
                self._file.close()
                raise UserError(
                    "folder-in-use",
                    f"{folder} is in use by another process. Wait until it ends, or choose another folder.",
                    path=folder,
                )
            time.sleep(0.05)

    def _acquire(self) -> bool:
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
