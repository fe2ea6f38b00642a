"""Find the largest batch that trains, by doubling and then bisection, with new processes for each size.

However a rank runs out of memory (exception, crash, kill), it ends its trial on all ranks, and cannot affect the next
one. All ranks take part in every trial, so the result fits on each of them.
"""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from paceline.analysis.charts import Chart, Line, svg
from paceline.config.batch import memory_key
from paceline.config.imports import trusted
from paceline.config.io import dump_recipe
from paceline.config.recipe import Recipe
from paceline.errors import UserError
from paceline.system.files import make_folder, write_json, write_text
from paceline.system.lifetime import child_env, own_command
from paceline.system.outcome import FILE as OUTCOME
from paceline.system.outcome import read_outcome

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


@dataclass(frozen=True)
class BatchSearch:
    """The batch sizes that were tried; `folder` has them as JSON and as a chart."""

    folder: Path
    trials: list[Trial]
    largest: Trial
    fastest: Trial


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
    """Run one trial in new processes; return its result. Raises an error that a smaller batch would not avoid."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        result, reported = Path(scratch) / "result.json", Path(scratch) / "outcome.json"
        words = ["try-batch", recipe, "--batch", batch, "--steps", steps, "--procs", procs, "--result", result]
        imports = [word for name in trusted() for word in ("--import", name)]
        command = own_command(*words, *imports, "--limits", *limits)
        environment = _environment() | {OUTCOME: str(reported)}
        with subprocess.Popen(command, stdout=_PIPE, stderr=_PIPE, text=True, env=environment) as process:
            try:
                output, errors = process.communicate(timeout=_TRIAL_TIMEOUT)
            except subprocess.TimeoutExpired:
                return Trial(batch, False, reason=f"timed out after {_TRIAL_TIMEOUT} s")
            finally:
                _kill_tree(process)
        error = read_outcome(reported).get("error")
        if error and error["code"] not in _RANK_FAILURES:
            raise UserError.from_json(error)
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


_RANK_FAILURES = ("rank-killed", "rank-crashed", "rank-failed", "rank-lost")
"""Codes of errors that may be due to a lack of memory; the others are not."""
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
    # the agent reports the failure of a rank below the rank's own message
    lines = [line.strip() for line in errors.splitlines() if line.strip() and "[rank-failed]" not in line]
    if not lines:
        return f"exit status {status} without a message; the memory limit may be too low for the process itself"
    return lines[-1].removeprefix("paceline: ").removeprefix("error: ")


def outcome(trials: list[Trial]) -> tuple[Trial, Trial]:
    """Return the trial with the largest batch that fits, and the fastest one."""
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        message = f"a batch of {trials[0].per_rank_batch} per rank does not train: {trials[0].reason}"
        raise UserError("batch-does-not-fit", message, per_rank_batch=trials[0].per_rank_batch)
    return fitting[-1], max(fitting, key=lambda trial: trial.images_per_second)


def find(
    recipe: Recipe,
    folder: Path,
    procs: int,
    memory_limits: Sequence[int],
    max_batch: int,
    steps: int,
    on_trial: Callable[[Trial], None],
) -> BatchSearch:
    """Search, and write the results to a folder."""
    if len(memory_limits) > procs:
        raise UserError(
            "too-many-limits",
            f"--memory-limit has {len(memory_limits)} values, but --procs is {procs}. Give at most one per rank.",
            limits=len(memory_limits),
        )
    # without a limit the kernel's out-of-memory killer would end the search, or any other process
    limits = list(memory_limits) or [psutil.virtual_memory().available // procs]
    make_folder(folder)
    path = folder / "recipe.yaml"
    for old in ("find-batch.json", "find-batch.svg"):
        (folder / old).unlink(missing_ok=True)  # results of an earlier search
    write_text(path, dump_recipe(recipe))

    def reported(batch: int) -> Trial:
        on_trial(trial := attempt(path, procs, steps, limits, batch))
        return trial

    trials = search(reported, max_batch)
    largest, fastest = outcome(trials)
    result = {
        "recipe": recipe.name,
        "key": memory_key(recipe, procs),
        "searched": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": procs,
        "memory_limit": limits,
        "largest": largest.per_rank_batch,
        "largest_global": largest.per_rank_batch * procs,
        "fastest": fastest.per_rank_batch,
        "trials": [asdict(trial) for trial in trials],
    }
    write_json(folder / "find-batch.json", result)
    write_text(folder / "find-batch.svg", _chart(trials, recipe.name))
    return BatchSearch(folder, trials, largest, fastest)


def _chart(trials: list[Trial], name: str) -> str:
    fitting = [trial for trial in trials if trial.fits]
    most_memory = max(max(trial.memory) for trial in fitting)
    most_speed = max(trial.images_per_second for trial in fitting)
    memory = [(trial.per_rank_batch, max(trial.memory) / most_memory) for trial in fitting]
    speed = [(trial.per_rank_batch, trial.images_per_second / most_speed) for trial in fitting]
    lines = [
        Line(f"memory (1 = {most_memory / 1e9:,.2f} GB)", memory),
        Line(f"images/s (1 = {most_speed:,.1f})", speed, run=1),
    ]
    return svg(Chart(f"{name}: relative to the maximum", lines, "images per rank", from_zero=True))
