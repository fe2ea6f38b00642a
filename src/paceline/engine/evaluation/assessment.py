"""Assesses each evaluation of a run: is it the best, below the expected curve, suspicious, or the last one?"""

from typing import Any

from paceline.engine.build import Setup
from paceline.engine.evaluation.history import early_stop_reason, follow_plateau
from paceline.engine.evaluation.sanity import sanity_warnings
from paceline.optim.schedules import lr_at
from paceline.system.logs import log


class Assessment:
    """What the evaluations so far mean. It is equal on all ranks, because their metrics are all-reduced."""

    def __init__(self, setup: Setup, best: float | None) -> None:
        """`best`: the metric of the best checkpoint, negated if lower is better."""
        self._setup, self._best = setup, best
        self._warned: set[str] = set()
        self.below_curve = ""
        """Why the run must end after its next checkpoint, if it fell below the expected curve."""
        self.stop_reason = early_stop_reason(setup.recipe, setup.history)
        """Why training ends here, if recipe.early_stop says so."""

    def add(self, record: dict[str, Any]) -> bool:
        """Assess an evaluation, and return whether it is the best so far."""
        setup, metric = self._setup, self._setup.recipe.checkpoint.best
        setup.history.add(record)
        self.stop_reason = early_stop_reason(setup.recipe, setup.history)
        self._compare_with_curve(record)
        self._check_sanity(record)
        self._follow_plateau(record["step"])
        value = -record[metric] if metric == "loss" else record[metric]
        improved = self._best is None or value > self._best
        self._best = value if improved else self._best
        return improved

    def early_stop(self, step: int) -> dict[str, Any]:
        """Return what the summary says about a run that recipe.early_stop ended before its last step."""
        if not self.stop_reason or step == self._setup.total_steps:
            return {}
        return {"stopped_by": "early_stop", "stop_reason": self.stop_reason, "total_steps": step}

    def _follow_plateau(self, step: int) -> None:
        setup = self._setup
        if not setup.lr_plan.plateau:
            return
        before = lr_at(step, setup.lr_plan)
        setup.lr_plan = follow_plateau(setup.lr_plan, setup.recipe, setup.history)
        after = lr_at(step, setup.lr_plan)
        if after < before and not self.stop_reason and setup.world.is_rank_zero:
            place = f"epoch {setup.timeline.epoch_at(step):.2f}"
            log.info("%s: plateau, the learning rate decays from %.4g to %.4g", place, before, after)

    def _compare_with_curve(self, record: dict[str, Any]) -> None:
        """Warn if the run falls below the expected curve of its recipe, or end it if curve.stop is set."""
        recipe = self._setup.recipe
        expected, found = recipe.curve.expected(record["epoch"]), record[recipe.curve.metric]
        if expected is None or found >= expected - recipe.curve.tolerance:
            return
        what = (
            f"{recipe.curve.metric} is {found:.2%} after epoch {record['epoch']:.2f}, below the {expected:.2%} that "
            f"{recipe.name} expects"
        )
        if recipe.curve.stop:
            self.below_curve = what
        elif self._setup.world.is_rank_zero:
            log.warning("%s", what)

    def _check_sanity(self, record: dict[str, Any]) -> None:
        """Warn if an evaluation indicates a failed training: once for each reason, and again at the end."""
        progress = record["step"] / self._setup.total_steps
        for reason, text in sanity_warnings(record, len(self._setup.source.classes), progress).items():
            if self._setup.world.is_rank_zero and (reason not in self._warned or progress == 1):
                log.warning("epoch %.2f: %s", record["epoch"], text)
            self._warned.add(reason)
