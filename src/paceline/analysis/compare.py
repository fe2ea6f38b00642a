"""Compare runs: first check that they are the same experiment, then compute speed-up, accuracy and cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.analysis.details.paired import PairedModels, paired_runs
from paceline.analysis.fairness import Fairness, fairness
from paceline.analysis.groups import GroupedRuns, grouped_runs
from paceline.analysis.run import LoggedRun
from paceline.errors import UserError


@dataclass(frozen=True)
class ComparedRuns:
    runs: list[LoggedRun]
    fairness: Fairness
    target: float | None
    """The top-1 accuracy whose time-to-accuracy is compared."""
    rows: list[dict[str, Any]]
    paired: list[PairedModels] = field(default_factory=list)
    """What `evaluate --details` of the same data says about each run and the first one."""
    grouped: GroupedRuns = field(default_factory=GroupedRuns)
    """Runs that differ only in the seed, and the statistics of these groups."""

    @property
    def is_comparable(self) -> bool:
        """Whether the ratio is a speed-up: complete runs of the same experiment."""
        return not self._incomplete and self.fairness.same and not self.fairness.unknown

    @property
    def is_reliable(self) -> bool:
        """Whether the speed-up is plausible as well."""
        return self.is_comparable and not self.warnings

    @property
    def warnings(self) -> list[str]:
        """Why the times or their ratio may be misleading, one sentence each."""
        disturbed = [f"{run.name} was {run.disturbance}" for run in self.runs if run.disturbance]
        if not self.is_comparable:
            return disturbed
        conditions = self.fairness.conditions
        return disturbed + [
            warning
            for run, row in zip(self.runs[1:], self.rows[1:], strict=True)
            if (warning := _too_fast(self.runs[0], run, row, conditions))
        ]

    @property
    def _incomplete(self) -> list[str]:
        return [run.name for run in self.runs if run.status not in ("finished", "imported") or not run.complete]

    @property
    def summary(self) -> str:
        """Whether the runs are the same experiment, why there is no speed-up if there is none, and warnings."""
        text = self.fairness.summary
        if self._incomplete and self.fairness.same and not self.fairness.unknown:
            verb = "are" if len(self._incomplete) > 1 else "is"
            text += f", but {', '.join(self._incomplete)} {verb} incomplete, so there is no speed-up"
        return "; ".join([text, *self.warnings])


_SUPERLINEAR = 1.1
"""Plausible speed-up per device: with more devices, caches hold a larger part of each device's work."""


def _too_fast(first: LoggedRun, run: LoggedRun, row: dict[str, Any], conditions: Sequence[str]) -> str:
    """Return why a speed-up above the ratio of devices is implausible; empty if it is plausible."""
    ratio, more = row["ratio"], row["device_ratio"]
    if not ratio or not more:
        return ""
    if more < 1:  # question the run with more devices, whichever comes first
        ratio, more, first, run = 1 / ratio, 1 / more, run, first
    if ratio <= _SUPERLINEAR * more or (more == 1 and conditions):
        return ""
    waits = [each.seconds.get("data", 0.0) / (each.train_seconds or math.inf) for each in (first, run)]
    if first.disturbance:
        reason = f"other processes slowed down {first.name}"
    elif conditions:
        reason = f"{', '.join(conditions)} differ{'s' * (len(conditions) == 1)}"
    elif waits[0] > waits[1] + 0.1:
        reason = (
            f"{first.name} waited for input {waits[0]:.0%} of the time, {run.name} {waits[1]:.0%}: perhaps its files "
            "were not in the page cache yet"
        )
    else:
        reason = f"{first.name} was slower than its devices allow"
    speed = f"{run.name} is {ratio:.2f}x as fast as {first.name} on {more:g}x the devices"
    return f"{speed}, more than expected; likely cause: {reason}"


def parse_accuracy(value: "str | float") -> float:
    """Return an accuracy from 0 to 1, given as 0.93 or 93%."""
    try:
        number = float(str(value).removesuffix("%")) / (100 if str(value).endswith("%") else 1)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:
        raise UserError("invalid-accuracy", f"{value!r} is not an accuracy. Write e.g. 0.93 or 93%.", value=value)
    return number


def compare(runs: Sequence[LoggedRun], target: float | None = None, price: float | None = None) -> ComparedRuns:
    """Compare runs to the first one.

    `target`: top-1 for time-to-accuracy, by default the highest that all runs reach. `price`: dollars per host and
    hour; it overrides the price in the run folders.
    """
    reached = [run.best["top1"] for run in runs if run.best]
    if target is None and len(reached) == len(runs) and reached:
        target = math.floor(min(reached) * 1000) / 1000
    rows = [_row(run, target, price) for run in runs]
    base = rows[0]
    for row in rows:
        row |= _relation(row, base)
    grouped = grouped_runs(runs)
    return ComparedRuns(list(runs), fairness(runs, bool(grouped.groups)), target, rows, paired_runs(runs), grouped)


def _row(run: LoggedRun, target: float | None, price: float | None) -> dict[str, Any]:
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
        "has_total_time": "evaluate" in run.seconds or "seconds" in run.facts,
        "top1": final.get("top1"),
        "top5": run.top5,
        "samples": final.get("samples"),
        "loss": final.get("loss"),
        "seconds_to_target": run.seconds_to(target) if target is not None else None,
        "target_reached": run.best["top1"] >= target if target is not None and run.best else None,
        "peak_memory": run.peak_memory,
        "device_utilization": run.device_utilization(),
        "other_load": run.other_load,
        "energy_joules": run.energy(),
        "cost": price * hosts * total / 3600 if price is not None and hosts and total else None,
        "steps": run.trained[-1]["step"] if run.trained else None,
    }


def _relation(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return the row's figures relative to the first run.

    The ratio is that of training times if both made the same number of steps, otherwise that of images per second.
    """
    ratio, of = None, ""
    if row["steps"] == base["steps"] and row["train_seconds"] and base["train_seconds"]:
        ratio, of = base["train_seconds"] / row["train_seconds"], "training time"
    elif row["images_per_second"] and base["images_per_second"]:
        ratio, of = row["images_per_second"] / base["images_per_second"], "images/s"
    same_hardware = row["hardware"] == base["hardware"]
    more = row["devices"] / base["devices"] if row["devices"] and base["devices"] and same_hardware else None
    difference = error = None
    if row["top1"] is not None and base["top1"] is not None:
        difference = row["top1"] - base["top1"]
        if row["samples"] and base["samples"]:
            error = math.sqrt(sum(_variance(each["top1"], each["samples"]) for each in (row, base)))
    return {
        "ratio": ratio,
        "ratio_of": of,
        "device_ratio": more,
        "efficiency": ratio / more if ratio and more and more != 1 else None,
        "top1_difference": difference,
        "top1_standard_error": error,
    }


def _variance(accuracy: float, samples: int) -> float:
    """Return the variance of a measured accuracy with Agresti-Caffo's correction, which is not zero at 100%."""
    accuracy = (accuracy * samples + 1) / (samples + 2)
    return accuracy * (1 - accuracy) / (samples + 2)
