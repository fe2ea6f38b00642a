"""Which variants of prepared images a recipe reads: those that its phases train on, and those that it evaluates on."""

from collections.abc import Mapping
from pathlib import Path

from paceline.config.recipe import Recipe
from paceline.data import cache
from paceline.data.shards import Dataset, default_folder
from paceline.data.splits import TEST, TRAIN, VAL


def place_of(recipe: Recipe) -> str:
    """Return the folder or URL of the prepared data of a recipe."""
    return recipe.data.path or str(default_folder(recipe.data.name))


def training_variants(recipe: Recipe) -> list[str]:
    """Return the variants that the phases train on, as the recipe names them: empty for the only one."""
    return list(dict.fromkeys(phase.variant or recipe.data.variant for phase in recipe.all_phases()))


def needed_variants(recipe: Recipe, dataset: Dataset, evaluated_split: str = "") -> dict[str, list[str]]:
    """Return the names of the variants of each split that training needs, or an evaluation of one split."""
    given = training_variants(recipe)
    names = [dataset.choose_for_evaluation(recipe.evaluate.variant_for(name), name) for name in given]
    evaluated = list(dict.fromkeys(names))
    if evaluated_split:
        return {evaluated_split: evaluated}
    return {TRAIN: [dataset.choose(name) for name in given], VAL: evaluated, TEST: evaluated}


def local(place: str, needed: Mapping[str, list[str]]) -> Path:
    """Return the local folder of prepared data, with these variants of each split; a URL is downloaded."""
    variants = dict.fromkeys(variant for names in needed.values() for variant in names)
    return {
        cache.local(place, variant, [split for split, names in needed.items() if variant in names])
        for variant in variants
    }.pop()
