"""Sweeps as text: a line per trial, and a table."""

from collections.abc import Mapping

from paceline.analysis.sweeps.record import SweepRecord, SweepTrial
from paceline.analysis.tables import duration


def values_text(values: Mapping[str, str]) -> str:
    """Return e.g. "optim.lr=0.0316 train.global_batch=256"."""
    return " ".join(f"{field}={short(word)}" for field, word in values.items())


def short(word: str) -> str:
    """Return a number with four digits; other values as they are."""
    try:
        return word if word.lstrip("-").isdecimal() else f"{float(word):.4g}"
    except ValueError:
        return word


def result_text(record: SweepRecord, trial: SweepTrial) -> str:
    """Return how a trial ended."""
    reached = f"{record.label} {record.shown(trial.value)}" if trial.value is not None else ""
    at = f" (epoch {trial.epoch:.4g})" if reached and trial.epoch is not None else ""
    if trial.state == "complete":
        return f"{reached}{at}"
    reason = f": {trial.reason}" if trial.state == "failed" and trial.reason else ""
    return f"{trial.state}{f', {reached}{at}' if reached else ''}{reason}"


def trial_table(record: SweepRecord) -> list[list[str]]:
    """Return a table with a row per trial, the best first, below its head."""
    rows = [["trial", record.label, "epoch", *record.space, "state", "time"]]
    for trial in ranked(record):
        epoch = "-" if trial.epoch is None else f"{trial.epoch:.4g}"
        values = [short(trial.values.get(field, "-")) for field in record.space]
        rows.append(
            [str(trial.number), record.shown(trial.value), epoch, *values, trial.state, duration(trial.seconds) or "-"]
        )
    return rows


def ranked(record: SweepRecord) -> list[SweepTrial]:
    """Return complete trials from best to worst, then the others by number."""
    sign = 1 if record.metric == "loss" else -1
    return sorted(
        record.trials,
        key=lambda trial: (trial.state != "complete", sign * (trial.value or 0.0) if trial.state == "complete" else 0),
    )


def summary_line(record: SweepRecord) -> str:
    """Return the number of trials per state, and the best one."""
    counts = dict.fromkeys(("complete", "pruned", "diverged", "failed", "running"), 0)
    for trial in record.trials:
        counts[trial.state] += 1
    ended = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    best = record.best
    found = (
        f"best: trial {best.number}, {result_text(record, best)}, {values_text(best.values)}" if best else "no result"
    )
    return f"{record.name}: {len(record.trials)} of {record.planned} trials ({ended or 'none started'}); {found}"
