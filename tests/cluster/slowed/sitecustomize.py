"""Loaded by Python in the ranks of tests: while a file exists, training waits between steps.

Otherwise, a run on a fast machine would end before the test could interfere.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType

QUICK, SECONDS = 30, 3.0  # first steps that do not wait, and the longest wait of the others


class _Finder(importlib.abc.MetaPathFinder):
    """Patches a module when it is loaded; importing it here would load torch into every Python process."""

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
    agree, handle = module.Agreement.agree, module.Signals._handle
    file, steps, signals = Path(os.environ["SLOW_WHILE"]), [], []

    def slow_agree(self, votes: list[int]) -> list[int]:
        steps.append(votes)
        deadline = time.monotonic() + SECONDS
        while len(steps) > QUICK and not signals and file.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return agree(self, votes)

    def record_signal(self, signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        handle(self, signum, frame)

    module.Agreement.agree, module.Signals._handle = slow_agree, record_signal


if "SLOW_WHILE" in os.environ:
    sys.meta_path.insert(0, _Finder())
