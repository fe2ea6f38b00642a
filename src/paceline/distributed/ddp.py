"""The model as a rank trains it: alone, or as one of DDP's replicas."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.config.recipe import Recipe
from paceline.distributed.grad_sync import WIRE_DTYPES, AllReduce, SharedMemory, shares_memory
from paceline.distributed.powersgd import PowerSgd
from paceline.distributed.world import World
from paceline.errors import UserError

_WHOLE_MODEL_MB = 1 << 20


class Replica:
    """`forward` to train with, `module` to save and evaluate."""

    gathers = False
    """Every rank has the whole state."""

    def __init__(self, model: nn.Module, world: World, recipe: Recipe):
        self.module = model
        self._world = world
        self._exchange: AllReduce | SharedMemory | PowerSgd | None = None
        self._ddp: DistributedDataParallel | None = None
        forward: nn.Module = model
        if world.size > 1:
            grad_sync = recipe.grad_sync
            dtype = WIRE_DTYPES[grad_sync.dtype]
            in_memory = grad_sync.transport != "network" and not grad_sync.powersgd_rank
            in_memory = in_memory and shares_memory(world, dtype.itemsize * sum(p.numel() for p in model.parameters()))
            if grad_sync.transport == "shm" and not in_memory:
                raise UserError(
                    "grad_sync.transport=shm: only CPU ranks of one machine, with room in /dev/shm and without "
                    "PowerSGD, exchange gradients through its memory; use auto"
                )
            if grad_sync.powersgd_rank:
                self._exchange = PowerSgd(world, grad_sync.powersgd_rank, grad_sync.powersgd_start_step)
            else:
                self._exchange = SharedMemory(world, dtype) if in_memory else AllReduce(world, dtype)
            self._ddp = DistributedDataParallel(
                model,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                # through memory there is nothing to overlap with: one exchange, one wait
                bucket_cap_mb=_WHOLE_MODEL_MB if in_memory else grad_sync.bucket_mb,
                forward_sync_buffers=False,  # average_buffers does it, when somebody looks
                gradient_as_bucket_view=True,
                static_graph=recipe.train.grad_accumulation == 1,
            )
            self._ddp.register_comm_hook(None, self._exchange.average)
            forward = self._ddp
        self.forward: Callable[[torch.Tensor], torch.Tensor] = torch.compile(forward) if recipe.compile else forward

    def exchanging(self, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch: only the last one of a step exchanges gradients."""
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    @staticmethod
    def gathered(state: Any) -> Any:
        """A state with whole tensors."""
        return state

    @staticmethod
    def whole(_model: nn.Module) -> AbstractContextManager[object]:
        """Around an evaluation, in which ranks may have different numbers of batches."""
        return nullcontext()

    def follow_scale(self, scaler: torch.amp.GradScaler) -> AbstractContextManager[object]:
        """Around the update of the loss scale."""
        if isinstance(self._exchange, PowerSgd) and scaler.is_enabled():
            return self._exchange.following(scaler)
        return nullcontext()

    def sync_seconds(self) -> Callable[[], float]:
        """After backward: how long this rank waited for the others; call the result when the device is done."""
        return self._exchange.seconds_since_last() if self._exchange else lambda: 0.0


@torch.no_grad()
def average_buffers(model: nn.Module, world: World) -> None:
    """Give every rank the mean of all ranks' batch-norm statistics, before evaluation and saving."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if world.size == 1 or not buffers:
        return
    flat = torch.cat([buffer.flatten() for buffer in buffers])
    world.sum_(flat).div_(world.size)
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))
