"""More ranks, a larger batch: what --scale-batch makes of a recipe, by a rule that has a name."""

import math
from dataclasses import replace

from paceline.config.duration import parse, text_of
from paceline.config.recipe import Recipe, Scaled
from paceline.errors import UserError


def scaled(recipe: Recipe, ranks: int, rule: str) -> Recipe:
    """The recipe with its batches multiplied by the number of ranks, and its learning rates by what the rule says.

    A schedule without a warm-up gets one, from the unscaled learning rate, of a tenth of the training and at most five
    epochs (Goyal et al. 2017); phases that give learning rates have their own ramps, and get none.
    """
    if recipe.scaled.by > 1:
        raise UserError(f"--scale-batch: the recipe is scaled already, by {recipe.scaled.by} ({recipe.scaled.rule})")
    if ranks == 1:
        return recipe
    factor = ranks if rule == "linear" else math.sqrt(ranks)
    phases = tuple(
        replace(phase, global_batch=phase.global_batch * ranks, lr=tuple(lr * factor for lr in phase.lr))
        for phase in recipe.phases
    )
    schedule = recipe.optim.schedule
    by_phases = any(phase.lr for phase in recipe.phases)
    if schedule.name != "piecewise" and parse(schedule.warmup).value == 0 and not by_phases:
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
