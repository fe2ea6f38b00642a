"""Where the time of a run went, in words with figures: a few rules, the costliest finding first."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.logbook.read import Run

_STRAGGLER = 0.1
"""Share of a step that one rank must lose to be worth naming."""

_FEW = 8
"""Images of a rank and step that keep no device busy."""


@dataclass(frozen=True)
class Finding:
    cause: str
    share: float
    """Of the run's time that it costs."""
    text: str


def verdict(run: Run) -> list[Finding]:
    """What costs time beside computing, costliest first; or that there is nothing but computing."""
    if not run.total_seconds or not run.trained or "compute" not in run.seconds:
        return [Finding("unknown", 0.0, "no times were recorded: nothing can be said about what limits this run")]
    found = sorted(_findings(run), key=lambda finding: -finding.share)
    if not found:
        share = run.seconds["compute"] / run.total_seconds
        with_exchange = "sync" not in run.seconds and (run.ranks or 1) > 1
        words = "forward and backward, the exchange in them not measured" if with_exchange else "forward and backward"
        found = [Finding("compute", share, f"limited by computing: {share:.0%} of the time is {words}{_speed(run)}")]
    return found


def _speed(run: Run) -> str:
    return f", {run.images_per_second:,.0f} images/s" if run.images_per_second else ""


def _findings(run: Run) -> Iterator[Finding]:
    stragglers = [found for part in ("data", "compute") if (found := _slow_rank(run, part))]
    yield from stragglers
    yield from _data(run, one_rank=any(found.cause == "data on one rank" for found in stragglers))
    yield from _exchange(run)
    yield from _small_steps(run)
    yield from _evaluation(run)
    yield from _saves(run)


def _steps(run: Run) -> int:
    return sum(record["steps"] for record in run.trained)


def _step_seconds(run: Run) -> float:
    return (run.train_seconds or 0.0) / max(1, _steps(run))


def _slow_rank(run: Run, part: str) -> Finding | None:
    """A rank that makes the others wait: they lose in the exchange what it loses elsewhere."""
    ranks = run.seconds_per_rank.get(part, [])
    if len(ranks) < 2:
        return None
    slowest = max(range(len(ranks)), key=ranks.__getitem__)
    others = statistics.median(ranks[:slowest] + ranks[slowest + 1 :])
    lost = (ranks[slowest] - others) / _steps(run)
    if lost < _STRAGGLER * _step_seconds(run) or ranks[slowest] < 1.2 * others:
        return None
    host = run.host_of_rank[slowest] if slowest < len(run.host_of_rank) else ""
    who = f"rank {slowest}{f' on {host}' if host else ''}"
    share = lost * _steps(run) / (run.total_seconds or 1.0)
    mine, theirs = _short(ranks[slowest] / _steps(run)), _short(others / _steps(run))
    if part == "data":
        text = (
            f"{who} waits for data {mine} a step, the others {theirs}; all wait for it: look at its disk and processor"
        )
        return Finding("data on one rank", share, text)
    text = f"{who} computes {mine} a step, the others {theirs}; all wait for it: look for other work or heat there"
    return Finding("compute on one rank", share, text)


def _data(run: Run, one_rank: bool) -> Iterator[Finding]:
    data, train = run.seconds.get("data", 0.0), run.train_seconds or 1.0
    if one_rank:  # what the others wait for all the same
        data = statistics.median(sorted(run.seconds_per_rank["data"])[:-1])
    if data < 0.15 * train:
        return
    alone = (
        f"; without that it would be {run.images / (train - data):,.0f} images/s" if run.images and train > data else ""
    )
    threads = run.recipe.get("data", {}).get("threads")
    cores = (run.starts[-1].get("hardware", {}) if run.starts else {}).get("cores")
    cure = "prepare the data (paceline prepare), or give the loader more threads"
    if threads and cores and threads < cores:
        cure = f"prepare the data (paceline prepare), or raise data.decode_threads from {threads} to {cores}"
    share = data / (run.total_seconds or 1.0)
    yield Finding("data", share, f"{data / train:.0%} of training is waiting for data{alone}; {cure}")


def _exchange(run: Run) -> Iterator[Finding]:
    """The exchange itself: what even the rank that came last spends in it. Waiting for a slow rank is not that."""
    own = min(run.seconds_per_rank.get("sync", []), default=run.seconds.get("sync", 0.0))
    train = run.train_seconds or 1.0
    if own < 0.2 * train:
        return
    rate = _gradient_bits(run) * _steps(run) / own
    speed = f" at {rate / 1e9:.2g} Gbit/s or less" if rate else ""  # less, where computing hides a part of it
    cure = "accumulate (train.grad_accumulation), or compress (grad_sync.dtype bf16, grad_sync.powersgd_rank)"
    yield Finding(
        "exchange", own / (run.total_seconds or 1.0), f"gradient exchange is {own / train:.0%} of a step{speed}; {cure}"
    )


def _gradient_bits(run: Run) -> float:
    """What a rank sends in a step: all-reduce passes each gradient on about twice, but for its own share."""
    ranks, grad_sync = run.ranks or 1, run.recipe.get("grad_sync", {})
    width = 32 if grad_sync.get("dtype", "fp32") == "fp32" else 16
    if grad_sync.get("powersgd_rank"):
        return 0.0
    return float(run.summary.get("parameters") or 0) * width * 2 * (ranks - 1) / ranks


def _small_steps(run: Run) -> Iterator[Finding]:
    """Work that is the same for any batch outweighs a batch that is too small."""
    optimizer, train = run.seconds.get("optimizer", 0.0), run.train_seconds or 1.0
    if not run.global_batch or not run.ranks:
        return
    images = run.global_batch // run.ranks
    if optimizer < (0.05 if images <= _FEW else 0.2) * train:
        return
    yield Finding(
        "tiny batch",
        optimizer / (run.total_seconds or 1.0),
        f"the optimizer is {optimizer / train:.0%} of a step, whose batch is only {images} images a rank; "
        "raise train.global_batch (paceline find-batch finds the largest)",
    )


def _evaluation(run: Run) -> Iterator[Finding]:
    share = run.seconds.get("evaluate", 0.0) / (run.total_seconds or 1.0)
    if share >= 0.2 and len(run.evaluated) > 1:
        each = run.seconds["evaluate"] / len(run.evaluated)
        every = run.recipe.get("evaluate", {}).get("every", "")
        text = f"{share:.0%} of the run is evaluation: {len(run.evaluated)} of {_short(each)}"
        yield Finding(
            "evaluation", share, f"{text}; evaluate less often{f' (evaluate.every is {every})' if every else ''}"
        )


def _saves(run: Run) -> Iterator[Finding]:
    share = run.seconds.get("checkpoint", 0.0) / (run.total_seconds or 1.0)
    checkpoints = sum(record["kind"] == "checkpoint" for record in run.records)
    if share >= 0.1 and checkpoints > 1:
        each = run.seconds["checkpoint"] / checkpoints
        every = run.recipe.get("checkpoint", {}).get("every", "")
        text = f"checkpoints held training up for {share:.0%} of the run: {checkpoints} of {_short(each)}"
        yield Finding(
            "checkpoints",
            share,
            f"{text}; save less often{f' (checkpoint.every is {every})' if every else ''}, or to a faster disk",
        )


def _short(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"
