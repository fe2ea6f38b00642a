"""The fields of a recipe as shown by `--help`."""

import json
from collections.abc import Sequence

from paceline.config.io import fields, to_tree
from paceline.config.recipe import Recipe
from paceline.system.tables import new_table, output, show


def print_fields(recipe: Recipe, source: str, only: Sequence[str] = ()) -> None:
    """Print every field with its value in this recipe and its description; `only`: limit to these groups."""
    tree, rows = to_tree(recipe), []
    for row in fields():
        group = row.path.partition(".")[0]
        if group in ("about", "name") or (only and group not in only):
            continue
        value = tree
        for part in row.path.split("."):
            value = value[part]
        text = value if isinstance(value, str) else json.dumps(value)
        choices = f" [{row.kind}]" if "|" in row.kind else ""
        rows.append((f"--{row.path}", text or '""', " ".join(f"{row.help}{choices}".split())))
    table, screen = new_table(("option", "value", "description"), rows), output()
    table.columns[0].no_wrap = True
    table.columns[1].max_width = screen.width // 3
    screen.print(f"\nfields of {source}\n", soft_wrap=True)
    show(table, screen)
