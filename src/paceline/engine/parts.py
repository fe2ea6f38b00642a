"""Checks the model, the optimizer and the schedule of a recipe without creating them."""

from paceline.config.recipe import Recipe
from paceline.models.factory import check as check_model
from paceline.models.factory import untrained
from paceline.optim.factory import check as check_optimizer
from paceline.optim.schedules import check as check_schedule


def check_parts(recipe: Recipe, resume: bool = False) -> None:
    """Refuse names that are neither built in nor registered, and options and fields that have no effect.

    `resume`: the initial weights may be missing, because checkpoints have all weights.
    """
    check_model(untrained(recipe.model) if resume else recipe.model)
    check_optimizer(recipe.optim)
    check_schedule(recipe.optim.schedule)
