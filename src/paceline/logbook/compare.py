"""Runs side by side: first whether they are the same experiment, then what the second one gained."""

import csv
import io
import json
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
    "data.threads": "threads that load data",
    "train.accumulation": "accumulation",
    "evaluate.every": "evaluate.every",
    "evaluate.per_rank_batch": "evaluate.per_rank_batch",
    "exchange.through": "exchange.through",
    "exchange.bucket_mb": "exchange.bucket_mb",
    "fsdp.reshard": "fsdp.reshard",
    "fsdp.offload": "fsdp.offload",
}
"""Facts that do not change what is computed, but how fast."""
_MOST_COLUMNS = 6
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
            return f"not the same experiment: {facts} differ; a ratio of their times is not a speed-up"
        if self.unknown:
            return f"cannot be told to be the same experiment: {', '.join(self.unknown)} not known of every run"
        conditions = [difference.fact for difference in self.differences]
        return "the same experiment" + (f", under other conditions: {', '.join(conditions)}" if conditions else "")


_DECIDING = {"global_batch": "global batch", "data": "data", "precision": "precision", "code": "code", "seed": "seed"}


def fairness(runs: Sequence[Run]) -> Fairness:
    facts = [run.facts | {"global_batch": run.global_batch} for run in runs]
    differences, unknown = [], []
    for name in dict.fromkeys(name for each in facts for name in each if name not in _ELSEWHERE):
        values = tuple(each.get(name) for each in facts)
        known = [value for value in values if value is not None]
        if any(value != known[0] for value in known):
            label = _DECIDING.get(name) or _CONDITIONS.get(name) or name
            differences.append(Difference(label, values, matters=name not in _CONDITIONS))
        elif len(known) < len(values):
            ours = all(run.kind == "paceline" for run in runs)
            if name in _DECIDING and known:
                unknown.append(_DECIDING[name])
            elif ours and name not in _CONDITIONS:  # a recipe has every field, and options of models differ
                differences.append(Difference(name, values, matters=True))
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
        whole = all(run.status in ("finished", "imported") and run.complete for run in self.runs)
        return whole and self.fairness.same and not self.fairness.unknown


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
    """Everything in relation to the first run; `price` is that of one host for an hour."""
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
    price = price if price is not None else (run.starts[-1].get("price_per_hour") if run.starts else None)
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
        "top1": final.get("top1"),
        "top5": final.get("top5"),
        "samples": final.get("samples"),
        "loss": final.get("loss"),
        "seconds_to_target": run.seconds_to(target) if target is not None else None,
        "peak_memory": run.peak_memory,
        "device_use": run.device_use(),
        "energy_joules": run.energy(),
        "cost": price * (hosts or 1) * total / 3600 if price is not None and total else None,
        "steps": run.trained[-1]["step"] if run.trained else None,
    }


