"""The command recipes: list the shipped recipes, or show one."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import make_parser

if TYPE_CHECKING:
    from paceline.config.recipe import Recipe

_RECIPES = """List the shipped recipes with the accuracy that their source published and the one that was measured here.

`paceline recipes RECIPE` shows one: its source and differences from it, all figures, and how to run it. Accuracy is
top-1, or top-1 / top-5. RECIPE may also be a YAML file.

`--record` writes the results of finished runs with different seeds into `about.measured` of RECIPE, a YAML file. In a
source checkout, RECIPE can be omitted for runs of a shipped recipe."""

_DROPPED_FIRST = ("data", "model", "duration")
_ACCURACY = re.compile(r"\d[\d., /]*%( top-5)?")
_VARIANT = re.compile(r"(max|short)-(\d+)-q\d+")


def recipes(arguments: list[str]) -> int:
    """Run `paceline recipes`; returns the exit status."""
    parser = make_parser("recipes", "[RECIPE] [--record RUN ...]", _RECIPES)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="show this recipe")
    parser.add_argument(
        "--record", nargs="+", type=Path, metavar="RUN", help="write the results of these runs into the recipe"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    source = options.recipe
    from paceline.api.recording import record_measured
    from paceline.api.training import list_recipes, load_recipe
    from paceline.system.files import say
    from paceline.system.tables import new_table, print_list, show

    if options.record:
        recipe = record_measured(options.record, source or "")
        say(f"{recipe.name}: measured {recipe.about.measured}")
    elif source is None:
        heads = ("name", "model", "data", "duration", "published", "measured")
        print_list(heads, [_cells(recipe) for recipe in list_recipes()], _DROPPED_FIRST)
        print("\n`paceline recipes RECIPE` shows one of them.")
    else:
        table = new_table(("", ""), list(_details(load_recipe(source), source)))
        table.show_header = False
        show(table)
    return 0


def _cells(recipe: "Recipe") -> tuple[str, ...]:
    accuracies = (_accuracy(recipe.about.published), recipe.about.measured.accuracy or "-")
    data = recipe.data.name or recipe.data.path
    return recipe.name, recipe.model.name, data, recipe.train.duration, *accuracies


def _accuracy(result: str) -> str:
    """Return the accuracy that a result begins with."""
    found = _ACCURACY.match(result)
    return found[0] if found else "-"


def _details(recipe: "Recipe", source: str) -> Iterator[tuple[str, str]]:
    from paceline.config.tracking import github_link

    about = recipe.about
    batch = f"global batch {recipe.train.global_batch}"
    yield "recipe", recipe.name
    yield "trains", f"{recipe.model.name} on {recipe.data.name or recipe.data.path}, {recipe.train.duration}, {batch}"
    yield "source", about.source or "-"
    for number, file in enumerate(about.code):
        yield "" if number else "code", github_link(file)
    for number, deviation in enumerate(about.deviations):
        yield "" if number else "differences", deviation
    yield "published", about.published or "-"
    yield "measured", str(about.measured) or "not measured"
    yield "settings", f"paceline train {source} --help"
    for number, command in enumerate(_commands(recipe, source)):
        yield "" if number else "run it", command


def _commands(recipe: "Recipe", source: str) -> Iterator[str]:
    """Yield the commands that prepare the data and train."""
    if recipe.data.name in ("cifar10", "cifar100"):
        yield f"paceline prepare {recipe.data.name}"
    if recipe.data.name == "imagenet":
        variants = dict.fromkeys([recipe.data.variant, recipe.evaluate.variant, *(p.variant for p in recipe.phases)])
        sides: dict[str, list[int]] = {}
        for variant in filter(None, map(_VARIANT.fullmatch, variants)):
            sides.setdefault(f" --{variant[1]}-side", []).append(int(variant[2]))
        original = " --original" if sides and "original" in variants else ""
        sizes = "".join(f"{option} {' '.join(map(str, sorted(values)))}" for option, values in sides.items())
        yield f"paceline prepare imagenet --train TAR --val TAR --devkit TAR{sizes}{original}"
    if recipe.data.path and not recipe.data.name:
        yield f"paceline prepare IMAGES --out {recipe.data.path} --val-fraction 0.1 --test-fraction 0.1"
    yield f"paceline train {source}"
