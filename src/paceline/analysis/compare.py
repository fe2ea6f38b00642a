"""Compare runs: first check that they are the same experiment, then compute speed-up, accuracy and cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.analysis.details.paired import PairedModels, paired_runs
from paceline.analysis.run import CODE_OF, LoggedRun
from paceline.errors import UserError

_CONDITIONS = {
    "hardware": "hardware",
    "torch": "torch",
    "commit": "git commit of the working directory",
    "threads per rank": "threads per rank",
    "strategy": "strategy",
    "data.decode_threads": "decode threads",
    "train.grad_accumulation": "gradient accumulation",
    "evaluate.every": "evaluate.every",
    "evaluate.per_rank_batch": "evaluate.per_rank_batch",
    "grad_sync.transport": "grad_sync.transport",
    "grad_sync.bucket_mb": "grad_sync.bucket_mb",
    "fsdp.reshard_after_forward": "fsdp.reshard_after_forward",
    "fsdp.cpu_offload": "fsdp.cpu_offload",
    "model.activation_checkpointing": "activation checkpointing",
    "compile": "compile",
}
"""Facts that affect only the speed, not the result."""
_NOT_COMPARED = (
    "train.global_batch",
    "seconds",
    "ranks",
    "nodes",
    "scaled.by",
    "scaled.rule",
    "scaled.from_batch",
    "scaled.from_lr",
)
"""Facts that are results, or that another fact already covers."""


@dataclass(frozen=True)
class Difference:
    fact: str
    values: tuple[Any, ...]
    """One value per run; None: unknown."""
    matters: bool
    """Whether the difference makes it another experiment; conditions and unknown values do not."""

    def __str__(self) -> str:
        return f"{self.fact}: " + " / ".join("unknown" if value is None else _short(value) for value in self.values)


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


_MAX_NAMED = 5
"""Differences that a summary names; of more, it gives the number, because they are listed below it."""


@dataclass(frozen=True)
class Fairness:
    """Whether runs are the same experiment, and how they differ."""

    differences: tuple[Difference, ...]
    unknown: tuple[str, ...]
    """Deciding facts that are unknown for at least one run."""

    @property
    def same(self) -> bool:
        return not any(difference.matters for difference in self.differences)

    @property
    def summary(self) -> str:
        """Whether the runs are the same experiment, and why not."""
        if not self.same:
            changed = [difference.fact for difference in self.differences if difference.matters]
            named = ", ".join(changed) if len(changed) <= _MAX_NAMED else f"{len(changed)} settings"
            verb = "differs" if len(changed) == 1 else "differ"
            return f"not the same experiment: {named} {verb}, so the ratio of their times is not a speed-up"
        if self.unknown:
            facts = ", ".join(self.unknown[:8]) + (" ..." if self.unknown[8:] else "")
            return f"cannot confirm that this is the same experiment: unknown for at least one run: {facts}"
        conditions = [difference.fact for difference in self.differences]
        if len(conditions) > _MAX_NAMED:
            return f"the same experiment under {len(conditions)} different conditions"
        return "the same experiment" + (f" under different conditions: {', '.join(conditions)}" if conditions else "")


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


def fairness(runs: Sequence[LoggedRun]) -> Fairness:
    """Return what differs between the runs, and which deciding facts are unknown."""
    facts = [run.facts | {"global_batch": run.global_batch} for run in runs]
    differences, unknown = [], []
    for name in dict.fromkeys(name for each in facts for name in each if name not in _NOT_COMPARED):
        values = tuple(each.get(name) for each in facts)
        known = [value for value in values if value is not None]
        if any(value != known[0] for value in known):
            label = _DECIDING.get(name) or _CONDITIONS.get(name) or name
            differences.append(Difference(label, values, matters=name not in _CONDITIONS))
        elif known and len(known) < len(values) and name not in _CONDITIONS:
            without = [run for run, value in zip(runs, values, strict=True) if value is None]
            if name.startswith(CODE_OF):
                continue  # not every run imports it, so that the imports in their recipes differ
            if all(run.recipe for run in without) and name not in _DECIDING:
                differences.append(Difference(name, values, matters=True))  # a recipe holds every field that it uses
            elif name in _DECIDING or any(run.kind != "paceline" for run in runs if run not in without):
                unknown.append(_DECIDING.get(name) or name)
    unknown_everywhere = [label for name, label in _DECIDING.items() if all(each.get(name) is None for each in facts)]
    ordered = sorted(differences, key=lambda difference: not difference.matters)
    return Fairness(tuple(ordered), tuple(unknown + unknown_everywhere))


@dataclass(frozen=True)
class ComparedRuns:
    runs: list[LoggedRun]
    fairness: Fairness
    target: float | None
    """The top-1 accuracy whose time-to-accuracy is compared."""
    rows: list[dict[str, Any]]
    paired: list[PairedModels] = field(default_factory=list)
    """What `evaluate --details` of the same data says about each run and the first one."""

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
        conditions = [difference.fact for difference in self.fairness.differences]
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
    return ComparedRuns(list(runs), fairness(runs), target, rows, paired_runs(runs))


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
