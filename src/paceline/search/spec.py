"""The settings of a sweep."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.batch import check_strategy, layouts, procs_per_node
from paceline.config.duration import parse
from paceline.config.io import dump_recipe, fingerprint
from paceline.config.recipe import Recipe
from paceline.config.space import Dimension, check_space, grid_of, parse_space
from paceline.errors import UserError

SAMPLERS = ("tpe", "random", "grid", "qmc", "gp")
PRUNERS = ("none", "median", "hyperband")
METRICS = ("top1", "top5", "loss")
DEFAULT_TRIALS = 20
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BUDGET = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|m|h|d)")


@dataclass(frozen=True)
class SweepSpec:
    """The settings of a sweep, and of the worker that one command starts."""

    recipe: Recipe
    space: tuple[Dimension, ...]
    folder: Path
    metric: str
    trials: int
    sampler: str = "tpe"
    pruner: str = "none"
    seed: int | None = None
    storage: str = "journal"
    """journal, sqlite, or the URL of a database."""
    procs: int = 1
    """Ranks of each trial."""
    parallel: int = 1
    """Trials that this process runs side by side."""
    budget: float | None = None
    """Seconds after which no trial starts."""
    words: tuple[str, ...] = ()
    """Additional options of `paceline train`: modules to import."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of the training processes."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def minimizes(self) -> bool:
        return self.metric == "loss"

    @property
    def identity(self) -> dict[str, Any]:
        """What all workers of a sweep must agree on."""
        return {
            "recipe": self.recipe.name,
            "fingerprint": fingerprint(self.recipe),
            "metric": self.metric,
            "space": {dimension.field: dimension.text for dimension in self.space},
        }

    @property
    def base(self) -> Path:
        return self.folder / "base.yaml"

    @property
    def base_text(self) -> str:
        return dump_recipe(self.recipe)

    def trial_folder(self, number: int) -> Path:
        """Return the run folder of a trial."""
        return self.folder / f"trial-{number:04}"

    def words_of(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the values of a trial as written on the command line, in the order of the space."""
        return {
            dimension.field: dimension.word(values[dimension.field])
            for dimension in self.space
            if dimension.field in values
        }


def make_spec(
    recipe: Recipe,
    settings: Sequence[str],
    folder: Path,
    *,
    given: Collection[str] = (),
    trials: int | None = None,
    metric: str = "",
    procs: int | str = "auto",
    parallel: int = 1,
    budget: str = "",
    sampler: str = "tpe",
    **more: Any,
) -> SweepSpec:
    """Return the spec for the values of --set, after all checks that need no training.

    `given`: fields that are overridden. `more`: other fields of the spec.
    """
    _check_pruner(more.get("pruner", "none"), recipe)
    space = parse_space(settings)
    tried = check_space(recipe, space, given)
    ranks = procs if isinstance(procs, int) else max(1, procs_per_node(recipe) // parallel)
    for variant in tried:
        check_strategy(variant, ranks)
        layouts(variant, ranks)
    points = math.prod(map(len, grid_of(space).values())) if sampler == "grid" else None
    return SweepSpec(
        recipe=recipe,
        space=tuple(space),
        folder=folder,
        metric=metric or recipe.checkpoint.best,
        trials=min(trials or points, points) if points else trials or DEFAULT_TRIALS,
        procs=ranks,
        parallel=parallel,
        budget=parse_budget(budget) if budget else None,
        sampler=sampler,
        **more,
    )


def _check_pruner(pruner: str, recipe: Recipe) -> None:
    every, length = parse(recipe.evaluate.every), parse(recipe.train.duration)
    if pruner != "none" and every.unit == length.unit and every.value >= length.value:
        message = (
            f"--pruner {pruner} needs evaluations before the end, but evaluate.every={recipe.evaluate.every} and "
            f"train.duration={recipe.train.duration}. Set --evaluate.every 1ep."
        )
        raise UserError("pruner-needs-evaluations", message, pruner=pruner)


def parse_budget(text: str) -> float:
    """Return the seconds of a time such as 2h, 90min or 1.5d."""
    match = _BUDGET.fullmatch(text.strip())
    if not match or not float(match[1]):
        message = f"--budget {text!r} is not a time. Write a number and a unit: 90s, 30min, 2h or 1d."
        raise UserError("invalid-budget", message, budget=text)
    return float(match[1]) * _UNITS[match[2]]
