"""The evaluations of a run so far, and what follows from them: the learning rate after a plateau, and an early stop.

They are part of every checkpoint and equal on all ranks. Both results are pure functions of them, so a resumed run
decays and stops at the same steps as an uninterrupted one.
"""

from collections.abc import Mapping
from typing import Any

from paceline.config.recipe import Recipe
from paceline.optim.schedules import LrPlan

_NAMES = {"top1": "top-1", "top5": "top-5", "loss": "the validation loss"}
_COLUMNS = ("step", "top1", "top5", "loss")
_MAX = 500_000  # more would exceed the size that the state of a checkpoint may have


class History:
    """The steps and metrics of all evaluations."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}

    @property
    def last_step(self) -> int:
        """The step of the newest evaluation, -1 if there is none."""
        return self._columns["step"][-1] if self._columns["step"] else -1

    def add(self, record: Mapping[str, Any]) -> None:
        """Add an evaluation. One that is repeated after a resume keeps its first result, which ranks agreed on."""
        if record["step"] > self.last_step:
            for name, column in self._columns.items():
                column.append(record[name])
                del column[:-_MAX]

    def since(self, step: int, metric: str) -> list[float]:
        """Return the values of a metric in the evaluations from a step on."""
        return [value for at, value in zip(self._columns["step"], self._columns[metric], strict=True) if at >= step]

    def state(self) -> dict[str, list[Any]]:
        return {name: list(column) for name, column in self._columns.items()}

    def load(self, state: Mapping[str, list[Any]]) -> None:
        """Replace the evaluations by those of a checkpoint."""
        self._columns = {name: list(state[name]) for name in _COLUMNS}


def follow_plateau(plan: LrPlan, recipe: Recipe, history: History) -> LrPlan:
    """Return the plan of the learning rate after the evaluations so far. Those during the warmup do not count."""
    if not plan.plateau:
        return plan
    metric = recipe.optim.schedule.metric or recipe.checkpoint.best
    return plan.after_evaluations(history.since(plan.warmup, metric), metric == "loss")


def early_stop_reason(recipe: Recipe, history: History) -> str:
    """Return why the run ends after the newest evaluation, "" if it does not."""
    settings, metric = recipe.early_stop, recipe.early_stop.metric or recipe.checkpoint.best
    if not settings.patience:
        return ""
    sign, best, bad = -1.0 if metric == "loss" else 1.0, None, 0
    for value in history.since(0, metric):
        if best is None or sign * value > sign * best + settings.min_delta:
            best, bad = value, 0
        else:
            bad += 1
    if best is None or bad < settings.patience:
        return ""
    least = f"{settings.min_delta:g}" if metric == "loss" else f"{100 * settings.min_delta:g} points"
    by = f" by more than {least}" if settings.min_delta else ""
    reached = f"{best:.4f}" if metric == "loss" else f"{best:.2%}"
    return f"{_NAMES[metric]} has not improved{by} for {bad} evaluation{'s' * (bad > 1)}; the best is {reached}"
