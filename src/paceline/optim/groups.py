"""Optimizers, and which parameters get which treatment."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn, optim

from paceline.config.recipe import Optim
from paceline.errors import UserError
from paceline.system.logs import log
from paceline.system.torchvision_compat import allow_torchvision

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
    small_decay = config.weight_decay if config.decay_norm_bias else 0.0
    listed = [
        {"params": decayed, "weight_decay": config.weight_decay, "scale": 1.0},
        {"params": plain, "weight_decay": small_decay, "scale": 1.0},
        {"params": biases, "weight_decay": small_decay, "scale": config.norm_bias_lr_factor},
    ]
    return [group for group in listed if group["params"]]


def create(model: nn.Module, config: Optim, fused: bool = True) -> optim.Optimizer:
    """The optimizer. Fused kernels are the fastest, but know no shards, and a step that the loss scaler skips leaves
    fused SGD's momentum uninitialized."""
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


def load_state(optimizer: optim.Optimizer, state: dict[str, Any], step: int, origin: str) -> None:
    """Take over the state that was saved after `step` steps, with each tensor laid out in memory as its parameter is.

    Checkpoints hold plain tensors. Fused optimizers walk through parameter and momentum side by side, so a momentum in
    another order than a channels_last filter would be applied to the wrong weights, and one of another shape would be
    written beyond its end: nothing is taken over before all of it has been checked.
    """
    if problem := next(_misfits(optimizer, state, step), None):
        raise UserError(f"{origin}: {problem}; it belongs to another model, or paceline has not written it")
    own = optimizer.state_dict()["param_groups"]  # the recipe's, which may have been overridden since
    kept = [{"step": group["step"]} if "step" in group else {} for group in state["param_groups"]]
    groups = [mine | theirs for mine, theirs in zip(own, kept, strict=True)]
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = _like(parameter, value)
    _complete(optimizer, origin)


def _complete(optimizer: optim.Optimizer, origin: str) -> None:
    """Parameters without a state start from zero: those of unused layers, which never had one."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    lacking = [parameter for parameter in parameters if not any(_held(optimizer, parameter))]
    if not lacking or len(lacking) == len(parameters):
        return
    log.warning("%s: the optimizer has no state of %d of %d parameters", origin, len(lacking), len(parameters))
    if isinstance(optimizer, optim.SGD):  # fused SGD wants the momentum of all or of none
        for parameter in lacking:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _held(optimizer: optim.Optimizer, parameter: torch.Tensor) -> list[bool]:
    return [value is not None for value in optimizer.state.get(parameter, {}).values()]


_TENSORS = {"SGD": {"momentum_buffer"}, "AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Lamb": {"exp_avg", "exp_avg_sq"}}
"""What an optimizer keeps of each parameter."""


def _misfits(optimizer: optim.Optimizer, state: dict[str, Any], step: int) -> Iterator[str]:
    """What of a saved state the optimizer could not work with, in words."""
    numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    if [group.get("params") for group in state["param_groups"]] != numbers:
        yield "the optimizer's groups of parameters are others"
        return
    for group in state["param_groups"]:
        if "step" in group and not _is_count(group["step"], step):
            yield f"the optimizer's step is not a whole number from 0 to {step}"
    parameters = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    wanted = _TENSORS[type(optimizer).__name__]
    for number, tensors in state["state"].items():
        where = f"state {number} of the optimizer"
        if number not in parameters:
            yield f"{where} belongs to no parameter"
        elif tensors and set(tensors) != wanted:
            yield f"{where} has {', '.join(map(str, tensors))} instead of {', '.join(sorted(wanted))}"
        else:
            for name, value in tensors.items():
                if problem := _unlike(parameters[number], name, value, step):
                    yield f"{where}: {name} {problem}"


def _is_count(value: Any, most: int) -> bool:
    if not isinstance(value, torch.Tensor) or value.ndim or value.dtype != torch.float32:
        return False
    return value.item() in range(most + 1)


def _unlike(parameter: torch.Tensor, name: str, value: Any, step: int) -> str:
    """Why a value cannot stand beside its parameter; empty if it can."""
    if name == "step":
        return "" if _is_count(value, step) else f"is not a whole number from 0 to {step}"
    if value is None and name == "momentum_buffer":
        return ""  # SGD without momentum
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]
        return f"is {found}, its parameter {parameter.dtype} {tuple(parameter.shape)}"
    if not value.isfinite().all():
        return "holds numbers that are not finite"
    return "holds negative numbers" if name == "exp_avg_sq" and (value < 0).any() else ""


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A whole tensor, laid out or sharded as the parameter is."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor  # not at the start: it takes a second to load

        assert isinstance(parameter, DTensor)
        shard: torch.Tensor = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        return shard
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
