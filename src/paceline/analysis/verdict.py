"""Find what limits the speed of a run, with figures; the most expensive cause first."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, fields

from paceline.analysis.run import LoggedRun
from paceline.config.data import FROM_FILES, IN_MEMORY

_STRAGGLER = 0.1
"""Fraction of a step that a slow rank must cost to be reported."""

_STRAGGLER_STEPS = 20
"""Steps before a slow rank is reported: the first steps are slower, by a different amount on each rank."""

_SMALL_BATCH = 8
"""Images per rank and step that cannot keep a device busy."""


@dataclass(frozen=True)
class Bottleneck:
    """What limits the speed of a run."""

    cause: str
    """Stable code, e.g. input-bound."""
    fraction: float
    """Part of the run's time that it costs, 0 to 1."""
    text: str
    """The cause with its figures, and what to do about it."""

    def __str__(self) -> str:
        return self.text


def verdict(run: LoggedRun) -> list[Bottleneck]:
    """Return the bottlenecks, most expensive first; `compute-bound` alone if there is no other.

    Only the part on the last number of ranks counts: it is the one that can be improved.
    """
    run = _on_last_ranks(run)
    if not run.total_seconds or not run.trained or "compute" not in run.seconds:
        return [Bottleneck("unknown", 0.0, "no times were recorded, so the bottleneck is unknown")]
    if found := sorted(_bottlenecks(run), key=lambda bottleneck: -bottleneck.fraction):
        return found
    fraction = run.seconds["compute"] / run.total_seconds
    with_sync = "sync" not in run.seconds and (run.ranks or 1) > 1
    where = "forward and backward" + (", gradient synchronization included" if with_sync else "")
    speed = f" ({run.images_per_second:,.0f} images/s)" if run.images_per_second else ""
    return [Bottleneck("compute-bound", fraction, f"compute-bound: {fraction:.0%} of run time in {where}{speed}")]


def _on_last_ranks(run: LoggedRun) -> LoggedRun:
    """Return the run without the records before a resume that changed the number of ranks."""
    ranks, begin = run.starts[0].get("ranks") if run.starts else None, 0
    for number, record in enumerate(run.records):
        if record["kind"] == "resume" and record.get("ranks") != ranks:
            ranks, begin = record.get("ranks"), number
    if not any(record["kind"] == "train" for record in run.records[begin:]):
        return run
    values = {each.name: getattr(run, each.name) for each in fields(LoggedRun)}
    return LoggedRun(**values | {"records": run.records[begin:]}) if begin else run


def _bottlenecks(run: LoggedRun) -> Iterator[Bottleneck]:
    stragglers = [straggler for part in ("data", "compute") if (straggler := _straggler(run, part))]
    yield from stragglers
    yield from _input(run, one_rank=any(straggler.cause == "input-straggler" for straggler in stragglers))
    yield from _communication(run)
    yield from _small_batch(run)
    yield from _evaluation(run)
    yield from _checkpoints(run)


def _steps(run: LoggedRun) -> int:
    return sum(record["steps"] for record in run.trained)


def _step_seconds(run: LoggedRun) -> float:
    return (run.train_seconds or 0.0) / max(1, _steps(run))


def _straggler(run: LoggedRun, part: str) -> Bottleneck | None:
    """Return the rank that the others wait for in gradient synchronization, if there is one."""
    ranks = run.seconds_per_rank.get(part, [])
    if len(ranks) < 2 or _steps(run) < _STRAGGLER_STEPS:
        return None
    slowest = max(range(len(ranks)), key=ranks.__getitem__)
    others = statistics.median(ranks[:slowest] + ranks[slowest + 1 :])
    lost = (ranks[slowest] - others) / _steps(run)
    if lost < _STRAGGLER * _step_seconds(run) or ranks[slowest] < 1.2 * others:
        return None
    host = run.host_of_rank[slowest] if slowest < len(run.host_of_rank) else ""
    rank = f"rank {slowest}{f' on {host}' if host else ''}"
    fraction = lost * _steps(run) / (run.total_seconds or 1.0)
    slow, usual = _short(ranks[slowest] / _steps(run)), _short(others / _steps(run))
    if part == "data":
        text = f"{rank} waits {slow} per step for input, the other ranks {usual}, and all ranks wait for it. "
        return Bottleneck("input-straggler", fraction, f"straggler: {text}Check its disk and CPU.")
    text = f"{rank} computes {slow} per step, the other ranks {usual}, and all ranks wait for it. "
    return Bottleneck(
        "compute-straggler", fraction, f"straggler: {text}Check that host for other processes and overheating."
    )


