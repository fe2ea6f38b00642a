"""Loads the modules that a recipe imports, and checks the names that they register."""

from collections.abc import Sequence

from paceline import extensions
from paceline.config.io import split_overrides
from paceline.config.problems import unknown_names
from paceline.config.recipe import Recipe


def allow_given(overrides: Sequence[str]) -> None:
    """Let modules be found in the current folder if the command line names one with --import."""
    if any(key == "import" for key, _ in split_overrides(overrides)):
        extensions.search_current_folder()


def load_imports(recipe: Recipe) -> None:
    """Import the modules of a recipe. UserError for names that are neither built in nor registered."""
    extensions.load(recipe.imports)
    for error in unknown_names(recipe):
        raise error
