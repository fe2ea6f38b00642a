"""A small, fast CIFAR network in the style of airbench (K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU").

It trains fast because the first layer is set once to whiten image patches and then frozen, later convolutions start as
(partial) identities, batch norm has no learned scale, and pooling comes early.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F


def _norm(kind: str, channels: int, momentum: float) -> nn.Module:
    """Return batch norm, or group norm (which is independent of the other images), with a learned bias only."""
    if kind not in ("batch", "group"):
        raise ValueError(f"norm={kind!r} is neither 'batch' nor 'group'")
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=momentum) if kind == "batch" else nn.GroupNorm(1, channels)
    norm.weight.requires_grad_(False)
    return norm


class _Conv(nn.Conv2d):
    """3x3 convolution without bias, initialized to pass as many inputs unchanged as it has outputs."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, 3, padding="same", bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.dirac_(self.weight[: min(self.weight.shape[:2])])


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, depth: int, norm: str, norm_momentum: float, residual: bool):
        super().__init__()
        self.residual = residual
        self.convs = nn.ModuleList(_Conv(inputs if n == 0 else outputs, outputs) for n in range(depth))
        self.norms = nn.ModuleList(_norm(norm, outputs, norm_momentum) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True), start=1):
            x = conv(x)
            if number == 1:
                x = F.max_pool2d(x, 2)
            x = norm(x)
            if self.residual and 1 < number == len(self.convs):
                x = x + first
            x = F.gelu(x)
            if number == 1:
                first = x
        return x


class AirbenchNet(nn.Module):
    """Whitening layer, one pooling block per width, global max pool, linear head with scaled logits.

    `depths` is the number of convolutions per block, two by default. With `residual` the output of the first one is
    added to that of the last one. `head_std` is the standard deviation of the initial head, 0 for the initialization of
    PyTorch. If the bias of the whitening layer is frozen (model.freeze, optim.groups), nothing before the first block
    needs a gradient, which avoids the backward pass through the largest feature maps.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        widths: Sequence[int] = (64, 256, 256),
        depths: Sequence[int] = (),
        norm: str = "batch",
        norm_momentum: float = 0.4,
        residual: bool = False,
        head_std: float = 1.0,
        logit_scale: float = 1 / 9,
    ):
        super().__init__()
        kernel = 2
        patch = in_chans * kernel * kernel
        self.whiten = nn.Conv2d(in_chans, 2 * patch, kernel)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        inputs, depths = [2 * patch, *widths[:-1]], depths or [2] * len(widths)
        shapes = zip(inputs, widths, depths, strict=True)
        self.blocks = nn.Sequential(*(_Block(*shape, norm, norm_momentum, residual) for shape in shapes))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        if head_std:
            with torch.no_grad():
                self.head.weight.mul_(head_std / self.head.weight.std())
        self.logit_scale = logit_scale

    def get_classifier(self) -> nn.Module:
        return self.head

    @torch.no_grad()
    def prepare(self, images: torch.Tensor) -> None:
        """Set the first layer from normalized training images: eigenvectors of their patches, scaled to unit variance.

        Each one is used with both signs because a GELU follows.
        """
        kernel = self.whiten.kernel_size[0]
        patches = images.unfold(2, kernel, 1).unfold(3, kernel, 1).permute(0, 2, 3, 1, 4, 5)
        flat = patches.reshape(-1, images.shape[1] * kernel * kernel).cpu().double()
        values, vectors = torch.linalg.eigh(flat.T @ flat / len(flat))
        scaled = (vectors / torch.sqrt(values + 5e-4)).T.flip(0).reshape(-1, images.shape[1], kernel, kernel)
        self.whiten.weight.copy_(torch.cat([scaled, -scaled]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.gelu(self.whiten(x)))
        return self.head(x.amax(dim=(2, 3))) * self.logit_scale
