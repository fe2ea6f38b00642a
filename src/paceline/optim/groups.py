"""Creates optimizers with parameter groups, and loads their state."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn, optim

from paceline.config.recipe import Optim
from paceline.errors import UserError
from paceline.system.logs import log
from paceline.system.norms import NORMS
from paceline.system.torchvision_compat import allow_torchvision


def groups(model: nn.Module, config: Optim) -> list[dict[str, Any]]:
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
    return [group for group in listed if group["params"]]


def create(model: nn.Module, config: Optim, fused: bool = True) -> optim.Optimizer:
    """Return the optimizer of a recipe.

    Fused kernels are the fastest, but do not support sharded tensors, and a step that the loss scaler skips leaves the
    momentum of fused SGD uninitialized.
    """
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
    """Load the state of a checkpoint at `step`, with each tensor in the memory layout of its parameter.

    Checkpoints hold contiguous tensors. Fused optimizers iterate over parameter and momentum in memory order, so a
    momentum in another order than a channels_last filter would update the wrong weights, and one of another shape would
    be written out of bounds: nothing is loaded before all of it has been checked.
    """
    if problem := next(_mismatches(optimizer, state, step), None):
        raise UserError(
            "checkpoint-optimizer-mismatch",
            f"{origin}: {problem}. The checkpoint is of another model, or was not written by paceline.",
            path=origin,
        )
    current = optimizer.state_dict()["param_groups"]  # from the recipe, which may have been overridden since
    kept = [{"step": group["step"]} if "step" in group else {} for group in state["param_groups"]]
    groups = [ours | theirs for ours, theirs in zip(current, kept, strict=True)]
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = _like(parameter, value)
    _complete(optimizer, origin)


def _complete(optimizer: optim.Optimizer, origin: str) -> None:
    """Start parameters without state from zero. Those of unused layers never have state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stateless = [parameter for parameter in parameters if not any(_has_state(optimizer, parameter))]
    if not stateless or len(stateless) == len(parameters):
        return
    log.warning("%s has no optimizer state for %d of %d parameters", origin, len(stateless), len(parameters))
    if isinstance(optimizer, optim.SGD):  # fused SGD needs the momentum of all parameters or of none
        for parameter in stateless:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _has_state(optimizer: optim.Optimizer, parameter: torch.Tensor) -> list[bool]:
    return [value is not None for value in optimizer.state.get(parameter, {}).values()]


_TENSORS = {"SGD": {"momentum_buffer"}, "AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Lamb": {"exp_avg", "exp_avg_sq"}}
"""Names of the tensors that an optimizer keeps for each parameter."""


def _mismatches(optimizer: optim.Optimizer, state: dict[str, Any], step: int) -> Iterator[str]:
    """Yield descriptions of what in a state the optimizer cannot use."""
    numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    if [group.get("params") for group in state["param_groups"]] != numbers:
        yield "the parameter groups of the optimizer differ"
        return
    for group in state["param_groups"]:
        if "step" in group and not _is_count(group["step"], step):
            yield f"the step of the optimizer is not an integer from 0 to {step}"
    parameters = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    wanted = _TENSORS[type(optimizer).__name__]
    for number, tensors in state["state"].items():
        where = f"optimizer state {number}"
        if number not in parameters:
            yield f"{where} does not belong to a parameter"
        elif tensors and set(tensors) != wanted:
            yield f"{where} has {', '.join(map(str, tensors))} instead of {', '.join(sorted(wanted))}"
        else:
            for name, value in tensors.items():
                if problem := _mismatch(parameters[number], name, value, step):
                    yield f"{where}: {name} {problem}"


def _is_count(value: Any, largest: int) -> bool:
    if not isinstance(value, torch.Tensor) or value.ndim or value.dtype != torch.float32:
        return False
    count = value.item()
    return 0 <= count <= largest and count == int(count)


def _mismatch(parameter: torch.Tensor, name: str, value: Any, step: int) -> str:
    """Return why a value cannot be the state of a parameter, or ""."""
    if name == "step":
        return "" if _is_count(value, step) else f"is not an integer from 0 to {step}"
    if value is None and name == "momentum_buffer":
        return ""  # SGD without momentum
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]
        return f"is {found}, but its parameter is {parameter.dtype} {tuple(parameter.shape)}"
    if not value.isfinite().all():
        return "contains NaN or infinity"
    return "contains negative numbers" if name == "exp_avg_sq" and (value < 0).any() else ""


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor in the memory layout or sharding of the parameter."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor  # imported late because it takes a second

        assert isinstance(parameter, DTensor)
        shard: torch.Tensor = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        return shard
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
