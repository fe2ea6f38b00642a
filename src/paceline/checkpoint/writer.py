"""Writes checkpoints in the background while training continues."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.checkpoint import store
from paceline.checkpoint.state import HostCopies, num_bytes
from paceline.distributed.mesh import ShardId
from paceline.system.files import disk_error
from paceline.system.host import BackgroundThread
from paceline.system.logs import log

BeforeCommit = Callable[[], None]


def _nothing() -> None: ...


class Writer:
    """Writes one checkpoint at a time, and deletes old ones after a newer one is committed."""

    def __init__(self, folder: Path, keep: int, best_metric: str, shard: ShardId | None = None):
        self._folder, self._keep, self._metric = folder, keep, best_metric
        self._shard = shard or ShardId()
        self._copies = HostCopies()
        self._thread: BackgroundThread | None = None
        self.error: str | None = None
        """Why the last checkpoint was not written, or None."""

    def snapshot(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Wait for the previous checkpoint, then return a copy in host memory of what this rank writes."""
        self.wait()
        copy: dict[str, Any] = self._copies.take(state(), self._shard)
        return copy

    def start(
        self, step: int, parts: dict[str, Any], metrics: dict[str, float], before_commit: BeforeCommit = _nothing
    ) -> Path:
        """Start writing a snapshot and return its path. `before_commit` runs in the background (see store.commit)."""
        path = self._path(step)
        self._in_background(self._write, path, step, parts, metrics, before_commit)
        return path

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _in_background(self, action: Callable[..., None], *args: object) -> None:
        self._thread = BackgroundThread(action, "checkpoint", args)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether this rank is writing files."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is not complete yet."""
        return self.busy

    def wait(self) -> None:
        """Wait until this rank has written its files."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def _write(
        self, path: Path, step: int, parts: dict[str, Any], metrics: dict[str, float], before_commit: BeforeCommit
    ) -> None:
        with self._keeping_error(num_bytes(parts)):
            store.write(path, step, parts, metrics, before_commit)
        self._conclude(step)

    @contextmanager
    def _keeping_error(self, needed: int = 0) -> Iterator[None]:
        self.error = None
        try:
            yield
        except Exception as error:  # any error: the run must not end as if the checkpoint had been written
            self.error = disk_error(error, needed) if isinstance(error, OSError) else str(error)

    def _conclude(self, step: int) -> None:
        """Delete old checkpoints after a new one was committed, or warn that it was not."""
        if self.error:
            log.warning(
                "the checkpoint of step %d was not written: %s. Earlier checkpoints are unaffected", step, self.error
            )
            return
        try:
            chosen = store.best(self._folder, self._metric)
            old = list(store.committed(self._folder))[self._keep :]
            store.delete([path for path in old if chosen is None or path != chosen.folder])
        except OSError as error:
            log.warning("old checkpoints were not deleted: %s", disk_error(error))


class ShardedWriter(Writer):
    """Writes one rank's shard. Rank 0 commits the checkpoint after all ranks have written theirs.

    All ranks call `start`, then `commit` or `abandon`, in the same order. With `copies_cpu` false, weights in host
    memory are written without a copy, and must not change until they are.
    """

    def __init__(self, folder: Path, keep: int, best_metric: str, shard: ShardId, copies_cpu: bool = True):
        super().__init__(folder, keep, best_metric, shard)
        self._copies, self.copies_cpu = HostCopies(copies_cpu), copies_cpu
        self._step = -1
        self._begin_error: OSError | None = None
        self._files: dict[str, Any] = {}
        self._before_commit: BeforeCommit = _nothing
        self.is_uncommitted = False
        """Whether a checkpoint was started and neither committed nor abandoned; the same on all ranks."""

    @property
    def writing(self) -> bool:
        return self.is_uncommitted or self.busy

    def begin(self, step: int) -> None:
        """Create the folder of a checkpoint: on one rank of those that see it, before any of them starts to write."""
        self._begin_error = None
        try:
            store.begin(self._path(step))
        except OSError as error:
            self._begin_error = error

    def start(
        self, step: int, parts: dict[str, Any], metrics: dict[str, float], before_commit: BeforeCommit = _nothing
    ) -> Path:
        """Start writing this rank's part of a snapshot and return the path of the checkpoint."""
        self._step, self._before_commit, self._files = step, before_commit, {}
        self.is_uncommitted = True
        self._in_background(self._write_shard, step, parts, metrics)
        return self._path(step)

    def _write_shard(self, step: int, parts: dict[str, Any], metrics: dict[str, float]) -> None:
        with self._keeping_error(num_bytes(parts)):
            if self._begin_error:
                raise self._begin_error
            if self._shard.is_first_replica:
                self._files = store.write_shard(self._path(step), step, parts, metrics, self._shard)

    def report(self) -> dict[str, Any]:
        """Return the state of this rank's shard as JSON; `files` are its manifest entries."""
        return {"busy": self.busy, "error": self.error, "files": self._files}

    @property
    def folder(self) -> Path:
        """Where the checkpoint is written until it is committed."""
        return store.temporary(self._path(self._step))

    def commit(self, files: dict[str, Any] | None) -> None:
        """Commit with the manifest entries of all shards, in the background; None on ranks that do not commit."""
        self.wait()
        self.is_uncommitted = False
        if files is not None:
            self._in_background(self._commit, self._path(self._step), files)

    def _commit(self, path: Path, files: dict[str, Any]) -> None:
        with self._keeping_error():
            store.commit(path, files, self._before_commit)
        if self.error:
            store.discard(path)
        self._conclude(self._step)

    def abandon(self, error: str, removes: bool) -> None:
        """Give up a checkpoint of which a shard could not be written."""
        self.is_uncommitted, self.error = False, error
        if removes:
            store.discard(self._path(self._step))
            self._conclude(self._step)


class NoWriter:
    """The null object for ranks that write no checkpoints."""

    error: str | None = None
    busy = writing = False

    def snapshot(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return {}

    def start(
        self, step: int, parts: dict[str, Any], metrics: dict[str, float], before_commit: BeforeCommit = _nothing
    ) -> None: ...

    def wait(self) -> None: ...
