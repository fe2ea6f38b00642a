"""The first log lines of a run: recipe, data, model, devices, duration, and warnings about suspicious settings."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from paceline import extensions
from paceline.config.optim import Optim
from paceline.config.recipe import Fsdp
from paceline.config.timeline import phase_table
from paceline.data.load.source import evaluation_variants, without_effect
from paceline.distributed.world import World
from paceline.engine.build import Setup
from paceline.engine.interval import IntervalTrigger
from paceline.optim.schedules import lr_at
from paceline.system.logs import log
from paceline.system.tables import lines_of, new_table
from paceline.system.wording import counted

_FEW_STEPS = 10


def announce(setup: Setup, path: Path, checkpoint: Path | None, notes: Sequence[str] = ()) -> None:
    """Log what is trained and where. `checkpoint` is the one the run resumes from, if any. All ranks must call this.

    `notes`: what the weights changed in the recipe.
    """
    where = _devices(setup.world)  # a collective
    weights = f"weights of {checkpoint}" if checkpoint else _weights(setup.recipe.model.weights)
    for line in [*_lines(setup, path, where, weights), *notes]:
        log.info("%s", line)
    if setup.world.is_rank_zero:
        for line in _warnings(setup):
            log.warning("%s", line)


def _lines(setup: Setup, path: Path, where: str, weights: str) -> Iterator[str]:
    recipe, timeline, phases = setup.recipe, setup.timeline, setup.timeline.phases
    optim = recipe.optim
    yield f"recipe: {recipe.name}, run folder {path}"
    yield f"data: {_data(setup)}"
    if classes := _classes(setup):
        yield f"classes: {classes}"
    parameters = list(setup.replica.module.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    frozen = f" ({trained:,} trained, model.freeze={','.join(recipe.model.freeze)})" if recipe.model.freeze else ""
    yield f"model: {recipe.model.name}, {total:,} parameters{frozen}, {weights}"
    tf32 = ", TF32" if recipe.tf32 and setup.world.device.type == "cuda" else ""
    yield f"device: {where}, {setup.precision}{tf32}"
    if strategy := ", ".join(_strategy(setup)):
        yield f"strategy: {strategy}"
    if len(phases) == 1:
        size = "x".join(map(str, setup.source.preprocessing(phases[0])["size"]))
        per_epoch = counted(phases[0].steps_per_epoch, "step")
        steps = f"{per_epoch} per epoch, {timeline.total:,} in total ({recipe.train.duration})"
        yield f"training: {steps}, images {phases[0].size or size} px, validated at {size} px"
        yield f"batch: {setup.layout}"
    rates = f"peak learning rate {setup.lr_plan.highest:.4g}{_scales(optim)}"
    averaged = f", EMA decay {recipe.ema.decay:g}{' with lookahead' * recipe.ema.lookahead}" if recipe.ema.decay else ""
    yield f"optimizer: {optim.name}, {rates}, schedule {_schedule(setup)}{averaged}"
    if stop := recipe.early_stop.patience:
        metric = recipe.early_stop.metric or recipe.checkpoint.best
        yield f"early stopping: after {counted(stop, 'evaluation')} without a better {metric}"
    if len(phases) > 1:
        yield f"training: {timeline.total:,} steps in total ({recipe.train.duration}), {len(phases)} phases"
        lr = lambda step: lr_at(step, setup.lr_plan)  # noqa: E731
        sizes = (setup.world.size, recipe.train.grad_accumulation)
        highest = setup.lr_plan.highest_between
        heads, *rows = phase_table(timeline, *sizes, lr, highest, setup.source.evaluation_variant)
        yield from lines_of(new_table(heads, rows))


def _strategy(setup: Setup) -> Iterator[str]:
    recipe, ranks, shards = setup.recipe, setup.world.size, setup.replica.shard.count
    if shards > 1:
        yield "fsdp, sharded over " + (
            f"{ranks} ranks" if shards == ranks else f"{shards} ranks of each node, {ranks // shards} replicas"
        )
    elif ranks > 1:
        yield "ddp"
    if recipe.model.activation_checkpointing != "none":
        yield f"{recipe.model.activation_checkpointing} activation checkpointing"
    if recipe.compile:
        yield "compiled"


def _data(setup: Setup) -> str:
    source = setup.source
    variants = f", variant {' and '.join(source.variants)}" if source.variants else ""
    if len(source.variants) > 1:
        variants += f", validated on {' and '.join(evaluation_variants(source, setup.timeline))}"
    extension = extensions.find("dataset", source.name)
    by = f"registered by {extension.where}" if extension else "built in"
    where = f"{source.place} ({source.name}{variants})" if source.place else f"{source.name} ({by})"
    counts = [(source.num_train, "training"), (source.num_val, "validation"), (source.num_test, "test")]
    *first, last = (f"{count:,} {split}" for count, split in counts if count)
    images = f"{', '.join(first)} and {last} images"
    return f"{where}, {images}, {len(source.classes):,} classes, fingerprint {source.fingerprint}"


def _classes(setup: Setup) -> str:
    """Return how many images the classes have, and what corrects an imbalance; empty if labels are not known yet."""
    if (labels := setup.loader.labels) is None:
        return ""
    counts = labels.bincount()
    least, most = int(counts[counts > 0].min()), int(counts.max())
    text = f"{least:,} to {most:,} training images per class, imbalance ratio {most / least:.3g}"
    if setup.recipe.data.sampler == "balanced":
        text += ", balanced sampler"
    if (weights := setup.objective.weights) is not None:
        text += f", class weights {weights.min():.3g} to {weights.max():.3g}"
    return text


def _weights(weights: str) -> str:
    return f"{weights} weights" if weights in ("random", "pretrained") else f"weights from {weights}"


def _scales(optim: Optim) -> str:
    """Return which weights have another learning rate."""
    head = f"head x {optim.head_lr_mult:g}" if optim.head_lr_mult != 1 else ""
    layers = f"layer decay {optim.layer_decay:g}" if optim.layer_decay != 1 else ""
    text = ", ".join(filter(None, (head, layers)))
    return f" ({text})" if text else ""


def _schedule(setup: Setup) -> str:
    schedule = setup.recipe.optim.schedule
    if setup.lr_plan.phases:
        return "by phases"
    return f"{schedule.name}, warmup {schedule.warmup}" if setup.lr_plan.warmup else schedule.name


def _devices(world: World) -> str:
    hosts = len(set(world.hosts()))
    where = f"{hosts} nodes" if hosts > 1 else "this machine"
    threads = torch.get_num_threads()
    each = f"{threads} thread{'s' if threads > 1 else ''}{' each' if world.size > 1 else ''}"
    return f"{world.size} {world.device.type} rank{'s' if world.size > 1 else ''} on {where} ({each})"


def _empty_classes(setup: Setup) -> list[str]:
    """Return the names of classes without training images; none if labels are known only after reading all images."""
    if (labels := setup.loader.labels) is None:
        return []
    present = set(labels.unique().tolist())
    return [entry.name for label, entry in enumerate(setup.source.classes) if label not in present]


def _warnings(setup: Setup) -> Iterator[str]:
    """Settings that are valid but rarely intended."""
    recipe, world = setup.recipe, setup.world
    if recipe.fsdp != Fsdp() and setup.replica.shard.count == 1:
        yield "the settings of `fsdp` have no effect: the model is not sharded. Use strategy=fsdp on several ranks."
    elif recipe.fsdp.mesh == "hybrid" and setup.replica.shard.count == world.size:
        yield "fsdp.mesh=hybrid has no effect on one node: the model is sharded over all of its ranks"
    if setup.precision == "fp16" and world.device.type == "cpu":
        yield "precision=fp16: most CPUs emulate fp16, several times slower than fp32. Use precision=bf16 or fp32."
    fewest = min(setup.timeline.phases, key=lambda phase: phase.steps_per_epoch)
    if fewest.steps_per_epoch < _FEW_STEPS:
        yield (
            f"an epoch has only {fewest.steps_per_epoch} step{'s' * (fewest.steps_per_epoch > 1)} "
            f"({setup.source.num_train:,} images, global batch {fewest.global_batch:,}). Reduce --train.global_batch "
            "for more steps per epoch."
        )
    if empty := _empty_classes(setup):
        some = ", ".join(empty[:5]) + (", ..." if empty[5:] else "")
        yield f"{len(empty)} of {len(setup.source.classes)} classes have no training images: {some}"
    named = {name for phase in setup.timeline.phases for name in (phase.variant, phase.evaluate_variant)}
    if warning := without_effect(setup.source, named):
        yield warning
    yield from _unreachable(setup)
    yield from _cut_off(setup)


def _cut_off(setup: Setup) -> Iterator[str]:
    """Schedules that are longer than the run, or begin with an epoch that changes nothing."""
    schedule, plan, duration = setup.recipe.optim.schedule, setup.lr_plan, setup.recipe.train.duration
    if plan.phases:
        return
    if plan.warmup >= plan.total:
        yield (
            f"optim.schedule.warmup={schedule.warmup} is not shorter than train.duration={duration}, so the learning "
            "rate only rises. Use a shorter warmup."
        )
    if plan.warmup and schedule.interval == "epoch" and not lr_at(0, plan):
        yield (
            f"optim.schedule.start_factor={schedule.start_factor:g} with optim.schedule.interval=epoch: the learning "
            "rate is 0 during the whole first epoch. Use a start_factor above 0, e.g. 0.01."
        )
    if plan.points and plan.points[-1][0] > plan.total:
        yield (
            f"optim.schedule.points end at {schedule.points[-1].at}, but train.duration={duration}: the learning rate "
            f"of the last step is {lr_at(plan.total - 1, plan):.3g}. Move the points, or use another schedule, e.g. "
            "`--optim.schedule '{name: cosine, points: []}'`."
        )


def _unreachable(setup: Setup) -> Iterator[str]:
    """Early stops and decays for which the run has too few evaluations before its end."""
    recipe, plan = setup.recipe, setup.lr_plan
    every = IntervalTrigger(recipe.evaluate.every, setup.timeline)
    if (evaluations := every.times_before(setup.timeline.total)) is None:
        return
    if recipe.early_stop.patience and evaluations <= recipe.early_stop.patience:
        yield (
            f"early_stop.patience={recipe.early_stop.patience} cannot stop this run: it has "
            f"{counted(evaluations, 'evaluation')} before its end (evaluate.every={recipe.evaluate.every}). Use a "
            "smaller patience, or evaluate more often."
        )
    relevant = evaluations - (every.times_before(plan.warmup) or 0)
    if plan.plateau and relevant < plan.plateau.patience + 2:  # the first one is always the best so far
        yield (
            f"optim.schedule.patience={plan.plateau.patience} never lowers the learning rate: the run has "
            f"{counted(relevant, 'evaluation')} between warmup and end (evaluate.every={recipe.evaluate.every}). Use a "
            "smaller patience, or evaluate more often."
        )
