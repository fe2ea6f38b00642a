"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): ranks all-reduce low-rank factors of their gradients.

torch's own hook crashes under gloo when a model has several buckets, copies every gradient several times, and keeps the
error of an fp16 step that overflowed and was skipped.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from paceline.distributed.grad_sync import AllReduce
from paceline.distributed.world import World
from paceline.system.device import between, now
from paceline.system.torch_internals import copy_all_

_Stages = Generator[torch.Tensor, None, None]
"""Computes until a tensor is ready to be averaged, yields it, and continues once it is averaged."""


class PowerSgd:
    """Sends a gradient matrix as P Q, with few columns in P and few rows in Q, and adds the error to the next gradient.

    Each rank has its own error, which is not part of checkpoints: a resumed run starts with uncompressed gradients.

    A bucket takes two all-reduces, each of which overlaps with the backward pass until the next bucket is ready. All
    are started by the thread of the backward pass: in callbacks of gloo, their order would differ between ranks.
    """

    def __init__(self, world: World, rank: int, start_step: int):
        self._world, self._rank = world, rank
        self._start_step = max(2, start_step)  # DDP rebuilds its buckets in the second step
        self._steps = 0
        self._uncompressed = AllReduce(world, torch.float32)
        self._factors: dict[int, _Factors] = {}
        self._pending: deque[_Pending] = deque()
        self._last_sent: Any = 0.0

    def average(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._last_sent = now(self._world.device)
        index, is_last, compress = bucket.index(), bucket.is_last(), self._steps >= self._start_step
        self._steps += is_last
        if not compress:
            return self._uncompressed.average(None, bucket)
        if index not in self._factors:
            self._factors[index] = _Factors(bucket, self._rank)
        self._advance()
        pending = _Pending(self._factors[index].average(bucket), bucket.buffer(), self._world)
        self._pending.append(pending)
        pending.advance()
        while is_last and self._pending:
            self._advance()
        return pending.future

    def _advance(self) -> None:
        """Continue every bucket, in the same order on all ranks, and forget those that are done."""
        for pending in self._pending:
            pending.advance()
        self._pending = deque(pending for pending in self._pending if not pending.is_done)

    @contextmanager
    def following(self, scaler: torch.amp.GradScaler) -> Iterator[None]:
        """Context for an update of fp16's loss scale. A lower scale drops the error, because that step was skipped.

        Nothing waits for the device: the scale stays there.
        """
        one = torch.ones((), device=self._world.device)
        before = scaler.scale(one)
        yield
        after = scaler.scale(one)
        for factors in self._factors.values():
            factors.rescale(after / before, drop=after < before)

    def seconds_since_last(self) -> Callable[[], float]:
        """Call after backward. Returns a function for the seconds since the last bucket was sent."""
        return between(self._last_sent, now(self._world.device))


class _Pending:
    """A bucket that is being averaged."""

    def __init__(self, stages: _Stages, buffer: torch.Tensor, world: World):
        self._stages, self._buffer, self._ranks = stages, buffer, world.size
        self._work: dist.Work | None = None
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[world.device] if world.device.type == "cuda" else None
        )
        self.is_done = False

    def advance(self) -> None:
        """Wait for the last all-reduce, on GPUs only on their stream, and start the next one if there is any."""
        if self._work is not None:
            self._work.wait()
        tensor = next(self._stages, None)
        if tensor is not None:
            self._work = dist.all_reduce(tensor.div_(self._ranks), async_op=True)
        else:
            self.is_done = True
            self.future.set_result(self._buffer)


