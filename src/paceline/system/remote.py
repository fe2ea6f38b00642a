"""Files at https:// and s3:// URLs: downloads as streams that resume after a broken connection, and uploads."""

import contextlib
import hashlib
import http.client
import io
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from paceline.errors import UserError
from paceline.system.files import printable
from paceline.system.packages import needs_package

_ATTEMPTS = 8  # about a minute in total
_PAUSE = 0.5  # seconds before the second attempt, doubled for each further one
_TIMEOUT = 30  # seconds without data
_BROKEN = (OSError, http.client.HTTPException)
_BLOCK = 1 << 20  # bytes between two reports of progress
_PART = 8 << 20  # bytes per request to an object store; larger files are uploaded in several parts
_PARALLEL_PARTS = 4


def is_remote(place: str) -> bool:
    """Whether it is a URL rather than a path."""
    return place.startswith(("https://", "http://", "s3://"))


def _is_encoded(place: str) -> bool:
    """Whether names in a URL are percent-encoded. Keys of object stores are not, as in the AWS CLI."""
    return place.startswith(("https://", "http://"))


def _bucket_and_key(place: str) -> tuple[str, str]:
    """Return the URL of the bucket, and the key in it."""
    scheme, separator, rest = place.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}{separator}{bucket}", key


def join(place: str, *names: str) -> str:
    """Return the URL of a file below another URL."""
    return "/".join([place.rstrip("/"), *(map(urllib.parse.quote, names) if _is_encoded(place) else names)])


def last_name(place: str) -> str:
    """Return the name of the file or folder at a URL."""
    name = place.rstrip("/").rpartition("/")[2]
    return urllib.parse.unquote(name) if _is_encoded(place) else name


def redacted(place: str) -> str:
    """Return a URL without its secrets: the password, or the signature of a presigned URL."""
    if not _is_encoded(place):  # ? and # belong to the key
        return re.sub("://[^/]*@", "://", place)
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
def opened(place: str, offset: int = 0, attempts: int = _ATTEMPTS) -> Iterator[IO[bytes]]:
    """Open a remote file as a stream of bytes from `offset` on; `attempts` without any data in between are an error."""
    if place.startswith("s3://"):
        bucket, key = _bucket_and_key(place)
        with _readable(place):
            store = ObjectStore(bucket)
        stream = store.opened(key, offset)
    else:
        stream = io.BufferedReader(_Http(place, offset, attempts), _BLOCK)
    with stream:
        yield stream


def size(place: str) -> int:
    """Return the size of a remote file in bytes."""
    with opened(place) as stream:
        return size_of(stream)


def size_of(stream: IO[bytes]) -> int:
    """Return the size of an opened remote file in bytes, 0 if the server does not tell."""
    return int(stream.raw.size)  # type: ignore[attr-defined]


def save(
    stream: IO[bytes], file: IO[bytes], limit: int | None = None, advance: Callable[[int], object] = lambda _: None
) -> int:
    """Write a stream to a file, at most `limit` bytes, and return their number. `advance` gets the bytes per block."""
    count = 0
    while block := stream.read(_BLOCK if limit is None else min(_BLOCK, limit - count)):
        file.write(block)
        advance(len(block))
        count += len(block)
    return count


# not obstore's HTTPStore: it rejects servers without byte ranges or file sizes, does not resume without an ETag,
# and its messages contain the signatures of presigned URLs
class _Http(io.RawIOBase):
    def __init__(self, place: str, offset: int, attempts: int):
        refuse_password("URL", place)
        self._place, self._position, self._attempts, self._failures = place, offset, attempts, 0
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
        """Wait before the next attempt. Raises after too many failures in a row."""
        self._failures += 1
        if self._failures >= self._attempts:
            raise _unreadable(self._place, error) from None
        time.sleep(_PAUSE * 2 ** (self._failures - 1))


def _skip(response: Any, count: int) -> None:
    while count > 0 and (block := response.read(min(count, 1 << 20))):
        count -= len(block)