def _input(run: LoggedRun, one_rank: bool) -> Iterator[Bottleneck]:
    data, train = run.seconds.get("data", 0.0), run.train_seconds or 1.0
    if one_rank:  # the straggler is reported separately: count what the other ranks wait
        data = statistics.median(sorted(run.seconds_per_rank["data"])[:-1])
    if data < 0.15 * train:
        return
    without = f" ({run.images / (train - data):,.0f} images/s without it)" if run.images and train > data else ""
    settings = run.recipe.get("data", {})
    threads, name = settings.get("decode_threads"), settings.get("name")
    cores = (run.starts[-1].get("hardware", {}) if run.starts else {}).get("cores")
    fix = "Prepare the data (paceline prepare), or raise data.decode_threads"
    if name and name not in (*IN_MEMORY, *FROM_FILES):
        faster = f"Make __getitem__ of the registered dataset {name!r:.40} faster"
        fix = f"{faster}, prepare its images (paceline prepare), or raise data.decode_threads"
    if isinstance(threads, int) and cores and 0 < threads < cores:
        fix += f" from {threads} to {cores}"
    text = f"input-bound: {data / train:.0%} of step time waiting for input{without}. {fix}."
    yield Bottleneck("input-bound", data / (run.total_seconds or 1.0), text)


def _communication(run: LoggedRun) -> Iterator[Bottleneck]:
    """The time that even the last rank spends in gradient synchronization: the rest is waiting for a slow rank."""
    sync = min(run.seconds_per_rank.get("sync", []), default=run.seconds.get("sync", 0.0))
    train = run.train_seconds or 1.0
    if sync < 0.2 * train:
        return
    rate = _gradient_bits(run) * _steps(run) / sync
    # an upper bound, since a part of the traffic overlaps with the backward pass
    speed = f" (at most {rate / 1e9:.2g} Gbit/s)" if rate else ""
    fix = "Raise train.grad_accumulation, or compress: grad_sync.dtype bf16, or grad_sync.powersgd_rank."
    text = f"communication-bound: {sync / train:.0%} of step time in gradient synchronization{speed}. {fix}"
    yield Bottleneck("communication-bound", sync / (run.total_seconds or 1.0), text)


def _gradient_bits(run: LoggedRun) -> float:
    """Return the bits that a rank sends per step: a ring all-reduce sends 2 (n - 1) / n of the gradients."""
    ranks, grad_sync = run.ranks or 1, run.recipe.get("grad_sync", {})
    width = 32 if grad_sync.get("dtype", "fp32") == "fp32" else 16
    if grad_sync.get("powersgd_rank"):
        return 0.0
    return float(run.summary.get("parameters") or 0) * width * 2 * (ranks - 1) / ranks


def _small_batch(run: LoggedRun) -> Iterator[Bottleneck]:
    """The optimizer step costs the same for any batch, so it dominates with a small one."""
    optimizer, train = run.seconds.get("optimizer", 0.0), run.train_seconds or 1.0
    if not run.global_batch or not run.ranks:
        return
    images = run.global_batch // run.ranks
    if optimizer < (0.05 if images <= _SMALL_BATCH else 0.2) * train:
        return
    text = f"small batch: {optimizer / train:.0%} of step time in the optimizer, with {images} images per rank"
    fix = "Raise train.global_batch (paceline find-batch finds the largest that fits)."
    yield Bottleneck("small-batch", optimizer / (run.total_seconds or 1.0), f"{text}. {fix}")


def _evaluation(run: LoggedRun) -> Iterator[Bottleneck]:
    fraction = run.seconds.get("evaluate", 0.0) / (run.total_seconds or 1.0)
    if fraction >= 0.2 and len(run.evaluated) > 1:
        each = _short(run.seconds["evaluate"] / len(run.evaluated))
        every = run.recipe.get("evaluate", {}).get("every", "")
        text = f"frequent evaluation: {fraction:.0%} of run time in {len(run.evaluated)} evaluations of {each} each"
        fix = f"Raise evaluate.every{f' (now {every})' if every else ''}."
        yield Bottleneck("frequent-evaluation", fraction, f"{text}. {fix}")


def _checkpoints(run: LoggedRun) -> Iterator[Bottleneck]:
    fraction = run.seconds.get("checkpoint", 0.0) / (run.total_seconds or 1.0)
    count = sum(record["kind"] == "checkpoint" for record in run.records)
    if fraction >= 0.1 and count > 1:
        each = _short(run.seconds["checkpoint"] / count)
        every = run.recipe.get("checkpoint", {}).get("every", "")
        text = f"blocking checkpoints: {fraction:.0%} of run time in {count} checkpoints of {each} each"
        fix = f"Raise checkpoint.every{f' (now {every})' if every else ''}, or use a faster disk."
        yield Bottleneck("blocking-checkpoints", fraction, f"{text}. {fix}")


def _short(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"
