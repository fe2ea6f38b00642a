"""What other machines send is read within bounds: of time, of memory, and of the folder that it is unpacked to."""

import os
import select
import selectors
import shutil
import subprocess
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
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
    """Files and folders of a tar archive that are below these names; links and devices are left out.

    Whatever is wrong with the archive is a tarfile.TarError or an OSError.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Entry) as tar:
            for number, entry in enumerate(tar):
                if not any(f"{entry.name}/".startswith(f"{name}/") for name in names) or number >= _MOST_FILES:
                    raise tarfile.ExtractError(f"{entry.name[:100]!r} was not asked for")
                if entry.size > shutil.disk_usage(target).free:
                    raise tarfile.ExtractError(f"{entry.name[:100]!r} of {entry.size} bytes has no room on this disk")
                if entry.isfile() or entry.isdir():
                    tar.extract(entry, target, filter=_own_mode)
    except (ValueError, LookupError, ArithmeticError, RecursionError, EOFError) as error:
        raise tarfile.ReadError(f"not a tar archive ({type(error).__name__})") from None


def _own_mode(entry: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
    """Nothing outside of the target, and who may read it is this user's umask to say."""
    safe = tarfile.data_filter(entry, target)
    return safe.replace(mode=None, deep=False) if safe else None  # type: ignore[arg-type]
