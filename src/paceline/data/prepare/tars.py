"""Tar archives, read forwards and never unpacked: a member is a name and bytes, whatever it claims to be."""

import contextlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import UserError
from paceline.system.files import size_text

_MAX_HEADER = 1 << 14  # bytes of a long name or of attributes; tarfile holds them in memory, and searches some slowly
_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_ATTRIBUTES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


class _Header(tarfile.TarInfo):
    """Refuses headers that would be large in memory, as soon as they say so."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in _NAMES + _ATTRIBUTES and header.size > _MAX_HEADER):
            raise tarfile.ReadError(f"a header of {header.size:,} bytes, where {_MAX_HEADER:,} are the most")
        return header


@dataclass(frozen=True)
class Member:
    """A file in a tar, to be read before the next one is asked for."""

    name: str
    """Without folders, so that it cannot lead out of one."""
    size: int
    file: IO[bytes]
    place: str
    fix: str

    def read(self, limit: int) -> bytes:
        """All of it, if that is no more than so many bytes."""
        if self.size > limit:
            size = f"{size_text(self.size)}, more than {size_text(limit)}"
            raise UserError(f"{self.place}: {self.name} has {size}; {self.fix}")
        with _complete(self.place, self.fix):
            return self.file.read()


def archive(stream: IO[bytes], place: str, fix: str = "fetch it again") -> Iterator[Member]:
    """Files of a tar, read forwards only; folders, links and devices are passed over."""
    # as a stream: a size below zero cannot lead back and around in a circle
    with _complete(place, fix), tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Header) as tar:
        while member := tar.next():
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep a million of them
            if member.issparse():
                raise tarfile.ReadError(f"{Path(member.name).name} is a sparse file, whose size is only a claim")
            if member.isfile():
                file = tar.extractfile(member)
                assert file is not None
                yield Member(Path(member.name).name, member.size, file, place, fix)


@contextlib.contextmanager
def _complete(place: str, fix: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
        # tarfile stumbles over crafted headers in many ways
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{place} is not a complete tar archive ({reason}); {fix}") from None
