"""Writing checkpoints of several ranks, of which rank 0 is real: commits, full and slow disks, copies of the state."""

import errno
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.checkpoint import state, store
from paceline.checkpoint.state import HostCopies
from paceline.checkpoint.writer import ShardedWriter, Writer
from paceline.distributed.mesh import ShardId
from paceline.distributed.world import World
from paceline.engine.checkpoints import Checkpoints

STEP, WEIGHT, PROGRESS = 5, torch.arange(28.0), {"step": 5}
NO_STATE: dict[str, Any] = {"ema": {}, "optimizer": {"state": {}, "param_groups": []}}


class _TwoRanks(World):
    """Rank 0 of two. `other` is what rank 1 reports about its shard."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value | OTHER if isinstance(value, dict) else value]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        POLLS.append(1)
        ENOUGH.extend(POLLS[5:])
        return tensor

    def barrier(self) -> None: ...

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value


OTHER: dict[str, Any] = {}
POLLS: list[int] = []
ENOUGH: list[int] = []
RANK_0 = _TwoRanks(0, 2, 0, 2)
NO_REPLICAS: Any = SimpleNamespace(needed=False, keeps_copy=False, collect=lambda *_: None, follow=lambda *_: None)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    OTHER.clear()
    writer = ShardedWriter(tmp_path, 2, "top1", ShardId(0, 1))
    checkpoints = Checkpoints(RANK_0, writer, NO_REPLICAS)
    state = {"model": {"weight": WEIGHT}, "progress": PROGRESS, **NO_STATE}
    checkpoints.save(STEP, lambda: state, {}, lambda: None, lambda: None)
    writer.wait()
    return checkpoints


def test_checkpoint_is_committed_when_all_ranks_have_written(checkpoints: Checkpoints, tmp_path: Path) -> None:
    OTHER.update(busy=True)
    checkpoints.poll(-1)
    assert not list(store.committed(tmp_path))
    assert checkpoints.writing
    OTHER.update(busy=False)
    checkpoints.complete()
    assert [path.name for path in store.committed(tmp_path)] == [f"step-{STEP:08d}"]
    assert checkpoints.error() is None
    assert not checkpoints.writing


def test_full_disk_of_another_rank_is_reported_and_nothing_is_left(checkpoints: Checkpoints, tmp_path: Path) -> None:
    OTHER.update(error="No space left on device", host="node-1")
    checkpoints.complete()
    assert "No space left on device (on node-1)" in (checkpoints.error() or "")
    assert not list(tmp_path.iterdir())


def test_ranks_wait_for_a_slow_disk_in_short_collectives(tmp_path: Path, monkeypatch) -> None:
    """A single collective would exceed the rank timeout, and the job would be restarted forever."""
    POLLS.clear()
    ENOUGH.clear()
    write = store.write

    def slow(*arguments: Any) -> None:
        while not ENOUGH:
            time.sleep(0.01)
        write(*arguments)

    monkeypatch.setattr(store, "write", slow)
    checkpoints = Checkpoints(RANK_0, Writer(tmp_path, 2, "top1"), NO_REPLICAS)
    parts = {"model": {"weight": WEIGHT}, **NO_STATE}
    state = HostCopies().take(parts, ShardId())
    checkpoints.save(STEP, lambda: state | {"progress": PROGRESS}, {}, lambda: None, lambda: None)
    checkpoints.complete()
    assert len(POLLS) > 5
    assert next(store.committed(tmp_path))


def test_shards_on_cpus_are_written_without_a_copy(tmp_path: Path) -> None:
    """Training goes on after they are written."""
    weight, ends = torch.arange(4.0), []
    writer = ShardedWriter(tmp_path, 2, "top1", ShardId(0, 1), copies_cpu=False)
    parts = {"model": {"weight": weight, "tied": weight[:2]}, **NO_STATE}
    copies = writer.snapshot(lambda: parts)
    assert copies["model"]["weight"].data_ptr() == weight.data_ptr()
    assert copies["model"]["tied"].data_ptr() != weight.data_ptr()
    OTHER.clear()
    checkpoints = Checkpoints(RANK_0, writer, NO_REPLICAS)
    state = parts | {"progress": PROGRESS}
    checkpoints.save(STEP, lambda: state, {}, lambda: None, lambda: ends.append(writer.busy))
    assert ends == [False]


def test_the_reason_why_a_checkpoint_could_not_begin_is_kept(tmp_path: Path, monkeypatch) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "begin", full)
    writer = ShardedWriter(tmp_path, 2, "top1", ShardId(0, 1))
    writer.begin(STEP)
    writer.start(STEP, {"model": {}}, {})
    writer.wait()
    assert "No space left on device" in (writer.error or "")


class _Pinned(SimpleNamespace):
    def copy_(self, source: Any, non_blocking: bool) -> "_Pinned":
        self.calls.append(("copy", non_blocking))
        return self


def test_gpu_tensors_are_copied_to_pinned_memory_with_one_wait(monkeypatch) -> None:
    calls: list[Any] = []

    def empty(shape: Any, dtype: Any, pin_memory: bool) -> _Pinned:
        calls.append(("allocate", pin_memory))
        return _Pinned(shape=shape, dtype=dtype, calls=calls)

    monkeypatch.setattr(state.torch, "empty", empty)
    monkeypatch.setattr(state.torch.accelerator, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(state, "own_chunk", lambda tensor, _: tensor.stands_for)
    tensors = []
    for _ in range(2):
        tensor = torch.zeros(2)
        tensor.detach = lambda tensor=tensor: tensor
        tensor.stands_for = SimpleNamespace(shape=(2,), dtype=torch.float32, device=torch.device("cuda", 0))
        tensors.append(tensor)
    copies = HostCopies()
    copies.take({"a": tensors[0], "b": tensors[1]}, ShardId())
    assert calls == [("allocate", True), ("copy", True)] * 2 + ["wait"]
    calls.clear()
    copies.take({"a": tensors[0], "b": tensors[1]}, ShardId())
    assert calls == [("copy", True)] * 2 + ["wait"]  # the memory of the last checkpoint
