"""Python reads this in the ranks of a test's jobs: as long as a file is there, training waits between steps.

Otherwise it would depend on the speed of a machine whether a run is over before the test has done something to it.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType

QUICK, SECONDS = 30, 3.0  # steps after each start that do not wait, and how long the others do at most


class _Finder(importlib.abc.MetaPathFinder):
    """Of a module that is changed as soon as it is loaded; loading it here would load torch into every Python."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == "paceline.engine.stop" else None
        if spec and spec.loader:
            load = spec.loader.exec_module

            def load_and_slow_down(module: ModuleType) -> None:
                load(module)
                _slow_down(module)

            spec.loader.exec_module = load_and_slow_down
        return spec


def _slow_down(module: ModuleType) -> None:
    exchange, note = module.Agreement.agree, module.Signals._note
    file, steps, signals = Path(os.environ["SLOW_WHILE"]), [], []

    def slowly(self, votes: list[int]) -> list[int]:
        steps.append(votes)
        deadline = time.monotonic() + SECONDS
        while len(steps) > QUICK and not signals and file.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return exchange(self, votes)

    def noted(self, signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        note(self, signum, frame)

    module.Agreement.agree, module.Signals._note = slowly, noted


if "SLOW_WHILE" in os.environ:
    sys.meta_path.insert(0, _Finder())
