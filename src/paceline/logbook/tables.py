"""A comparison as people and programs read it: a table, Markdown, JSON, CSV."""

import csv
import io
import json
import re
from collections.abc import Sequence
from typing import Any

from paceline.base.files import printable
from paceline.logbook.compare import Comparison, Fairness

_MOST_COLUMNS = 6
"""Of a table with a column for each run."""


def table(comparison: Comparison) -> list[list[str]]:
    """Rows of text, the first one the heads: one line per figure, one column per run."""
    rows, counts = comparison.rows, comparison.speedup_counts
    of = " and ".join(dict.fromkeys(row["ratio_of"] for row in rows[1:] if row["ratio_of"])) or "times"
    word = "speed-up" if counts else f"ratio of {of} (no speed-up)"
    target = f"time to {100 * comparison.target:.5g}% top-1" if comparison.target is not None else ""
    lines = [
        ("status", [row["status"] for row in rows]),
        ("ranks (hosts)", [_places(row) for row in rows]),
        ("global batch", [_form(row["global_batch"], ",") for row in rows]),
        ("training time", [duration(row["train_seconds"]) for row in rows]),
        ("with evaluation and saves", [duration(row["total_seconds"]) if row["whole"] else "" for row in rows]),
        (word, ["-" if row is rows[0] else _form(row["ratio"], ".2f", "x") for row in rows]),
        (
            "efficiency",
            ["-" if row is rows[0] else _form(row["efficiency"] if counts else None, ".0%") for row in rows],
        ),
        ("images/s", [_form(row["images_per_second"], ",.0f") for row in rows]),
        (target, [_reached(row) for row in rows]),
        ("top-1", [_accuracy(row) for row in rows]),
        ("top-5", [_form(row["top5"], ".2%") for row in rows]),
        ("top-1 against the first", ["-" if row is rows[0] else _difference(row["top1_difference"]) for row in rows]),
        (
            "chance alone gives",
            ["-" if row is rows[0] else _chance(row["top1_standard_error"]) for row in rows],
        ),
        ("loss", [_form(row["loss"], ".4f") for row in rows]),
        ("most memory of a rank", [_form(_gigabytes(row["peak_memory"]), ".2f", " GB") for row in rows]),
        ("use of devices", [_form(row["device_use"], ".0%") for row in rows]),
        ("energy of GPUs", [_form(_watt_hours(row["energy_joules"]), ",.1f", " Wh") for row in rows]),
        ("cost", [_form(row["cost"], ",.2f" if (row["cost"] or 1) >= 0.1 else ".2g", " $") for row in rows]),
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


def _difference(share: float | None) -> str:
    if share is None:
        return ""
    text = f"{100 * share:+.2f}"
    return f"{'0.00' if float(text) == 0 else text} points"


def _chance(error: float | None) -> str:
    """Two standard errors."""
    return "" if error is None else f"±{200 * error:.2f} points"


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


def page_table(comparison: Comparison) -> list[list[str]]:
    """The table as pages show it: of many runs, one line per run."""
    rows = table(comparison)
    return rows if len(comparison.runs) <= _MOST_COLUMNS else [list(column) for column in zip(*rows, strict=True)]


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
