"""Files at https:// and s3:// URLs, read as streams that resume after a broken connection."""

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

_ATTEMPTS = 8  # about a minute in total
_PAUSE = 0.5  # seconds before the second attempt, doubled for each further one
_TIMEOUT = 60  # seconds without data
_BROKEN = (OSError, http.client.HTTPException)


def is_remote(place: str) -> bool:
    """Whether it is a URL rather than a path."""
    return place.startswith(("https://", "http://", "s3://"))


def join(place: str, *names: str) -> str:
    """Return the URL of a file below another URL."""
    return "/".join([place.rstrip("/"), *map(urllib.parse.quote, names)])


def redacted(place: str) -> str:
    """Return a URL without its secrets: the password, or the signature of a presigned URL."""
    try:
        parts = urllib.parse.urlsplit(place)
    except ValueError:
        return place.partition("?")[0]
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def refuse_password(what: str, place: str) -> None:
    """Raise if a URL contains a password: URLs appear in command lines, which other users can read."""
    if "@" in place.partition("://")[2].partition("/")[0]:
        raise UserError(
            "password-in-url",
            f"{what} {redacted(place)} contains a password, which other users could see. Remove it from the URL. "
            "Set the keys for s3:// in AWS_* variables.",
            url=redacted(place),
        )


@contextlib.contextmanager
def opened(place: str, offset: int = 0) -> Iterator[IO[bytes]]:
    """Open a remote file as a stream of bytes from `offset` on."""
    raw = _S3(place, offset) if place.startswith("s3://") else _Http(place, offset)
    with raw, io.BufferedReader(raw, 1 << 20) as stream:
        yield stream


def size(place: str) -> int:
    """Return the size of a remote file in bytes."""
    with opened(place) as stream:
        return int(stream.raw.size)  # type: ignore[attr-defined]


class _Http(io.RawIOBase):
    def __init__(self, place: str, offset: int):
        refuse_password("URL", place)
        self._place, self._position, self._failures = place, offset, 0
        self.size = 0
        self._version: str | None = None
        self._response: Any = self._connect()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                count: int = self._response.readinto(buffer)
                if count or self._position >= self.size:
                    self._position += count
                    self._failures = 0
                    return count
                raise http.client.IncompleteRead(b"")
            except _BROKEN as error:
                self._response.close()
                self._wait(error)
                self._response = self._connect()

    def close(self) -> None:
        if hasattr(self, "_response"):
            self._response.close()
        super().close()

    def _connect(self) -> Any:
        while True:
            try:
                request = urllib.request.Request(self._place)
                if self._position:
                    request.add_header("Range", f"bytes={self._position}-")
                response = urllib.request.urlopen(request, timeout=_TIMEOUT)
                version = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
                if self._version not in (None, version):
                    message = f"{redacted(self._place)} changed while it was read. Run the command again."
                    raise UserError("url-changed", message, url=redacted(self._place))
                self._version = version
                self.size = int(response.headers.get("Content-Length") or 0)
                if response.status == 206:
                    self.size += self._position
                else:  # a server without range requests sends the whole file
                    _skip(response, self._position)
                return response
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code not in (408, 429):
                    raise _unreadable(self._place, error) from None
                self._wait(error)
            except _BROKEN as error:
                self._wait(error)
            except ValueError as error:  # an invalid URL or header
                raise _unreadable(self._place, error) from None

    def _wait(self, error: Exception) -> None:
        """Wait before the next attempt. Raises after _ATTEMPTS failures in a row."""
        self._failures += 1
        if self._failures >= _ATTEMPTS:
            raise _unreadable(self._place, error) from None
        time.sleep(_PAUSE * 2 ** (self._failures - 1))


def _skip(response: Any, count: int) -> None:
    while count > 0 and (block := response.read(min(count, 1 << 20))):
        count -= len(block)


class _S3(io.RawIOBase):
    """Reads through obstore, which takes credentials, region and endpoint from AWS_* variables, and retries."""

    def __init__(self, place: str, offset: int):
        self._place = place
        try:
            import obstore
        except ImportError:
            message = f"reading {place} needs obstore, which is not installed. Run: pip install 'paceline[s3]'"
            raise UserError("missing-package", message, package="obstore") from None
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
        except Exception as error:  # obstore's exceptions have no other common base class
            raise _unreadable(self._place, error, "Check the URL and the AWS_* variables.") from None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        with self._errors():
            block = memoryview(self._file.read(len(view)))
        view[: len(block)] = block
        return len(block)


def _unreadable(place: str, error: Exception, fix: str = "Check the URL and the network.") -> UserError:
    reason = printable(" ".join(str(error).split())[:200]) or type(error).__name__
    return UserError("url-unreadable", f"{redacted(place)} cannot be read ({reason}). {fix}", url=redacted(place))
