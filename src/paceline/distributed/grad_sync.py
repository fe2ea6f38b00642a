"""DDP communication hooks that average gradients over ranks, and measure how long each rank waits for it.

`SharedMemory` serves CPU ranks of one node; gloo would copy gradients through sockets between them. `AllReduce` sends
buckets while the backward pass continues. PowerSGD (distributed/powersgd.py) sends low-rank factors of the gradients.
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
from torch.distributed import GradBucket

from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.system.device import between, now

_SHM = "/dev/shm"
WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class AllReduce:
    """All-reduces each bucket as soon as it is ready, in the data type of grad_sync.dtype."""

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
        """Call after backward. Returns a function for the seconds since the last bucket was sent."""
        return between(self._last_sent, now(self._world.device))


class SharedMemory:
    """Averages gradients in memory that all ranks of one node map.

    A reduce-scatter followed by an all-gather: each rank sums its own chunk of everybody's gradient, then copies the
    other chunks. This takes two and a half passes over memory, and the order of the sum never changes.
    Two buffers alternate: a rank is at most one step ahead, so no rank overwrites what another still reads.
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
        chunks = [slice(*bounds) for bounds in _chunks(buffer.numel(), self._world.size)]
        others = [(rank, chunk) for rank, chunk in enumerate(chunks) if rank != mine]
        for _, chunk in others:
            area[mine, chunk].copy_(buffer[chunk])
        self._world.barrier()
        own = chunks[mine]
        for rank, _ in others:
            buffer[own].add_(area[rank, own])
        area[mine, own].copy_(buffer[own].div_(self._world.size))
        self._world.barrier()
        for rank, chunk in others:
            buffer[chunk].copy_(area[rank, chunk])
        if self._dtype != buffer.dtype:
            buffer[own].copy_(area[mine, own])  # every rank must continue with the same rounded values
        self._seconds += time.perf_counter() - begin
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def seconds_since_last(self) -> Callable[[], float]:
        """Return a function for the seconds spent averaging since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return lambda: seconds

    def _area(self, index: int, numel: int) -> torch.Tensor:
        """Return a (ranks, numel) buffer in shared memory, allocated anew when DDP rebuilds its buckets."""
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
            os.unlink(path)  # unlink at once, so that no file stays behind however the run ends
        return area.view(self._world.size, numel)


def _reserve(num_bytes: int) -> str:
    """Allocate a file in shared memory and return its path; a full /dev/shm is an error now, not a crash later."""
    descriptor, path = tempfile.mkstemp(dir=_SHM, prefix="paceline-")
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.unlink(path)
        raise UserError(
            "shm-full",
            f"{_SHM} has no room for {num_bytes >> 20} MB of gradients ({error.strerror}). Free space there, or use "
            "grad_sync.transport=network.",
        ) from None
    finally:
        os.close(descriptor)
    return path


def _chunks(numel: int, ranks: int) -> list[tuple[int, int]]:
    edges = [numel * rank // ranks for rank in range(ranks + 1)]
    return list(pairwise(edges))


def can_share_memory(world: World, num_bytes: int) -> bool:
    """Whether all ranks are CPU processes of one node whose shared memory holds both gradient buffers."""
    if world.device.type != "cpu" or world.local_size != world.size:
        return False
    room = shutil.disk_usage(_SHM).free if os.path.isdir(_SHM) else 0
    return world.broadcast_object(room > 2 * world.size * num_bytes)
