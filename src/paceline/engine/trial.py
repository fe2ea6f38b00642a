"""Tests one batch size: a few training steps on synthetic images of the largest size in the recipe."""

import dataclasses
import json
import resource
import time

import psutil

from paceline.config.data import Augment, Data, Synthetic
from paceline.config.recipe import Recipe
from paceline.data import kinds
from paceline.data.load.loader import DEFAULT_SIZE
from paceline.data.load.source import open_source
from paceline.distributed.world import World
from paceline.engine.build import Setup, build
from paceline.engine.train import train_step
from paceline.errors import UserError
from paceline.models import factory
from paceline.optim.schedules import lr_at
from paceline.system import logs
from paceline.system.device import peak_memory, wait

_SHAPES = {"digits": (1, 8, 10), "cifar10": (3, 32, 10), "cifar100": (3, 32, 100), "imagenet": (3, DEFAULT_SIZE, 1000)}
"""Channels, side and classes of known datasets, which are not needed for a trial."""


def try_batch(recipe: Recipe, per_rank_batch: int, steps: int, limits: list[int]) -> None:
    """Train a few steps with this batch; rank 0 prints speed and memory. Running out of memory exits."""
    world = World.from_env(recipe.device)
    logs.set_up(1, 2)  # warnings only
    if limits and world.device.type == "cpu":
        _limit_memory(limits[min(world.rank, len(limits) - 1)])
    with world.connected():
        # hosts may not have the data
        (channels, side, classes), data = world.on_rank_zero(lambda: (shape_of(recipe), _data_name(recipe)))
        setup = build(as_trial(recipe, (channels, side, classes), per_rank_batch, world.size, steps), world)
        seconds = _run(setup, steps)
        memory = world.all_gather_object(peak_memory(world.device))
        if world.is_rank_zero:
            speed = per_rank_batch * world.size * steps / max(seconds, 1e-9)
            print(json.dumps({"images_per_second": speed, "memory": memory, "data": data}), flush=True)


def _limit_memory(size: int) -> None:
    """Limit the resident memory of this process. Reserved addresses without memory do not count."""
    used = psutil.Process().memory_info()
    if size <= used.rss:
        raise UserError(
            "memory-limit-too-low",
            f"out of memory: a process uses {used.rss / 1e9:.2f} GB before training starts, more than the limit of "
            f"{size / 1e9:.2f} GB. Increase --memory-limit.",
            limit=size,
            used=used.rss,
        )
    resource.setrlimit(resource.RLIMIT_AS, (used.vms + size - used.rss,) * 2)


def as_trial(recipe: Recipe, shape: tuple[int, int, int], per_rank_batch: int, ranks: int, steps: int) -> Recipe:
    """Return the recipe for a few steps on synthetic images of its largest size, with the same memory use.

    `shape`: channels, side and number of classes.
    """
    channels, side, classes = shape
    sides = [phase.size or recipe.data.size or side for phase in recipe.all_phases()]
    samples = per_rank_batch * ranks
    synthetic = Synthetic(max(samples, 2), 2, channels, max(sides), classes)
    return dataclasses.replace(
        recipe,
        data=Data(
            name="synthetic", synthetic=synthetic, mean=(0.5,) * channels, std=(0.25,) * channels, augment=Augment()
        ),
        train=dataclasses.replace(recipe.train, global_batch=samples, duration=f"{steps + 1}ba", grad_accumulation=1),
        optim=dataclasses.replace(recipe.optim, schedule=dataclasses.replace(recipe.optim.schedule, warmup="0ba")),
        model=factory.untrained(recipe.model),
        evaluate=dataclasses.replace(recipe.evaluate, size=0),
        grad_sync=dataclasses.replace(recipe.grad_sync, powersgd_start_step=0),
        phases=(),
        ramp=type(recipe.ramp)(),
    )


def shape_of(recipe: Recipe) -> tuple[int, int, int]:
    """Return channels, side and number of classes of a recipe's images, guessed if its data is not available."""
    data = recipe.data
    if data.name == "synthetic":
        return data.synthetic.channels, data.synthetic.size, data.synthetic.classes
    if data.name in _SHAPES:
        return _SHAPES[data.name]
    try:
        return 3, DEFAULT_SIZE, len(open_source(kinds.resolve(recipe)).classes)
    except UserError:
        return _SHAPES["imagenet"]


def _data_name(recipe: Recipe) -> str:
    """Return data.name as a run has it: detected from data.path, if the data is available."""
    try:
        return kinds.resolve(recipe).data.name
    except UserError:
        return recipe.data.name


def _run(setup: Setup, steps: int) -> float:
    """Return the seconds of all steps but the first, which allocates the memory that the others reuse."""
    batches = setup.loader.steps()
    begin = 0.0
    for step in range(steps + 1):
        if step == 1:
            wait(setup.world.device)
            begin = time.perf_counter()
        train_step(setup, next(batches), step, lr_at(step, setup.lr_plan))
        if setup.ema:
            setup.ema.update(setup.replica.module, step + 1)
    wait(setup.world.device)
    return time.perf_counter() - begin
