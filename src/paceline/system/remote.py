"""Files behind https:// and s3:// addresses, read forwards; a broken connection is taken up where it broke."""

import contextlib
import http.client
import io
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import IO, Any

from paceline.errors import UserError
from paceline.system.files import printable

_ATTEMPTS = 8  # a minute in all
_PAUSE = 0.5  # seconds before the second attempt; each further one waits twice as long
_SECONDS = 60  # without a byte before a connection counts as broken
_BROKEN = (OSError, http.client.HTTPException)


def is_remote(place: str) -> bool:
    return place.startswith(("https://", "http://", "s3://"))


def join(place: str, *names: str) -> str:
    return "/".join([place.rstrip("/"), *map(urllib.parse.quote, names)])


def shown(place: str) -> str:
    """An address without what may be secret: a password, or the signature of a presigned one."""
    try:
        parts = urllib.parse.urlsplit(place)
    except ValueError:
        return place.partition("?")[0]
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def refuse_password(what: str, place: str) -> None:
    """An address becomes part of command lines, which others can read."""
    if "@" in place.partition("://")[2].partition("/")[0]:
        raise UserError(f"{what} {shown(place)}: addresses cannot hold a password; keys of s3:// are AWS_* variables")


@contextlib.contextmanager
def opened(place: str, offset: int = 0) -> Iterator[IO[bytes]]:
    """A remote file as a stream of bytes from `offset` on."""
    raw = _S3(place, offset) if place.startswith("s3://") else _Http(place, offset)
    with raw, io.BufferedReader(raw, 1 << 20) as stream:
        yield stream


def size(place: str) -> int:
    """In bytes."""
    with opened(place) as stream:
        return int(stream.raw.size)  # type: ignore[attr-defined]


class _Http(io.RawIOBase):
    def __init__(self, place: str, offset: int):
        refuse_password("address", place)
        self._place, self._position, self._failures = place, offset, 0
        self.size = 0
        self._version: str | None = None
        self._answer: Any = self._ask()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                count: int = self._answer.readinto(buffer)
                if count or self._position >= self.size:
                    self._position += count
                    self._failures = 0
                    return count
                raise http.client.IncompleteRead(b"")
            except _BROKEN as error:
                self._answer.close()
                self._wait(error)
                self._answer = self._ask()

    def close(self) -> None:
        if hasattr(self, "_answer"):
            self._answer.close()
        super().close()

    def _ask(self) -> Any:
        while True:
            try:
                request = urllib.request.Request(self._place)
                if self._position:
                    request.add_header("Range", f"bytes={self._position}-")
                answer = urllib.request.urlopen(request, timeout=_SECONDS)
                version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
                if self._version not in (None, version):
                    raise _unreadable(self._place, ValueError("it changed while it was read"), "start again")
                self._version = version
                self.size = int(answer.headers.get("Content-Length") or 0)
                if answer.status == 206:
                    self.size += self._position
                else:  # a server that knows no ranges sends all of it
                    _skip(answer, self._position)
                return answer
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code not in (408, 429):
                    raise _unreadable(self._place, error) from None
                self._wait(error)
            except _BROKEN as error:
                self._wait(error)
            except ValueError as error:  # an address or a header that makes no sense
                raise _unreadable(self._place, error) from None

    def _wait(self, error: Exception) -> None:
        """Before the next attempt; after a few in a row the file counts as unreadable."""
        self._failures += 1
        if self._failures >= _ATTEMPTS:
            raise _unreadable(self._place, error) from None
        time.sleep(_PAUSE * 2 ** (self._failures - 1))


def _skip(answer: Any, count: int) -> None:
    while count > 0 and (block := answer.read(min(count, 1 << 20))):
        count -= len(block)


class _S3(io.RawIOBase):
    """Through obstore, which finds credentials, region and endpoint in the AWS_* variables and repeats what fails."""

    def __init__(self, place: str, offset: int):
        self._place = place
        try:
            import obstore
        except ImportError:
            raise UserError(f"{place}: reading from S3 needs obstore; pip install 'paceline[s3]'") from None
        bucket, _, key = place.removeprefix("s3://").partition("/")
        with self._errors():
            store = obstore.store.from_url(f"s3://{bucket}", client_options={"allow_http": True})
            self._file = obstore.open_reader(store, key, buffer_size=8 << 20)
            self.size = int(self._file.size)
            self._file.seek(offset)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # obstore's own exceptions have no common base but this
            raise _unreadable(self._place, error, "check the address and the AWS_* variables") from None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        with self._errors():
            block = memoryview(self._file.read(len(view)))
        view[: len(block)] = block
        return len(block)


def _unreadable(place: str, error: Exception, cure: str = "check the address and the network") -> UserError:
    reason = printable(" ".join(str(error).split())[:200]) or type(error).__name__
    return UserError(f"{shown(place)} cannot be read ({reason}); {cure}")
