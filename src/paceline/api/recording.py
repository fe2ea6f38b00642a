"""Write measured results into the file of a recipe."""

from collections.abc import Sequence
from pathlib import Path

from paceline.analysis.measure import measure
from paceline.analysis.read import read
from paceline.analysis.run import LoggedRun
from paceline.api.arguments import check_path
from paceline.config.edit import write_measured
from paceline.config.io import load_recipe, recipe_file, shipped
from paceline.config.recipe import Recipe
from paceline.errors import UserError


def record_measured(runs: Sequence[str | Path | LoggedRun], recipe: str | Path = "") -> Recipe:
    """Write the result of finished runs into about.measured of their recipe's file, and return the recipe.

    The runs may differ in their seeds and in settings that affect only speed. `recipe`: a YAML file, or a shipped
    recipe of a source checkout; by default the shipped recipe that the runs trained.
    """
    if not runs:
        raise UserError("record-without-runs", "no runs are given. Give the folders of finished runs.")
    logged = [run if isinstance(run, LoggedRun) else read(check_path("run", run)) for run in runs]
    source = str(recipe) or _shipped_recipe_of(logged[0])
    path = recipe_file(source)
    if path in shipped().values() and not (path.parents[3] / "pyproject.toml").is_file():
        message = f"{source}: {path} is part of the installed package. Record the runs in a YAML file of your own."
        raise UserError("recipe-installed", message, path=path)
    write_measured(path, measure(load_recipe(source), source, logged))
    return load_recipe(source)


def _shipped_recipe_of(run: LoggedRun) -> str:
    name = str(run.recipe.get("name"))
    if name not in shipped():
        message = (
            f"{run.origin} trained {name!r}, not a shipped recipe. Give its file: paceline recipes FILE --record ..."
        )
        raise UserError("record-needs-recipe", message, run=run.origin, recipe=name)
    return name
