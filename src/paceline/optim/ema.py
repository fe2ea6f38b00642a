"""Exponential moving average (EMA) of the weights."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from paceline.config.optim import Ema
from paceline.system.torch_internals import copy_all_

_Place = tuple[nn.Module, str]
"""A tensor of a model: the module and the name in it. The tensor itself may be replaced, as buffers or by FSDP."""


class AveragedModel:
    """A copy of the model with averaged weights. Integer buffers are copied."""

    def __init__(self, model: nn.Module, config: Ema, total: int = 0, start: int = 0):
        """`total`: steps of the run; `start`: ema.start in steps."""
        self.model = deepcopy(model).requires_grad_(False).eval()
        self._config, self._total, self._start = config, total, start
        self._places: tuple[list[_Place], list[_Place]] | None = None

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Update after step `step` (from 1); with ema.lookahead, also the weights of `model`."""
        if step % self._config.every:
            return
        average = get_ema_multi_avg_fn(decay_at(step, self._config, self._total, self._start))
        self._places = self._places or (_places(self.model), _places(model))  # found once, because it takes time
        ours, theirs = ([getattr(module, name) for module, name in places] for places in self._places)
        kinds: dict[tuple[bool, type], list[int]] = {}  # under FSDP weights are sharded and buffers are not
        for index, our in enumerate(ours):
            kinds.setdefault((our.is_floating_point(), type(our)), []).append(index)
        for (moving, _), indices in kinds.items():
            same = [ours[index] for index in indices], [theirs[index] for index in indices]
            if not moving:
                copy_all_(*same)
                continue
            average(*same, None)
            if self._config.lookahead:
                copy_all_(*reversed([list(map(_local, tensors)) for tensors in same]))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of this rank, or a tensor that is not sharded: sharded tensors cannot be copied as a list."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)  # importing DTensor takes a second
    return to_local() if to_local else tensor


def decay_at(step: int, config: Ema, total: int, start: int = 0) -> float:
    """Return the decay of the update after step `step` (from 1)."""
    if config.decay_schedule == "cubic":
        return config.decay * (step / total) ** 3
    updates = step // config.every - start // config.every
    if start and updates <= 1:
        return 0.0
    return min(config.decay, (1 + updates) / (10 + updates)) if config.decay_schedule == "warmup" else config.decay


def _places(model: nn.Module) -> list[_Place]:
    """Return where the tensors of a model's state are, each once."""
    kept, places = model.state_dict().keys(), dict[int, _Place]()
    for path, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if isinstance(tensor, nn.Parameter) or f"{path}.{name}".removeprefix(".") in kept:
                places.setdefault(id(tensor), (module, name))  # weights can be shared between modules
    return list(places.values())
