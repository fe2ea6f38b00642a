"""Checkpoints that only rank 0 need see, on every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint.verified import Save
from paceline.distributed.world import World

Read = TypeVar("Read", tuple[Save, dict[str, Any]], tuple[Save, dict[str, Any]] | None)


def read_on_rank_zero(world: World, read: Callable[[], Read]) -> Read:
    """What the leader reads."""

    def plain() -> list[Any] | None:
        if found := read():
            save, parts = found
            return [str(save.folder), save.step, save.metrics, save.recipe, parts]
        return None

    if not (told := world.on_rank_zero(plain)):
        return None  # type: ignore[return-value]
    folder, step, metrics, recipe, parts = told
    return Save(Path(folder), step, metrics, recipe), parts
