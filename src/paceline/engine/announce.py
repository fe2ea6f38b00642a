"""The first lines of a run: what is trained, on what, where, for how long; and what looks wrong about it."""

from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.config.timeline import columns, phase_table
from paceline.data.load.source import Source
from paceline.distributed.world import World
from paceline.engine.build import Setup
from paceline.optim.schedules import lr_at
from paceline.system.logs import log

_FEW_STEPS = 10


def announce(setup: Setup, path: Path, checkpoint: Path | None) -> None:
    """`checkpoint`: what the run resumes from."""
    where = _places(setup.world)  # all ranks take part
    weights = f"weights of {checkpoint}" if checkpoint else _weights(setup.recipe.model.weights)
    for line in _lines(setup, path, where, weights):
        log.info("%s", line)
    if setup.world.is_rank_zero:
        for line in _doubts(setup):
            log.warning("%s", line)


def _lines(setup: Setup, path: Path, where: str, weights: str) -> Iterator[str]:
    recipe, timeline, phases = setup.recipe, setup.timeline, setup.timeline.phases
    optim = recipe.optim
    yield f"recipe: {recipe.name}, run folder {path}"
    yield f"data: {_data(setup.source)}"
    parameters = sum(parameter.numel() for parameter in setup.replica.module.parameters())
    yield f"model: {recipe.model.name}, {parameters:,} parameters, {weights}"
    yield f"device: {where}, {setup.precision}"
    if len(phases) == 1:
        size = "x".join(map(str, setup.source.preprocessing(phases[0])["size"]))
        steps = f"{phases[0].steps_per_epoch:,} steps per epoch, {timeline.total:,} in all ({recipe.train.duration})"
        yield f"training: {steps}, images {phases[0].size or size} px, validated at {size} px"
        yield f"batch: {setup.layout}"
    yield f"optimizer: {optim.name}, peak learning rate {setup.lr_plan.highest:.4g}, schedule {_schedule(setup)}"
    if len(phases) > 1:
        yield f"training: {timeline.total:,} steps in all ({recipe.train.duration}), {len(phases)} phases"
        lr = lambda step: lr_at(step, setup.lr_plan)  # noqa: E731
        yield from columns(phase_table(timeline, setup.world.size, recipe.train.grad_accumulation, lr))


def _data(source: Source) -> str:
    variants = f", variant {' and '.join(source.variants)}" if source.variants else ""
    where = f"{source.place} ({source.name}{variants})" if source.place else f"{source.name} (built in)"
    images = f"{source.num_train:,} training and {source.num_val:,} validation images"
    return f"{where}, {images}, {len(source.classes):,} classes, fingerprint {source.fingerprint}"


def _weights(weights: str) -> str:
    return f"{weights} weights" if weights in ("random", "pretrained") else f"weights from {weights}"


def _schedule(setup: Setup) -> str:
    schedule = setup.recipe.optim.schedule
    if setup.lr_plan.phases:
        return "by phases"
    return f"{schedule.name}, warmup {schedule.warmup}" if setup.lr_plan.warmup else schedule.name


def _places(world: World) -> str:
    hosts = len(set(world.hosts()))
    where = f"{hosts} machines" if hosts > 1 else "this machine"
    threads = torch.get_num_threads()
    each = f"{threads} thread{'s' if threads > 1 else ''}{' each' if world.size > 1 else ''}"
    return f"{world.size} {world.device.type} rank{'s' if world.size > 1 else ''} on {where} ({each})"


def _doubts(setup: Setup) -> Iterator[str]:
    """What is possible, but rarely meant."""
    fewest = min(setup.timeline.phases, key=lambda phase: phase.steps_per_epoch)
    if fewest.steps_per_epoch < _FEW_STEPS:
        yield (
            f"an epoch has only {fewest.steps_per_epoch} step{'s' * (fewest.steps_per_epoch > 1)} "
            f"({setup.source.num_train:,} images, global batch {fewest.global_batch:,}); reduce --train.global_batch "
            "for more steps per epoch"
        )
    shown = set(setup.loader.labels.unique().tolist())
    if empty := [own.name for number, own in enumerate(setup.source.classes) if number not in shown]:
        some = ", ".join(empty[:5]) + (", ..." if empty[5:] else "")
        yield f"{len(empty)} of {len(setup.source.classes)} classes have no training images: {some}"
    schedule, plan = setup.recipe.optim.schedule, setup.lr_plan
    if plan.warmup >= setup.timeline.total and not plan.phases:
        yield (
            f"optim.schedule.warmup={schedule.warmup} is not shorter than "
            f"train.duration={setup.recipe.train.duration}: the learning rate only rises"
        )
