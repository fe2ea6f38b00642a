"""Exponential moving average (EMA) of the weights."""

from copy import deepcopy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from paceline.config.recipe import Ema


class AveragedModel:
    """A copy of the model with averaged weights. Integer buffers are copied."""

    def __init__(self, model: nn.Module, config: Ema):
        self.model = deepcopy(model).requires_grad_(False).eval()
        self._config = config

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Update after step `step` (from 1). The decay warms up, so that the initial weights have little influence."""
        if step % self._config.every:
            return
        updates = step // self._config.every
        average = get_ema_multi_avg_fn(min(self._config.decay, (1 + updates) / (10 + updates)))
        ours, theirs = self.model.state_dict().values(), model.state_dict().values()
        pairs = [(our, their) for our, their in zip(ours, theirs, strict=True)]
        moving = [(our, their) for our, their in pairs if our.is_floating_point()]
        for kind in {type(our) for our, _ in moving}:  # under FSDP weights are sharded and buffers are not
            same = [(our, their) for our, their in moving if type(our) is kind]
            average([our for our, _ in same], [their for _, their in same], None)
        for our, their in pairs:
            if not our.is_floating_point():
                our.copy_(their)
