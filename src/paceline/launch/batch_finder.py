"""The largest batch that trains: doubling, then bisection, each size in processes of its own that are thrown away.

Whatever a rank that runs out of memory does (an exception, a crash, a kill) ends its trial on all ranks, and nothing
it leaves behind can spoil the next one. All ranks take part in every trial, so the answer is the smallest of theirs.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from paceline.errors import UserError
from paceline.system.lifetime import tied

_PIPE = subprocess.PIPE
_SECONDS = 900  # of one trial, before it counts as hung


@dataclass(frozen=True)
class Trial:
    per_rank_batch: int
    fits: bool
    images_per_second: float = 0.0
    memory: tuple[int, ...] = ()
    """Most bytes of each rank."""
    reason: str = ""


def search(attempt: Callable[[int], Trial], most: int) -> list[Trial]:
    """Every size that was tried, in the order of size; the largest that fits is known to within a sixteenth."""
    trials: dict[int, Trial] = {}

    def fits(batch: int) -> bool:
        trials[batch] = attempt(batch)
        return trials[batch].fits

    batch = min(2, most)
    while fits(batch) and batch < most:
        batch = min(2 * batch, most)
    if not trials[batch].fits:
        good, bad = max((size for size, trial in trials.items() if trial.fits), default=0), batch
        if not good and batch > 1:
            good, bad = (1, batch) if fits(1) else (0, 1)
        while bad - good > max(1, good // 16):
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
    return [trials[size] for size in sorted(trials)]


def attempt(recipe: Path, procs: int, steps: int, limits: list[int], batch: int) -> Trial:
    """One trial in a process group of its own."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        result = Path(scratch) / "result.json"
        words = ["try-batch", recipe, "--batch", batch, "--steps", steps, "--procs", procs, "--result", result]
        command = [sys.executable, "-m", "paceline", *map(str, [*words, "--limits", *limits])]
        with subprocess.Popen(command, stdout=_PIPE, stderr=_PIPE, text=True, env=_environment()) as process:
            try:
                output, errors = process.communicate(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                return Trial(batch, False, reason=f"no end after {_SECONDS} s")
            finally:
                _end_all(process)
        answer = subprocess.CompletedProcess(command, process.returncode, output, errors)
        if answer.returncode or not result.exists():
            return Trial(batch, False, reason=_reason(answer))
        found = json.loads(result.read_text(encoding="utf-8"))
        return Trial(batch, True, found["images_per_second"], tuple(found["memory"]))


def _end_all(process: subprocess.Popen[str]) -> None:
    """The trial and its ranks, whatever state they are in: the next trial needs their memory."""
    if process.poll() is not None:
        return
    members = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(members, timeout=10)


def _environment() -> dict[str, str]:
    # the C library gives every thread an arena of its own, which counts as addresses though nothing lies in them
    return tied() | {"MALLOC_ARENA_MAX": "2"}


_OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "MemoryError",
    "bad_alloc",
    "Cannot allocate memory",
    "Resource temporarily unavailable",  # for a thread's stack
    "can't start new thread",
)


def _reason(answer: subprocess.CompletedProcess[str]) -> str:
    text = answer.stderr + answer.stdout
    if any(sign in text for sign in _OUT_OF_MEMORY) or answer.returncode in (-9, 137):
        return "out of memory"
    lines = [line.strip() for line in answer.stderr.splitlines() if line.strip() and "see the lines above" not in line]
    if not lines:
        return (
            f"ended with status {answer.returncode}, without a word: perhaps a limit below what a process needs at rest"
        )
    return lines[-1].removeprefix("paceline: ")[:200]


def outcome(trials: list[Trial]) -> tuple[Trial, Trial]:
    """The largest batch that fits, and the fastest."""
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        raise UserError(f"not even a batch of {trials[0].per_rank_batch} trains: {trials[0].reason}")
    return fitting[-1], max(fitting, key=lambda trial: trial.images_per_second)


def as_records(trials: list[Trial]) -> list[dict[str, object]]:
    return [asdict(trial) for trial in trials]
