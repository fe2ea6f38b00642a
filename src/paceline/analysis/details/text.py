"""The details of an evaluation as tables for the terminal."""

from collections.abc import Sequence
from typing import Any

from paceline.analysis.details.calibration import TEMPERATURES
from paceline.analysis.details.read import Details
from paceline.analysis.details.record import TRAINED_ON
from paceline.data.splits import TEST
from paceline.system.tables import new_table, output, show

_SHOWN = 5
_SHOWN_SLICES = 20


def show_details(details: Details) -> None:
    """Print accuracy, worst classes, confused pairs, calibration, likely label errors, slices and the folder."""
    record, screen = details.record, output()
    for line in summary_lines(record):
        screen.print(line, soft_wrap=True)
    names = [entry["name"] for entry in record["classes"]]
    tables = [
        ("worst classes", _classes(record["per_class"], names)),
        ("most confused", _pairs(record["confused_pairs"], names)),
        (f"by {record['slices']['by']}" if "slices" in record else "", _slices(record.get("slices"))),
    ]
    for title, (head, *rows) in tables:
        if rows:
            print()
            table = new_table((title, *head), rows)
            for column in table.columns[1:]:
                column.justify = "right"
            show(table, screen)
    print()
    files = ["details.json", record["predictions"], "classes.csv", "confusion.csv"]
    files += ["slices.csv"] if "slices" in record else []
    screen.print(f"{details.path}: {', '.join(files)}", soft_wrap=True)
    if details.path.parent.name == "evaluations":
        screen.print(f"`paceline report {details.path.parents[1]}` shows them with images.", soft_wrap=True)


def summary_lines(record: dict[str, Any]) -> list[str]:
    """Return the sentences above the tables, which the report shows as well."""
    whole, calibration = record["overall"], record["calibration"]
    lines = [TRAINED_ON] if record["data"]["trained_on"] else []
    lines += [
        f"top-1 {percent(whole['top1'])} (95% CI: {interval(whole['interval'])}), "
        f"balanced accuracy {percent(whole['balanced_accuracy'])}, macro F1 {percent(whole['f1'])}"
    ]
    temperature = calibration["temperature"]
    after = "; no temperature from {:g} to {:g} minimizes the loss".format(*TEMPERATURES)
    if temperature is not None:
        shown = f"{temperature:.3g}"
        # fitted to test images, it would make later figures on them optimistic
        apply = f"paceline predict --temperature {shown}"
        apply = "to apply one, fit it to val" if record["data"]["split"] == TEST else apply
        after = f"; {percent(calibration['ece_after'])} at temperature {shown}, fitted to the same images ({apply})"
    lines.append(f"expected calibration error (15 bins): {percent(calibration['ece'])}{after}")
    count = record["num_label_errors"]
    lines.append(f"likely label errors: {count:,}" + (" (confident learning)" if count else ""))
    if corrupt := record["data"]["num_corrupt"]:
        lines.append(f"left out as corrupt: {corrupt:,}")
    if "slices" in record and (unmatched := record["slices"]["unmatched"]):
        lines.append(f"images without a slice: {unmatched:,}")
    return lines


def percent(value: float | None) -> str:
    """Return a fraction in percent; empty if there is none."""
    return "" if value is None else f"{value:.2%}"


def interval(bounds: Sequence[float] | None) -> str:
    """Return a confidence interval in percent."""
    return f"{100 * bounds[0]:.1f}-{100 * bounds[1]:.1f}%" if bounds else ""


def _classes(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Sequence[str]]:
    present = [row for row in rows if row["support"]]
    worst = sorted(present, key=lambda row: (row["recall"], row["class"]))[:_SHOWN]
    cells = [
        (
            names[row["class"]],
            percent(row["recall"]),
            interval(row["interval"]),
            percent(row["precision"]),
            percent(row["f1"]),
            f"{row['support']:,}",
        )
        for row in worst
    ]
    return [("recall", "95% CI", "precision", "F1", "images"), *cells]


def _pairs(pairs: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Sequence[str]]:
    cells = [
        (names[pair["label"]], names[pair["predicted"]], f"{pair['count']:,}", percent(pair["fraction"]))
        for pair in pairs[:_SHOWN]
    ]
    return [("predicted as", "images", "of the class"), *cells]


def _slices(slices: dict[str, Any] | None) -> list[Sequence[str]]:
    rows = sorted(slices["rows"], key=lambda row: row["top1"]) if slices else []
    cells = [
        (
            row["slice"] if row["slice"] is not None else "(no value)",
            percent(row["top1"]),
            interval(row["interval"]),
            f"{row['loss']:.4f}",
            f"{row['samples']:,}",
        )
        for row in rows[:_SHOWN_SLICES]
    ]
    return [("top-1", "95% CI", "loss", "images"), *cells]
