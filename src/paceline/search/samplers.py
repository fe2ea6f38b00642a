"""Optuna's samplers, pruners and distributions for the options of a sweep."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config.duration import parse
from paceline.config.space import Choice, Dimension, Value, grid_of, points
from paceline.search.spec import SweepSpec
from paceline.search.storage import import_optuna


def sampler_of(spec: SweepSpec, number: int) -> Any:
    """Return the sampler for one trial.

    Its random numbers depend on the number of the trial only, so that workers with the same seed do not repeat
    each other.
    """
    samplers = import_optuna().samplers
    seed = None if spec.seed is None else random.Random(f"{spec.seed} {number}").getrandbits(31)
    match spec.sampler:
        case "tpe":
            return samplers.TPESampler(seed=seed, constant_liar=True)
        case "qmc":
            # all workers share one sequence, so that its seed is that of the sweep
            independent = samplers.RandomSampler(seed=seed)
            return samplers.QMCSampler(
                scramble=True, seed=spec.seed or 0, independent_sampler=independent, warn_independent_sampling=False
            )
        case "gp":
            return samplers.GPSampler(seed=seed, warn_independent_sampling=False)
        case _:
            return samplers.RandomSampler(seed=seed)


def pruner_of(spec: SweepSpec) -> Any:
    """Return the pruner; its resource is the epoch."""
    pruners = import_optuna().pruners
    match spec.pruner:
        case "median":
            return pruners.MedianPruner()
        case "hyperband":
            return pruners.HyperbandPruner(max_resource=_epochs(spec))
        case _:
            return pruners.NopPruner()


def _epochs(spec: SweepSpec) -> int | str:
    """Return the epochs of a trial; auto, which finished trials tell, if they vary or are not known."""
    amount = parse(spec.recipe.train.duration)
    varies = any(dimension.field == "train.duration" for dimension in spec.space)
    return max(1, math.ceil(amount.value)) if amount.unit == "ep" and not varies else "auto"


def suggest(trial: Any, space: Sequence[Dimension]) -> None:
    """Choose a value for every field that has none yet."""
    for dimension in space:
        if isinstance(dimension, Choice):
            trial.suggest_categorical(dimension.field, dimension.values)
        elif dimension.integer:
            limits = int(dimension.low), int(dimension.high)
            trial.suggest_int(dimension.field, *limits, log=dimension.log, step=int(dimension.step or 1))
        else:
            trial.suggest_float(dimension.field, dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def next_grid_point(spec: SweepSpec, visited: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    """Return the first point of the grid that no trial has."""
    return next(point for point in points(grid_of(spec.space)) if point not in visited)
