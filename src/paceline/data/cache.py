"""Prepared data at an https:// or s3:// URL, downloaded to a local cache once."""

import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.data.description import DESCRIPTION, MAX_DESCRIPTION_BYTES
from paceline.data.shards import Dataset
from paceline.data.splits import SPLITS
from paceline.errors import UserError
from paceline.system import remote
from paceline.system.files import FolderLock, make_folder, replacing, sha256, size_text, sync
from paceline.system.logs import log
from paceline.system.progress_bar import transfer_bar
from paceline.system.untrusted import leads_out

_ATTEMPTS = 3
_STREAMS = 8  # parallel downloads; one connection rarely saturates the network


def cache_folder() -> Path:
    """Return the folder for downloaded data: $PACELINE_CACHE (best on a fast local disk) or the user's cache."""
    if place := os.environ.get("PACELINE_CACHE"):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def described(place: str) -> Dataset:
    """Return the prepared data of a folder or a URL, of which only dataset.json is read."""
    if not remote.is_remote(place):
        return Dataset.open(Path(place))
    return Dataset.parse(_description(place), place)


def _description(place: str) -> bytes:
    with remote.opened(remote.join(place, DESCRIPTION)) as stream:
        return stream.read(MAX_DESCRIPTION_BYTES + 1)


def local(place: str, variant: str = "", splits: Collection[str] = SPLITS) -> Path:
    """Return the local folder of prepared data: `place` itself, or a verified copy of a URL.

    The copy has these splits of one variant, and what was downloaded before. Processes on one node share it: one of
    them downloads while the others wait. An interrupted download resumes.
    """
    if not remote.is_remote(place):
        return Path(place)
    content = _description(place)
    dataset = Dataset.parse(content, place)
    chosen = dataset.choose(variant)
    folder = cache_folder() / f"{dataset.name}-{dataset.fingerprint}"
    files = list(_files(dataset, place, folder, chosen, splits))
    if _is_described(folder, dataset) and all(file.is_here for file in files):
        return folder  # without writing: the disk may be read-only
    try:
        make_folder(folder)
        for parent in {file.path.parent for file in files}:
            if leads_out(folder, parent):
                message = f"{parent} is a symbolic link to outside of {folder}. Remove it, or set PACELINE_CACHE."
                raise UserError("link-outside-folder", message, path=parent)
        lock = FolderLock(folder, lambda: log.info("waiting for another process to download %s", place))
        try:
            _fetch([file for file in files if not file.is_here], f"{chosen} of {place}", folder)
            with replacing(folder / DESCRIPTION) as file:
                file.write(content)
        finally:
            lock.release()
    except OSError as error:
        message = f"{folder} is not writable ({error}). Set PACELINE_CACHE to another folder."
        raise UserError("cache-not-writable", message, path=folder) from None
    return folder


@dataclass(frozen=True)
class _RemoteFile:
    url: str
    path: Path
    bytes: int
    sha256: str

    @property
    def part(self) -> Path:
        return self.path.with_name(f".{self.path.name}.part")

    @property
    def is_here(self) -> bool:
        """Whether it is downloaded. A file is renamed to `path` only after its checksum matched."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == self.bytes


def _files(dataset: Dataset, place: str, folder: Path, variant: str, splits: Collection[str]) -> Iterator[_RemoteFile]:
    for split, content in dataset.description["variants"][variant]["splits"].items():
        for entry in [*content["lists"], *content["shards"]] if split in splits else ():
            name = entry["file"]
            path = folder / variant / split / name
            yield _RemoteFile(remote.join(place, variant, split, name), path, entry["bytes"], entry["sha256"])


def _fetch(missing: list[_RemoteFile], what: str, folder: Path) -> None:
    if not missing:
        return
    _check_disk_space(missing, folder)
    log.info("downloading %s to %s", what, folder)
    stop = threading.Event()
    pool = ThreadPoolExecutor(_STREAMS, thread_name_prefix="download")
    with transfer_bar() as bar:
        task = bar.add_task("downloading", total=sum(file.bytes for file in missing))

        def advance(count: int) -> None:
            bar.advance(task, count)
            if stop.is_set():
                raise InterruptedError("another download failed")

        try:
            for future in [pool.submit(_download, file, advance) for file in missing]:
                future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _download(file: _RemoteFile, advance: Callable[[int], None]) -> None:
    """Resume a partial download. If the checksum does not match, download once more from the start."""
    make_folder(file.path.parent)
    for attempt in range(_ATTEMPTS):
        found = file.part.stat().st_size if file.part.exists() else 0
        if found > file.bytes:
            file.part.unlink()
            found = 0
        advance(found)
        found += _append(file, found, advance)
        if found == file.bytes and sha256(file.part) == file.sha256:
            file.part.replace(file.path)
            sync(file.path.parent)
            return
        advance(-found)
        if found == file.bytes:  # a shorter file was truncated; the next attempt resumes it
            file.part.unlink()
            if attempt:
                break
    raise UserError(
        "checksum-mismatch",
        f"{file.url} does not match its checksum in {DESCRIPTION}. Upload the prepared data again.",
        url=file.url,
    )


def _append(file: _RemoteFile, begin: int, advance: Callable[[int], None]) -> int:
    """Download from byte `begin` up to the expected size. Returns the number of bytes received."""
    fetched = 0
    with open(file.part, "ab", opener=_open_no_follow) as out:
        if begin < file.bytes:
            with remote.opened(file.url, begin) as stream:
                fetched = remote.save(stream, out, file.bytes - begin, advance)
        out.flush()
        os.fsync(out.fileno())
    return fetched


def _open_no_follow(path: str, flags: int) -> int:
    """Open for writing without following links or blocking on a pipe: other users may write to a shared cache."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _check_disk_space(missing: list[_RemoteFile], folder: Path) -> None:
    needed = sum(file.bytes - (file.part.stat().st_size if file.part.exists() else 0) for file in missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            "disk-full",
            f"{folder} has {size_text(free)} free, but the download needs {size_text(needed)}. "
            "Set PACELINE_CACHE to a folder on another disk.",
            path=folder,
        )


def _is_described(folder: Path, dataset: Dataset) -> bool:
    try:
        return Dataset.open(folder).fingerprint == dataset.fingerprint
    except UserError:
        return False
