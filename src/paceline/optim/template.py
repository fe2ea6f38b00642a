"""Checks and loads the state of optimizers whose names, types and shapes are not known beforehand.

They are those of a template: a new optimizer with the same settings, after one step on tensors like the parameters. So
an untrusted checkpoint can only hold what the optimizer itself would have created.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim

from paceline.config.optim import Optim
from paceline.optim.factory import GROUP_FIELDS, argument_names, construct
from paceline.system.untrusted import HUGE

_FRACTIONS = ("mu_product", "m_schedule")
"""Products of numbers below 1; NAdam divides by their difference to 1."""


@dataclass(frozen=True)
class Template:
    """What a new optimizer keeps after one step."""

    parameters: dict[int, torch.Tensor]
    """The parameters of the optimizer to load into, by their number in its state."""
    states: dict[int, dict[str, Any]]
    """By the number of the parameter."""
    groups: list[dict[str, Any]]
    """Numbers that a parameter group counts or adapts; not those that come from the recipe."""

    @classmethod
    def of(cls, optimizer: optim.Optimizer, config: Optim) -> "Template":
        """Take a step on zeros, one tensor per shape, which costs less than a training step."""
        copies: list[dict[str, Any]] = []
        numbers: list[int] = []
        first = 0
        for group in optimizer.param_groups:
            unique: dict[Any, nn.Parameter] = {}
            for parameter in group["params"]:
                key = (parameter.shape, parameter.stride(), parameter.dtype)
                if key not in unique:
                    unique[key] = nn.Parameter(torch.zeros_like(parameter))
                    unique[key].grad = torch.ones_like(unique[key])
                numbers.append(first + list(unique).index(key))
            fields = {key: group[key] for key in GROUP_FIELDS if key in group}
            copies.append({"params": list(unique.values()), **fields})
            first += len(unique)
        new = construct(copies, config, fused=optimizer.defaults.get("fused"))
        new.step()
        made = new.state_dict()
        known = {"params", "lr", *GROUP_FIELDS, *argument_names(optimizer, config)}
        return cls(
            parameters_by_number(optimizer),
            {number: made["state"].get(copy, {}) for number, copy in enumerate(numbers)},
            [
                {key: value for key, value in group.items() if key not in known and _is_number(value)}
                for group in made["param_groups"]
            ],
        )

    def mismatches(self, state: dict[str, Any], step: int) -> Iterator[str]:
        """Yield descriptions of what in a state at `step` differs from the template."""
        for made, group in zip(self.groups, state["param_groups"], strict=True):
            for name in made.keys() & group.keys():
                if problem := _mismatch(name, group[name], made[name], step):
                    yield f"{name} of a parameter group {problem}"
        for number, values in state["state"].items():
            where = f"optimizer state {number}"
            if number not in self.parameters:
                yield f"{where} does not belong to a parameter"
                continue
            if values and (missing := self.states[number].keys() - values.keys()):
                yield f"{where} has no {', '.join(sorted(missing))}"
            for name, value in values.items():
                if not isinstance(name, str):
                    yield f"{where} has a name that is not a string: {name}"
                elif problem := _mismatch(name, value, self._like(number, name, value), step):
                    yield f"{where}: {name} {problem}"

    def load(self, optimizer: optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a state that has been checked, each tensor with the type, device and layout that it was created with."""
        states = {
            number: {name: place(value, self._like(number, name, value)) for name, value in values.items()}
            for number, values in state["state"].items()
            if values
        }
        current = optimizer.state_dict()  # settings from the recipe, and state that exists before the first step
        groups = [
            ours | {name: theirs[name] for name in made.keys() & theirs.keys()}
            for ours, theirs, made in zip(current["param_groups"], state["param_groups"], self.groups, strict=True)
        ]
        optimizer.load_state_dict({"state": current["state"] | states, "param_groups": groups})
        for number, values in states.items():  # PyTorch converts them to the type and device of their parameter
            loaded = optimizer.state.get(self.parameters[number], {})
            loaded.update((name, value) for name, value in values.items() if name in loaded)

    def _like(self, number: int, name: str, value: Any) -> Any:
        """Return what a value must be like. Later steps may add tensors like the parameter, and numbers."""
        later = self.parameters[number] if isinstance(value, torch.Tensor) else 0.0
        return self.states[number].get(name, later)


def parameters_by_number(optimizer: optim.Optimizer) -> dict[int, torch.Tensor]:
    """Return the parameters by their number in the optimizer's state."""
    return dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor  # type: ignore[attr-defined]
    return own


def place(value: Any, like: Any) -> Any:
    """Return a tensor with the type, device, and memory layout or sharding of another; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(like, "device_mesh"):
        return _shard(value, like)
    if hasattr(value, "device_mesh"):
        value = value.full_tensor()  # type: ignore[attr-defined]
    return torch.empty_like(like).copy_(value)


def _shard(value: torch.Tensor, like: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor  # late, because it takes a second

    placements = tuple(Replicate() if placement.is_partial() else placement for placement in like.placements)
    if isinstance(value, DTensor):
        if value.device == like.device and value.placements == placements:
            return value
        value = value.full_tensor()
    # parameters may be in host memory although their mesh is of GPUs (fsdp.cpu_offload)
    return distribute_tensor(value, like.device_mesh, placements).to(like.device)


def is_count(value: Any, largest: int, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether a value is a scalar tensor with an integer from 0 to `largest`."""
    if not isinstance(value, torch.Tensor) or value.ndim or value.dtype != dtype:
        return False
    count = value.item()
    return 0 <= count <= largest and count == int(count)


def tensor_mismatch(name: str, value: Any, like: torch.Tensor) -> str:
    """Return why a value cannot be a tensor like another one, or ""."""
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (like.shape, like.dtype):
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]
        return f"is {found} instead of {like.dtype} {tuple(like.shape)}"
    own = local(value)
    if not own.isfinite().all():
        return "contains NaN or infinity"
    return "contains negative numbers" if name.startswith("exp_avg_sq") and (own < 0).any() else ""


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mismatch(name: str, value: Any, made: Any, step: int) -> str:
    """Return why a value cannot take the place of one that the optimizer made, or ""."""
    if isinstance(made, torch.Tensor):
        if name == "step" and not made.ndim:
            return "" if is_count(value, step, made.dtype) else f"is not an integer from 0 to {step}"
        if problem := tensor_mismatch(name, value, made):
            return problem
    elif made is None or isinstance(made, bool | str):
        return "" if type(value) is type(made) and value == made else f"is not {made!r}"
    elif not _is_number(made):
        return f"is a {type(made).__name__}, which checkpoints do not support"
    elif not _is_number(value) or isinstance(value, torch.Tensor) or not -HUGE <= value <= HUGE:
        return "is not a finite number"
    elif isinstance(made, int) and not (isinstance(value, int) and min(made, 1) <= value <= max(made, step)):
        return f"is not an integer from {min(made, 1)} to {max(made, step)}"
    elif made > 0 > value:
        return "is negative"
    invalid = name in _FRACTIONS and _is_number(value) and not 0 <= value <= 1
    return "is not between 0 and 1" if invalid else ""
