"""Copies of run folders, of a rank whose file cannot be read (other ranks are stubs)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.distributed.world import World
from paceline.engine import replicas
from paceline.engine.replicas import Replicas
from paceline.errors import UserError
from paceline.track.records import RunFolder


class _RankOne(World):
    """Rank 1, which is on another node than rank 0."""

    sent: list[int]

    def all_gather_object(self, value: Any) -> list[Any]:
        return [True, False]

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        SENT.append(len(tensor))
        return tensor

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value

    def on_rank_zero(self, action: Any) -> Any:
        return "mark"

    def barrier(self) -> None: ...


SENT: list[int] = []


@pytest.mark.parametrize(("content", "chunks"), [(None, []), (b"123456", [4, 2])])
def test_a_file_that_cannot_be_read_does_not_leave_other_ranks_waiting(
    tmp_path: Path, monkeypatch, content: bytes | None, chunks: list[int]
) -> None:
    """The rank takes part in all collectives, and reports the error afterwards."""
    SENT.clear()
    monkeypatch.setattr(replicas, "_CHUNK", 4)
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    shard = folder.checkpoints / "shard"
    if content is not None:
        shard.write_bytes(content)
        monkeypatch.setattr(replicas, "_size", lambda path: len(content))
        shard.write_bytes(content[:3])  # it has become shorter
    copies = Replicas(_RankOne(1, 2), folder)
    with pytest.raises(UserError, match="cannot be copied") as caught:
        copies.collect(folder.checkpoints, [[], ["shard"]])
    assert caught.value.code == "replica-not-written"
    assert chunks == SENT
