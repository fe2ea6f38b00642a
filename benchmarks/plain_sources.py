"""Training procedures of the sources of ImageNet recipes, in plain torch: optimizer, schedule and loss.

Every number is that of the source; a `Scale` makes epochs, batches and images smaller, for the source as for the
recipe. Written from cybertronai/imagenet18, libffcv/ffcv-imagenet, pytorch/vision (references/classification), timm,
and the scripts that the ResNet-18 recipes name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from plain_images import Reading, Transform, Validation, normalized
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from paceline.system.torchvision_compat import allow_torchvision

allow_torchvision()
from timm.data import Mixup, create_transform  # noqa: E402
from timm.optim import Lamb  # noqa: E402
from torchvision import transforms  # noqa: E402
from torchvision.ops._utils import split_normalization_params  # noqa: E402
from torchvision.transforms import InterpolationMode, v2  # noqa: E402


@dataclass(frozen=True)
class Scale:
    """How much smaller than its recipe a proxy is."""

    times: tuple[tuple[float, float], ...]
    """Epochs of the recipe and of the proxy; linear in between."""
    batches: int
    rates: float = 4.0
    """Divisor of SGD's learning rates, in addition to the linear scaling; a small network needs smaller ones."""
    sides: int = 4
    updates: int = 8
    """The EMA is updated this many times as often, and forgets 100 times as fast."""

    def time(self, epoch: float) -> float:
        ours, theirs = [small for _, small in self.times], [epoch for epoch, _ in self.times]
        return float(np.interp(epoch, theirs, ours))

    def batch(self, images: int) -> int:
        return images // self.batches

    def lr(self, rate: float) -> float:
        """Return the learning rate of SGD for the smaller batch."""
        return rate / self.batches / self.rates

    def side(self, pixels: int) -> int:
        return pixels // self.sides

    def decay(self, decay: float) -> float:
        return 1 - 100 * (1 - decay)


