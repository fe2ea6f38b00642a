"""Writes checkpoints in the background while training continues."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.checkpoint import store
from paceline.checkpoint.state import num_bytes, snapshot
from paceline.system.files import disk_error
from paceline.system.host import BackgroundThread
from paceline.system.logs import log


class Writer:
    """Writes one checkpoint at a time, and deletes old ones after a newer one is committed."""

    def __init__(self, folder: Path, keep: int, best_metric: str):
        self._folder, self._keep, self._metric = folder, keep, best_metric
        self._thread: BackgroundThread | None = None
        self.error: str | None = None
        """Why the last checkpoint was not written, or None."""

    def snapshot(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Wait for the previous checkpoint, then return a copy of the state in host memory."""
        self.wait()
        copy: dict[str, Any] = snapshot(state())
        return copy

    def start(
        self,
        step: int,
        parts: dict[str, Any],
        metrics: dict[str, float],
        before_commit: Callable[[], None] = lambda: None,
    ) -> Path:
        """Start writing a snapshot and return its path. `before_commit` runs in the background (see store.write)."""
        path = self._folder / f"step-{step:08d}"
        self._thread = BackgroundThread(self._run, "checkpoint", (path, step, parts, metrics, before_commit))
        self._thread.start()
        return path

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def _run(
        self, path: Path, step: int, parts: dict[str, Any], metrics: dict[str, float], before_commit: Callable[[], None]
    ) -> None:
        try:
            store.write(path, step, parts, metrics, before_commit)
            self.error = None
        except Exception as error:  # any error: the run must not end as if the checkpoint had been written
            self.error = disk_error(error, num_bytes(parts)) if isinstance(error, OSError) else str(error)
            log.warning(
                "the checkpoint of step %d was not written: %s. Earlier checkpoints are unaffected", step, self.error
            )
            return
        try:
            self._delete_old()
        except OSError as error:
            log.warning("old checkpoints were not deleted: %s", disk_error(error))

    def wait(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None

    def _delete_old(self) -> None:
        chosen = store.best(self._folder, self._metric)
        old = list(store.committed(self._folder))[self._keep :]
        store.delete([path for path in old if chosen is None or path != chosen.folder])


class NoWriter:
    """The null object for ranks that write no checkpoints."""

    error: str | None = None
    writing = False

    def snapshot(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return {}

    def start(
        self,
        step: int,
        parts: dict[str, Any],
        metrics: dict[str, float],
        before_commit: Callable[[], None] = lambda: None,
    ) -> None: ...

    def wait(self) -> None: ...