def _relation(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Speed-up by training time where both did the same number of steps, else by images per second."""
    ratio = None
    if row["steps"] == base["steps"] and row["train_seconds"] and base["train_seconds"]:
        ratio = base["train_seconds"] / row["train_seconds"]
    elif row["images_per_second"] and base["images_per_second"]:
        ratio = row["images_per_second"] / base["images_per_second"]
    alike = row["hardware"] == base["hardware"]
    more = row["devices"] / base["devices"] if row["devices"] and base["devices"] and alike else None
    difference = noise = None
    if row["top1"] is not None and base["top1"] is not None:
        difference = row["top1"] - base["top1"]
        if row["samples"] and base["samples"]:
            noise = math.sqrt(sum(_variance(each["top1"], each["samples"]) for each in (row, base)))
    return {
        "time_ratio": ratio,
        "efficiency": ratio / more if ratio and more and more != 1 else None,
        "top1_difference": difference,
        "top1_standard_error": noise,
    }


def _variance(share: float, samples: int) -> float:
    """Of a share that was seen: a hit and a miss are added (Agresti and Caffo), so that 100 % has one too."""
    share = (share * samples + 1) / (samples + 2)
    return share * (1 - share) / (samples + 2)


def table(comparison: Comparison) -> list[list[str]]:
    """Rows of text, the first one the heads: one line per figure, one column per run."""
    rows, counts = comparison.rows, comparison.speedup_counts
    word = "speed-up" if counts else "ratio of times (not a speed-up)"
    target = f"time to {100 * comparison.target:.5g}% top-1" if comparison.target is not None else ""
    lines = [
        ("status", [row["status"] for row in rows]),
        ("ranks (hosts)", [_places(row) for row in rows]),
        ("global batch", [_form(row["global_batch"], ",") for row in rows]),
        ("training time", [duration(row["train_seconds"]) for row in rows]),
        ("with evaluation and saves", [duration(row["total_seconds"]) for row in rows]),
        (word, ["-" if row is rows[0] else _form(row["time_ratio"], ".2f", "x") for row in rows]),
        (
            "efficiency",
            ["-" if row is rows[0] else _form(row["efficiency"] if counts else None, ".0%") for row in rows],
        ),
        ("images/s", [_form(row["images_per_second"], ",.0f") for row in rows]),
        (target, [duration(row["seconds_to_target"]) for row in rows]),
        ("top-1", [_accuracy(row) for row in rows]),
        ("top-5", [_form(row["top5"], ".2%") for row in rows]),
        ("top-1 against the first", ["-" if row is rows[0] else _difference(row) for row in rows]),
        ("loss", [_form(row["loss"], ".4f") for row in rows]),
        ("most memory of a rank", [_form(_gigabytes(row["peak_memory"]), ".2f", " GB") for row in rows]),
        ("use of devices", [_form(row["device_use"], ".0%") for row in rows]),
        ("energy of GPUs", [_form(_watt_hours(row["energy_joules"]), ",.1f", " Wh") for row in rows]),
        ("cost", [_form(row["cost"], ",.2f", " $") for row in rows]),
    ]
    known = [(label, cells) for label, cells in lines if label and any(cell not in ("", "-") for cell in cells)]
    return [["", *(row["run"] for row in rows)], *([label, *cells] for label, cells in known)]


def _form(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _places(row: dict[str, Any]) -> str:
    if row["ranks"] is None:
        return ""
    return f"{row['ranks']} ({row['hosts']})" if row["hosts"] else str(row["ranks"])


def _accuracy(row: dict[str, Any]) -> str:
    return _form(row["top1"], ".2%") + (f" of {row['samples']:,}" if row["samples"] and row["top1"] is not None else "")


def _difference(row: dict[str, Any]) -> str:
    difference, noise = row["top1_difference"], row["top1_standard_error"]
    if difference is None:
        return ""
    text = f"{100 * difference:+.2f} points"
    if noise is None:
        return text
    return text + f" (chance alone: about {100 * 2 * noise:.2f})"


def _gigabytes(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def _watt_hours(joules: float | None) -> float | None:
    return None if joules is None else joules / 3600


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def page_table(comparison: Comparison) -> list[list[str]]:
    """The table as pages show it: of many runs, one line per run."""
    rows = table(comparison)
    return rows if len(comparison.runs) <= _MOST_COLUMNS else [list(column) for column in zip(*rows, strict=True)]


def markdown(comparison: Comparison) -> str:
    head, *rows = page_table(comparison)
    lines = [_cells(head), _cells(["---"] * len(head)), *map(_cells, rows)]
    return "\n".join([_capital(comparison.fairness.sentence) + ".", "", *lines, "", *listing(comparison.fairness), ""])


def listing(fairness: Fairness) -> list[str]:
    """What differs, a line each."""
    return [f"- {difference}{'' if difference.matters else ' (a condition)'}" for difference in fairness.differences]


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_json(comparison: Comparison) -> str:
    fair = comparison.fairness
    content = {
        "same_experiment": fair.same and not fair.unknown,
        "fairness": fair.sentence,
        "differences": [
            {"fact": difference.fact, "values": difference.values, "matters": difference.matters}
            for difference in fair.differences
        ],
        "speed_up": comparison.speedup_counts,
        "target_top1": comparison.target,
        "runs": comparison.rows,
        "notes": {run.name: run.notes for run in comparison.runs if run.notes},
    }
    return json.dumps(content, indent=2, default=str) + "\n"


def as_csv(comparison: Comparison) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(comparison.rows[0]))
    writer.writeheader()
    writer.writerows(comparison.rows)
    return text.getvalue()
