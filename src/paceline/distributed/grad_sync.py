"""How ranks average their gradients inside DDP, and how long each of them waits for it.

Ranks that share one machine's memory and compute on the CPU do not need a network between them: `SharedMemory` lets
each rank add up its share of the gradient where all can see it. Everyone else sends buckets while the backward pass
goes on (`AllReduce`), or far less than the gradients (distributed/powersgd.py). All are DDP communication hooks.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.system.device import between, now

_MEMORY = "/dev/shm"
WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class AllReduce:
    """Send each bucket as soon as it is ready, in the wire's number format."""

    def __init__(self, world: World, dtype: torch.dtype):
        self._world, self._dtype = world, dtype
        self._last_sent: Any = 0.0

    def average(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        wire = buffer.to(self._dtype).div_(self._world.size)
        future = dist.all_reduce(wire, async_op=True).get_future()
        self._last_sent = now(self._world.device)

        def widen(done: torch.futures.Future[Any]) -> torch.Tensor:
            return buffer.copy_(done.value()[0])

        return future.then(widen)

    def seconds_since_last(self) -> Callable[[], float]:
        """Call after backward: how long it lasted beyond this rank's own computing, known once the device is done."""
        return between(self._last_sent, now(self._world.device))


class SharedMemory:
    """Average through memory that all ranks of one machine map.

    Each rank lays out what the others have to add up, adds up its own share of everybody's gradient, and takes over the
    other shares: two and a half passes over memory instead of a trip through the network stack, and a sum whose order
    does not change from step to step.
    There are two areas, used in turn: a rank can be at most one step ahead, so nobody writes what another still reads.
    """

    def __init__(self, world: World, dtype: torch.dtype):
        self._world, self._dtype = world, dtype
        self._areas: dict[int, list[torch.Tensor]] = {}
        self._turn: dict[int, int] = {}
        self._seconds = 0.0

    def average(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        begin = time.perf_counter()
        buffer, index = bucket.buffer(), bucket.index()
        area = self._area(index, buffer.numel())
        mine = self._world.rank
        shares = [slice(*bounds) for bounds in _shares(buffer.numel(), self._world.size)]
        others = [(rank, share) for rank, share in enumerate(shares) if rank != mine]
        for _, share in others:
            area[mine, share].copy_(buffer[share])
        self._world.barrier()
        own = shares[mine]
        for rank, _ in others:
            buffer[own].add_(area[rank, own])
        area[mine, own].copy_(buffer[own].div_(self._world.size))
        self._world.barrier()
        for rank, share in others:
            buffer[share].copy_(area[rank, share])
        if self._dtype != buffer.dtype:
            buffer[own].copy_(area[mine, own])  # every rank must go on with the same rounded values
        self._seconds += time.perf_counter() - begin
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def seconds_since_last(self) -> Callable[[], float]:
        seconds, self._seconds = self._seconds, 0.0
        return lambda: seconds

    def _area(self, index: int, numel: int) -> torch.Tensor:
        """(ranks, numel) in shared memory; made at the first step, and again when DDP rebuilds its buckets."""
        areas = self._areas.get(index)
        if areas is None or areas[0].shape[1] != numel:
            areas = self._areas[index] = [self._allocate(numel) for _ in range(2)]
        turn = self._turn[index] = 1 - self._turn.get(index, 0)
        return areas[turn]

    def _allocate(self, numel: int) -> torch.Tensor:
        count = self._world.size * numel
        path = self._world.on_rank_zero(lambda: _reserve(count * self._dtype.itemsize))
        area = torch.from_file(path, shared=True, size=count, dtype=self._dtype)
        self._world.barrier()
        if self._world.is_rank_zero:
            os.unlink(path)  # the name goes at once, so that later nothing stays behind however the run ends
        return area.view(self._world.size, numel)


def _reserve(num_bytes: int) -> str:
    """A new file of that size in memory; without room it is an error now, not a crash later."""
    descriptor, path = tempfile.mkstemp(dir=_MEMORY, prefix="paceline-")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.unlink(path)
        raise UserError(
            f"{_MEMORY} has no room for the {num_bytes >> 20} MB that ranks exchange gradients in ({error.strerror}); "
            "free some of it"
        ) from None
    finally:
        os.close(descriptor)
    return path


def _shares(numel: int, ranks: int) -> list[tuple[int, int]]:
    edges = [numel * rank // ranks for rank in range(ranks + 1)]
    return list(pairwise(edges))


def shares_memory(world: World, num_bytes: int) -> bool:
    """Whether all ranks are CPU processes of one machine whose shared memory holds both areas of gradients."""
    if world.device.type != "cpu" or world.local_size != world.size:
        return False
    room = shutil.disk_usage(_MEMORY).free if os.path.isdir(_MEMORY) else 0
    return world.broadcast_object(room > 2 * world.size * num_bytes)
