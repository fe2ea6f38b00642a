"""A stopwatch that splits time into named parts."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Sums seconds per part; `take` returns the sums and resets them."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        self._parts[name] += seconds

    def __getitem__(self, name: str) -> float:
        return self._parts[name]

    def take(self) -> dict[str, float]:
        parts = dict(self._parts)
        self._parts.clear()
        return parts
