"""Recipes as shown by `--help` and `paceline recipes`."""

import json
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.config.io import fields, load_recipe, shipped, to_tree
from paceline.config.recipe import Recipe
from paceline.system.logs import Screen


def print_fields(recipe: Recipe, source: str, only: Sequence[str] = ()) -> None:
    """Print every field with its value in this recipe and its description; `only`: limit to these groups."""
    tree = to_tree(recipe)
    table = Table(box=box.SIMPLE, title=Text(f"fields of {source}"), title_justify="left", pad_edge=False)
    table.add_column("option", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=28)
    table.add_column("description", overflow="fold")
    for row in fields():
        group = row.path.partition(".")[0]
        if group in ("about", "name") or (only and group not in only):
            continue
        value = tree
        for part in row.path.split("."):
            value = value[part]
        text = value if isinstance(value, str) else json.dumps(value)
        choices = f" [{row.kind}]" if "|" in row.kind else ""
        table.add_row(f"--{row.path}", Text(text or '""'), Text(row.help + choices))
    Screen().print(table)


def print_recipes() -> None:
    """Print the shipped recipes with their source and results."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for name in shipped():
        recipe = load_recipe(name)
        about = recipe.about
        grid.add_row(Text(name, "bold"))
        batch = f"global batch {recipe.train.global_batch}"
        grid.add_row("  trains", Text(f"{recipe.model.name} on {recipe.data.name}, {recipe.train.duration}, {batch}"))
        grid.add_row("  source", Text(about.source))
        grid.add_row("  published", Text(about.published or "-"))
        grid.add_row("  measured here", Text(about.measured or "not measured"))
    Screen().print(grid)
