"""When something that happens every so often is due."""

import math
import time

from paceline.config.duration import parse
from paceline.config.timeline import Timeline


class Interval:
    """Every so many steps or epochs; or seconds, which a rank asks for and all ranks then act on together."""

    def __init__(self, text: str, timeline: Timeline):
        amount = parse(text)
        self._seconds = amount.value if amount.unit == "s" else 0.0
        self._steps = max(1, round(amount.value)) if amount.unit == "ba" else 0
        self._epochs, self._timeline = amount.value if amount.unit == "ep" else 0.0, timeline
        self._last = time.monotonic()
        self._just_due = False

    def vote(self, now: float) -> int:
        """This rank's vote for the next step."""
        return int(bool(self._seconds) and now - self._last >= self._seconds)

    def due(self, step: int, agreed: int, now: float) -> bool:
        if self._steps:
            return step % self._steps == 0
        if self._epochs:
            return self._times(step) > self._times(step - 1)
        # the votes of the step that acts on the votes before it are still on their way: pass them over
        self._just_due = bool(agreed) and not self._just_due
        if self._just_due:
            self._last = now
        return self._just_due

    def _times(self, step: int) -> int:
        """How many whole intervals lie before the end of a step, to the nearest step."""
        phase = self._timeline.phase_at(step)
        return math.floor((self._timeline.epoch_at(step) + 0.5 / phase.steps_per_epoch) / self._epochs)
