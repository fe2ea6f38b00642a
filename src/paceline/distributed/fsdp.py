"""FSDP2: each rank keeps a shard of every weight, gradient and optimizer state."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.config.recipe import Recipe
from paceline.distributed.grad_sync import WIRE_DTYPES
from paceline.distributed.mesh import create_mesh, shard_id
from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.system.blocks import repeated_blocks
from paceline.system.norms import BATCH_NORMS


class Sharded:
    """`forward` is for training, `module` for checkpoints and evaluation; same methods as Replica."""

    def __init__(self, model: nn.Module, world: World, recipe: Recipe, precision: str, mesh: DeviceMesh | None = None):
        mesh = mesh or create_mesh(world, recipe.fsdp.mesh)
        shard(model, world, recipe, precision, mesh)
        self.shard = shard_id(mesh)
        """What this rank holds of the state."""
        self.module, self._reshard = model, recipe.fsdp.reshard_after_forward
        self.forward: Callable[[torch.Tensor], torch.Tensor] = model

    def sync_gradients(self, last: bool) -> AbstractContextManager[object]:
        """Context for a micro-batch: only the last one of a step synchronizes gradients."""
        cast(FSDPModule, self.module).set_requires_gradient_sync(last)
        return nullcontext()

    @staticmethod
    def freeze(_parameters: Iterable[nn.Parameter]) -> None:
        """Nothing: FSDP computes the gradients of all parameters that were trained at the start."""

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """Unshard all weights, so that ranks can evaluate different numbers of batches."""
        parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.set_reshard_after_forward(self._reshard, recurse=False)
                part.reshard()

    @staticmethod
    def follow_scale(_scaler: torch.amp.GradScaler) -> AbstractContextManager[object]:
        return nullcontext()

    def sync_seconds(self) -> Callable[[], float]:
        """Unknown (NaN): FSDP communicates throughout forward and backward, which count as compute."""
        return lambda: math.nan


def shard(model: nn.Module, world: World, recipe: Recipe, precision: str, mesh: DeviceMesh) -> None:
    """Shard a model block by block, so that only one block's weights are unsharded at a time."""
    compute = WIRE_DTYPES[precision]
    if any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        compute = torch.float32  # batch-norm kernels need fp32 weights; autocast handles the rest
    settings: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": recipe.fsdp.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=WIRE_DTYPES[recipe.grad_sync.dtype], cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy() if _offloads(recipe, world) else OffloadPolicy(),
    }
    blocks = list(repeated_blocks(model))
    if not blocks:
        raise UserError(
            "fsdp-no-blocks",
            f"strategy=fsdp: model.name={recipe.model.name} has no repeated blocks to shard. Use strategy=ddp.",
            model=recipe.model.name,
        )
    try:
        for block in blocks:
            fully_shard(block, **settings)
        fully_shard(model, **settings)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            "fsdp-unsupported-model",
            f"strategy=fsdp: model.name={recipe.model.name} cannot be sharded ({reason}). Use strategy=ddp.",
            model=recipe.model.name,
        ) from None


def _offloads(recipe: Recipe, world: World) -> bool:
    return recipe.fsdp.cpu_offload and world.device.type == "cuda"


def without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are on the meta device. Shared ones stay shared."""
    tensors = [*model.parameters(), *model.buffers()]
    memo = {id(tensor): tensor.detach().to("meta") for tensor in tensors}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(memo[id(parameter)], parameter.requires_grad)
    return deepcopy(model, cast(Any, memo))


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers by name; a buffer that modules share has several."""
    return [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]


def initialize(model: nn.Module, source: nn.Module | None, world: World, recipe: Recipe) -> None:
    """Allocate the shards of a model without memory, and fill them with the weights of `source`, on rank 0."""
    model.to_empty(device="cpu" if _offloads(recipe, world) else world.device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=world.device))
    copy_weights(model, source, world)


@torch.no_grad()
def copy_weights(model: nn.Module, source: nn.Module | None, world: World) -> None:
    """Fill the shards of a model with the weights of `source`, on rank 0. A collective.

    One tensor at a time is whole on the ranks' devices. Buffers, including those that checkpoints do not hold, are not
    sharded.
    """
    weights = dict(_tensors(source)) if source else {}
    for name, target in _tensors(model):
        whole = torch.empty(target.shape, dtype=target.dtype, device=world.device)
        if source:
            whole.copy_(weights[name])
        if isinstance(target, DTensor):
            sharded = distribute_tensor(whole, target.device_mesh, target.placements)
            target.to_local().copy_(sharded.to_local())
        elif whole.numel():
            world.broadcast_(whole.view(-1).view(torch.uint8))  # as bytes, because gloo does not support all types
            target.copy_(whole)
