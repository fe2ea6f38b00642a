"""Read the output of other hosts within limits of time, memory and disk: it is untrusted."""

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

from paceline.system.files import printable

_MAX_FILES = 100_000
_MAX_LINE = 500  # characters of a line that is shown
_MAX_HEADER = 1 << 16  # bytes; tarfile reads a name into memory, whatever size the header claims


def shown(line: str) -> str:
    """Return untrusted text as one short printable line."""
    return printable(line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ...")


class OutputTooLarge(Exception):
    """A process printed more than the limit."""


def communicate(process: subprocess.Popen[bytes], data: bytes, timeout: float, limit: int) -> tuple[bytes, bytes]:
    """Like Popen.communicate, but raise OutputTooLarge above `limit` bytes per stream; the process then still runs."""
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin
    assert stdout
    assert stderr
    deadline, rest = time.monotonic() + timeout, memoryview(data)
    output: dict[IO[bytes], bytearray] = {stdout: bytearray(), stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        selector.register(stdin, selectors.EVENT_WRITE)
        for stream in output:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(process.args, timeout)
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                stream = next(one for one in (stdin, stdout, stderr) if one is key.fileobj)
                if stream is stdin:
                    rest = _write_block(stream, rest)
                    is_done = not rest
                else:
                    output[stream] += (block := os.read(key.fd, 1 << 16))
                    is_done = not block
                    if len(output[stream]) > limit:
                        raise OutputTooLarge
                if is_done:
                    selector.unregister(stream)
                    stream.close()
    process.wait(max(0.0, deadline - time.monotonic()))
    return bytes(output[stdout]), bytes(output[stderr])


def _write_block(stream: IO[bytes], data: memoryview) -> memoryview:
    """Write one block that a ready pipe takes without blocking; return the rest."""
    try:
        return data[os.write(stream.fileno(), data[: select.PIPE_BUF]) :]
    except BrokenPipeError:  # the exit status explains it
        return data[:0]


class _UntrustedTarInfo(tarfile.TarInfo):
    """An archive member whose headers must be short and which must not be sparse."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        names = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type == tarfile.XGLTYPE or (self.type in names and self.size > _MAX_HEADER):
            raise tarfile.ExtractError(f"the archive has a header of {self.size} bytes")
        return super()._proc_member(tar)  # type: ignore[misc]

    def _refuse_sparse(self, *_: Any) -> NoReturn:
        raise tarfile.ExtractError(f"{self.name!r} is a sparse file")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


def unpack(stream: IO[bytes], names: Sequence[str], target: Path) -> None:
    """Extract the files and folders of a tar archive that are below `names` into an empty folder.

    Links and devices are skipped, so that no path leads outside of it. An invalid archive raises tarfile.TarError or
    OSError.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_UntrustedTarInfo) as tar:
            for number, entry in enumerate(tar):
                path = PurePosixPath(entry.name)
                if number >= _MAX_FILES or ".." in path.parts or not any(map(path.is_relative_to, names)):
                    raise tarfile.ExtractError(f"{entry.name[:100]!r} was not requested")
                if entry.size > shutil.disk_usage(target).free:
                    raise tarfile.ExtractError(f"{entry.name[:100]!r} of {entry.size} bytes does not fit on this disk")
                if entry.isdir():
                    (target / path).mkdir(parents=True, exist_ok=True)
                elif content := tar.extractfile(entry) if entry.isfile() else None:
                    (target / path).parent.mkdir(parents=True, exist_ok=True)
                    with (target / path).open("wb") as file:
                        shutil.copyfileobj(content, file)
                    os.utime(target / path, (entry.mtime, entry.mtime))
    except (ValueError, LookupError, ArithmeticError, RecursionError, EOFError) as error:
        raise tarfile.ReadError(f"it is not a tar archive ({type(error).__name__})") from None
