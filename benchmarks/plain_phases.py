"""Training procedures of other recipes in plain torch: the phases of imagenet18, and shorter scripts."""

import math
from dataclasses import dataclass

from plain_images import Reading, Transform, Validation, normalized
from plain_sources import Scale, Source, without_decay
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from torchvision import transforms

_GPUS = 8
_ONE, _EIGHT = 1.0, 0.235 * 8


@dataclass(frozen=True)
class _Data:
    """The images and batches of imagenet18 from an epoch on."""

    epoch: int
    size: int
    per_gpu: int
    short_side: int = 0
    """0: original files."""
    min_scale: float = 0.08


_Rates = list[tuple[tuple[int, ...], tuple[float, ...]]]
"""Learning rates: constant from an epoch on, or linear between two epochs."""


def _middle(peak: float) -> tuple[list[_Data], _Rates]:
    """The schedule for two and four nodes, which differ only in the learning rate."""
    data = [_Data(0, 128, 256, 160), _Data(6, 128, 512, 160), _Data(13, 224, 224, 352, 0.087)]
    at_224, at_288 = peak * 224 / 256, peak * 128 / 256
    rates: _Rates = [
        ((0, 6), (peak, 2 * peak)),
        ((6,), (2 * peak,)),
        ((11, 13), (2 * peak, peak)),
        ((13,), (at_224,)),
        ((16, 23), (at_224, at_224 / 10)),
        ((23, 28), (at_224 / 10, at_224 / 100)),
        ((28, 30), (at_288 / 100, at_288 / 1000)),
    ]
    return [*data, _Data(28, 288, 128, 0, 0.5)], rates


_SCHEDULES: dict[int, tuple[list[_Data], _Rates]] = {
    1: (
        [_Data(0, 128, 512, 160), _Data(14, 224, 224), _Data(32, 288, 128, 0, 0.5)],
        [
            ((0, 5), (_ONE, 2 * _ONE)),
            ((5,), (_ONE,)),
            ((14,), (_ONE * 224 / 512,)),
            ((16,), (_ONE / 10 * 224 / 512,)),
            ((27,), (_ONE / 100 * 224 / 512,)),
            ((32,), (_ONE / 100 * 128 / 512,)),
            ((33, 35), (_ONE / 1000 * 128 / 512,)),
        ],
    ),
    2: _middle(0.75 * 2),
    4: _middle(0.5 * 4),
    8: (
        [
            *(_Data(0, 128, 128, 160), _Data(6, 128, 256, 160), _Data(14, 224, 128, 352, 0.087)),
            *(_Data(17, 224, 224, 352, 0.087), _Data(29, 288, 128, 0, 0.5)),
        ],
        [
            ((0, 6), (_EIGHT, 2 * _EIGHT)),
            ((6,), (2 * _EIGHT,)),
            ((11, 14), (2 * _EIGHT, _EIGHT)),
            ((14,), (_EIGHT,)),
            ((17, 23), (_EIGHT, _EIGHT / 10 * 224 / 128)),
            ((23, 29), (_EIGHT / 10 * 224 / 128, _EIGHT / 100 * 224 / 128)),
            ((29, 35), (_EIGHT / 100, _EIGHT / 1000)),
        ],
    ),
    16: (
        [
            *(_Data(0, 128, 64, 160), _Data(6, 128, 128, 160), _Data(16, 224, 64)),
            *(_Data(19, 224, 192), _Data(37, 288, 128, 0, 0.5)),
        ],
        [
            ((0, 6), (_EIGHT, 2 * _EIGHT)),
            ((6,), (2 * _EIGHT,)),
            ((16,), (_EIGHT,)),
            ((19,), (2 * _EIGHT / (10 / 1.5),)),
            ((31,), (2 * _EIGHT / (100 / 1.5),)),
            ((37,), (2 * _EIGHT / 100,)),
            ((38, 50), (2 * _EIGHT / 1000,)),
        ],
    ),
}
_LENGTHS = {1: 35, 2: 30, 4: 30, 8: 35, 16: 50}


class Imagenet18(Source):
    """cybertronai/imagenet18, with --no-bn-wd and --init-bn0, in fp32.

    As the recipe says, a linear learning rate is that at the beginning of a step, there at its end.
    """

    nodes = 1
    rectangular = 8
    """Images per rectangular batch of a proxy."""

    def __init__(self, net: nn.Module, scale: Scale, classes: int):
        super().__init__(net, scale, classes)
        self.data, self.rates = _SCHEDULES[self.nodes]
        self.epochs = round(scale.time(_LENGTHS[self.nodes]))
        norms = {id(p) for module in net.modules() if isinstance(module, nn.BatchNorm2d) for p in module.parameters()}
        self.optimizer = SGD(without_decay(net, 1e-4, lambda _, p: id(p) in norms), lr=0.0, momentum=0.9, fused=True)

    def _data(self, epoch: int) -> _Data:
        return [data for data in self.data if self.scale.time(data.epoch) <= epoch][-1]

    def reading(self, epoch: int) -> Reading:
        data, scale = self._data(epoch), self.scale
        batch, size = scale.batch(data.per_gpu * _GPUS * self.nodes), scale.side(data.size)
        return Reading(batch, size, self._variant(data), data.min_scale)

    def validation(self, epoch: int) -> Validation:
        data, size = self._data(epoch), self.scale.side(self._data(epoch).size)
        rectangular = self.rectangular if data.size == 288 else 0
        return Validation(size, int(size * 1.14), self._variant(data), rectangular)

    def _variant(self, data: _Data) -> str:
        return f"short-{self.scale.side(data.short_side)}" if data.short_side else "original"

    def before_step(self, epoch: int, index: int, steps: int) -> None:
        times, rates = [each for each in self.rates if self.scale.time(each[0][0]) <= epoch][-1]
        if len(rates) == 1:
            self.set_lr(self.scale.lr(rates[0]))
        else:
            begin, end = map(self.scale.time, times)
            done = (epoch - begin + index / steps) / (end - begin)
            self.set_lr(self.scale.lr(rates[0] + (rates[1] - rates[0]) * done))


