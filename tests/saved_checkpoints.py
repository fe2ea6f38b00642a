"""Reads checkpoints with whole tensors."""

from pathlib import Path
from typing import Any

from paceline.checkpoint.tensors import materialize
from paceline.checkpoint.verified import CheckpointInfo, open_verified


def read(folder: Path) -> tuple[CheckpointInfo, dict[str, Any]]:
    checkpoint, parts = open_verified(folder)
    return checkpoint, materialize(parts)
