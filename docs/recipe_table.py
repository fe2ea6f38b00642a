"""Write the generated part of docs/recipes.md from the shipped recipes: `python docs/recipe_table.py`."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from paceline.analysis.tables import plain
from paceline.config import yamls
from paceline.config.io import load_recipe, shipped
from paceline.config.recipe import Recipe
from paceline.config.tracking import github_link

PAGE = Path(__file__).with_name("recipes.md")
_MARK = "<!-- written by docs/recipe_table.py -->\n"
_WIDTH = 118


def page() -> str:
    """Return the page: what is written by hand, and the generated part."""
    by_hand = PAGE.read_text(encoding="utf-8").partition(_MARK)[0]
    recipes = {name: load_recipe(name) for name in shipped()}
    families: dict[str, list[Recipe]] = {}
    for name in sorted(recipes, key=_natural):
        families.setdefault(_root(name), []).append(recipes[name])
    lines = [*_table(families), "", "## Sources and differences"]
    for root in sorted(families):
        lines += ["", f"### {root}", *_family(families[root])]
    return by_hand + _MARK + "\n" + "\n".join(lines) + "\n"


def _root(name: str) -> str:
    """Return the recipe at the end of the chain of bases."""
    base = yamls.read(shipped()[name]).get("base")
    return _root(base) if base else name


def _table(families: dict[str, list[Recipe]]) -> Iterator[str]:
    yield "| recipe | code of the source | differences | published | measured here |"
    yield "|---|---|---|---|---|"
    for root in sorted(families):
        for recipe in families[root]:
            about, count = recipe.about, len(recipe.about.measured.seeds)
            more = f", {len(about.code) - 1} more" if about.code[1:] else ""
            code = f"{_link(about.code[0], short=True)}{more}" if about.code else ""
            published = "" if about.published.startswith("none") else about.published
            measured = f"{about.measured.accuracy}, {count} seed{'s' * (count > 1)}" if about.measured.seeds else ""
            cells = (f"[{recipe.name}](#{root})", code, str(len(about.deviations) or ""), plain(published), measured)
            yield f"| {' | '.join(cell or '-' for cell in cells)} |"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort numbers in names by their value."""
    return [(int(part or 0), rest) for part, rest in re.findall(r"(\d*)(\D+|$)", name)]


def _link(file: str, *, short: bool = False) -> str:
    path, _, commit = file.rpartition("@")
    return f"[{path.rpartition('/')[2] if short else path}]({github_link(file)}) at {commit[:7]}"


def _family(recipes: list[Recipe]) -> Iterator[str]:
    """Yield the sources of a family, with the differences that several recipes share once."""
    groups: dict[tuple[str, tuple[str, ...]], list[Recipe]] = {}
    for recipe in recipes:
        groups.setdefault((recipe.about.source, recipe.about.deviations), []).append(recipe)
    described: dict[tuple[str, ...], str] = {}
    for (source, deviations), members in groups.items():
        files = dict.fromkeys(file for recipe in members for file in recipe.about.code)
        measured = [(recipe.name, _measured(recipe)) for recipe in members if recipe.about.measured.seeds]
        yield ""
        yield from _wrapped(f"{', '.join(f'`{recipe.name}`' for recipe in members)}: {plain(source)}.")
        if files or deviations or measured:
            yield ""
        yield from (f"- code: {_link(file)}" for file in files)
        if deviations in described:
            yield f"- differences from the source: those of `{described[deviations]}`"
        elif deviations:
            described[deviations] = members[0].name
            yield "- differences from the source:"
            for deviation in deviations:
                yield from _wrapped(f"    - {plain(deviation)}", " " * 6)
        for name, text in measured:
            yield from _wrapped(f"- `{name}` measured: {text}", "  ")


def _measured(recipe: Recipe) -> str:
    measured = recipe.about.measured
    commits = "".join(f", commit {commit[:7]}{'+' * commit.endswith('+')}" for commit in measured.commits)
    return plain(f"{measured}{commits}")


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