class ObjectStore:
    """A folder of an object store. obstore takes keys, region and endpoint from AWS_* variables, and retries."""

    def __init__(self, place: str, retries: int = 10):
        with needs_package("obstore", redacted(place), extra="s3"):
            import obstore
        self._place, self._obstore = place.rstrip("/"), obstore
        bucket, key = _bucket_and_key(self._place)
        self._store = obstore.store.from_url(  # it decodes the key
            self._place if _is_encoded(place) else f"{bucket}/{urllib.parse.quote(key)}",
            client_options={"allow_http": True},
            retry_config={"max_retries": retries},
        )
        self._tags_are_checksums = True

    def files(self) -> dict[str, int]:
        """Return the sizes of all files by name."""
        return {entry["path"]: entry["size"] for batch in self._obstore.list(self._store) for entry in batch}

    def opened(self, name: str, offset: int = 0) -> IO[bytes]:
        """Open a file as a stream of bytes from `offset` on."""
        place = f"{self._place}/{name}"
        with _readable(place):
            file = self._obstore.open_reader(self._store, name, buffer_size=_PART)
            file.seek(offset)
        return io.BufferedReader(_Object(file, place), _BLOCK)

    def upload(self, name: str, path: Path) -> None:
        """Upload a file part by part, and raise OSError if the store then has something else."""
        digests: list[bytes] = []
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size  # what is appended meanwhile belongs to the next upload
            parts = _parts(file, length, digests)
            content = parts if length > _PART else b"".join(parts)
            answer = self._obstore.put(self._store, name, content, chunk_size=_PART, max_concurrency=_PARALLEL_PARTS)
        self._verify(name, length, _tag(digests), str(answer["e_tag"] or "").strip('"'))

    def _verify(self, name: str, length: int, expected: str, tag: str) -> None:
        """Compare an upload with the checksum that the store returns, or with its size if it returns none."""
        if not self._tags_are_checksums or not tag:
            if self._obstore.head(self._store, name)["size"] != length:
                raise OSError(f"{name} is truncated in the store")
        elif tag != expected:  # in encrypted buckets it is not a checksum
            digests: list[bytes] = []
            with self.opened(name) as stream:
                for _ in _parts(stream, length + 1, digests):
                    pass
            if _tag(digests) != expected:
                raise OSError(f"{name} is corrupt in the store")
            self._tags_are_checksums = False

    def copy(self, name: str, target: str) -> None:
        """Copy a file within the store."""
        self._obstore.copy(self._store, name, target)

    def delete(self, name: str) -> None:
        """Delete a file."""
        self._obstore.delete(self._store, name)


def _parts(stream: IO[bytes], length: int, digests: list[bytes]) -> Iterator[bytes]:
    """Yield up to `length` bytes in parts, and append their checksums to `digests`."""
    while part := stream.read(min(_PART, length)):
        digests.append(hashlib.md5(part, usedforsecurity=False).digest())
        length -= len(part)
        yield part


def _tag(digests: list[bytes]) -> str:
    """Return the ETag that S3 gives to a file: its MD5, or the MD5 of the MD5s of several parts."""
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f"{whole}-{len(digests)}" if len(digests) > 1 else "".join(digest.hex() for digest in digests) or whole


class _Object(io.RawIOBase):
    """Adapts obstore's reader to io."""

    def __init__(self, file: Any, place: str):
        self._file, self._place, self.size = file, place, int(file.size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        with _readable(self._place):
            block = memoryview(self._file.read(len(view)))
            if not block and self._file.tell() < self.size:
                raise OSError("it changed while it was read")
        view[: len(block)] = block
        return len(block)


@contextlib.contextmanager
def _readable(place: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # obstore's exceptions have no other common base
        raise _unreadable(place, error, "Check the URL and the AWS_* variables.") from None


def _unreadable(place: str, error: Exception, fix: str = "Check the URL and the network.") -> UserError:
    reason = printable(" ".join(str(error).split())[:200]) or type(error).__name__
    message = f"{redacted(place)} cannot be read ({reason}). {fix}"
    return UserError("url-unreadable", message, url=redacted(place), reason=reason)
