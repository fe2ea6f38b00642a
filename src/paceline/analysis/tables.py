"""A comparison as a table, Markdown, JSON and CSV."""

import csv
import io
import json
import re
from collections.abc import Sequence
from typing import Any

from paceline.analysis.compare import ComparedRuns
from paceline.analysis.curves import CURVES, common_name
from paceline.analysis.details.paired_text import paired_markdown, sentences
from paceline.analysis.fairness import Fairness
from paceline.analysis.groups_text import group_tables, markdown_lines
from paceline.analysis.groups_text import sentences as group_sentences
from paceline.analysis.run import LoggedRun
from paceline.system.files import printable
from paceline.system.tables import lines_of, new_table

_MAX_COLUMNS = 3
"""Runs in a table with a column per run; with more runs, the table has a row per run."""
_LOSS = next(curve for curve in CURVES if curve.metric == "loss")


def table(comparison: ComparedRuns) -> list[list[str]]:
    """Return rows of text, the first one the header: a row per figure, a column per run, the main results first."""
    rows, runs, counts = comparison.rows, comparison.runs, comparison.is_comparable
    of = " and ".join(dict.fromkeys(row["ratio_of"] for row in rows[1:] if row["ratio_of"])) or "training time"
    target = f"time to {100 * comparison.target:.5g}% top-1" if comparison.target is not None else ""
    lines = [
        ("top-1", [_accuracy(row) for row in rows]),
        ("best top-1", [best(run) for run in runs]),
        ("test top-1 (of the best checkpoint)", [_form(run.tested.get("top1"), ".2%") for run in runs]),
        ("training time", [duration(row["train_seconds"]) for row in rows]),
        (
            _ratio_name(comparison, of),
            ["-", *(_form(row["ratio"], ".2f", "x") for row in rows[1:])],
        ),
        ("efficiency", ["-", *(_form(row["efficiency"] if counts else None, ".0%") for row in rows[1:])]),
        ("difference in top-1 to the first run (±2 standard errors)", ["-", *map(_difference, rows[1:])]),
        ("images/s", [_form(row["images_per_second"], ",.0f") for row in rows]),
        (target, [_time_to_target(row) for row in rows]),
        ("ranks (hosts)", [_ranks(row) for row in rows]),
        ("global batch", [_form(row["global_batch"], ",") for row in rows]),
        ("peak memory per rank", [_form(_gigabytes(row["peak_memory"]), ".2f", " GB") for row in rows]),
        ("device utilization", [_form(row["device_utilization"], ".0%") for row in rows]),
        (
            "time with evaluation and checkpoints",
            [duration(row["total_seconds"]) if row["has_total_time"] else "" for row in rows],
        ),
        ("top-5", [_form(row["top5"], ".2%") for row in rows]),
        (common_name(runs, _LOSS, "eval"), [_form(row["loss"], ".4f") for row in rows]),
        (common_name(runs, _LOSS, "train"), [_form(_last_loss(run), ".4f") for run in runs]),
        ("other CPU load", [_form(row["other_load"], ".0%") for row in rows]),
        ("GPU energy", [_form(_watt_hours(row["energy_joules"]), ",.1f", " Wh") for row in rows]),
        ("cost", [_form(row["cost"], ",.2f" if (row["cost"] or 1) >= 0.1 else ".2g", " $") for row in rows]),
        ("status", [row["status"] for row in rows]),
    ]
    known = [(label, cells) for label, cells in lines if label and any(cell not in ("", "-") for cell in cells)]
    return [["", *(row["run"] for row in rows)], *([label, *cells] for label, cells in known)]


def best(run: LoggedRun) -> str:
    """Return the best top-1 and its epoch."""
    if not run.best:
        return ""
    place = f"epoch {run.best['epoch']:.4g}" if run.best.get("epoch") is not None else f"step {run.best['step']:,}"
    return f"{run.best['top1']:.2%} ({place})"


def _last_loss(run: LoggedRun) -> float | None:
    return run.trained[-1].get("loss") if run.trained else None


def _ratio_name(comparison: ComparedRuns, of: str) -> str:
    if not comparison.is_comparable:
        return f"ratio of {of} (not a speed-up)"
    return "speed-up" if comparison.is_reliable else "speed-up (unreliable)"


