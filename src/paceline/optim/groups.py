"""Creates optimizers with parameter groups."""

from fnmatch import fnmatch

import torch
from torch import nn, optim

from paceline.config.recipe import Optim
from paceline.errors import UserError
from paceline.optim.factory import Groups, check, construct, has_known_state
from paceline.optim.rehearsal import check_resumable, check_shardable
from paceline.system.norms import NORMS


def groups(model: nn.Module, config: Optim) -> Groups:
    """Return parameter groups: weights with weight decay, biases and norms without, norm biases with their own factor.

    `scale` of a group is its factor on the scheduled learning rate.
    """
    norm_biases = {
        id(module.bias) for module in model.modules() if isinstance(module, NORMS) and module.bias is not None
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in trained if p.ndim > 1]
    plain = [p for p in trained if p.ndim <= 1 and id(p) not in norm_biases]
    biases = [p for p in trained if id(p) in norm_biases]
    small_decay = config.weight_decay if config.decay_norm_bias else 0.0
    listed = [
        {"params": decayed, "weight_decay": config.weight_decay, "scale": 1.0},
        {"params": plain, "weight_decay": small_decay, "scale": 1.0},
        {"params": biases, "weight_decay": small_decay, "scale": config.norm_bias_lr_factor},
    ]
    return [group for group in _with_fallback(listed, model, config) if group["params"]]


def _with_fallback(listed: Groups, model: nn.Module, config: Optim) -> Groups:
    """Split groups by timm's options for Muon: parameters that AdamW updates, although their shape suits Muon."""
    patterns = config.options.get("fallback_list", [])
    names = [name for name, _ in model.named_parameters()]
    if not isinstance(patterns, list) or not all(any(fnmatch(name, str(item)) for name in names) for item in patterns):
        message = (
            f"optim.options.fallback_list={patterns!r} is not a list of patterns that match parameters of the model"
        )
        raise UserError("invalid-optimizer-option", f"{message}: {', '.join(names)[:300]}.", name="fallback_list")
    if config.options.get("fallback_no_weight_decay"):
        patterns = [*patterns, *getattr(model, "no_weight_decay", list)()]
    chosen = {id(p) for name, p in model.named_parameters() if any(fnmatch(name, str(item)) for item in patterns)}
    if not chosen:
        return listed
    return [
        {**group, "params": [p for p in group["params"] if (id(p) in chosen) == fallback], **more}
        for group in listed
        for fallback, more in ((False, {}), (True, {"use_fallback": True}))
    ]


def create(model: nn.Module, config: Optim, loss_scaling: bool = False) -> optim.Optimizer:
    """Return the optimizer of a recipe, with the fastest kernels that it has.

    Fused kernels also skip an overflowed step (`loss_scaling`) on the device, without a wait for its result.
    """
    check(config)
    sharded = next((parameter for parameter in model.parameters() if hasattr(parameter, "device_mesh")), None)
    if not has_known_state(config):
        check_resumable(config)
        if sharded is not None:
            check_shardable(config, sharded)
    if config.name != "sgd":
        return construct(groups(model, config), config, fused=True)
    dampened = bool(config.options.get("dampening"))  # the first momentum is not dampened, so it cannot start at zero
    fusable = sharded is None and not (loss_scaling and dampened)  # PyTorch's fused SGD does not take sharded tensors
    optimizer = construct(groups(model, config), config, fused=True if fusable else None)
    if loss_scaling and optimizer.defaults.get("fused") and config.momentum:
        _init_momentum(optimizer)
    return optimizer


def _init_momentum(optimizer: optim.Optimizer) -> None:
    """Start the momentum at zero. Fused SGD would leave it uninitialized if the first step is skipped."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def set_lr(optimizer: optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]
