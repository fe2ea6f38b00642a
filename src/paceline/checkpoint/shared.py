"""Reads a checkpoint on rank 0 and broadcasts it, so that other ranks need not see the folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint.verified import CheckpointInfo
from paceline.distributed.world import World

Read = TypeVar("Read", tuple[CheckpointInfo, dict[str, Any]], tuple[CheckpointInfo, dict[str, Any]] | None)


def read_on_rank_zero(world: World, read: Callable[[], Read]) -> Read:
    """Return what `read` returns on rank 0, on every rank."""

    def plain() -> list[Any] | None:
        if found := read():
            checkpoint, parts = found
            return [str(checkpoint.folder), checkpoint.step, checkpoint.metrics, checkpoint.recipe, parts]
        return None

    if not (received := world.on_rank_zero(plain)):
        return None  # type: ignore[return-value]
    folder, step, metrics, recipe, parts = received
    return CheckpointInfo(Path(folder), step, metrics, recipe), parts
