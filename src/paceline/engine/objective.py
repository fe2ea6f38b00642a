"""The training objective: the loss, and mixup and cutmix of its inputs."""

import numpy as np
import torch
from torch.nn import functional as F

from paceline import extensions
from paceline.config.recipe import Train
from paceline.data.load.batch import Batch
from paceline.data.load.order import step_seed

_MIXING = 0x31C5  # separates this random stream from the others


class Objective:
    def __init__(self, config: Train, num_classes: int, seed: int, weights: torch.Tensor | None = None):
        """`weights`: of the classes; None if all images count the same."""
        self._config, self._num_classes, self._seed, self.weights = config, num_classes, seed, weights
        self._soft = config.loss == "bce" or config.mixup or config.cutmix
        self._registered = extensions.find("loss", config.loss)

    def prepare(self, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images and targets: labels, or class probabilities for soft targets."""
        if not self._soft:
            return batch.images, batch.labels
        smoothing = self._config.label_smoothing
        targets = F.one_hot(batch.labels, self._num_classes).float()
        targets = targets * (1 - smoothing) + smoothing / self._num_classes
        if self._config.mixup or self._config.cutmix:
            return self._mixed(batch.images, targets, step)
        return batch.images, targets

    def _mixed(self, images: torch.Tensor, targets: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix each image with its neighbor, which is the same on any number of ranks, all with the same weight.

        The order of images (data/load/order.py) gives each copy of a repeated image another neighbor.
        """
        generator = np.random.default_rng(step_seed(self._seed, step, _MIXING))
        cut = bool(self._config.cutmix) and (not self._config.mixup or generator.random() < 0.5)
        weight = float(generator.beta(*2 * (self._config.cutmix if cut else self._config.mixup,)))
        order = torch.arange(len(images), device=images.device) ^ 1
        order = order.clamp_(max=len(images) - 1)  # in an odd batch, the last image is mixed with itself
        if not cut:
            return torch.lerp(images[order], images, weight), torch.lerp(targets[order], targets, weight)
        height, width = images.shape[-2:]
        rows, columns = (int(side * (1 - weight) ** 0.5) for side in (height, width))
        center_row, center_column = generator.integers(height), generator.integers(width)
        top, bottom = np.clip([center_row - rows // 2, center_row - rows // 2 + rows], 0, height).tolist()
        left, right = np.clip([center_column - columns // 2, center_column - columns // 2 + columns], 0, width).tolist()
        mixed = images.clone()
        mixed[..., top:bottom, left:right] = images[order][..., top:bottom, left:right]
        kept = 1 - (bottom - top) * (right - left) / (height * width)
        return mixed, torch.lerp(targets[order], targets, kept)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the batch."""
        if self._registered:
            loss: torch.Tensor = self._registered(logits, targets, **self._config.loss_options)
            if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
                found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:60]
                raise self._registered.error(f"returns {found}, not a scalar tensor that depends on the logits")
            return loss
        weights = self._weights_on(logits.device)
        if self._config.loss == "bce":
            per_image = None if weights is None else (targets * weights).sum(1, keepdim=True)
            if self._config.bce_target_threshold:
                targets = targets.gt(self._config.bce_target_threshold).to(targets.dtype)
            return F.binary_cross_entropy_with_logits(logits, targets, per_image)
        smoothing = 0.0 if self._soft else self._config.label_smoothing
        if weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=smoothing)
        # divided by the images: torch divides by their weights, which differ between ranks and micro-batches
        return F.cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=smoothing) / len(logits)

    def _weights_on(self, device: torch.device) -> torch.Tensor | None:
        if self.weights is not None and self.weights.device != device:
            self.weights = self.weights.to(device)
        return self.weights
