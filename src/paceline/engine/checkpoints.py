"""Writes checkpoints while the ranks train, and commits sharded ones once every rank has written its shard.

Ranks that wait for a slow disk do so in short collectives, so that none is considered failed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.checkpoint import store
from paceline.checkpoint.writer import BeforeCommit, NoWriter, ShardedWriter, Writer
from paceline.distributed.world import World
from paceline.engine.replicas import Replicas
from paceline.errors import UserError
from paceline.system.host import host_name


class Checkpoints:
    """The checkpoints of a run. All methods but `wait` are collectives."""

    def __init__(self, world: World, writer: Writer | NoWriter, replicas: Replicas):
        self._world, self._writer, self._replicas = world, writer, replicas

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is not complete yet; known on rank 0."""
        return self._writer.writing

    def save(
        self,
        step: int,
        state: Callable[[], dict[str, Any]],
        metrics: dict[str, float],
        before_commit: BeforeCommit,
        on_copied: Callable[[], object],
    ) -> Path | None:
        """Start writing a checkpoint, after the previous one is complete. Returns its path, on ranks that write.

        Training waits only for the copy to host memory, after which `on_copied` is called; without a copy, it waits
        until the shards are written.
        """
        self.complete()
        parts, writer = self._writer.snapshot(state), self._writer
        if not isinstance(writer, ShardedWriter):
            on_copied()
            return writer.start(step, parts, metrics, before_commit)
        if self._world.is_rank_zero or self._replicas.keeps_copy:
            writer.begin(step)
        self._world.barrier()  # the folder exists
        path = writer.start(step, parts, metrics, before_commit)
        if not writer.copies_cpu:
            self._wait_until_idle()
        on_copied()
        return path

    def poll(self, newest: int) -> None:
        """Commit a sharded checkpoint if it is written, and copy complete ones to nodes that do not see them.

        `newest`: the step of the newest complete checkpoint on rank 0.
        """
        self._commit_if_written()
        self._replicas.follow(newest, self._wait_until_idle)

    def complete(self) -> None:
        """Wait until no rank writes and a sharded checkpoint is committed or abandoned."""
        self._wait_until_idle()
        self._commit_if_written()
        self._wait_until_idle()

    def wait(self) -> None:
        """Wait for this rank's files, after a failure."""
        self._writer.wait()

    def error(self) -> str | None:
        """Return why the last checkpoint was not written on rank 0, on every rank."""
        error = self._writer.error
        return self._world.broadcast_object(error and f"{host_name()}: {error}")

    def _wait_until_idle(self) -> None:
        if self._world.size > 1:
            self._world.wait_until(lambda: not self._writer.busy)
        self._writer.wait()

    def _commit_if_written(self) -> None:
        writer = self._writer
        if not isinstance(writer, ShardedWriter) or not writer.is_uncommitted:
            return
        reports = self._world.all_gather_object(writer.report() | {"host": host_name()})
        if any(report["busy"] for report in reports):
            return
        error = next((f"{report['error']} (on {report['host']})" for report in reports if report["error"]), None)
        if error is None:
            error = self._collect(writer, [sorted(report["files"]) for report in reports])
        first_here = self._world.is_rank_zero or self._replicas.keeps_copy
        if error is not None:
            writer.abandon(error, removes=first_here)
            return
        files = {name: entry for report in reports for name, entry in report["files"].items()}
        writer.commit(files if self._world.is_rank_zero else None)

    def _collect(self, writer: ShardedWriter, files: list[list[str]]) -> str | None:
        """Copy shards of nodes that do not share rank 0's file system to rank 0. Returns why that failed, if it did."""
        error = None
        try:
            self._replicas.collect(writer.folder, files)
        except UserError as failed:
            error = str(failed)
        error = next(filter(None, self._world.all_gather_object(error)), None)
        if self._replicas.keeps_copy:
            store.remove(writer.folder)  # the whole checkpoint is copied to this node after its commit
        return error
