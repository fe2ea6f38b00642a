"""--scale-batch: scale batch size and learning rate with the number of ranks."""

import math
from dataclasses import replace

from paceline.config.duration import parse, text_of
from paceline.config.optim import SCHEDULES
from paceline.config.recipe import Recipe, Scaled
from paceline.errors import UserError


def scaled(recipe: Recipe, ranks: int, rule: str) -> Recipe:
    """The recipe with its batches multiplied by the number of ranks, and its learning rates scaled by the rule.

    A schedule without a warmup gets one from the unscaled learning rate, over a tenth of the run and at most five
    epochs (Goyal et al. 2017). Phases with learning rates and registered schedules have their own ramps and get none.
    """
    if recipe.scaled.by > 1:
        raise UserError(
            "already-scaled",
            f"--scale-batch: the recipe is already scaled by {recipe.scaled.by} ({recipe.scaled.rule}). "
            "Leave the option out.",
            by=recipe.scaled.by,
        )
    if ranks == 1:
        return recipe
    factor = ranks if rule == "linear" else math.sqrt(ranks)
    phases = tuple(
        replace(phase, global_batch=phase.global_batch * ranks, lr=tuple(lr * factor for lr in phase.lr))
        for phase in recipe.phases
    )
    schedule = recipe.optim.schedule
    phases_set_lr = any(phase.lr for phase in recipe.phases)
    has_warmup = schedule.name in SCHEDULES and schedule.name != "piecewise"
    if has_warmup and parse(schedule.warmup).value == 0 and not phases_set_lr:
        schedule = replace(schedule, warmup=_warmup(recipe.train.duration), start_factor=1 / factor)
    return replace(
        recipe,
        train=replace(recipe.train, global_batch=recipe.train.global_batch * ranks),
        optim=replace(recipe.optim, lr=recipe.optim.lr * factor, schedule=schedule),
        phases=phases,
        scaled=Scaled(ranks, "linear" if rule == "linear" else "sqrt", recipe.train.global_batch, recipe.optim.lr),
    )


def _warmup(duration: str) -> str:
    value, unit = parse(duration)
    if unit == "ba":
        return f"{max(1, round(value / 10))}ba"
    return text_of(min(5.0, value / 10), "ep")
