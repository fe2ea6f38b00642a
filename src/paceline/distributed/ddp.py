"""The model that one rank trains: a replica whose gradients are averaged over ranks, by DDP or in shared memory."""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.config.recipe import Recipe
from paceline.distributed.grad_sync import WIRE_DTYPES, AllReduce, SharedMemory, can_share_memory
from paceline.distributed.mesh import ShardId
from paceline.distributed.powersgd import PowerSgd
from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.system.norms import FrozenNorm

_STATISTICS, _NUM_BATCHES = ("running_mean", "running_var"), "num_batches_tracked"
"""Buffers of batch norm."""


class Replica:
    """`forward` is for training, `module` for checkpoints and evaluation."""

    shard = ShardId()
    """What this rank holds of the state: all of it."""

    def __init__(self, model: nn.Module, world: World, recipe: Recipe):
        self.module, self._world, self._recipe = model, world, recipe
        self._sync: AllReduce | SharedMemory | PowerSgd | None = None
        self._ddp: DistributedDataParallel | None = None
        self.forward: Callable[[torch.Tensor], torch.Tensor] = model
        self._connect()

    def _connect(self) -> None:
        """Synchronize the gradients of all parameters that are trained. A collective."""
        if self._world.size > 1:
            self._sync = _synchronization(self.module, self._world, self._recipe)
            if not isinstance(self._sync, SharedMemory):
                self._ddp = _wrapped(self.module, self._world, self._recipe, self._sync)
                self.forward = self._ddp

    def freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Compute no more gradients of these parameters. A collective.

        PowerSGD keeps computing them, since its error feedback is bound to the buckets of all gradients.
        """
        if isinstance(self._sync, PowerSgd):
            return
        for parameter in parameters:
            parameter.requires_grad_(False)
        if isinstance(self._sync, SharedMemory):
            self._sync.close()
        self._ddp, self._sync, self.forward = None, None, self.module
        gc.collect()  # DDP is part of a cycle, and only its end removes its hooks
        self._connect()

    def sync_gradients(self, last: bool) -> AbstractContextManager[object]:
        """Context for a micro-batch: only the last one of a step synchronizes gradients."""
        if isinstance(self._sync, SharedMemory):
            return self._sync.synchronizing() if last else nullcontext()
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    @staticmethod
    def unsharded(_model: nn.Module) -> AbstractContextManager[object]:
        """Context for an evaluation, in which ranks may have different numbers of batches."""
        return nullcontext()

    def follow_scale(self, scaler: torch.amp.GradScaler) -> AbstractContextManager[object]:
        """Context for the update of the loss scale."""
        if isinstance(self._sync, PowerSgd) and scaler.is_enabled():
            return self._sync.following(scaler)
        return nullcontext()

    def sync_seconds(self) -> Callable[[], float]:
        """Call after backward. Returns a function for the seconds of waiting, to be called when the device is done."""
        return self._sync.seconds_since_last() if self._sync else lambda: 0.0


def _synchronization(model: nn.Module, world: World, recipe: Recipe) -> AllReduce | SharedMemory | PowerSgd:
    """Return how ranks average gradients."""
    grad_sync = recipe.grad_sync
    dtype = WIRE_DTYPES[grad_sync.dtype]
    use_shm = grad_sync.transport != "network" and not grad_sync.powersgd_rank
    use_shm = use_shm and can_share_memory(
        world, dtype.itemsize * sum(p.numel() for p in model.parameters() if p.requires_grad)
    )
    if grad_sync.transport == "shm" and not use_shm:
        raise UserError(
            "shm-unavailable",
            "grad_sync.transport=shm needs all ranks on the CPUs of one node, enough free space in /dev/shm, "
            "and grad_sync.powersgd_rank=0. Use grad_sync.transport=auto.",
        )
    if grad_sync.powersgd_rank:
        return PowerSgd(world, grad_sync.powersgd_rank, grad_sync.powersgd_start_step)
    return SharedMemory(world, dtype, model.parameters()) if use_shm else AllReduce(world, dtype)


def _wrapped(model: nn.Module, world: World, recipe: Recipe, sync: AllReduce | PowerSgd) -> DistributedDataParallel:
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=recipe.grad_sync.bucket_mb,
        forward_sync_buffers=False,  # average_buffers does it before evaluation and checkpoints
        init_sync=False,  # broadcast_model has done it
        gradient_as_bucket_view=True,
        static_graph=recipe.train.grad_accumulation == 1,
    )
    ddp.register_comm_hook(None, sync.average)
    return ddp


def broadcast_model(model: nn.Module, world: World) -> None:
    """Give all ranks the parameters and buffers of rank 0."""
    _broadcast([*model.parameters(), *model.buffers()], world)


@torch.no_grad()
def average_buffers(model: nn.Module, world: World) -> None:
    """Average the batch-norm statistics over all ranks, before evaluation and checkpoints.

    Other buffers are taken from rank 0, because their mean may not be a valid value.
    """
    if world.size == 1:
        return
    statistics, others = [], []
    for name, buffer in model.named_buffers():
        path, _, kind = name.rpartition(".")
        if isinstance(model.get_submodule(path), FrozenNorm):
            continue  # the same on all ranks, and an average could round it
        if kind in _STATISTICS and buffer.is_floating_point():
            statistics.append(buffer)
        elif kind != _NUM_BATCHES:  # the same on all ranks
            others.append(buffer)
    _broadcast(others, world)
    if statistics:
        flat = torch.cat([buffer.flatten() for buffer in statistics])
        world.sum_(flat).div_(world.size)
        for buffer, part in zip(statistics, flat.split([buffer.numel() for buffer in statistics]), strict=True):
            buffer.copy_(part.view_as(buffer))


@torch.no_grad()
def _broadcast(tensors: Sequence[torch.Tensor], world: World) -> None:
    if world.size == 1:
        return
    for tensor in filter(torch.Tensor.numel, tensors):
        values = tensor.detach().contiguous()
        world.broadcast_(values.view(-1).view(torch.uint8))  # as bytes, because gloo does not support all types
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)
