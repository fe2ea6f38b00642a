"""Time and memory of training steps with the load of real training, beside a plain PyTorch loop."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.engine.build import Setup, build
from paceline.engine.train import train_step
from paceline.models.activation_checkpointing import checkpoint_activations
from paceline.optim.schedules import lr_at
from paceline.selftest.probes import Probing
from paceline.selftest.probes.plain import plain_model
from paceline.selftest.settings import speed_recipe
from paceline.system.device import peak_memory, wait

_ROUNDS, _QUICK_ROUNDS = 9, 3
_STEPS_PER_ROUND, _QUICK_STEPS = 5, 2
_MEMORY_STEPS, _QUICK_MEMORY_STEPS = 20, 5


def steps(probing: Probing) -> dict[str, Any]:
    """Return seconds per step, of a plain loop and of each rank without communication, and the memory of each rank."""
    world, quick = probing.world, probing.settings.quick
    setup = build(speed_recipe(probing.settings), world)
    batch = next(setup.loader.steps())
    images, targets = setup.objective.prepare(batch[0], 0)

    def own() -> None:
        train_step(setup, batch, 0, lr_at(0, setup.lr_plan))

    # copied before either trains; DDP's plain wrapper and no communication at all
    plain = _plain_step(setup, images, targets, communicate=True)
    alone = _plain_step(setup, images, targets, communicate=False)
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    count = _QUICK_STEPS if quick else _STEPS_PER_ROUND
    seconds: dict[str, list[float]] = {"own": [], "plain": [], "alone": []}
    for number in range(rounds + 1):
        for name, step in (("own", own), ("plain", plain), ("alone", alone)):
            world.barrier()
            taken = _timed(step, count, world.device)
            if number:  # the first round warms up
                seconds[name].append(taken)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    per_rank = world.all_gather_object(medians)
    memory_steps = _QUICK_MEMORY_STEPS if quick else _MEMORY_STEPS
    memory = world.all_gather_object(_memory(own, memory_steps, world.device))
    return {
        "precision": setup.precision,
        "batch": len(images),
        "seconds": {name: max(rank[name] for rank in per_rank) for name in ("own", "plain")},
        "alone_per_rank": [rank["alone"] for rank in per_rank],
        "peak_per_rank": world.all_gather_object(peak_memory(world.device)),
        "memory_per_rank": memory,
        "memory_steps": memory_steps,
    }


def _plain_step(setup: Setup, images: torch.Tensor, targets: torch.Tensor, communicate: bool) -> Callable[[], None]:
    """Return a step of a loop as in PyTorch's tutorials, with a copy of the model that is not compiled."""
    optim, world = setup.recipe.optim, setup.world
    wrapped = model = plain_model(setup)
    checkpoint_activations(model, setup.recipe.model)  # the user's choice, which costs any loop the same time
    if communicate and world.size > 1:
        wrapped = DistributedDataParallel(model, [world.device] if world.device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), optim.lr, momentum=optim.momentum, nesterov=optim.nesterov)
    scaler = torch.amp.GradScaler(world.device.type, enabled=setup.scaler.is_enabled())

    def step() -> None:
        with setup.autocast():
            logits = wrapped(images)
        scaler.scale(F.cross_entropy(logits.float(), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _timed(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Return the seconds per step."""
    wait(device)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    return (time.perf_counter() - begin) / count


def _memory(step: Callable[[], None], count: int, device: torch.device) -> list[int]:
    """Return the bytes in use after a few steps and after some more."""
    found = []
    for _ in range(2):
        _timed(step, count, device)
        gc.collect()
        cuda = device.type == "cuda"
        found.append(torch.cuda.memory_allocated() if cuda else psutil.Process().memory_info().rss)
    return found


def images_per_second(setup: Setup, count: int) -> float:
    """Return how many images of a batch this rank trains on per second, without loading any."""
    batch = next(setup.loader.steps())
    images = sum(len(each.labels) for each in batch)

    def step() -> None:
        train_step(setup, batch, 0, lr_at(0, setup.lr_plan))

    _timed(step, 2, setup.world.device)
    return images / _timed(step, count, setup.world.device)
