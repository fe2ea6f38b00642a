"""Write the results of a sweep: results.json, and the recipe of the best trial."""

import dataclasses
from typing import Any

from paceline.analysis.sweeps.record import SweepRecord, SweepTrial
from paceline.config.io import dump_recipe, recipe_from_tree, to_tree
from paceline.config.recipe import Recipe
from paceline.config.space import override_words
from paceline.config.tracking import About
from paceline.search.spec import SweepSpec
from paceline.search.storage import import_optuna
from paceline.system.files import write_text

END = "end"
"""Attribute of a trial with its TrialEnd."""
BEST_RECIPE = "best.yaml"
_MIN_TRIALS = 5
"""Number of complete trials that importances need."""


def write_results(spec: SweepSpec, study: Any, final: bool) -> None:
    """Write results.json and, if there is a best trial, best.yaml; `final`: with importances, which take time."""
    trials = [_row(spec, trial) for trial in study.get_trials(deepcopy=False)]
    record = SweepRecord(
        name=spec.name,
        recipe=spec.recipe.name,
        metric=spec.metric,  # type: ignore[arg-type]  # checked when the spec was made
        space={dimension.field: dimension.text for dimension in spec.space},
        sampler=spec.sampler,
        pruner=spec.pruner,
        planned=spec.trials,
        trials=trials,
        importance=_importance(study, trials) if final else None,
    )
    record.write(spec.folder)
    if best := record.best:
        write_text(spec.folder / BEST_RECIPE, dump_recipe(best_recipe(spec, record, best)))


def _row(spec: SweepSpec, trial: Any) -> SweepTrial:
    states = import_optuna().trial.TrialState
    end = trial.user_attrs.get(END, {})
    unfinished = trial.state in (states.RUNNING, states.WAITING)
    return SweepTrial(
        number=trial.number,
        state="running" if unfinished else end.get("state", "failed"),
        values=spec.words_of(trial.params),
        run=spec.trial_folder(trial.number).name,
        curve=sorted(trial.intermediate_values.items()),
        **({} if unfinished else {name: end.get(name) for name in ("value", "epoch", "seconds")}),
        reason="" if unfinished else end.get("reason", ""),
    )


def best_recipe(spec: SweepSpec, record: SweepRecord, best: SweepTrial) -> Recipe:
    """Return the recipe of the best trial, which says where it comes from."""
    recipe = recipe_from_tree(to_tree(spec.recipe), spec.recipe.name, override_words(best.values))
    source = (
        f"{recipe.name} with the values of trial {best.number}, the best of {len(record.trials)} of the sweep "
        f"{spec.name}: {record.label} {record.shown(best.value)} on validation images"
    )
    return dataclasses.replace(recipe, name=f"{spec.name}-best", about=About(source))


def _importance(study: Any, trials: list[SweepTrial]) -> dict[str, float] | None:
    """Return how much of the variance each field explains, by fANOVA; None if too few trials are complete."""
    values = {trial.value for trial in trials if trial.state == "complete"}
    if sum(trial.state == "complete" for trial in trials) < _MIN_TRIALS or len(values) < 2:
        return None
    importance = import_optuna().importance
    evaluator = importance.FanovaImportanceEvaluator(seed=0)
    found: dict[str, float] = importance.get_param_importances(study, evaluator=evaluator)
    return {field: min(1.0, max(0.0, float(part))) for field, part in found.items()}
