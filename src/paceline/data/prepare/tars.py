"""Tar archives, read as streams and never extracted: a member is only a name and bytes."""

import contextlib
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import UserError
from paceline.system import remote
from paceline.system.files import printable, size_text
from paceline.system.logs import log
from paceline.system.wording import counted

_MAX_HEADER = 1 << 14  # bytes of a long name or pax header, which tarfile loads into memory
_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_warned: set[str] = set()
_ATTRIBUTES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


class _Header(tarfile.TarInfo):
    """Rejects headers that claim to be large before tarfile allocates memory for them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in _NAMES + _ATTRIBUTES and header.size > _MAX_HEADER):
            raise tarfile.ReadError(f"a header of {header.size:,} bytes is larger than {_MAX_HEADER:,}")
        return header

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> "_Header":
        """Read a header. tarfile itself takes a corrupt or missing header for the end of the archive."""
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            raise tarfile.ReadError("it has no end") from None
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"a header is corrupt: {error}") from None


@dataclass(frozen=True)
class Member:
    """A file in a tar. Read it before advancing to the next one."""

    name: str
    """Without folders, so that path traversal is impossible."""
    path: str
    """With folders, for messages and labels; never a path on this machine."""
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
    """Yield the files of a tar. Folders and devices are skipped, and links with a warning. `fix` ends errors."""
    links, first = 0, ""
    # mode r| cannot seek, so that negative sizes cannot cause an endless loop
    with _complete(place, fix), tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Header) as tar:
        while member := tar.next():
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all of them in memory
            if member.issparse():
                raise tarfile.ReadError(f"{Path(member.name).name} is a sparse file, which is not supported")
            if member.isfile():
                file = tar.extractfile(member)
                assert file is not None
                path = posixpath.normpath(f"/{member.name}")[1:]
                yield Member(Path(member.name).name, path, member.size, file, place, fix)
            elif member.islnk() or member.issym():
                links, first = links + 1, first or member.name
        while rest := tar.fileobj.read(1 << 16):
            if rest.strip(b"\0"):
                raise tarfile.ReadError("data follows its end, perhaps another archive")
    if links and place not in _warned:  # an archive is read several times
        _warned.add(place)
        message = "%s: skipped %s, e.g. %s. Create the archive with tar --dereference --hard-dereference."
        log.warning(message, place, counted(links, "link"), printable(first))


@contextlib.contextmanager
def _complete(place: str, fix: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
        # tarfile raises all of these on crafted headers
        reason = " ".join(str(error).split())[:100]
        message = f"{place} is not a complete tar archive ({reason}). {fix}"
        raise UserError("archive-corrupt", message, path=place) from None


@contextlib.contextmanager
def opened(place: str) -> Iterator[IO[bytes]]:
    """Open a local file, or an https:// or s3:// URL, as a stream of bytes."""
    if remote.is_remote(place):
        with remote.opened(place) as stream:
            yield stream
        return
    size_of(place)
    with Path(place).open("rb") as file:
        yield file


def size_of(place: str) -> int:
    """Return the size of a file or URL in bytes. Raises if it does not exist."""
    if remote.is_remote(place):
        return remote.size(place)
    path = Path(place)
    if not path.is_file():
        raise UserError("source-not-found", f"{place} does not exist. Check the path.", path=place)
    return path.stat().st_size