def _form(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _ranks(row: dict[str, Any]) -> str:
    if row["ranks"] is None:
        return ""
    return f"{row['ranks']} ({row['hosts']})" if row["hosts"] else str(row["ranks"])


def _accuracy(row: dict[str, Any]) -> str:
    return _form(row["top1"], ".2%") + (f" of {row['samples']:,}" if row["samples"] and row["top1"] is not None else "")


def _difference(row: dict[str, Any]) -> str:
    difference, error = row["top1_difference"], row["top1_standard_error"]
    if difference is None:
        return ""
    text = f"{100 * difference:+.2f}"
    margin = "" if error is None else f" ±{200 * error:.2f}"
    return f"{'0.00' if float(text) == 0 else text}{margin} points"


def _time_to_target(row: dict[str, Any]) -> str:
    if row["target_reached"] is None or row["seconds_to_target"] is not None:
        return duration(row["seconds_to_target"])
    return "no times in the log" if row["target_reached"] or not row["total_seconds"] else "not reached"


def _gigabytes(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def _watt_hours(joules: float | None) -> float | None:
    return None if joules is None else joules / 3600


def duration(seconds: float | None) -> str:
    """Return seconds, or H:MM:SS from two minutes on; empty if unknown."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def runs_are_rows(comparison: ComparedRuns) -> bool:
    """Return whether the table has a row per run instead of a column."""
    return len(comparison.runs) > _MAX_COLUMNS


def page_table(comparison: ComparedRuns) -> list[list[str]]:
    """Return the table as terminals and pages show it: with many runs, a row per run."""
    rows = table(comparison)
    return [list(column) for column in zip(*rows, strict=True)] if runs_are_rows(comparison) else rows


def markdown(comparison: ComparedRuns) -> str:
    """Return the verdict, the table and the differences as Markdown."""
    head, *rows = page_table(comparison)
    lines = [_cells(head), _cells(["---"] * len(head)), *map(_cells, rows)]
    differences = map(plain, listing(comparison.fairness))
    groups, classes = markdown_lines(comparison.grouped, plain), paired_markdown(comparison.paired, plain)
    return "\n".join([_capital(plain(comparison.summary)) + ".", "", *lines, "", *differences, *groups, *classes, ""])


def as_text(comparison: ComparedRuns) -> str:
    """Return the summary, the differences and the table as plain text."""
    head, *rows = page_table(comparison)
    lines = [_capital(comparison.summary) + ".", *listing(comparison.fairness), "", *lines_of(new_table(head, rows))]
    for heads, cells in group_tables(comparison.grouped):
        lines += ["", *lines_of(new_table(heads, cells))]
    lines += group_sentences(comparison.grouped)
    lines += [line for pair in comparison.paired for line in ("", *sentences(pair))]
    return "\n".join(map(printable, lines))


def listing(fairness: Fairness) -> list[str]:
    """Return the differences as list items."""
    return [
        f"- {difference}" + (f" ({effect})" if (effect := fairness.effect(difference)) else "")
        for difference in fairness.differences
    ]


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join("---" if cell == "---" else plain(cell) for cell in cells) + " |"


def plain(text: str) -> str:
    """Return text escaped for Markdown and HTML."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", printable(text))


def as_json(comparison: ComparedRuns) -> str:
    """Return verdict, differences and all figures as JSON."""
    fair = comparison.fairness
    content = {
        "same_experiment": fair.same and not fair.unknown,
        "summary": comparison.summary,
        "warnings": comparison.warnings,
        "differences": [
            {"fact": difference.fact, "values": difference.values, "matters": difference.matters}
            for difference in fair.differences
        ],
        "is_comparable": comparison.is_comparable,
        "is_reliable": comparison.is_reliable,
        "target_top1": comparison.target,
        "runs": comparison.rows,
        "seeds": comparison.grouped.to_json(),
        "paired": [pair.to_json() for pair in comparison.paired],
        "notes": {run.name: run.notes for run in comparison.runs if run.notes},
    }
    return json.dumps(content, indent=2, default=str) + "\n"


def as_csv(comparison: ComparedRuns) -> str:
    """Return a line per run with all figures as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(comparison.rows[0]))
    writer.writeheader()
    writer.writerows(comparison.rows)
    return text.getvalue()
