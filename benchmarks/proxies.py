"""Small versions of shipped recipes, made by overrides only, and the plain loops of their sources."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import plain_phases as phases
import plain_sources as sources
from plain_images import Folder, seeded
from plain_models import CHANNELS, LAYERS, VIT, PlainVit, resnet
from plain_sources import Scale, Source
from torch import nn

import paceline as pl
from paceline.config.duration import parse
from paceline.config.io import load_recipe
from paceline.config.overrides import words_of
from paceline.config.phases import Phase
from paceline.config.recipe import Recipe


@dataclass(frozen=True)
class Proxy:
    """A recipe, how much smaller its proxy is, and its source as a plain loop."""

    recipe: str
    source: Callable[[nn.Module, Scale, int], Source]
    net: Callable[[int], nn.Module]
    """Creates the network for a number of classes, with the initial weights of the source."""
    scale: Scale


def _dawnbench(classes: int) -> nn.Module:
    """The network of imagenet18 with --init-bn0; as the recipe says, the bias of the classifier starts at 0."""
    net: Any = resnet("resnet50", classes, zero_init=True)
    nn.init.normal_(net.fc.weight, std=0.01)
    nn.init.zeros_(net.fc.bias)
    return net


def _imagenet18(nodes: int, batches: int, *epochs: float) -> Proxy:
    """`epochs`: those at which the source changes settings; in the proxy, each interval takes one epoch."""
    times = tuple((epoch, float(number)) for number, epoch in enumerate((0.0, *epochs)))
    name = f"imagenet-rn50-imagenet18-{nodes}"
    return Proxy(name, phases.imagenet18(nodes), _dawnbench, Scale(times, batches))


_RN18, _RN50 = partial(resnet, "resnet18"), partial(resnet, "resnet50")
_BLUR18, _BLUR50 = partial(_RN18, blur=True), partial(_RN50, blur=True)
_RAMP = ((0, 0), (2, 1), (11, 2), (13, 4), (16, 5))
_LONG_RAMP = ((0, 0), (2, 1), (65, 2), (76, 4), (88, 5))

IMAGENET = (
    _imagenet18(1, 128, 5, 14, 16, 27, 32, 33, 35),
    _imagenet18(2, 256, 6, 11, 13, 16, 23, 28, 30),
    _imagenet18(4, 512, 6, 11, 13, 16, 23, 28, 30),
    _imagenet18(8, 512, 6, 11, 14, 17, 23, 29, 35),
    _imagenet18(16, 1024, 6, 16, 19, 31, 37, 38, 50),
    Proxy("imagenet-rn50-ffcv-16ep", sources.Ffcv, _BLUR50, Scale(_RAMP, 256)),
    Proxy("imagenet-rn18-ffcv-16ep", sources.Ffcv18, _BLUR18, Scale(_RAMP, 64)),
    Proxy("imagenet-rn18-ffcv-88ep", sources.Ffcv18Long, _BLUR18, Scale(_LONG_RAMP, 64)),
    Proxy("imagenet-rn50-torchvision-v1", sources.TorchvisionV1, _RN50, Scale(((0, 0), (90, 3)), 16)),
    Proxy("imagenet-rn50-torchvision-v2", sources.TorchvisionV2, _RN50, Scale(((0, 0), (5, 2), (600, 5)), 64)),
    Proxy(
        "imagenet-rn50-a3",
        sources.ResnetStrikesBack,
        partial(_RN50, zero_init=True),
        Scale(((0, 0), (5, 1), (100, 4)), 128),
    ),
    Proxy("imagenet-rn18-2ep", phases.OneCycle, _RN18, Scale(((0, 0), (2, 2)), 14)),
    Proxy("imagenet-rn18-6ep", phases.OneCycleLong, _RN18, Scale(((0, 0), (6, 4)), 14)),
    Proxy(
        "imagenet-rn18-2ep-cosine",
        phases.CosineNotebook,
        partial(_RN18, zero_init=True),
        Scale(((0, 0), (2, 3)), 64),
    ),
)
CIFAR = (
    Proxy("cifar10-vit-b32-plateau", phases.VitPlateau, PlainVit, Scale(((0, 0), (26, 26)), 48)),
    Proxy("cifar10-vit-b32-ddp", phases.VitWarmup, PlainVit, Scale(((0, 0), (1, 1), (10, 4)), 24)),
    Proxy("cifar10-vit-b32-fsdp", phases.VitWarmup, PlainVit, Scale(((0, 0), (1, 1), (10, 4)), 24)),
)


def longer(proxy: Proxy, factor: int) -> Proxy:
    """Return a proxy with more epochs, and with the learning rate scaled to its batch."""
    times = tuple((epoch, factor * small) for epoch, small in proxy.scale.times)
    return replace(proxy, scale=replace(proxy.scale, times=times, rates=1.0))


def shrink(proxy: Proxy, data: dict[str, Any], seed: int = 0, **more: Any) -> Recipe:
    """Return the recipe of a proxy for the CPU, with smaller images, batches and lengths."""
    recipe, scale = load_recipe(proxy.recipe), proxy.scale
    changed: dict[str, Any] = {
        "seed": seed,
        "device": "cpu",
        "precision": "fp32",
        "train.duration": _time(recipe.train.duration, scale),
        "train.global_batch": scale.batch(recipe.train.global_batch),
        "model.weights": "random",
        "evaluate.size": scale.side(recipe.evaluate.size),
        "evaluate.per_rank_batch": phases.Imagenet18.rectangular,
        "checkpoint.every": "1ep",
        "log.every": "1ba",
        "log.tensorboard": False,
    }
    if recipe.data.name == "imagenet":
        narrow: dict[str, Any] = {"layers": list(LAYERS), "channels": list(CHANNELS)}
        changed |= {"data.size": scale.side(recipe.data.size), "data.variant": _variant(recipe.data.variant, scale)}
    else:
        narrow = VIT
        changed["data.size"] = VIT["img_size"]
    changed["model.options"] = recipe.model.options | narrow
    changed |= _phases(recipe, scale) | _optimizer(recipe, scale)
    return load_recipe(proxy.recipe, words_of(changed | data | more))


def _phases(recipe: Recipe, scale: Scale) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if recipe.phases:
        changed["phases"] = [_phase(phase, scale) for phase in recipe.phases]
    if any(recipe.ramp.sizes):
        changed["ramp.epochs"] = [scale.time(epoch) for epoch in recipe.ramp.epochs]
        changed["ramp.sizes"] = [scale.side(side) for side in recipe.ramp.sizes]
        changed["ramp.multiple"] = scale.side(recipe.ramp.multiple)
    return changed


def _phase(phase: Phase, scale: Scale) -> dict[str, Any]:
    smaller = {
        "epochs": [scale.time(epoch) for epoch in phase.epochs],
        "size": scale.side(phase.size),
        "evaluate_size": scale.side(phase.evaluate_size),
        "global_batch": scale.batch(phase.global_batch),
        "lr": [scale.lr(rate) for rate in phase.lr],
        "variant": _variant(phase.variant, scale),
    }
    return {key: value for key, value in (asdict(phase) | smaller).items() if value}


def _optimizer(recipe: Recipe, scale: Scale) -> dict[str, Any]:
    optim, schedule = recipe.optim, recipe.optim.schedule
    changed: dict[str, Any] = {"optim.schedule.warmup": _time(schedule.warmup, scale)}
    if optim.name == "sgd":
        changed["optim.lr"] = scale.lr(optim.lr)
    if schedule.name == "step":
        changed["optim.schedule.step_size"] = _time(schedule.step_size, scale)
    if schedule.points:
        points = [{"at": _time(point.at, scale), "factor": point.factor} for point in schedule.points]
        changed["optim.schedule.points"] = points
    if recipe.ema.decay:
        changed["ema.decay"] = scale.decay(recipe.ema.decay)
        changed["ema.every"] = recipe.ema.every // scale.updates
        changed["ema.start"] = _time(recipe.ema.start, scale)
    return changed


def _time(text: str, scale: Scale) -> str:
    length = parse(text)
    return f"{scale.time(length.value):g}ep" if length.unit == "ep" else text


def _variant(name: str, scale: Scale) -> str:
    """short-160-q90 -> short-40-q90, if sides are a quarter."""
    if name in ("", "original"):
        return name
    kind, side, quality = name.split("-")
    return f"{kind}-{scale.side(int(side))}-{quality}"


def prepare(tree: Path, out: Path, sides: int) -> Path:
    """Prepare an image folder in the sizes that the proxies need; `sides`: how much smaller than the recipes'."""
    shorter, longer = [160 // sides, 352 // sides], [400 // sides, 500 // sides]
    return pl.prepare_imagenet(out, source=tree, original=True, short_side=shorter, max_side=longer, workers=1)


@dataclass(frozen=True)
class Curve:
    """The loss of every step, and the last validation."""

    losses: list[float]
    val_loss: float
    top1: float


def train(recipe: Recipe, runs: Path) -> Curve:
    """Train with the engine, in this process."""
    run = pl.train(recipe, runs=runs, name=f"{recipe.name}-{recipe.seed}", in_process=True)
    losses = [loss for _, loss in run.points("loss", "train", "step")]
    return Curve(losses, run.last["loss"], run.last["top1"])


def train_plainly(proxy: Proxy, folder: Folder, seed: int) -> Curve:
    """Train with the plain loop, from its own initial weights and with its own augmentation."""
    generator, losses = seeded(seed), []
    source = proxy.source(proxy.net(folder.num_classes), proxy.scale, folder.num_classes)
    for epoch in range(source.epochs):
        reading = source.reading(epoch)
        steps, transform = folder.steps_per_epoch(reading), source.transform(reading)
        for index, (images, labels) in zip(count(), folder.batches(reading, transform, generator), strict=False):
            mixed, targets = source.mix(images, labels)
            if targets.ndim == 2 or isinstance(source, sources.ResnetStrikesBack):
                targets = source.targets(targets)
            losses.append(source.step(epoch, index, steps, mixed, targets))
        source.after_epoch(0.0)
    return Curve(losses, *folder.validate(source.evaluated, source.validation(source.epochs - 1)))


def distances(ours: Sequence[Curve], plain: Sequence[Curve]) -> dict[str, tuple[float, float]]:
    """Return the difference of the means over seeds, and its standard error.

    Of the training loss in every third of the run, and of the last validation.
    """
    numbers = [np.array([_summary(curve) for curve in curves]) for curves in (ours, plain)]
    difference = numbers[0].mean(0) - numbers[1].mean(0)
    error = np.sqrt(sum(each.var(0, ddof=1) / len(each) for each in numbers))
    names = ("first third", "second third", "last third", "validation")
    return dict(zip(names, zip(difference.tolist(), error.tolist(), strict=True), strict=True))


def _summary(curve: Curve) -> list[float]:
    return [*(float(part.mean()) for part in np.array_split(np.array(curve.losses), 3)), curve.val_loss]
