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
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from paceline.distributed.local_barrier import LocalBarrier
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

    Every rank has a row, to which it copies its gradients. Once all ranks have computed theirs, each rank averages one
    chunk of all rows and writes the result to all rows. A rank's gradients of its own chunk stay where they are,
    because no other rank reads them. Rows are added in rank order, so that no result depends on which rank adds them.
    """

    def __init__(self, world: World, dtype: torch.dtype, parameters: Iterable[torch.Tensor]):
        self._world = world
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        *self._offsets, numel = accumulate((each.numel() for each in self._parameters), initial=0)
        self._barrier = LocalBarrier(world, _SHM)
        self._rows = self._allocate(dtype, numel + len(self._parameters))
        length, own = self._rows.shape[1], self._rows[world.rank]
        self._begin, self._end = (length * rank // world.size for rank in (world.rank, world.rank + 1))
        self._used = own[numel:]  # 1 for every parameter that has a gradient
        self._views = _views(own, self._parameters)
        self._has_gradient: list[bool] = []
        self._kept: dict[int, torch.Tensor] = {}  # gradients that are not copied to the row, flat
        self._is_last, self._seconds = False, 0.0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._on_gradient(number))
            for number, parameter in enumerate(self._parameters)
        ]

    def close(self) -> None:
        """Stop following the gradients of the parameters."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Context for the last backward pass of a step, at the end of which all ranks have the same gradients."""
        self._has_gradient, self._is_last = [False] * len(self._parameters), True
        yield
        self._is_last = False
        begin = time.perf_counter()
        for number, has_gradient in enumerate(self._has_gradient):
            if not has_gradient:  # not in this backward pass
                self._stage(number)
        self._used.copy_(torch.tensor(self._has_gradient))
        self._barrier.wait()
        self._average()
        self._barrier.wait()
        for number, used in enumerate(self._used.tolist()):
            if used and number not in self._kept:  # by any rank
                parameter, view = self._parameters[number], self._views[number]
                parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
        self._kept.clear()
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
        parameter, view = self._parameters[number], self._views[number]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
            return
        # a gradient comes in parts if weights are shared by segments of reentrant activation checkpointing
        is_in_row = self._has_gradient[number] and number not in self._kept
        self._has_gradient[number] = True
        if self._is_own(number) and not is_in_row and _same_layout(gradient, view):
            self._kept[number] = gradient.as_strided((gradient.numel(),), (1,))
            return
        if is_in_row:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self._kept.pop(number, None)
        parameter.grad = None

    def _is_own(self, number: int) -> bool:
        """Whether this rank averages all of the parameter's gradient, and it is large enough for a block of its own."""
        begin, numel = self._offsets[number], self._parameters[number].numel()
        return numel >= _BLOCK and self._begin <= begin and begin + numel <= self._end

    @torch.no_grad()
    def _average(self) -> None:
        """Average this rank's chunk of all rows."""
        first = self._begin
        for number in sorted(self._kept):
            gradient, begin = self._kept[number], self._offsets[number]
            self._average_columns(first, begin)
            self._average_columns(begin, first := begin + gradient.numel(), gradient)
        self._average_columns(first, self._end)

    def _average_columns(self, begin: int, end: int, own: torch.Tensor | None = None) -> None:
        """Average some columns of all rows, in blocks that fit into the cache; `own` replaces this rank's row."""
        rows = list(self._rows[:, begin:end].unbind())
        if own is not None:
            rows[self._world.rank] = own
        buffer = torch.empty(_BLOCK)
        for blocks in zip(*(row.split(_BLOCK) for row in rows), strict=True):
            total = blocks[0].float()
            for block in blocks[1:]:
                total = torch.add(total, block, out=buffer[: len(block)])
            mean = torch.mul(total, 1 / len(blocks), out=blocks[self._world.rank])
            for block in blocks:
                if block is not mean:
                    block.copy_(mean)

    def _allocate(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        count = self._world.size * numel
        path = self._world.on_rank_zero(lambda: _reserve(count * dtype.itemsize))
        try:
            rows = torch.from_file(path, shared=True, size=count, dtype=dtype)
            self._world.barrier()
        finally:
            if self._world.is_rank_zero:
                os.unlink(path)  # at once, so that no file stays behind however the run ends
        return rows.view(self._world.size, numel)


def _views(row: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a view for the gradient of each parameter, in its memory format, as optimizers expect."""
    views, offset = [], row.storage_offset()
    for parameter in parameters:
        strides = torch.empty_like(parameter, device="meta").stride()
        views.append(row.as_strided(parameter.shape, strides, offset))
        offset += parameter.numel()
    return views


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether elements have the same type and the same order in memory; strides of dimensions of size 1 say nothing."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.dtype == b.dtype and all(size == 1 or x == y for size, x, y in strides)


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
