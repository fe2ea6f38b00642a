"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): ranks all-reduce low-rank factors of their gradients.

torch's own hook crashes under gloo when a model has several buckets, copies every gradient several times, and keeps the
error of an fp16 step that overflowed and was skipped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from paceline.distributed.world import World
from paceline.system.device import between, now
from paceline.system.torch_internals import copy_all_


class PowerSgd:
    """Sends a gradient matrix as P Q, with few columns in P and few rows in Q, and adds the error to the next gradient.

    Each rank has its own error, which is not part of checkpoints: a resumed run starts with uncompressed gradients.
    """

    def __init__(self, world: World, rank: int, start_step: int):
        self._world, self._rank = world, rank
        self._start_step = max(2, start_step)  # DDP rebuilds its buckets in the second step
        self._steps = 0
        self._factors: dict[int, _Factors] = {}
        self._last_sent: Any = 0.0

    def average(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._last_sent = now(self._world.device)
        index, buffer = bucket.index(), bucket.buffer()
        if self._steps < self._start_step:
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
        """Context for an update of fp16's loss scale. A lower scale drops the error, because that step was skipped."""
        before = scaler.get_scale()
        yield
        after = scaler.get_scale()
        for factors in self._factors.values():
            if after < before:
                factors.restart()
            elif after > before:
                factors.rescale(after / before)

    def seconds_since_last(self) -> Callable[[], float]:
        """Call after backward. Returns a function for the seconds since the last bucket was sent."""
        return between(self._last_sent, now(self._world.device))


class _Factors:
    """The state of one bucket: Q of each matrix, stored by rows because that is many times faster, and the error."""

    def __init__(self, bucket: GradBucket, rank: int):
        self._error = torch.zeros_like(bucket.buffer())
        shapes = [(shape[0], shape.numel() // shape[0]) for shape in (p.shape for p in bucket.parameters())]
        self._shapes = [
            (rows, columns) if 2 * rank * (rows + columns) < rows * columns else None for rows, columns in shapes
        ]
        self._qs = [self._error.new_empty(rank, shape[1]) for shape in self._shapes if shape]
        self._index = bucket.index()
        self.restart()

    def average(self, bucket: GradBucket, ranks: int) -> None:
        """Average a bucket's gradients in place."""
        bucket.buffer().add_(self._error)
        gradients = bucket.gradients()
        errors = self._error.split([gradient.numel() for gradient in gradients])
        pairs = list(zip(gradients, errors, self._shapes, strict=True))
        matrices = [(gradient.view(shape), error.view(shape)) for gradient, error, shape in pairs if shape]
        vectors = [gradient for gradient, _, shape in pairs if shape is None]  # too small to compress
        ps = [matrix @ q.T for (matrix, _), q in zip(matrices, self._qs, strict=True)]
        _average([*ps, *vectors], ranks)
        ps = [torch.linalg.qr(p).Q for p in ps]
        for q, (matrix, _), p in zip(self._qs, matrices, ps, strict=True):
            torch.mm(p.T, matrix, out=q)
        _average(self._qs, ranks)
        for (matrix, error), p, q in zip(matrices, ps, self._qs, strict=True):
            torch.addmm(matrix, p, q, alpha=-1, out=error)
            torch.mm(p, q, out=matrix)

    def rescale(self, factor: float) -> None:
        """Convert the error to another loss scale."""
        self._error.mul_(factor)

    def restart(self) -> None:
        """Drop the error and draw new factors."""
        self._error.zero_()
        draw = torch.Generator(self._error.device).manual_seed(self._index)  # the same on all ranks
        for q in self._qs:
            q.normal_(generator=draw)


def _average(tensors: list[torch.Tensor], ranks: int) -> None:
    """Average tensors in place with one all-reduce."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(ranks)
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    copy_all_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
