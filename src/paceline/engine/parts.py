"""Checks the model, the optimizer and the schedule of a recipe without creating them."""

from paceline.config.recipe import Recipe
from paceline.models.factory import check as check_model
from paceline.optim.factory import check as check_optimizer
from paceline.optim.schedules import check as check_schedule


def check_parts(recipe: Recipe) -> None:
    """Refuse names that are neither built in nor registered, and options and fields that have no effect."""
    check_model(recipe.model)
    check_optimizer(recipe.optim)
    check_schedule(recipe.optim.schedule)
