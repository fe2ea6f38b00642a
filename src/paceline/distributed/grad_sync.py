"""Gradient synchronization: averages gradients over ranks, and measures how long each rank waits for it.

`SharedMemory` serves CPU ranks of one node; gloo would copy gradients through sockets between them. `AllReduce` is a
DDP communication hook that sends buckets while the backward pass continues. PowerSGD (distributed/powersgd.py) sends
low-rank factors of the gradients.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.system.device import between, now

_SHM = "/dev/shm"
_BLOCK = 1 << 16  # elements
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

        # the result is in `wire`, whatever the value of the future is: NCCL's holds tensors, other back ends' may not;
        # on GPUs the callback runs on a stream that waits for the all-reduce
        return future.then(lambda _: buffer.copy_(wire))

    def seconds_since_last(self) -> Callable[[], float]:
        """Call after backward. Returns a function for the seconds since the last bucket was sent."""
        return between(self._last_sent, now(self._world.device))


class SharedMemory:
    """Averages gradients in memory that all ranks of one node map.

    Every rank has a row, which its gradients are views of. Once all ranks have computed theirs, each rank averages one
    chunk of all rows and writes the result to all rows. Rows are added in rank order, so that no result depends on
    which rank adds them.
    """

    def __init__(self, world: World, dtype: torch.dtype, parameters: Iterable[torch.Tensor]):
        self._world = world
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._numel = sum(parameter.numel() for parameter in self._parameters)
        self._rows = self._allocate(dtype, self._numel + len(self._parameters))
        own = self._rows[world.rank]
        self._used = own[self._numel :]  # 1 for every parameter that has a gradient
        self._views = _views(own, self._parameters)
        self._is_last, self._seconds = False, 0.0
        for number, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._on_gradient(number))

    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Context for the last backward pass of a step, at the end of which all ranks have the same gradients."""
        self._used.zero_()
        self._is_last = True
        yield
        self._is_last = False
        begin = time.perf_counter()
        for number, used in enumerate(self._used.tolist()):
            if not used:  # not in this backward pass
                self._stage(number)
        self._world.barrier()
        self._average()
        self._world.barrier()
        for parameter, view, used in zip(self._parameters, self._views, self._used.tolist(), strict=True):
            if used:  # by any rank
                parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
        self._seconds += time.perf_counter() - begin

    def seconds_since_last(self) -> Callable[[], float]:
        """Return a function for the seconds spent averaging since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return lambda: seconds

    def _on_gradient(self, number: int) -> None:
        if self._is_last:  # copied while it is in the cache
            self._stage(number)

    @torch.no_grad()
    def _stage(self, number: int) -> None:
        gradient = self._parameters[number].grad
        if gradient is None:
            self._views[number].zero_()
        else:
            self._views[number].copy_(gradient)
            self._parameters[number].grad = None
            self._used[number] = 1

    @torch.no_grad()
    def _average(self) -> None:
        """Average this rank's chunk of all rows, in blocks that fit into the cache."""
        size, length = self._world.size, self._rows.shape[1]
        begin, end = (length * rank // size for rank in (self._world.rank, self._world.rank + 1))
        total = torch.empty(_BLOCK)
        for first in range(begin, end, _BLOCK):
            columns = self._rows[:, first : min(end, first + _BLOCK)].unbind()
            mean = total[: len(columns[0])].copy_(columns[0])
            for other in columns[1:]:
                mean.add_(other)
            mean.div_(size)
            for row in columns:
                row.copy_(mean)

    def _allocate(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        count = self._world.size * numel
        path = self._world.on_rank_zero(lambda: _reserve(count * dtype.itemsize))
        rows = torch.from_file(path, shared=True, size=count, dtype=dtype)
        self._world.barrier()
        if self._world.is_rank_zero:
            os.unlink(path)  # unlink at once, so that no file stays behind however the run ends
        return rows.view(self._world.size, numel)


def _views(row: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a view for the gradient of each parameter, in its memory format, as optimizers expect."""
    views, offset = [], row.storage_offset()
    for parameter in parameters:
        strides = torch.empty_like(parameter, device="meta").stride()
        views.append(row.as_strided(parameter.shape, strides, offset))
        offset += parameter.numel()
    return views


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


def can_share_memory(world: World, num_bytes: int) -> bool:
    """Whether all ranks are CPU processes of one node whose shared memory holds the gradients of every rank."""
    if world.device.type != "cpu" or world.local_size != world.size:
        return False
    room = shutil.disk_usage(_SHM).free if os.path.isdir(_SHM) else 0
    return world.broadcast_object(room > world.size * num_bytes)
