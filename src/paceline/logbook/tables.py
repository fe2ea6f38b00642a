"""A comparison as people and programs read it: a table, Markdown, JSON, CSV."""

import csv
import io
import json
import re
from collections.abc import Sequence
from typing import Any

from paceline.logbook.compare import Comparison, Fairness
from paceline.logbook.curves import CURVES, common_name
from paceline.logbook.read import Run
from paceline.system.files import printable

_MOST_COLUMNS = 3
"""Of a table with a column for each run; with more runs, each one has a line, which ends in what matters least."""
_LOSS = next(curve for curve in CURVES if curve.metric == "loss")


def table(comparison: Comparison) -> list[list[str]]:
    """Rows of text, the first one the heads: one line per figure, one column per run, what matters most first."""
    rows, runs, counts = comparison.rows, comparison.runs, comparison.speedup_counts
    of = " and ".join(dict.fromkeys(row["ratio_of"] for row in rows[1:] if row["ratio_of"])) or "times"
    target = f"time to {100 * comparison.target:.5g}% top-1" if comparison.target is not None else ""
    lines = [
        ("top-1", [_accuracy(row) for row in rows]),
        ("best top-1", [best(run) for run in runs]),
        ("training time", [duration(row["train_seconds"]) for row in rows]),
        (
            _ratio_name(comparison, of),
            ["-", *(_form(row["ratio"], ".2f", "x") for row in rows[1:])],
        ),
        ("efficiency", ["-", *(_form(row["efficiency"] if counts else None, ".0%") for row in rows[1:])]),
        ("difference in top-1 to the first run (±2 standard errors)", ["-", *map(_difference, rows[1:])]),
        ("images/s", [_form(row["images_per_second"], ",.0f") for row in rows]),
        (target, [_reached(row) for row in rows]),
        ("ranks (hosts)", [_places(row) for row in rows]),
        ("global batch", [_form(row["global_batch"], ",") for row in rows]),
        ("peak memory per rank", [_form(_gigabytes(row["peak_memory"]), ".2f", " GB") for row in rows]),
        ("device utilization", [_form(row["device_use"], ".0%") for row in rows]),
        (
            "time with evaluation and checkpoints",
            [duration(row["total_seconds"]) if row["whole"] else "" for row in rows],
        ),
        ("top-5", [_form(row["top5"], ".2%") for row in rows]),
        (common_name(runs, _LOSS, "eval"), [_form(row["loss"], ".4f") for row in rows]),
        (common_name(runs, _LOSS, "train"), [_form(_last_loss(run), ".4f") for run in runs]),
        ("other CPU load", [_form(row["other_load"], ".0%") for row in rows]),
        ("energy of GPUs", [_form(_watt_hours(row["energy_joules"]), ",.1f", " Wh") for row in rows]),
        ("cost", [_form(row["cost"], ",.2f" if (row["cost"] or 1) >= 0.1 else ".2g", " $") for row in rows]),
        ("status", [row["status"] for row in rows]),
    ]
    known = [(label, cells) for label, cells in lines if label and any(cell not in ("", "-") for cell in cells)]
    return [["", *(row["run"] for row in rows)], *([label, *cells] for label, cells in known)]


def best(run: Run) -> str:
    """The best top-1, and when it was reached."""
    if not run.best:
        return ""
    place = f"epoch {run.best['epoch']:.4g}" if run.best.get("epoch") is not None else f"step {run.best['step']:,}"
    return f"{run.best['top1']:.2%} ({place})"


def _last_loss(run: Run) -> float | None:
    return run.trained[-1].get("loss") if run.trained else None


def _ratio_name(comparison: Comparison, of: str) -> str:
    if not comparison.speedup_counts:
        return f"ratio of {of} (no speed-up)"
    return "speed-up" if comparison.certified else "speed-up (unreliable)"


def _form(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _places(row: dict[str, Any]) -> str:
    if row["ranks"] is None:
        return ""
    return f"{row['ranks']} ({row['hosts']})" if row["hosts"] else str(row["ranks"])


def _accuracy(row: dict[str, Any]) -> str:
    return _form(row["top1"], ".2%") + (f" of {row['samples']:,}" if row["samples"] and row["top1"] is not None else "")


def _difference(row: dict[str, Any]) -> str:
    share, error = row["top1_difference"], row["top1_standard_error"]
    if share is None:
        return ""
    text = f"{100 * share:+.2f}"
    chance = "" if error is None else f" ±{200 * error:.2f}"
    return f"{'0.00' if float(text) == 0 else text}{chance} points"


def _reached(row: dict[str, Any]) -> str:
    if row["seconds_to_target"] is None and row["top1"] is not None and row["train_seconds"]:
        return "not reached"
    return duration(row["seconds_to_target"])


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


def runs_are_lines(comparison: Comparison) -> bool:
    return len(comparison.runs) > _MOST_COLUMNS


def page_table(comparison: Comparison) -> list[list[str]]:
    """The table as screens and pages show it: of many runs, one line per run."""
    rows = table(comparison)
    return [list(column) for column in zip(*rows, strict=True)] if runs_are_lines(comparison) else rows


def markdown(comparison: Comparison) -> str:
    head, *rows = page_table(comparison)
    lines = [_cells(head), _cells(["---"] * len(head)), *map(_cells, rows)]
    differences = map(plain, listing(comparison.fairness))
    return "\n".join([_capital(plain(comparison.sentence)) + ".", "", *lines, "", *differences, ""])


def listing(fairness: Fairness) -> list[str]:
    """What differs, a line each."""
    return [f"- {difference}{'' if difference.matters else ' (a condition)'}" for difference in fairness.differences]


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join("---" if cell == "---" else plain(cell) for cell in cells) + " |"


def plain(text: str) -> str:
    """Text that Markdown and HTML show as it is."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", printable(text))


def as_json(comparison: Comparison) -> str:
    fair = comparison.fairness
    content = {
        "same_experiment": fair.same and not fair.unknown,
        "fairness": comparison.sentence,
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
