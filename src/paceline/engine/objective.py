"""What training minimises: the loss, and what is done to a batch for its sake (mixup, cutmix)."""

import numpy as np
import torch
from torch.nn import functional as F

from paceline.config.recipe import Train
from paceline.data.load.batch import Batch
from paceline.data.load.order import step_seed

_MIXING = 0x31C5  # keeps this random stream apart from the others


class Objective:
    def __init__(self, config: Train, num_classes: int, seed: int):
        self._config, self._num_classes, self._seed = config, num_classes, seed
        self._soft = config.loss == "bce" or config.mixup or config.cutmix

    def prepare(self, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and targets: labels, or shares of classes where a label does not say it all."""
        if not self._soft:
            return batch.images, batch.labels
        smoothing = self._config.label_smoothing
        targets = F.one_hot(batch.labels, self._num_classes).float()
        targets = targets * (1 - smoothing) + smoothing / self._num_classes
        if self._config.mixup or self._config.cutmix:
            return self._mixed(batch.images, targets, step)
        return batch.images, targets

    def _mixed(self, images: torch.Tensor, targets: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix each image with its neighbor, which is the same one on any number of ranks, all by the same share."""
        chance = np.random.default_rng(step_seed(self._seed, step, _MIXING))
        cut = bool(self._config.cutmix) and (not self._config.mixup or chance.random() < 0.5)
        share = float(chance.beta(*2 * (self._config.cutmix if cut else self._config.mixup,)))
        order = torch.arange(len(images), device=images.device) ^ 1
        order = order.clamp_(max=len(images) - 1)  # of an odd number, the last one is its own partner
        if not cut:
            return torch.lerp(images[order], images, share), torch.lerp(targets[order], targets, share)
        height, width = images.shape[-2:]
        rows, columns = (int(side * (1 - share) ** 0.5) for side in (height, width))
        middle_row, middle_column = chance.integers(height), chance.integers(width)
        top, bottom = np.clip([middle_row - rows // 2, middle_row - rows // 2 + rows], 0, height).tolist()
        left, right = np.clip([middle_column - columns // 2, middle_column - columns // 2 + columns], 0, width).tolist()
        mixed = images.clone()
        mixed[..., top:bottom, left:right] = images[order][..., top:bottom, left:right]
        kept = 1 - (bottom - top) * (right - left) / (height * width)
        return mixed, torch.lerp(targets[order], targets, kept)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean over the batch."""
        if self._config.loss == "bce":
            return F.binary_cross_entropy_with_logits(logits, targets)
        smoothing = 0.0 if self._soft else self._config.label_smoothing
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)
