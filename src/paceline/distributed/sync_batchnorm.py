"""Synchronized batch norm: statistics over the batches of all ranks.

torch's own SyncBatchNorm works only on GPUs, where it is used; this module has the same for CPUs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.distributed.world import World
from paceline.system.norms import BATCH_NORMS


def synchronize(model: nn.Module, world: World) -> nn.Module:
    """Convert every batch norm of a model to synchronized batch norm, and return the model."""
    if world.device.type == "cuda" and world.size > 1:
        from timm.layers import convert_sync_batchnorm

        converted: nn.Module = convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            kind = type(module)
            module.__class__ = type(f"Synchronized{kind.__name__}", (_Synchronized, kind), {})
    return model


class _Synchronized(nn.Module):
    """A mixin that replaces the training forward pass of a batch norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm: Any = self
        if not norm.training:
            return super().forward(x)
        y, mean, variance, count = _SyncedNormalize.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            momentum = norm.momentum if norm.momentum is not None else 1 / float(norm.num_batches_tracked)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
        if hasattr(norm, "act"):  # timm's batch norms carry the activation that follows them
            y = norm.act(norm.drop(y))
        return y


class _SyncedNormalize(torch.autograd.Function):
    """Normalization with sums over all ranks in forward and backward, computed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
        wide = x.float()
        axes = [axis for axis in range(x.ndim) if axis != 1]
        count = torch.tensor([x.numel() / x.shape[1]], device=x.device)
        mean, variance, count = _moments(wide, axes, count)
        scale = torch.rsqrt(variance + eps)
        normal = (wide - _as(mean, x)) * _as(scale, x)
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.axes = axes
        ctx.mark_non_differentiable(mean, variance, count)
        return (normal * _as(weight, x) + _as(bias, x)).to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_others: Any) -> Any:
        normal, scale, weight, count = ctx.saved_tensors
        wide = grad.float()
        of_bias, of_weight = wide.sum(ctx.axes), (wide * normal).sum(ctx.axes)
        sums = _added(torch.stack([of_bias, of_weight])) / count
        inner = wide - _as(sums[0], grad) - normal * _as(sums[1], grad)
        # gradients of weight and bias stay local: gradient synchronization averages them like all others
        return (inner * _as(scale * weight, grad)).to(grad.dtype), of_weight, of_bias, None


def _moments(x: torch.Tensor, axes: list[int], count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, variance and count over all ranks. Two passes lose no digits, unlike E[x^2] - E[x]^2."""
    total = _added(torch.cat([x.sum(axes), count]))
    mean, count = total[:-1] / total[-1], total[-1:]
    squares = _added((x - _as(mean, x)).square().sum(axes))
    return mean, squares / count, count


def _added(tensor: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def _as(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape per-channel values to broadcast over (n, channels, ...)."""
    return values.view(1, -1, *([1] * (like.ndim - 2)))
