"""Optimizers, and which parameters get which treatment."""

from typing import Any

import torch
from torch import nn, optim

from paceline.base.compat import allow_torchvision
from paceline.config.recipe import Optim

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def groups(model: nn.Module, config: Optim) -> list[dict[str, Any]]:
    """Matrices and filters decay; biases and everything in norms do not; norm biases may learn faster.

    Every group carries `scale`, its factor on the scheduled learning rate.
    """
    norm_biases = {
        id(module.bias) for module in model.modules() if isinstance(module, _NORMS) and module.bias is not None
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in trained if p.ndim > 1]
    plain = [p for p in trained if p.ndim <= 1 and id(p) not in norm_biases]
    biases = [p for p in trained if id(p) in norm_biases]
    small_decay = config.weight_decay if config.decay_all else 0.0
    listed = [
        {"params": decayed, "weight_decay": config.weight_decay, "scale": 1.0},
        {"params": plain, "weight_decay": small_decay, "scale": 1.0},
        {"params": biases, "weight_decay": small_decay, "scale": config.norm_bias_lr},
    ]
    return [group for group in listed if group["params"]]


def create(model: nn.Module, config: Optim, fused: bool = True) -> optim.Optimizer:
    """The optimizer. Fused kernels are the fastest, but know no shards, and a step that the loss scaler skips leaves
    fused SGD's momentum uninitialised."""
    if config.name == "sgd":
        nesterov = config.nesterov and config.momentum > 0
        return optim.SGD(groups(model, config), lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=fused)
    if config.name == "lamb":
        allow_torchvision()
        from timm.optim.lamb import Lamb

        lamb: optim.Optimizer = Lamb(groups(model, config), lr=config.lr, betas=config.betas, eps=config.eps)
        return lamb
    return optim.AdamW(groups(model, config), lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def set_lr(optimizer: optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]


def load_state(optimizer: optim.Optimizer, state: dict[str, Any]) -> None:
    """Take over a saved state, with each tensor laid out in memory as its parameter is.

    Saves hold plain tensors. Fused optimizers walk through parameter and momentum side by side, so a momentum in
    another order than a channels_last filter would be applied to the wrong weights.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, wanted in zip(optimizer.param_groups, settings, strict=True):
        group.update(wanted)  # the recipe's, which may have been overridden since
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = _like(parameter, value)


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A whole tensor, laid out or sharded as the parameter is."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor  # not at the start: it takes a second to load

        assert isinstance(parameter, DTensor)
        shard: torch.Tensor = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        return shard
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
