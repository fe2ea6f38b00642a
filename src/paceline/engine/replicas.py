"""Replicates the run folder to every node that does not share rank 0's file system, so that any node may fail.

Files are copied when a checkpoint is complete and after every rendezvous: the node with the newest checkpoint sends it
to the others. Nodes that share a file system see one folder, and nothing is sent.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from uuid import uuid4

import torch

from paceline.checkpoint import store
from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.system.files import make_folder, sync
from paceline.system.host import BackgroundThread, host_name
from paceline.track.records import RunFolder

T = TypeVar("T")
_CHUNK = 16 << 20
_PARTIAL = ".copy-"
_REWRITTEN = (".json", ".yaml")  # other files only grow
_LOCAL = ("telemetry/", "log.txt", ".", "checkpoints/")  # differ per node; checkpoints are sent one by one


class Replicas:
    """Keeps the copies of a run folder up to date. `copy_newest`, `follow` and `complete` are collectives."""

    def __init__(self, world: World, folder: RunFolder):
        self._world, self._folder = world, folder
        self._shares = world.all_gather_object(self._sees_folder_of_rank_zero())
        """Whether each rank sees the folder of rank 0."""
        self.keeps_copy = world.local_rank == 0 and not self._shares[world.rank]
        """Whether this rank writes its node's copy."""
        self.needed = not all(self._shares)
        self._sent: dict[str, int] = {}
        self._newest = -1
        self._thread: BackgroundThread | None = None
        self._failed: UserError | None = None

    def _sees_folder_of_rank_zero(self) -> bool:
        folder = self._folder.path

        def mark() -> str:
            make_folder(folder)
            (folder / (name := f".mark-{uuid4().hex}")).touch()
            return name

        name = self._world.on_rank_zero(mark)
        sees = (folder / name).exists()
        self._world.barrier()
        if self._world.is_rank_zero:
            (folder / name).unlink()
        return sees

    def copy_newest(self) -> None:
        """Copy the newest checkpoint of all nodes to rank 0 and to all others, before the run is opened."""
        if not self.needed:
            return
        if self.keeps_copy:
            store.clean_up(self._folder.checkpoints)  # shards that were not collected before a kill
        newest = newest_step(self._folder.checkpoints) if self._world.local_rank == 0 else -1
        steps = self._world.all_gather_object(newest)
        src = max(range(len(steps)), key=lambda rank: (steps[rank], -rank))
        if steps[src] >= 0:
            self._copy(src, writes=self._world.is_rank_zero or self.keeps_copy)
            self._wait_and_check()
            self._newest = steps[src]

    def follow(self, newest: int, wait_for_writer: Callable[[], object]) -> None:
        """Copy the checkpoint of step `newest`, which rank 0 has completed, if it has not been copied.

        `wait_for_writer` waits for a checkpoint that is being written, which deletes older ones when it is complete.
        """
        if self.needed and newest > self._newest:
            wait_for_writer()
            self._copy(0, self.keeps_copy)
            self._newest = newest

    def complete(self) -> None:
        """Copy what has been written since the last checkpoint, at the end of a run."""
        if self.needed:
            self._copy(0, self.keeps_copy)
            self._wait_and_check()

    def collect(self, folder: Path, files: Sequence[Sequence[str]]) -> None:
        """Copy files that ranks wrote to a folder of other nodes, by rank, to the same folder of rank 0."""
        if not self.needed:
            return
        failed, writes = None, self._world.is_rank_zero
        for src, names in enumerate(files):
            if self._shares[src] or not names:
                continue
            sizes = [_size(folder / name) for name in names] if self._world.rank == src else []
            for name, size in zip(names, self._world.broadcast_object(sizes, src), strict=True):
                try:
                    self._copy_file(src, folder / name, folder / name, 0, size, writes and failed is None)
                    if writes and failed is None:
                        sync(folder / name)
                except OSError as error:
                    failed = error
        if failed:
            raise self._copy_error(str(folder.relative_to(self._folder.path)), failed)

    def _copy(self, src: int, writes: bool) -> None:
        world, checkpoints = self._world, self._folder.checkpoints
        writes = writes and world.rank != src
        self._wait_and_check()
        names = {path.name for path in store.committed(checkpoints)}
        per_rank = world.all_gather_object(sorted(names) if writes else None)
        known = [set(there) for there in per_rank if there is not None]
        to_send = list(self._to_send(set.intersection(*known))) if world.rank == src else []
        files: list[tuple[str, int, int]]
        kept: list[str]
        files, kept = world.broadcast_object((to_send, sorted(names)), src)
        written: list[Path] = []
        for name, begin, end in files:
            path = self._folder.path / name
            # a whole file replaces the old one later, a range is appended to the file itself
            written.append(path.with_name(f"{_PARTIAL}{path.name}") if begin == 0 else path)
            try:
                self._copy_file(src, path, written[-1], begin, end, writes)
            except OSError as error:
                _remove_partial(written)  # the log of this node may be on the same full disk
                raise self._copy_error(name, error) from None
        world.barrier()  # `src` has read all of it
        if writes:
            old = [checkpoints / name for name in names - set(kept)]
            sent = [name for name, _, _ in files]
            self._thread = BackgroundThread(self._commit, "replicas", (sent, written, old))
            self._thread.start()

    def _to_send(self, known: set[str]) -> Iterator[tuple[str, int, int]]:
        """Yield name, begin and end of the file ranges to send; the marker that makes a checkpoint valid comes last."""
        root = self._folder.path
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not path.is_symlink() and not name.startswith(_LOCAL):
                size, sent = path.stat().st_size, self._sent.get(name, 0)
                if path.suffix in _REWRITTEN or size < sent:
                    sent = 0
                if size != sent:
                    yield name, sent, size
                self._sent[name] = size
        for checkpoint in store.committed(self._folder.checkpoints):
            if checkpoint.name not in known:
                for path in store.files_of(checkpoint):
                    yield path.relative_to(root).as_posix(), 0, path.stat().st_size

    def _copy_file(self, src: int, path: Path, partial: Path, begin: int, end: int, writes: bool) -> None:
        """Send a range of a file to all ranks. A rank that cannot read or write it takes part in all of it first."""
        failed: list[OSError] = []

        def attempt(action: Callable[..., T], *arguments: Any) -> T | None:
            if not failed:
                try:
                    return action(*arguments)
                except OSError as error:
                    failed.append(error)
            return None

        with ExitStack() as files:
            source = attempt(_opened, path, "rb", begin) if self._world.rank == src else None
            target = attempt(_opened_to_write, partial, begin) if writes else None
            for file in filter(None, (source, target)):
                files.enter_context(file)
            for at in range(begin, end, _CHUNK):
                chunk = torch.zeros(min(_CHUNK, end - at), dtype=torch.uint8)
                if source:
                    attempt(_read, source, chunk)
                self._world.broadcast_(chunk, src)
                if target:
                    attempt(target.write, chunk.numpy().tobytes())
        if failed:
            raise failed[0]

    def _commit(self, names: Sequence[str], written: Sequence[Path], old: Sequence[Path]) -> None:
        """Sync copies to disk in order, rename them, then delete old checkpoints. Runs in the background."""
        name = ""
        try:
            for name, partial in zip(names, written, strict=True):
                path = self._folder.path / name
                sync(partial)
                partial.replace(path)
                sync(path.parent)
            for folder in (self._folder.checkpoints, self._folder.path):
                if folder.exists():
                    sync(folder)
            store.delete(old)
        except OSError as error:
            self._failed = self._copy_error(name, error)

    def wait(self) -> None:
        """Wait for copies that are being synced to disk."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def _wait_and_check(self) -> None:
        self._world.wait_until(lambda: self._thread is None or not self._thread.is_alive())
        self.wait()
        if self._failed:
            raise self._failed

    def _copy_error(self, name: str, error: OSError) -> UserError:
        path = self._folder.path / name
        message = f"{path} cannot be copied on {host_name()} ({error.strerror or error}). Check the disk there."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"{path} cannot be written on {host_name()} ({error.strerror}). Free some space there."
        return UserError("replica-not-written", message, path=path, host=host_name())


def _opened(path: Path, mode: str, begin: int) -> BinaryIO:
    """Open a file at an offset."""
    file = cast(BinaryIO, path.open(mode))
    file.seek(begin)
    return file


def _opened_to_write(path: Path, begin: int) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return _opened(path, "r+b" if begin and path.exists() else "wb", begin)


def _read(file: BinaryIO, chunk: torch.Tensor) -> None:
    """Fill a tensor of bytes."""
    content = file.read(len(chunk))
    if len(content) < len(chunk):
        raise OSError("the file is shorter than it was")
    chunk.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it cannot be read, which an attempt to copy it reports."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _remove_partial(written: Sequence[Path]) -> None:
    for path in written:
        if path.name.startswith(_PARTIAL):
            path.unlink(missing_ok=True)


def newest_step(checkpoints: Path) -> int:
    """Return the step of the newest complete checkpoint, or -1."""
    newest = next(store.committed(checkpoints), None)
    return store.step_of(newest) if newest else -1
