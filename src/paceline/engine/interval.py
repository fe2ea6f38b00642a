"""Decides after which steps a periodic action is due."""

import math
import time

from paceline.config.duration import parse
from paceline.config.timeline import Timeline


class IntervalTrigger:
    """A period in steps, epochs or seconds. For seconds, ranks vote so that all of them act after the same step."""

    def __init__(self, text: str, timeline: Timeline):
        amount = parse(text)
        self._seconds = amount.value if amount.unit == "s" else 0.0
        self._steps = max(1, round(amount.value)) if amount.unit == "ba" else 0
        self._epochs, self._timeline = amount.value if amount.unit == "ep" else 0.0, timeline
        self._last = time.monotonic()
        self._just_due = False

    def vote(self, now: float) -> int:
        """Return this rank's vote for the next step (1: due)."""
        return int(bool(self._seconds) and now - self._last >= self._seconds)

    def due(self, step: int, agreed: int, now: float) -> bool:
        """Return whether the action is due after this step; `agreed` is the largest vote of all ranks."""
        if self._steps:
            return step % self._steps == 0
        if self._epochs:
            return self._times(step) > self._times(step - 1)
        # votes arrive one step late, so the votes cast before this action arrive after it: ignore them
        self._just_due = bool(agreed) and not self._just_due
        if self._just_due:
            self._last = now
        return self._just_due

    def times_before(self, step: int) -> int | None:
        """Return how often the action is due before a step; None if that depends on the clock."""
        if self._seconds:
            return None
        return max(0, step - 1) // self._steps if self._steps else min(max(0, step - 1), self._times(max(0, step - 1)))

    def _times(self, step: int) -> int:
        """Return how many whole periods end before the end of a step, rounded to the nearest step."""
        phase = self._timeline.phase_at(step)
        return math.floor((self._timeline.epoch_at(step) + 0.5 / phase.steps_per_epoch) / self._epochs)
