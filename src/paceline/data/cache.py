"""Prepared data behind an https:// or s3:// address, brought to this machine once and used from there."""

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from paceline.data.description import DESCRIPTION, MOST_BYTES
from paceline.data.shards import Dataset
from paceline.errors import UserError
from paceline.system import remote
from paceline.system.files import FolderLock, make_folder, replacing, sha256, size_text, sync
from paceline.system.logs import console, log
from paceline.system.untrusted import leads_out

_ATTEMPTS = 3
_STREAMS = 8  # files at a time: one connection rarely fills a machine's link


def cache_folder() -> Path:
    """Where fetched data is kept: $PACELINE_CACHE, which a fast local disk suits, or the user's cache."""
    if place := os.environ.get("PACELINE_CACHE"):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def local(place: str, variant: str = "") -> Path:
    """The folder of prepared data: the place itself, or a verified copy of one variant of it and the whole description.

    Processes of one machine share the copy: one of them fetches, the others wait for it. What an interruption left
    behind is taken up where it ended.
    """
    if not remote.is_remote(place):
        return Path(place)
    with remote.opened(remote.join(place, DESCRIPTION)) as stream:
        content = stream.read(MOST_BYTES + 1)
    dataset = Dataset.parse(content, place)
    chosen = dataset.choose(variant)
    folder = cache_folder() / f"{dataset.name}-{dataset.fingerprint}"
    files = list(_files(dataset, place, folder, chosen))
    if _is_described(folder, dataset) and all(file.is_here for file in files):
        return folder  # which may be on a disk that is read-only here
    try:
        make_folder(folder)
        for parent in {file.path.parent for file in files}:
            if leads_out(folder, parent):
                raise UserError(f"{parent} is a symbolic link out of {folder}; remove it, or set PACELINE_CACHE")
        lock = FolderLock(folder, lambda: log.info("waiting for another process that fetches %s", place))
        try:
            _fetch([file for file in files if not file.is_here], f"{chosen} of {place}", folder)
            with replacing(folder / DESCRIPTION) as described:
                described.write(content)
        finally:
            lock.release()
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}); choose another place with PACELINE_CACHE") from None
    return folder


@dataclass(frozen=True)
class _File:
    place: str
    path: Path
    bytes: int
    sha256: str

    @property
    def part(self) -> Path:
        return self.path.with_name(f".{self.path.name}.part")

    @property
    def is_here(self) -> bool:
        """Files get their names only when their checksums match; records have their own for what happens later."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == self.bytes


def _files(dataset: Dataset, place: str, folder: Path, variant: str) -> Iterator[_File]:
    for split, content in dataset.description["variants"][variant]["splits"].items():
        for entry in [*content["lists"], *content["shards"]]:
            name = entry["file"]
            path = folder / variant / split / name
            yield _File(remote.join(place, variant, split, name), path, entry["bytes"], entry["sha256"])


def _fetch(missing: list[_File], what: str, folder: Path) -> None:
    if not missing:
        return
    _check_room(missing, folder)
    log.info("fetching %s to %s", what, folder)
    bar = Progress(
        *(TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn()),
        *(TimeRemainingColumn(), TextColumn("left")),
        console=console,
    )
    stop = threading.Event()
    pool = ThreadPoolExecutor(_STREAMS, thread_name_prefix="fetch")
    with bar:
        task = bar.add_task("fetching", total=sum(file.bytes for file in missing))

        def advance(count: int) -> None:
            bar.advance(task, count)
            if stop.is_set():
                raise InterruptedError("another file could not be fetched")

        try:
            for future in [pool.submit(_bring, file, advance) for file in missing]:
                future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _bring(file: _File, advance: Callable[[int], None]) -> None:
    """Append to what is there already; a file that does not match its checksum is fetched once more from its start."""
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
        if found == file.bytes:  # shorter ones were cut off, and are taken up where they ended
            file.part.unlink()
            if attempt:
                break
    raise UserError(f"{file.place} does not match its checksum in {DESCRIPTION}; copy the prepared data there again")


def _append(file: _File, begin: int, advance: Callable[[int], None]) -> int:
    """Fetch from byte `begin` on, and no more than there should be; the number of bytes."""
    fetched = 0
    with open(file.part, "ab", opener=_not_followed) as out:
        if begin < file.bytes:
            with remote.opened(file.place, begin) as stream:
                while block := stream.read(min(1 << 20, file.bytes - begin - fetched)):
                    out.write(block)
                    advance(len(block))
                    fetched += len(block)
        out.flush()
        os.fsync(out.fileno())
    return fetched


def _not_followed(path: str, flags: int) -> int:
    """Open for writing, but not what a link or a pipe of that name leads to: others may write to a shared cache."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _check_room(missing: list[_File], folder: Path) -> None:
    needed = sum(file.bytes - (file.part.stat().st_size if file.part.exists() else 0) for file in missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder} has {size_text(free)} free, but {size_text(needed)} are to be fetched; choose another disk with "
            "PACELINE_CACHE"
        )


def _is_described(folder: Path, dataset: Dataset) -> bool:
    try:
        return Dataset.open(folder).fingerprint == dataset.fingerprint
    except UserError:
        return False