class Source:
    """A procedure that trains a network."""

    epochs: int
    optimizer: Optimizer
    clip = 0.0
    smoothing = 0.0

    def __init__(self, net: nn.Module, scale: Scale, classes: int):
        self.net, self.scale, self.classes = net, scale, classes

    def reading(self, epoch: int) -> Reading:
        raise NotImplementedError

    def validation(self, epoch: int) -> Validation:
        raise NotImplementedError

    def transform(self, reading: Reading) -> Transform:
        crop = transforms.RandomResizedCrop(reading.size, scale=(reading.min_crop, 1.0))
        return transforms.Compose([crop, transforms.RandomHorizontalFlip(), normalized])

    def mix(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mixed images, and labels or their probabilities."""
        return images, labels

    def targets(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Return the targets of the loss, from labels or from the probabilities of mixed labels."""
        if probabilities.ndim == 1:
            probabilities = F.one_hot(probabilities, self.classes).float()
        return probabilities * (1 - self.smoothing) + self.smoothing / self.classes

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy, with labels or with what `targets` returns."""
        if targets.ndim == 1:
            return F.cross_entropy(logits, targets, label_smoothing=self.smoothing)
        return F.cross_entropy(logits, targets)

    @property
    def evaluated(self) -> nn.Module:
        return self.net

    def before_step(self, epoch: int, index: int, steps: int) -> None:
        """Set learning rates; `index`: of the step among those of its epoch."""

    def after_step(self, epoch: int) -> None:
        """Step a scheduler, or average the weights."""

    def after_epoch(self, validation_loss: float) -> None:
        """Step a scheduler."""

    def step(self, epoch: int, index: int, steps: int, images: torch.Tensor, targets: torch.Tensor) -> float:
        """Take a training step; return the loss."""
        self.net.train()
        self.before_step(epoch, index, steps)
        self.optimizer.zero_grad()
        loss = self.loss(self.net(images), targets)
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimizer.step()
        self.after_step(epoch)
        return loss.item()

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr


def without_decay(net: nn.Module, decay: float, excluded: Callable[[str, nn.Parameter], bool]) -> list[dict[str, Any]]:
    """Return parameter groups with and without weight decay."""
    named = list(net.named_parameters())
    return [
        {"params": [p for name, p in named if not excluded(name, p)], "weight_decay": decay},
        {"params": [p for name, p in named if excluded(name, p)], "weight_decay": 0.0},
    ]


class TorchvisionV1(Source):
    """train.py --model resnet50, with its defaults on 8 GPUs."""

    def __init__(self, net: nn.Module, scale: Scale, classes: int):
        super().__init__(net, scale, classes)
        self.epochs = round(scale.time(90))
        self.optimizer = SGD(net.parameters(), scale.lr(0.1), momentum=0.9, weight_decay=1e-4, fused=True)
        self.scheduler = lr_scheduler.StepLR(self.optimizer, round(scale.time(30)), gamma=0.1)

    def reading(self, epoch: int) -> Reading:
        return Reading(self.scale.batch(8 * 32), self.scale.side(224))

    def validation(self, epoch: int) -> Validation:
        return Validation(self.scale.side(224), self.scale.side(256))

    def after_epoch(self, validation_loss: float) -> None:
        self.scheduler.step()


class TorchvisionV2(Source):
    """The "new training recipe": warmup and cosine per epoch, EMA of the weights, mixup or cutmix, augmentation.

    As the recipe says, the average is updated after every 32nd step of the run instead of each epoch.
    """

    smoothing = 0.1

    def __init__(self, net: nn.Module, scale: Scale, classes: int):
        super().__init__(net, scale, classes)
        self.epochs, self.warmup = round(scale.time(600)), round(scale.time(5))
        norms, others = split_normalization_params(net)
        groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 2e-5}]
        self.optimizer = SGD(groups, scale.lr(0.5), momentum=0.9, fused=True)
        rise = lr_scheduler.LinearLR(self.optimizer, start_factor=0.01, total_iters=self.warmup)
        fall = lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=self.epochs - self.warmup)
        self.scheduler = lr_scheduler.SequentialLR(self.optimizer, [rise, fall], milestones=[self.warmup])
        decay = scale.decay(1 - (1 - 0.99998) * 8 * 128 * 32 / 600)
        self.average = AveragedModel(net, avg_fn=get_ema_avg_fn(decay), use_buffers=True)
        self.steps = 0

    @property
    def evaluated(self) -> nn.Module:
        return self.average.module

    def reading(self, epoch: int) -> Reading:
        return Reading(self.scale.batch(8 * 128), self.scale.side(176), repeats=4)

    def validation(self, epoch: int) -> Validation:
        return Validation(self.scale.side(224), self.scale.side(232))

    def transform(self, reading: Reading) -> Transform:
        change = transforms.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR)
        crop = transforms.RandomResizedCrop(reading.size)
        erase = transforms.RandomErasing(0.1)
        return transforms.Compose([crop, transforms.RandomHorizontalFlip(), change, normalized, erase])

    def mix(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kinds = [v2.MixUp(alpha=0.2, num_classes=self.classes), v2.CutMix(alpha=1.0, num_classes=self.classes)]
        mixed: tuple[torch.Tensor, torch.Tensor] = v2.RandomChoice(kinds)(images, labels)
        return mixed

    def after_step(self, epoch: int) -> None:
        self.steps += 1
        if self.steps % (32 // self.scale.updates) == 0:
            self.average.update_parameters(self.net)
            if epoch < self.warmup:
                self.average.n_averaged.fill_(0)

    def after_epoch(self, validation_loss: float) -> None:
        self.scheduler.step()


class ResnetStrikesBack(Source):
    """Procedure A3 with timm: LAMB, binary cross-entropy, mixup or cutmix, RandAugment."""

    def __init__(self, net: nn.Module, scale: Scale, classes: int):
        super().__init__(net, scale, classes)
        self.epochs, self.warmup = round(scale.time(100)), scale.time(5)
        groups = without_decay(net, 0.02, lambda name, parameter: parameter.ndim <= 1 or name.endswith(".bias"))
        self.optimizer = Lamb(groups, lr=8e-3, eps=1e-6)

    def reading(self, epoch: int) -> Reading:
        return Reading(self.scale.batch(2048), self.scale.side(160), "original")

    def validation(self, epoch: int) -> Validation:
        size = self.scale.side(224)
        return Validation(size, int(size / 0.95), "original", bicubic=True)

    def transform(self, reading: Reading) -> Transform:
        made: Transform = create_transform(
            reading.size, is_training=True, auto_augment="rand-m6-mstd0.5-inc1", color_jitter=0.0
        )
        return made

    def mix(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixing = Mixup(  # type: ignore[no-untyped-call]
            mixup_alpha=0.1, cutmix_alpha=1.0, label_smoothing=0.0, num_classes=self.classes
        )
        mixed: tuple[torch.Tensor, torch.Tensor] = mixing(images.clone(), labels)
        return mixed

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(logits, (targets > 0.2).float())

    def before_step(self, epoch: int, index: int, steps: int) -> None:
        low, high = 1e-4, 1e-6
        if epoch < self.warmup:
            self.set_lr(low + (8e-3 - low) * epoch / self.warmup)
        else:
            self.set_lr(high + (8e-3 - high) * 0.5 * (1 + math.cos(math.pi * epoch / self.epochs)))


class Ffcv(Source):
    """train_imagenet.py of ffcv-imagenet with a configuration of rn50_configs or rn18_configs."""

    smoothing = 0.1
    length, ramp, batch, lr, decay, side = 16, (11, 13), 8 * 512, 1.7, 1e-4, 500

    def __init__(self, net: nn.Module, scale: Scale, classes: int):
        super().__init__(net, scale, classes)
        self.epochs = round(scale.time(self.length))
        self.optimizer = SGD(
            without_decay(net, self.decay, lambda name, _: "bn" in name), lr=1.0, momentum=0.9, fused=True
        )

    def reading(self, epoch: int) -> Reading:
        step, low, high = self.scale.side(32), self.scale.side(160), self.scale.side(192)
        resolution = np.interp(epoch, [self.scale.time(end) for end in self.ramp], [low, high])
        size = int(np.round(resolution / step)) * step
        return Reading(self.scale.batch(self.batch), size, f"max-{self.scale.side(self.side)}")

    def validation(self, epoch: int) -> Validation:
        size = self.scale.side(256)
        return Validation(size, round(size * 256 / 224), f"max-{self.scale.side(self.side)}", flip=True)

    def before_step(self, epoch: int, index: int, steps: int) -> None:
        times, peak = [0.0, self.scale.time(2), float(self.epochs)], self.scale.lr(self.lr)
        edges = np.interp([epoch, epoch + 1], times, [1e-4 * peak, peak, 0.0])
        self.set_lr(float(np.interp(index, [0, steps], edges)))


class Ffcv18(Ffcv):
    batch, lr, decay, side = 1024, 0.5, 5e-5, 400


class Ffcv18Long(Ffcv18):
    length, ramp = 88, (65, 76)
