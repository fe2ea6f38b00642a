"""torch's normalization layers by kind, and batch norm that is not trained."""

from typing import Self

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LayerNorm, nn.GroupNorm)
"""Their common base classes are private."""


class FrozenNorm(nn.Module):
    """A mixin that keeps a batch norm in evaluation mode, so that its statistics do not change."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


def freeze_norm(norm: nn.Module) -> None:
    """Keep a batch norm in evaluation mode, in copies of the model as well."""
    kind = type(norm)
    norm.__class__ = type(f"Frozen{kind.__name__}", (FrozenNorm, kind), {})
    norm.eval()
