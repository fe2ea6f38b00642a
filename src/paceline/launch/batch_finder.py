"""Find the largest batch that trains, by doubling and then bisection, with new processes for each size.

However a rank runs out of memory (exception, crash, kill), it ends its trial on all ranks, and cannot affect the next
one. All ranks take part in every trial, so the result fits on each of them.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from paceline.analysis.charts import Chart, Line, svg
from paceline.config.batch import memory_key
from paceline.config.recipe import Recipe
from paceline.errors import UserError
from paceline.launch.groups import CONSEQUENCES, Nodes
from paceline.launch.hosts import free_memory
from paceline.launch.trials import Ended, Trials, prepared_trials
from paceline.system.files import write_json, write_text
from paceline.track.checks import NonNegativeFloat, NonNegativeInt


class _RankResult(TypedDict):
    """What rank 0 of a trial reports."""

    images_per_second: NonNegativeFloat
    memory: Annotated[list[NonNegativeInt], Field(min_length=1, max_length=10_000)]
    data: Annotated[str, Field(max_length=200)]


_MEASURED = TypeAdapter(_RankResult)


@dataclass(frozen=True)
class Trial:
    per_rank_batch: int
    fits: bool
    images_per_second: float = 0.0
    memory: tuple[int, ...] = ()
    """Peak bytes per rank."""
    data: str = ""
    """The name of the recipe's data, as a run has it."""
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


def attempt(trials: Trials, steps: int, limits: Sequence[int], batch: int) -> Trial:
    """Run one trial in new processes; return its result. Raises an error that a smaller batch would not avoid."""
    found: list[_RankResult] = []

    def add(record: dict[str, Any]) -> None:
        with suppress(ValidationError):
            found.append(_MEASURED.validate_python(record))

    ended = trials.run("try-batch", ["--batch", batch, "--steps", steps, "--limits", ",".join(map(str, limits))], add)
    if ended.error and ended.error.code not in _RANK_FAILURES:
        raise ended.error
    if ended.status or not found:
        return Trial(batch, False, reason=_reason(ended))
    measured = found[-1]
    return Trial(batch, True, measured["images_per_second"], tuple(measured["memory"]), measured["data"])


_RANK_FAILURES = ("rank-killed", "rank-crashed", "rank-failed", *CONSEQUENCES)
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


def _reason(ended: Ended) -> str:
    """Return why a trial failed."""
    if ended.timed_out:
        return ended.reason
    text = ended.output + str(ended.error or "")
    if any(sign in text for sign in _OUT_OF_MEMORY) or ended.status in (-9, 137):
        return "out of memory"
    if ended.output.strip():
        return ended.reason
    if ended.error:
        return str(ended.error)
    return f"exit status {ended.status} without a message; the memory limit may be too low for the process itself"


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
    nodes: Nodes,
    memory_limits: Sequence[int],
    max_batch: int,
    steps: int,
    on_trial: Callable[[Trial], None],
) -> BatchSearch:
    """Search, and write the results to a folder."""
    if len(memory_limits) > nodes.ranks:
        raise UserError(
            "too-many-limits",
            f"--memory-limit has {len(memory_limits)} values for {nodes.ranks} ranks. Give one value, or one per rank.",
            limits=len(memory_limits),
        )
    with prepared_trials(recipe, folder, nodes, ("find-batch.json", "find-batch.svg")) as started:
        # without a limit the kernel's out-of-memory killer would end the search, or any other process
        limits = list(memory_limits) or _free_memory(nodes)

        def reported(batch: int) -> Trial:
            on_trial(trial := attempt(started, steps, limits, batch))
            return trial

        tried = search(reported, max_batch)
    largest, fastest = outcome(tried)
    # the kind of data, which a path alone does not tell, is that of a run on these nodes
    known = replace(recipe, data=replace(recipe.data, name=largest.data))
    result = {
        "recipe": recipe.name,
        "key": memory_key(known, nodes.ranks),
        "searched": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": nodes.ranks,
        "hosts": [host.name for host in nodes.hosts],
        "memory_limit": limits,
        "largest": largest.per_rank_batch,
        "largest_global": largest.per_rank_batch * nodes.ranks,
        "fastest": fastest.per_rank_batch,
        "trials": [asdict(trial) for trial in tried],
    }
    write_json(folder / "find-batch.json", result)
    write_text(folder / "find-batch.svg", _chart(tried, recipe.name))
    return BatchSearch(folder, tried, largest, fastest)


def _free_memory(nodes: Nodes) -> list[int]:
    """Return the free memory of each rank's node, divided by its ranks."""
    if not nodes.hosts:
        return [psutil.virtual_memory().available // nodes.procs]
    free = [free_memory(host, nodes.python) // nodes.procs for host in nodes.hosts]
    return [size for size in free for _ in range(nodes.procs)]


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
