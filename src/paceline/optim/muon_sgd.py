"""The optimizer of airbench94_muon: Muon for convolution filters, SGD for all other parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import optim

from paceline.system.torchvision_compat import allow_torchvision

_NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)]


class MuonSgd(optim.Optimizer):
    """Muon that keeps the norm of filters constant instead of weight decay, and SGD with Nesterov momentum.

    Each filter is scaled to the norm sqrt(output channels) before its update, and the update is not scaled by shape,
    which is how this differs from timm's `muon` and torch's Muon. Momentum is not dampened.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.24,
        momentum: float = 0.6,
        sgd_momentum: float = 0.85,
        weight_decay: float = 0.0,
        ns_steps: int = 3,
    ):
        if ns_steps < 1 or not 0 <= sgd_momentum < 1:
            raise ValueError(f"ns_steps={ns_steps} must be at least 1, and sgd_momentum={sgd_momentum} between 0 and 1")
        fields = {"momentum": momentum, "sgd_momentum": sgd_momentum, "ns_steps": ns_steps}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **fields})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        is_filter, gradient, state = parameter.ndim == 4, parameter.grad, self.state[parameter]
        assert gradient is not None
        if not is_filter and group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = group["momentum" if is_filter else "sgd_momentum"]
        update = gradient.add(state["momentum_buffer"].mul_(momentum).add_(gradient), alpha=momentum)
        if is_filter:
            parameter.mul_(len(parameter) ** 0.5 / parameter.norm())
            update = _orthogonalized(update.reshape(len(update), -1), group["ns_steps"]).view_as(parameter)
        parameter.add_(update, alpha=-group["lr"])


def _orthogonalized(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the nearest semi-orthogonal matrix, approximately, by Newton-Schulz iterations in bf16."""
    allow_torchvision()
    from timm.optim.muon import zeropower_via_newtonschulz  # imported late because it takes seconds

    result: torch.Tensor = zeropower_via_newtonschulz(matrix, steps, _NEWTON_SCHULZ)
    return result.to(matrix.dtype)