class _Factors:
    """The state of one bucket: Q of each matrix, stored by rows because that is many times faster, and the error."""

    def __init__(self, bucket: GradBucket, rank: int):
        self._error = torch.zeros_like(bucket.buffer())
        shapes = [(shape[0], shape.numel() // shape[0]) for shape in (p.shape for p in bucket.parameters())]
        self._is_matrix = [2 * rank * (rows + columns) < rows * columns for rows, columns in shapes]
        matrices = [shape for shape, is_matrix in zip(shapes, self._is_matrix, strict=True) if is_matrix]
        vectors = [
            (rows * columns,)
            for (rows, columns), is_matrix in zip(shapes, self._is_matrix, strict=True)
            if not is_matrix
        ]
        self._first, views = _packed([*((rows, rank) for rows, _ in matrices), *vectors], self._error)
        self._ps, self._vectors = views[: len(matrices)], views[len(matrices) :]
        self._second, self._qs = _packed([(rank, columns) for _, columns in matrices], self._error)
        # zero rows below a matrix change nothing, so that matrices of all sizes are orthogonalized together
        self._stack = self._error.new_zeros(len(matrices), max((rows for rows, _ in matrices), default=0), rank)
        self._bases = [basis[:rows] for basis, (rows, _) in zip(self._stack, matrices, strict=True)]
        self._initial = torch.empty_like(self._second)
        draw = torch.Generator(self._error.device).manual_seed(bucket.index())  # the same on all ranks
        self._second.copy_(self._initial.normal_(generator=draw))

    def average(self, bucket: GradBucket) -> _Stages:
        """Average a bucket's gradients in place."""
        bucket.buffer().add_(self._error)
        gradients = bucket.gradients()
        errors = self._error.split([gradient.numel() for gradient in gradients])
        pairs = list(zip(gradients, errors, self._is_matrix, strict=True))
        matrices = [
            (gradient.view(len(gradient), -1), error.view(len(gradient), -1))
            for gradient, error, is_matrix in pairs
            if is_matrix
        ]
        vectors = [gradient.view(-1) for gradient, _, is_matrix in pairs if not is_matrix]  # too small to compress
        for p, q, (matrix, _) in zip(self._ps, self._qs, matrices, strict=True):
            torch.mm(matrix, q.T, out=p)
        copy_all_(self._vectors, vectors)
        yield self._first
        copy_all_([*self._bases, *vectors], [*self._ps, *self._vectors])
        if not matrices:
            return
        self._stack.copy_(_orthonormal(self._stack))
        for p, q, (matrix, _) in zip(self._bases, self._qs, matrices, strict=True):
            torch.mm(p.T, matrix, out=q)
        yield self._second
        for p, q, (matrix, error) in zip(self._bases, self._qs, matrices, strict=True):
            torch.addmm(matrix, p, q, alpha=-1, out=error)
            torch.mm(p, q, out=matrix)

    def rescale(self, factor: torch.Tensor, drop: torch.Tensor) -> None:
        """Convert the error to another loss scale; or drop it, and start with new factors."""
        self._error.mul_(factor).masked_fill_(drop, 0.0)
        torch.where(drop, self._initial, self._second, out=self._second)


def _packed(shapes: list[tuple[int, ...]], like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a flat tensor and the tensors of these shapes in it."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = like.new_empty(sum(sizes))
    return flat, [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _orthonormal(matrices: torch.Tensor) -> torch.Tensor:
    """Return orthonormal bases of the columns of a batch of matrices."""
    if matrices.device.type == "cpu":
        return torch.linalg.qr(matrices).Q
    return by_reflections(matrices)  # torch.linalg.qr launches kernels for every matrix of a batch


def by_reflections(matrices: torch.Tensor) -> torch.Tensor:
    """Return the same with kernels for the whole batch.

    Unlike Gram-Schmidt, Householder reflections give a basis also if columns are zero or dependent. A factor that
    became zero would stay zero.
    """
    rest = matrices / matrices.abs().amax((1, 2), keepdim=True).clamp_min(torch.finfo(matrices.dtype).tiny)
    columns, normals = rest.shape[2], []
    for column in range(columns):
        normal = rest[:, column:, column].clone()
        normal[:, 0] += torch.copysign(torch.linalg.vector_norm(normal, dim=1), normal[:, 0])
        normal = torch.nn.functional.normalize(normal, dim=1, eps=torch.finfo(normal.dtype).tiny)
        _reflect_(rest[:, column:, column:], normal)
        normals.append(normal)
    bases = torch.eye(rest.shape[1], columns, dtype=rest.dtype, device=rest.device).repeat(len(rest), 1, 1)
    for column in reversed(range(columns)):
        _reflect_(bases[:, column:, column:], normals[column])
    return bases


def _reflect_(matrices: torch.Tensor, normal: torch.Tensor) -> None:
    """Reflect the columns of each matrix at the plane with this normal."""
    matrices.baddbmm_(normal[:, :, None], normal[:, None] @ matrices, alpha=-2)
