"""What is wrong with a recipe beyond the type and range of single fields."""

from collections.abc import Iterator
from itertools import pairwise

from paceline.config.data import BUILT_IN, IN_MEMORY, Data
from paceline.config.duration import parse
from paceline.config.phases import problems as phase_problems
from paceline.config.phases import ramp_problems
from paceline.config.recipe import Recipe, near_multiples


def problems(recipe: Recipe) -> Iterator[str]:
    """What is wrong with a recipe beyond the type and range of single fields."""
    train, schedule = recipe.train, recipe.optim.schedule
    if train.global_batch % train.grad_accumulation:
        yield (
            f"train.grad_accumulation={train.grad_accumulation} does not divide train.global_batch="
            f"{train.global_batch}; "
            f"try {' or '.join(map(str, near_multiples(train.global_batch, train.grad_accumulation)))} for the batch"
        )
    if len(recipe.data.mean) != len(recipe.data.std):
        yield f"data.mean has {len(recipe.data.mean)} values, data.std {len(recipe.data.std)}; give both or neither"
    if schedule.name == "piecewise" and not schedule.points:
        yield "optim.schedule.points is empty; a piecewise schedule needs e.g. [{at: 0ep, factor: 1.0}]"
    if schedule.name != "piecewise" and schedule.points:
        yield f"optim.schedule.points is only read by a piecewise schedule, not by {schedule.name!r}; remove one"
    for name in ("crop_scale", "crop_ratio"):
        low, high = getattr(recipe.data.augment, name)
        if low > high:
            yield f"data.augment.{name}={low}, {high}: the first is larger than the second; swap them"
    yield from _data_problems(recipe.data)
    if recipe.data.name not in IN_MEMORY:
        if recipe.data.augment.translate:
            kind = recipe.data.name or recipe.data.path
            yield f"data.augment.translate is for images in memory, and {kind} is not; set it to 0"
    elif recipe.data.augment.policy != "none" or recipe.data.augment.color_jitter:
        yield f"data.augment.policy and color_jitter need image files, not {recipe.data.name}; set them to none and 0"
    yield from _out_of_order("optim.schedule.points", [point.at for point in schedule.points])
    length = parse(train.duration)
    yield from phase_problems(recipe.phases, length.value if length.unit == "ep" else 0.0, train.global_batch)
    yield from ramp_problems(recipe.ramp)
    if recipe.ramp.sizes[1] and recipe.phases:
        yield "ramp and phases both say when images change their size; remove one"
    if recipe.ramp.sizes[1] and length.unit != "ep":
        yield f"ramp needs a training in epochs, and train.duration={train.duration}; write e.g. 16ep"
    epochs = [epoch for epoch, _ in recipe.curve.points]
    if any(begin >= end for begin, end in pairwise(epochs)):
        yield f"curve.points are not in order of time: {', '.join(f'{epoch:g}' for epoch in epochs)}"
    if recipe.grad_sync.powersgd_rank and recipe.strategy == "fsdp":
        yield "grad_sync.powersgd_rank needs whole gradients, which fsdp does not have; use strategy ddp, or 0"
    if recipe.grad_sync.powersgd_rank and recipe.grad_sync.dtype != "fp32":
        yield f"grad_sync.dtype={recipe.grad_sync.dtype} and grad_sync.powersgd_rank both compress; use one of them"
    if recipe.grad_sync.transport == "shm" and recipe.strategy == "fsdp":
        yield "grad_sync.transport=shm is for ddp; fsdp exchanges over the network: use auto"


def _data_problems(data: Data) -> Iterator[str]:
    if not data.name and not data.path:
        yield (
            "data: missing; set data.path to a prepared folder, an image folder or a CSV list, or data.name to "
            "digits, cifar10, imagenet or synthetic"
        )
    if data.path and data.name in BUILT_IN:
        yield (
            f"data.path={data.path!r}: data.name={data.name} is built in and reads no files; remove data.path, or "
            "data.name (--data.name ''), so that the path decides"
        )


def _out_of_order(path: str, times: list[str]) -> Iterator[str]:
    amounts = [parse(time) for time in times]
    if len({amount.unit for amount in amounts}) > 1:
        yield f"{path} mixes ep and ba ({', '.join(times)}); use one unit"
    elif amounts != sorted(amounts):
        yield f"{path} are not in order of time: {', '.join(times)}"
