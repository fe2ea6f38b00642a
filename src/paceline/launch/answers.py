"""What other machines send is read within bounds: of time, of memory, and of the folder that it is unpacked to."""

import os
import select
import selectors
import shutil
import subprocess
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

_MOST_FILES = 100_000
_LONGEST_HEADER = 1 << 16  # bytes; tarfile reads names into memory, whatever size they claim to have


class TooMuch(Exception):
    """An answer that does not end."""


def communicate(process: subprocess.Popen[bytes], data: bytes, timeout: float, most: int) -> tuple[bytes, bytes]:
    """As that of Popen: what a process prints, but at most so many bytes; then, and after `timeout`, it still runs."""
    given, out, errors = process.stdin, process.stdout, process.stderr
    assert given
    assert out
    assert errors
    deadline, left = time.monotonic() + timeout, memoryview(data)
    told: dict[IO[bytes], bytearray] = {out: bytearray(), errors: bytearray()}
    with selectors.DefaultSelector() as ready:
        ready.register(given, selectors.EVENT_WRITE)
        for stream in told:
            ready.register(stream, selectors.EVENT_READ)
        while ready.get_map():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(process.args, timeout)
            for key, _ in ready.select(max(0.0, deadline - time.monotonic())):
                stream = next(own for own in (given, out, errors) if own is key.fileobj)
                if stream is given:
                    left = _written(stream, left)
                    is_done = not left
                else:
                    told[stream] += (block := os.read(key.fd, 1 << 16))
                    is_done = not block
                    if len(told[stream]) > most:
                        raise TooMuch
                if is_done:
                    ready.unregister(stream)
                    stream.close()
    process.wait(max(0.0, deadline - time.monotonic()))
    return bytes(told[out]), bytes(told[errors])


def _written(stream: IO[bytes], left: memoryview) -> memoryview:
    """What is left after one block of a size that a pipe takes without waiting."""
    try:
        return left[os.write(stream.fileno(), left[: select.PIPE_BUF]) :]
    except BrokenPipeError:  # its exit status will tell why
        return left[:0]


class _Entry(tarfile.TarInfo):
    """Of an archive that somebody else made: its headers are short, and no file of it has holes."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        names = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type == tarfile.XGLTYPE or (self.type in names and self.size > _LONGEST_HEADER):
            raise tarfile.ExtractError(f"a header of {self.size} bytes")
        return super()._proc_member(tar)  # type: ignore[misc]

    def _refused(self, *_: Any) -> NoReturn:
        raise tarfile.ExtractError(f"{self.name!r} is a sparse file")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refused


def unpack(stream: IO[bytes], names: Sequence[str], target: Path) -> None:
    """Files and folders of a tar archive that are below these names, into an empty folder; links and devices are left
    out, so that no name leads out of it. Whatever is wrong with the archive is a tarfile.TarError or an OSError.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Entry) as tar:
            for number, entry in enumerate(tar):
                path = PurePosixPath(entry.name)
                if number >= _MOST_FILES or ".." in path.parts or not any(map(path.is_relative_to, names)):
                    raise tarfile.ExtractError(f"{entry.name[:100]!r} was not asked for")
                if entry.size > shutil.disk_usage(target).free:
                    raise tarfile.ExtractError(f"{entry.name[:100]!r} of {entry.size} bytes has no room on this disk")
                if entry.isdir():
                    (target / path).mkdir(parents=True, exist_ok=True)
                elif content := tar.extractfile(entry) if entry.isfile() else None:
                    (target / path).parent.mkdir(parents=True, exist_ok=True)
                    with (target / path).open("wb") as file:
                        shutil.copyfileobj(content, file)
                    os.utime(target / path, (entry.mtime, entry.mtime))
    except (ValueError, LookupError, ArithmeticError, RecursionError, EOFError) as error:
        raise tarfile.ReadError(f"not a tar archive ({type(error).__name__})") from None
