"""Runs side by side: first whether they are the same experiment, then what the second one gained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import UserError
from paceline.logbook.read import Run

_CONDITIONS = {
    "hardware": "hardware",
    "torch": "torch",
    "commit": "commit of the folder one worked in",
    "threads of a rank": "threads of a rank",
    "strategy": "strategy",
    "data.decode_threads": "threads that load data",
    "train.grad_accumulation": "accumulation",
    "evaluate.every": "evaluate.every",
    "evaluate.per_rank_batch": "evaluate.per_rank_batch",
    "grad_sync.transport": "grad_sync.transport",
    "grad_sync.bucket_mb": "grad_sync.bucket_mb",
    "fsdp.reshard_after_forward": "fsdp.reshard_after_forward",
    "fsdp.cpu_offload": "fsdp.cpu_offload",
}
"""Facts that do not change what is computed, but how fast."""
_ELSEWHERE = (
    "train.global_batch",
    "seconds",
    "ranks",
    "nodes",
    "scaled.by",
    "scaled.rule",
    "scaled.from_batch",
    "scaled.from_lr",
)
"""Facts that are not compared as such: stated otherwise, or results."""


@dataclass(frozen=True)
class Difference:
    fact: str
    values: tuple[Any, ...]
    """Of each run; None where it is not known."""
    matters: bool
    """Whether it makes another experiment of it; conditions and unknown values do not."""

    def __str__(self) -> str:
        return f"{self.fact}: " + " / ".join("unknown" if value is None else _short(value) for value in self.values)


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Fairness:
    differences: tuple[Difference, ...]
    unknown: tuple[str, ...]
    """Facts that decide, and that some run does not tell."""

    @property
    def same(self) -> bool:
        return not any(difference.matters for difference in self.differences)

    @property
    def sentence(self) -> str:
        if not self.same:
            facts = ", ".join(difference.fact for difference in self.differences if difference.matters)
            verb = "differ" if "," in facts else "differs"
            return f"not the same experiment: {facts} {verb}; a ratio of their times is not a speed-up"
        if self.unknown:
            some = ", ".join(self.unknown[:8]) + (" ..." if self.unknown[8:] else "")
            return f"cannot be told to be the same experiment: {some} not known of every run"
        conditions = [difference.fact for difference in self.differences]
        return "the same experiment" + (f", under other conditions: {', '.join(conditions)}" if conditions else "")


_DECIDING = {
    "global_batch": "global batch",
    "data": "data",
    "precision": "precision",
    "code": "code",
    "seed": "seed",
    "model.name": "model",
    "optim.lr": "learning rate",
    "train.duration": "duration",
}


def fairness(runs: Sequence[Run]) -> Fairness:
    facts = [run.facts | {"global_batch": run.global_batch} for run in runs]
    differences, unknown = [], []
    for name in dict.fromkeys(name for each in facts for name in each if name not in _ELSEWHERE):
        values = tuple(each.get(name) for each in facts)
        known = [value for value in values if value is not None]
        if any(value != known[0] for value in known):
            label = _DECIDING.get(name) or _CONDITIONS.get(name) or name
            differences.append(Difference(label, values, matters=name not in _CONDITIONS))
        elif known and len(known) < len(values) and name not in _CONDITIONS:
            silent = [run for run, value in zip(runs, values, strict=True) if value is None]
            if all(run.recipe for run in silent) and name not in _DECIDING:
                differences.append(Difference(name, values, matters=True))  # a recipe has every field that it uses
            elif name in _DECIDING or any(run.kind != "paceline" for run in runs if run not in silent):
                unknown.append(_DECIDING.get(name) or name)
    nobody_tells = [label for name, label in _DECIDING.items() if all(each.get(name) is None for each in facts)]
    ordered = sorted(differences, key=lambda difference: not difference.matters)
    return Fairness(tuple(ordered), tuple(unknown + nobody_tells))


@dataclass(frozen=True)
class Comparison:
    runs: list[Run]
    fairness: Fairness
    target: float | None
    """The accuracy to which times are compared."""
    rows: list[dict[str, Any]]

    @property
    def speedup_counts(self) -> bool:
        """Of whole runs of one experiment only."""
        return not self._not_whole and self.fairness.same and not self.fairness.unknown

    @property
    def certified(self) -> bool:
        """Whether the speed-up can be taken at its word."""
        return self.speedup_counts and not self.doubts

    @property
    def doubts(self) -> list[str]:
        """Why times, or ratios of them, are not what they seem."""
        found = [f"{run.name} was {run.disturbance}" for run in self.runs if run.disturbance]
        if not self.speedup_counts:
            return found
        conditions = [difference.fact for difference in self.fairness.differences]
        return found + [
            doubt
            for run, row in zip(self.runs[1:], self.rows[1:], strict=True)
            if (doubt := _too_fast(self.runs[0], run, row, conditions))
        ]

    @property
    def _not_whole(self) -> list[str]:
        return [run.name for run in self.runs if run.status not in ("finished", "imported") or not run.complete]

    @property
    def sentence(self) -> str:
        """Whether they are the same experiment, and whether a speed-up can be told."""
        found = self.fairness.sentence
        if self._not_whole and self.fairness.same and not self.fairness.unknown:
            found += f", but {', '.join(self._not_whole)} not whole from end to end: no speed-up can be told"
        return "; ".join([found, *self.doubts])


_ROOM = 1.1
"""What a speed-up may exceed the ratio of devices by: caches hold a larger part of the work of each."""


def _too_fast(first: Run, run: Run, row: dict[str, Any], conditions: Sequence[str]) -> str:
    """Why a speed-up beyond the ratio of devices is not to be believed; empty where it is."""
    ratio, more = row["ratio"], row["device_ratio"]
    if not ratio or not more:
        return ""
    if more < 1:  # the one with more devices is asked how it could be so fast
        ratio, more, first, run = 1 / ratio, 1 / more, run, first
    if ratio <= _ROOM * more or (more == 1 and conditions):
        return ""
    waits = [each.seconds.get("data", 0.0) / (each.train_seconds or math.inf) for each in (first, run)]
    if first.disturbance:
        reason = f"other work slowed {first.name} down"
    elif conditions:
        reason = f"{', '.join(conditions)} differ{'s' * (len(conditions) == 1)}"
    elif waits[0] > waits[1] + 0.1:
        reason = (
            f"{first.name} waited for data {waits[0]:.0%} of the time, {run.name} {waits[1]:.0%}: perhaps its files "
            "were not in the page cache yet"
        )
    else:
        reason = f"{first.name} was slower than its devices allow"
    speed = f"{run.name} is {ratio:.2f}x as fast as {first.name} on {more:g}x the devices"
    return f"{speed}, more than expected; likely cause: {reason}"


def share(value: "str | float") -> float:
    """An accuracy as people write it: 0.93 or 93%."""
    try:
        number = float(str(value).removesuffix("%")) / (100 if str(value).endswith("%") else 1)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:
        raise UserError(f"{value!r} is no accuracy; write e.g. 0.93 or 93%")
    return number


def compare(runs: Sequence[Run], target: float | None = None, price: float | None = None) -> Comparison:
    """Everything in relation to the first run; `price` of a host for an hour counts more than what a run says."""
    reached = [run.best["top1"] for run in runs if run.best]
    if target is None and len(reached) == len(runs) and reached:
        target = math.floor(min(reached) * 1000) / 1000  # what all of them got to
    rows = [_row(run, target, price) for run in runs]
    base = rows[0]
    for row in rows:
        row |= _relation(row, base)
    return Comparison(list(runs), fairness(runs), target, rows)


def _row(run: Run, target: float | None, price: float | None) -> dict[str, Any]:
    hosts = len(run.hosts) or run.facts.get("nodes")
    price = run.price if price is None else price
    total, final = run.total_seconds, run.final
    return {
        "run": run.name,
        "status": run.status,
        "ranks": run.ranks,
        "hosts": hosts,
        "devices": run.devices,
        "hardware": run.facts.get("hardware"),
        "global_batch": run.global_batch,
        "images_per_second": run.images_per_second,
        "train_seconds": run.train_seconds,
        "total_seconds": total,
        "whole": "evaluate" in run.seconds or "seconds" in run.facts,
        "top1": final.get("top1"),
        "top5": final.get("top5"),
        "samples": final.get("samples"),
        "loss": final.get("loss"),
        "seconds_to_target": run.seconds_to(target) if target is not None else None,
        "peak_memory": run.peak_memory,
        "device_use": run.device_use(),
        "other_load": run.other_load,
        "energy_joules": run.energy(),
        "cost": price * hosts * total / 3600 if price is not None and hosts and total else None,
        "steps": run.trained[-1]["step"] if run.trained else None,
    }


def _relation(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Speed-up by training time where both did the same number of steps, else by images per second."""
    ratio, of = None, ""
    if row["steps"] == base["steps"] and row["train_seconds"] and base["train_seconds"]:
        ratio, of = base["train_seconds"] / row["train_seconds"], "times"
    elif row["images_per_second"] and base["images_per_second"]:
        ratio, of = row["images_per_second"] / base["images_per_second"], "images/s"
    alike = row["hardware"] == base["hardware"]
    more = row["devices"] / base["devices"] if row["devices"] and base["devices"] and alike else None
    difference = noise = None
    if row["top1"] is not None and base["top1"] is not None:
        difference = row["top1"] - base["top1"]
        if row["samples"] and base["samples"]:
            noise = math.sqrt(sum(_variance(each["top1"], each["samples"]) for each in (row, base)))
    return {
        "ratio": ratio,
        "ratio_of": of,
        "device_ratio": more,
        "efficiency": ratio / more if ratio and more and more != 1 else None,
        "top1_difference": difference,
        "top1_standard_error": noise,
    }


def _variance(share: float, samples: int) -> float:
    """Of a share that was seen: a hit and a miss are added (Agresti and Caffo), so that 100 % has one too."""
    share = (share * samples + 1) / (samples + 2)
    return share * (1 - share) / (samples + 2)
