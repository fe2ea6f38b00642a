"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): ranks exchange thin factors of their gradients, not the gradients.

torch has a hook for it, which ends the process under gloo when a model has several buckets, copies every gradient
several times, and keeps what it could not send of an fp16 step that overflowed and was skipped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from paceline.distributed.world import World
from paceline.system.device import between, now


class PowerSgd:
    """A gradient matrix is sent as P Q, P of a few columns, Q of a few rows; what that misses is added to the next one.

    That memory is each rank's own and is not saved: a resumed run begins with whole gradients again.
    """

    def __init__(self, world: World, rank: int, after: int):
        self._world, self._rank = world, rank
        self._whole_steps = max(2, after)  # DDP forms its buckets anew in the second step
        self._steps = 0
        self._factors: dict[int, _Factors] = {}
        self._last_sent: Any = 0.0

    def average(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._last_sent = now(self._world.device)
        index, buffer = bucket.index(), bucket.buffer()
        if self._steps < self._whole_steps:
            dist.all_reduce(buffer.div_(self._world.size))
        else:
            if index not in self._factors:
                self._factors[index] = _Factors(bucket, self._rank)
            self._factors[index].average(bucket, self._world.size)
        self._steps += bucket.is_last()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    @contextmanager
    def following(self, scaler: torch.amp.GradScaler) -> Iterator[None]:
        """Around an update of fp16's loss scale, which falls when a step overflowed and was skipped: its rest goes."""
        before = scaler.get_scale()
        yield
        after = scaler.get_scale()
        for factors in self._factors.values():
            if after < before:
                factors.restart()
            elif after > before:
                factors.rescale(after / before)

    def seconds_since_last(self) -> Callable[[], float]:
        return between(self._last_sent, now(self._world.device))


class _Factors:
    """Of one bucket: Q of each matrix, in rows (products with it are many times faster so), and what was not sent."""

    def __init__(self, bucket: GradBucket, rank: int):
        self._missed = torch.zeros_like(bucket.buffer())
        shapes = [(shape[0], shape.numel() // shape[0]) for shape in (p.shape for p in bucket.parameters())]
        self._shapes = [
            (rows, columns) if 2 * rank * (rows + columns) < rows * columns else None for rows, columns in shapes
        ]
        self._qs = [self._missed.new_empty(rank, shape[1]) for shape in self._shapes if shape]
        self._index = bucket.index()
        self.restart()

    def average(self, bucket: GradBucket, ranks: int) -> None:
        """In place."""
        bucket.buffer().add_(self._missed)
        gradients = bucket.gradients()
        missed_parts = self._missed.split([gradient.numel() for gradient in gradients])
        pairs = list(zip(gradients, missed_parts, self._shapes, strict=True))
        matrices = [(gradient.view(shape), missed.view(shape)) for gradient, missed, shape in pairs if shape]
        vectors = [gradient for gradient, _, shape in pairs if shape is None]  # too small to be worth it: sent whole
        ps = [matrix @ q.T for (matrix, _), q in zip(matrices, self._qs, strict=True)]
        _average([*ps, *vectors], ranks)
        ps = [torch.linalg.qr(p).Q for p in ps]
        for q, (matrix, _), p in zip(self._qs, matrices, ps, strict=True):
            torch.mm(p.T, matrix, out=q)
        _average(self._qs, ranks)
        for (matrix, missed), p, q in zip(matrices, ps, self._qs, strict=True):
            torch.addmm(matrix, p, q, alpha=-1, out=missed)
            torch.mm(p, q, out=matrix)

    def rescale(self, factor: float) -> None:
        """What was not sent, in units of another loss scale."""
        self._missed.mul_(factor)

    def restart(self) -> None:
        self._missed.zero_()
        draw = torch.Generator(self._missed.device).manual_seed(self._index)  # the same on all ranks
        for q in self._qs:
            q.normal_(generator=draw)


def _average(tensors: list[torch.Tensor], ranks: int) -> None:
    """In place, in one message."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(ranks)
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
