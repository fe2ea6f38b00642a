"""Find the largest batch that trains, by doubling and then bisection, with new processes for each size.

However a rank runs out of memory (exception, crash, kill), it ends its trial on all ranks, and cannot affect the next
one. All ranks take part in every trial, so the result fits on each of them.
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
from paceline.system.lifetime import child_env

_PIPE = subprocess.PIPE
_TRIAL_TIMEOUT = 900  # seconds


@dataclass(frozen=True)
class Trial:
    per_rank_batch: int
    fits: bool
    images_per_second: float = 0.0
    memory: tuple[int, ...] = ()
    """Peak bytes per rank."""
    reason: str = ""


def search(attempt: Callable[[int], Trial], limit: int) -> list[Trial]:
    """Return all trials, sorted by size; the largest size that fits is exact to 1/16."""
    trials: dict[int, Trial] = {}

    def fits(batch: int) -> bool:
        trials[batch] = attempt(batch)
        return trials[batch].fits

    batch = min(2, limit)
    while fits(batch) and batch < limit:
        batch = min(2 * batch, limit)
    if not trials[batch].fits:
        good, bad = max((size for size, trial in trials.items() if trial.fits), default=0), batch
        if not good and batch > 1:
            good, bad = (1, batch) if fits(1) else (0, 1)
        while bad - good > max(1, good // 16):
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
    return [trials[size] for size in sorted(trials)]


def attempt(recipe: Path, procs: int, steps: int, limits: list[int], batch: int) -> Trial:
    """Run one trial in new processes; return its result."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        result = Path(scratch) / "result.json"
        words = ["try-batch", recipe, "--batch", batch, "--steps", steps, "--procs", procs, "--result", result]
        command = [sys.executable, "-m", "paceline", *map(str, [*words, "--limits", *limits])]
        with subprocess.Popen(command, stdout=_PIPE, stderr=_PIPE, text=True, env=_environment()) as process:
            try:
                output, errors = process.communicate(timeout=_TRIAL_TIMEOUT)
            except subprocess.TimeoutExpired:
                return Trial(batch, False, reason=f"timed out after {_TRIAL_TIMEOUT} s")
            finally:
                _kill_tree(process)
        if process.returncode or not result.exists():
            return Trial(batch, False, reason=_reason(process.returncode, output, errors))
        measured = json.loads(result.read_text(encoding="utf-8"))
        return Trial(batch, True, measured["images_per_second"], tuple(measured["memory"]))


def _kill_tree(process: subprocess.Popen[str]) -> None:
    """Kill the trial and its ranks: the next trial needs their memory."""
    if process.poll() is not None:
        return
    members = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(members, timeout=10)


def _environment() -> dict[str, str]:
    # glibc reserves addresses for an arena per thread, which would count towards RLIMIT_AS
    return child_env() | {"MALLOC_ARENA_MAX": "2"}


_OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "MemoryError",
    "bad_alloc",
    "Cannot allocate memory",
    "Resource temporarily unavailable",  # the stack of a thread
    "can't start new thread",
)


def _reason(status: int, output: str, errors: str) -> str:
    """Return why a trial failed."""
    text = errors + output
    if any(sign in text for sign in _OUT_OF_MEMORY) or status in (-9, 137):
        return "out of memory"
    lines = [line.strip() for line in errors.splitlines() if line.strip() and "[rank-failed]" not in line]
    if not lines:
        return f"exit status {status} without a message; the memory limit may be too low for the process itself"
    return lines[-1].removeprefix("paceline: ").removeprefix("error: ")[:200]


def outcome(trials: list[Trial]) -> tuple[Trial, Trial]:
    """Return the trial with the largest batch that fits, and the fastest one."""
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        message = f"a batch of {trials[0].per_rank_batch} per rank does not train: {trials[0].reason}"
        raise UserError("batch-does-not-fit", message, per_rank_batch=trials[0].per_rank_batch)
    return fitting[-1], max(fitting, key=lambda trial: trial.images_per_second)


def as_records(trials: list[Trial]) -> list[dict[str, object]]:
    return [asdict(trial) for trial in trials]
