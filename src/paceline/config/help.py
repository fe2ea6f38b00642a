"""What `--help` and `paceline recipes` show of recipes."""

import json
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.config.io import fields, load_recipe, shipped, to_tree
from paceline.config.recipe import Recipe


def print_fields(recipe: Recipe, source: str, only: Sequence[str] = ()) -> None:
    """Every field with this recipe's own value and a sentence; `only`: of these groups."""
    tree = to_tree(recipe)
    table = Table(box=box.SIMPLE, title=f"fields of {source}", title_justify="left", pad_edge=False)
    table.add_column("option", no_wrap=True)
    table.add_column("value", overflow="fold", max_width=28)
    table.add_column("what it is")
    for row in fields():
        group = row.path.partition(".")[0]
        if group == "about" or (only and group not in only):
            continue
        value = tree
        for part in row.path.split("."):
            value = value[part]
        text = value if isinstance(value, str) else json.dumps(value)
        choices = f" [{row.kind}]" if "|" in row.kind else ""
        table.add_row(f"--{row.path}", Text(text or '""'), Text(row.help + choices))
    Console().print(table)


def print_recipes() -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    for title in ("source", "published", "measured by this project"):
        table.add_column(title)
    for name in shipped():
        about = load_recipe(name).about
        table.add_row(name, Text(about.source), Text(about.published or "-"), Text(about.measured or "not measured"))
    Console().print(table)
