"""Narrow versions of the networks of the recipes' sources, in plain torch and torchvision, with timm's weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from paceline.system.torchvision_compat import allow_torchvision

allow_torchvision()
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet  # noqa: E402

LAYERS, CHANNELS = (1, 1, 1, 1), (8, 16, 32, 64)
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


def resnet(kind: str, classes: int, zero_init: bool = False, blur: bool = False) -> nn.Module:
    """Return a narrow `resnet18` or `resnet50` of torchvision; `blur`: with the BlurPool of ffcv-imagenet."""
    block: Any = BasicBlock if kind == "resnet18" else Bottleneck
    net = ResNet(block, list(LAYERS), classes)
    net.inplanes = 64
    for number, (channels, blocks) in enumerate(zip(CHANNELS, LAYERS, strict=True)):
        layer = net._make_layer(block, channels, blocks, stride=1 if number == 0 else 2)
        setattr(net, f"layer{number + 1}", layer)
    net.fc = nn.Linear(CHANNELS[-1] * block.expansion, classes)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif zero_init and isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
        elif zero_init and isinstance(module, BasicBlock):
            nn.init.zeros_(module.bn2.weight)
    return _with_blur(net) if blur else net


class BlurPool(nn.Module):
    """A convolution with a blurred input."""

    kernel: torch.Tensor

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.conv = conv
        kernel = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 16
        self.register_buffer("kernel", kernel.repeat(conv.in_channels, 1, 1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.conv2d(x, self.kernel, padding=1, groups=self.conv.in_channels))


def _with_blur(module: nn.Module) -> nn.Module:
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Conv2d) and max(child.stride) > 1 and child.in_channels >= 16:
            setattr(module, name, BlurPool(child))
        else:
            _with_blur(child)
    return module


class PlainVit(nn.Module):
    """A ViT with torch's encoder layers and a class token."""

    def __init__(self, classes: int):
        super().__init__()
        side, width = VIT["patch_size"], VIT["embed_dim"]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, (VIT["img_size"] // side) ** 2 + 1, width))
        self.patches = nn.Conv2d(3, width, side, side)
        layer = {"dropout": 0.0, "activation": "gelu", "layer_norm_eps": 1e-6, "batch_first": True, "norm_first": True}
        heads = VIT["num_heads"]
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **layer)  # type: ignore[arg-type]
            for _ in range(VIT["depth"])
        )
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


_TIMM_NAMES = {
    "patches": "patch_embed.proj",
    "self_attn.in_proj_": "attn.qkv.",
    "self_attn.out_proj": "attn.proj",
    "linear1": "mlp.fc1",
    "linear2": "mlp.fc2",
}


def by_timm_name(net: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a plain network with the names of timm's network."""
    return dict(_renamed(net.state_dict()))


def _renamed(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        for old, new in _TIMM_NAMES.items():
            name = name.replace(old, new)
        yield name.replace(".conv.weight", ".weight"), value


def load(net: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Copy the weights of timm's network to a plain one, and return it."""
    own = by_timm_name(net)
    if own.keys() != state.keys() or any(own[name].shape != value.shape for name, value in state.items()):
        raise ValueError(f"the networks differ: {sorted(own.keys() ^ state.keys())}")
    for name, value in state.items():
        own[name].copy_(value.detach())  # tensors of state_dict() share the memory of the network
    return net
