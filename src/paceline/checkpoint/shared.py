"""Checkpoints that only rank 0 need see, on every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint.verified import CheckpointInfo
from paceline.distributed.world import World

Read = TypeVar("Read", tuple[CheckpointInfo, dict[str, Any]], tuple[CheckpointInfo, dict[str, Any]] | None)


def read_on_rank_zero(world: World, read: Callable[[], Read]) -> Read:
    """What the leader reads."""

    def plain() -> list[Any] | None:
        if found := read():
            checkpoint, parts = found
            return [str(checkpoint.folder), checkpoint.step, checkpoint.metrics, checkpoint.recipe, parts]
        return None

    if not (told := world.on_rank_zero(plain)):
        return None  # type: ignore[return-value]
    folder, step, metrics, recipe, parts = told
    return CheckpointInfo(Path(folder), step, metrics, recipe), parts
