"""Checkpoints that only rank 0 need see, on every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint.store import Save
from paceline.distributed.world import World

Read = TypeVar("Read", tuple[Save, dict[str, Any]], tuple[Save, dict[str, Any]] | None)


def read_on_leader(world: World, read: Callable[[], Read]) -> Read:
    """What the leader reads."""

    def plain() -> list[Any] | None:
        found = read()
        return [str(found[0].folder), found[0].step, found[0].metrics, found[1]] if found else None

    told = world.on_leader(plain)
    return (Save(Path(told[0]), told[1], told[2]), told[3]) if told else None  # type: ignore[return-value]
