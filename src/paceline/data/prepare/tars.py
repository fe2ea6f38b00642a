"""Tar archives, read as streams and never extracted: a member is only a name and bytes."""

import contextlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import UserError
from paceline.system.files import size_text

_MAX_HEADER = 1 << 14  # bytes of a long name or pax header, which tarfile loads into memory
_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_ATTRIBUTES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


class _Header(tarfile.TarInfo):
    """Rejects headers that claim to be large before tarfile allocates memory for them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in _NAMES + _ATTRIBUTES and header.size > _MAX_HEADER):
            raise tarfile.ReadError(f"a header of {header.size:,} bytes is larger than {_MAX_HEADER:,}")
        return header


@dataclass(frozen=True)
class Member:
    """A file in a tar. Read it before advancing to the next one."""

    name: str
    """Without folders, so that path traversal is impossible."""
    size: int
    file: IO[bytes]
    place: str
    fix: str

    def read(self, limit: int) -> bytes:
        """Return the content. Raises if it is larger than `limit` bytes."""
        if self.size > limit:
            message = f"{self.place}: {self.name} has {size_text(self.size)}, more than {size_text(limit)}. {self.fix}"
            raise UserError("archive-member-too-large", message, path=self.place, member=self.name)
        with _complete(self.place, self.fix):
            return self.file.read()


def archive(stream: IO[bytes], place: str, fix: str = "Download it again.") -> Iterator[Member]:
    """Yield the files of a tar. Folders, links and devices are skipped. `fix` ends the error messages."""
    # mode r| cannot seek, so that negative sizes cannot cause an endless loop
    with _complete(place, fix), tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Header) as tar:
        while member := tar.next():
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all of them in memory
            if member.issparse():
                raise tarfile.ReadError(f"{Path(member.name).name} is a sparse file, which is not supported")
            if member.isfile():
                file = tar.extractfile(member)
                assert file is not None
                yield Member(Path(member.name).name, member.size, file, place, fix)


@contextlib.contextmanager
def _complete(place: str, fix: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
        # tarfile raises all of these on crafted headers
        reason = " ".join(str(error).split())[:100]
        message = f"{place} is not a complete tar archive ({reason}). {fix}"
        raise UserError("archive-corrupt", message, path=place) from None
