"""When something that happens every so often is due."""

import time

from paceline.config.duration import parse, to_steps


class Interval:
    """Every so many steps; or every so many seconds, which a rank wishes for and all ranks then do together."""

    def __init__(self, steps: int = 0, seconds: float = 0.0):
        self._steps, self._seconds = steps, seconds
        self._last = time.monotonic()
        self._just_due = False

    @classmethod
    def of(cls, text: str, steps_per_epoch: int) -> "Interval":
        amount = parse(text)
        if amount.unit == "s":
            return cls(seconds=amount.value)
        return cls(steps=max(1, to_steps(text, steps_per_epoch)))

    def wish(self, now: float) -> int:
        """This rank's vote for the next step."""
        return int(bool(self._seconds) and now - self._last >= self._seconds)

    def due(self, step: int, agreed: int, now: float) -> bool:
        if self._steps:
            return step % self._steps == 0
        # the votes of the step that acts on the votes before it are still on their way: pass them over
        self._just_due = bool(agreed) and not self._just_due
        if self._just_due:
            self._last = now
        return self._just_due
