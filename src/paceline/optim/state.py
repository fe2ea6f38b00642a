"""Optimizer state: what checkpoints hold of it, and the checks before it is loaded."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import optim

from paceline.config.optim import Optim
from paceline.errors import UserError
from paceline.optim.factory import has_known_state
from paceline.optim.template import Template, is_count, parameters_by_number, place, tensor_mismatch
from paceline.system.logs import log


def state_dict(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the state for a checkpoint. Settings that are not plain values, such as data types, are left out."""
    state = optimizer.state_dict()
    groups = [{key: value for key, value in group.items() if _is_plain(value)} for group in state["param_groups"]]
    return {"state": state["state"], "param_groups": groups}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def load_state(optimizer: optim.Optimizer, config: Optim, state: dict[str, Any], step: int, origin: str) -> None:
    """Load the state of a checkpoint at `step`, with each tensor in the memory layout of its parameter.

    Checkpoints hold contiguous tensors. Fused optimizers iterate over parameter and momentum in memory order, so a
    momentum in another order than a channels_last filter would update the wrong weights, and one of another shape would
    be written out of bounds: nothing is loaded before all of it has been checked.
    """
    if problem := try_load(optimizer, config, state, step):
        raise UserError(
            "checkpoint-optimizer-mismatch",
            f"{origin}: {problem}. The checkpoint is of another model or optimizer, or was not written by paceline.",
            path=origin,
        )
    _complete(optimizer, origin)


def try_load(optimizer: optim.Optimizer, config: Optim, state: dict[str, Any], step: int) -> str:
    """Load a state if all of it can be used. Returns the first problem, or ""."""
    numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    if [group.get("params") for group in state["param_groups"]] != numbers:
        return "the parameter groups of the optimizer differ"
    if has_known_state(config):
        problem = next(_mismatches(optimizer, state, step), "")
        if not problem:
            _load(optimizer, state)
        return problem
    template = Template.of(optimizer, config)
    problem = next(template.mismatches(state, step), "")
    if not problem:
        template.load(optimizer, state)
    return problem


def _load(optimizer: optim.Optimizer, state: dict[str, Any]) -> None:
    current = optimizer.state_dict()["param_groups"]  # from the recipe, which may have been overridden since
    kept = [{"step": group["step"]} if "step" in group else {} for group in state["param_groups"]]
    groups = [ours | theirs for ours, theirs in zip(current, kept, strict=True)]
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = optimizer.state.get(parameter, {})
            # PyTorch leaves the step where the checkpoint had it, unless the kernel needs it on the device
            on_device = group.get("fused") or group.get("capturable")
            for name, value in values.items():
                if name == "step":
                    values[name] = value.to(parameter.device if on_device else "cpu")
                elif isinstance(value, torch.Tensor):
                    values[name] = place(value, parameter)


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
"""Names of the tensors that a built-in optimizer keeps for each parameter."""


def _mismatches(optimizer: optim.Optimizer, state: dict[str, Any], step: int) -> Iterator[str]:
    """Yield descriptions of what in a state a built-in optimizer cannot use."""
    for group in state["param_groups"]:
        if "step" in group and not is_count(group["step"], step):
            yield f"the step of the optimizer is not an integer from 0 to {step}"
    parameters = parameters_by_number(optimizer)
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


def _mismatch(parameter: torch.Tensor, name: str, value: Any, step: int) -> str:
    """Return why a value cannot be the state of a parameter, or ""."""
    if name == "step":
        return "" if is_count(value, step) else f"is not an integer from 0 to {step}"
    if value is None and name == "momentum_buffer":
        return ""  # SGD without momentum
    return tensor_mismatch(name, value, parameter)