def imagenet18(nodes: int) -> type[Imagenet18]:
    """Return the procedure for a number of nodes."""
    return type(f"Imagenet18On{nodes}", (Imagenet18,), {"nodes": nodes})


class OneCycle(Source):
    """A script with torch's OneCycleLR, which also cycles the momentum."""

    length = 2

    def __init__(self, net: nn.Module, scale: Scale, classes: int):
        super().__init__(net, scale, classes)
        self.epochs = round(scale.time(self.length))
        self.optimizer = SGD(net.parameters(), scale.lr(1.0), momentum=0.9, weight_decay=3e-5, fused=True)
        self.scheduler: lr_scheduler.OneCycleLR | None = None

    def reading(self, epoch: int) -> Reading:
        return Reading(self.scale.batch(256), self.scale.side(224))

    def validation(self, epoch: int) -> Validation:
        return Validation(self.scale.side(224), self.scale.side(256))

    def transform(self, reading: Reading) -> Transform:
        return transforms.Compose([transforms.RandomResizedCrop(reading.size), normalized])

    def before_step(self, epoch: int, index: int, steps: int) -> None:
        if self.scheduler is None:
            peak = self.scale.lr(1.0)
            self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, peak, epochs=self.epochs, steps_per_epoch=steps)

    def after_step(self, epoch: int) -> None:
        assert self.scheduler
        self.scheduler.step()


class OneCycleLong(OneCycle):
    length = 6


class CosineNotebook(Source):
    """A notebook with CosineAnnealingLR per epoch and center crops."""

    def __init__(self, net: nn.Module, scale: Scale, classes: int):
        super().__init__(net, scale, classes)
        self.epochs = round(scale.time(2))
        self.optimizer = SGD(net.parameters(), scale.lr(0.1), momentum=0.9, weight_decay=5e-4, fused=True)
        self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, self.epochs, eta_min=scale.lr(1e-5))

    def reading(self, epoch: int) -> Reading:
        return Reading(self.scale.batch(1024), self.scale.side(224))

    def validation(self, epoch: int) -> Validation:
        return Validation(self.scale.side(224), self.scale.side(256))

    def transform(self, reading: Reading) -> Transform:
        resize, crop = transforms.Resize(self.scale.side(256)), transforms.CenterCrop(reading.size)
        return transforms.Compose([resize, crop, transforms.RandomHorizontalFlip(), normalized])

    def after_epoch(self, validation_loss: float) -> None:
        self.scheduler.step()


class VitPlateau(Source):
    """A ViT with Adam, clipped gradients and ReduceLROnPlateau."""

    clip = 0.5

    def __init__(self, net: nn.Module, scale: Scale, classes: int):
        super().__init__(net, scale, classes)
        self.epochs = round(scale.time(26))
        self.optimizer = Adam(net.parameters(), lr=2e-3, fused=True)
        self.scheduler = lr_scheduler.ReduceLROnPlateau(self.optimizer)

    def reading(self, epoch: int) -> Reading:
        return Reading(self.scale.batch(768), 32)

    def after_epoch(self, validation_loss: float) -> None:
        self.scheduler.step(validation_loss)


class VitWarmup(Source):
    """The same model with AdamW, warmup and cosine."""

    clip, smoothing = 1.0, 0.1

    def __init__(self, net: nn.Module, scale: Scale, classes: int):
        super().__init__(net, scale, classes)
        self.epochs = round(scale.time(10))
        small = lambda name, p: p.ndim <= 1 or name in ("cls_token", "pos_embed")  # noqa: E731
        self.optimizer = AdamW(without_decay(net, 0.05, small), lr=5e-5, fused=True)
        self.scheduler: lr_scheduler.LRScheduler | None = None

    def reading(self, epoch: int) -> Reading:
        return Reading(self.scale.batch(384), 32)

    def before_step(self, epoch: int, index: int, steps: int) -> None:
        if self.scheduler is None:
            rise = steps * round(self.scale.time(1))

            def factor(step: int) -> float:
                fall = (step - rise) / (steps * self.epochs - rise)
                return step / rise if step < rise else 0.5 * (1 + math.cos(math.pi * fall))

            self.scheduler = lr_scheduler.LambdaLR(self.optimizer, factor)

    def after_step(self, epoch: int) -> None:
        assert self.scheduler
        self.scheduler.step()
