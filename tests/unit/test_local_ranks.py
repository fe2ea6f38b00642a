"""Real ranks of one node (CPU, fp32 and bf16 gradients, one thread): averages in shared memory, and lost ranks."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HANG
from torch import nn
from torch.distributed import FileStore
from torch.utils.checkpoint import checkpoint

from paceline.distributed import grad_sync, process_group
from paceline.distributed.grad_sync import SharedMemory
from paceline.distributed.local_barrier import LocalBarrier
from paceline.distributed.world import World

Answers = list[tuple[int, Any]]


def _start(rank: int, size: int, folder: str, action: Callable[[World], Any], answers: Any) -> None:
    torch.set_num_threads(1)
    process_group.connect_ranks("gloo", FileStore(f"{folder}/store", size), rank, size, timedelta(seconds=HANG))
    answers.put((rank, action(World(rank, size, rank, size))))
    answers.close()
    answers.join_thread()
    os._exit(0)  # other ranks may be dead, which destroying the process group would wait for


def _on_ranks(size: int, action: Callable[[World], Any], folder: Path, expected: int) -> Answers:
    """Call a function on real ranks, and return what those that do not die answer, by rank."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_start, args=(rank, size, str(folder), action, answers)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    found = sorted((answers.get(timeout=HANG) for _ in range(expected)), key=lambda answer: int(answer[0]))
    for rank in ranks:
        rank.join(HANG)
    return found


class _Net(nn.Module):
    """Has weights of which each rank averages one, some or none, and one in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.small = nn.Conv2d(8, 8, 1).to(memory_format=torch.channels_last)
        self.large = nn.Linear(8 * 36, 64)
        self.last = nn.Linear(64, 32)
        self.unused = nn.Linear(64, 32)
        self.of_rank_one = nn.Linear(64, 32)
        self.recurrent = nn.Linear(64, 64)

    def loss(self, images: torch.Tensor, rank: int) -> torch.Tensor:
        hidden = self.large(self.small(self.first(images)).flatten(1)).relu()
        for _ in range(2):  # every segment has its own backward pass
            hidden = checkpoint(self.recurrent, hidden, use_reentrant=True)
        output = self.last(hidden) + (self.of_rank_one(hidden) if rank == 1 else 0)
        return output.square().mean()


def _images(rank: int) -> torch.Tensor:
    return torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(rank))


def _averaged(world: World) -> list[Any]:
    """Return the gradients after two steps of two micro-batches."""
    grad_sync._BLOCK = 128  # elements; larger tensors stay where backward wrote them
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = _Net()
        sync = SharedMemory(world, dtype, model.parameters())
        for _ in range(2):
            model.zero_grad()
            first, second = _images(world.rank)
            model.loss(first, world.rank).backward()
            with sync.synchronizing():
                model.loss(second, world.rank).backward()
        found.append({name: _array(each.grad) for name, each in model.named_parameters()})
    return found


def _array(gradient: torch.Tensor | None) -> Any:
    return None if gradient is None else gradient.contiguous().numpy()


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_averaged_over_ranks(size: int, tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    for rank in range(size):
        model = _Net()
        for images in _images(rank):
            model.loss(images, rank).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, torch.zeros(())) + parameter.grad / size
    answers = [found for _, found in _on_ranks(size, _averaged, tmp_path, size)]
    for number, tolerance in enumerate((1e-6, 1e-2)):
        for name, gradient in answers[0][number].items():
            if name.startswith("unused"):
                assert gradient is None
                continue
            distance = (torch.from_numpy(gradient) - expected[name]).abs().max()
            assert distance <= tolerance * expected[name].abs().max(), name
            assert all((other[number][name] == gradient).all() for other in answers), name


def _fork_and_die_or_wait(world: World) -> str:
    barrier = LocalBarrier(world, "/tmp")
    if world.rank == 1:
        if os.fork() == 0:  # a worker of the user's code, which outlives its rank
            while not Path(os.environ["RANK_0_ENDS"]).exists():
                time.sleep(0.1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    process_group.set_timeout(timedelta(seconds=60))
    try:
        barrier.wait()
    except RuntimeError as error:
        return "closed" if "closed" in str(error) else str(error)
    finally:
        Path(os.environ["RANK_0_ENDS"]).touch()
    return "passed"


def test_children_of_a_rank_do_not_hide_its_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANK_0_ENDS", str(tmp_path / "ends"))
    assert _on_ranks(2, _fork_and_die_or_wait, tmp_path, 1) == [(0, "closed")]


def _die_or_wait(world: World) -> str:
    barrier = LocalBarrier(world, "/tmp")
    barrier.wait()
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        barrier.wait()
    except RuntimeError as error:
        return "lost" if process_group.is_lost_connection(error) else str(error)
    return "passed"


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_killed_is_noticed_at_once(size: int, tmp_path: Path) -> None:
    assert _on_ranks(size, _die_or_wait, tmp_path, size - 1) == [(rank, "lost") for rank in range(size - 1)]


def _wait_or_sleep(world: World) -> str:
    barrier = LocalBarrier(world, "/tmp")
    if world.rank == 1:
        time.sleep(3)
        return "slept"
    process_group.set_timeout(timedelta(seconds=0.5))
    try:
        barrier.wait()
    except RuntimeError as error:
        return "timed out" if process_group.is_lost_connection(error) and "timed out" in str(error) else str(error)
    return "passed"


def test_the_rank_timeout_applies_to_the_barrier(tmp_path: Path) -> None:
    assert _on_ranks(2, _wait_or_sleep, tmp_path, 2) == [(0, "timed out"), (1, "slept")]
