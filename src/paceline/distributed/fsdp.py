"""FSDP2: each rank keeps a shard of every weight, gradient and optimizer state."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paceline.config.recipe import Recipe
from paceline.distributed.grad_sync import WIRE_DTYPES
from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.system.blocks import repeated_blocks
from paceline.system.norms import BATCH_NORMS


class Sharded:
    """`forward` is for training, `module` for checkpoints and evaluation; same methods as Replica."""

    state_is_sharded = True
    """Reading the full state is a collective: all ranks take part."""

    def __init__(self, model: nn.Module, world: World, recipe: Recipe, precision: str):
        shard(model, world, recipe, precision)
        self.module, self._reshard = model, recipe.fsdp.reshard_after_forward
        self.forward: Callable[[torch.Tensor], torch.Tensor] = model

    def sync_gradients(self, last: bool) -> AbstractContextManager[object]:
        """Context for a micro-batch: only the last one of a step synchronizes gradients."""
        cast(FSDPModule, self.module).set_requires_gradient_sync(last)
        return nullcontext()

    @staticmethod
    def full_state(state: Any) -> Any:
        """Return the state with full (unsharded) tensors; all ranks take part."""
        return _gathered(state)

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


def shard(model: nn.Module, world: World, recipe: Recipe, precision: str) -> None:
    """Shard a model block by block, so that only one block's weights are unsharded at a time."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    compute = WIRE_DTYPES[precision]
    if any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        compute = torch.float32  # batch-norm kernels need fp32 weights; autocast handles the rest
    offload = recipe.fsdp.cpu_offload and world.device.type == "cuda"
    settings: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": recipe.fsdp.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=WIRE_DTYPES[recipe.grad_sync.dtype], cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
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


def _gathered(tree: Any) -> Any:
    if isinstance(tree, DTensor):
        return tree.full_tensor()
    if isinstance(tree, dict):
        return {key: _gathered(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_gathered(value) for value in tree]
    return tree


def load_full_state(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Load full weights into a sharded model."""
    set_model_state_dict(model, dict[str, Any](weights), options=StateDictOptions(full_state_dict=True))
