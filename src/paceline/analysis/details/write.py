"""Writes the folder of an evaluation: details.json, predictions.parquet, CSV tables and thumbnails."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from paceline.analysis.details.record import EvaluationFigures
from paceline.system.files import make_folder, naming, replacing, write_text
from paceline.track.sealed import write_sealed

DETAILS, THUMBNAILS = "details.json", "thumbnails"
PARQUET, CSV = "predictions.parquet", "predictions.csv"
_CLASSES, _CONFUSION, _SLICES = "classes.csv", "confusion.csv", "slices.csv"
_FILES = {DETAILS, THUMBNAILS, PARQUET, CSV, _CLASSES, _CONFUSION, _SLICES}


def other_file(folder: Path) -> str:
    """Return the name of a file that is not part of the details in a folder, and that they could replace; else ""."""
    paths = folder.iterdir() if folder.is_dir() else ()
    names = sorted(path.name for path in paths if not path.name.startswith("."))
    # thumbnails come first, so that interrupted details have them
    return next((name for name in names if name not in _FILES or THUMBNAILS not in names), "")


def write_details(
    folder: Path, figures: EvaluationFigures, facts: Mapping[str, Any], thumbnails: Mapping[int, bytes]
) -> dict[str, Any]:
    """Write all files, details.json last; it marks a complete folder. Returns its content.

    `facts`: what was evaluated, with the classes; `thumbnails`: WebP files by id.
    """
    make_folder(folder / THUMBNAILS)
    for old in (folder / DETAILS, folder / PARQUET, folder / CSV, folder / _SLICES):
        old.unlink(missing_ok=True)
    for old in (folder / THUMBNAILS).glob("*.webp"):
        if old.stem.isdecimal():
            old.unlink()
    for number, content in thumbnails.items():
        path = folder / THUMBNAILS / f"{number}.webp"
        with naming(path):
            path.write_bytes(content)
    names = [entry["name"] for entry in facts["classes"]]
    record = {**facts, **figures.record, "predictions": _predictions(folder, figures, names)}
    write_text(folder / _CLASSES, _classes(figures.record["per_class"], facts["classes"]))
    cells = ([names[a], names[b], a, b, count] for a, b, count in figures.cells.tolist())
    head = ["label_name", "predicted_name", "label", "predicted", "count"]
    write_text(folder / _CONFUSION, _csv(head, cells))
    if "slices" in record:
        write_text(folder / _SLICES, _slices(record["slices"]["rows"]))
    write_sealed(folder / DETAILS, record)
    return record


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def _classes(rows: Sequence[dict[str, Any]], classes: Sequence[dict[str, str]]) -> str:
    head = ["class", "id", "name", "support", "predicted", "correct", "recall", "recall_low", "recall_high"]
    head += ["precision", "precision_low", "precision_high", "f1"]
    lines = (
        [
            row["class"],
            entry["id"],
            entry["name"],
            row["support"],
            row["predicted"],
            row["correct"],
            row["recall"],
            *(row["interval"] or ("", "")),
            row["precision"],
            *(row["precision_interval"] or ("", "")),
            row["f1"],
        ]
        for row, entry in zip(rows, classes, strict=True)
    )
    return _csv(head, lines)


def _slices(rows: Sequence[dict[str, Any]]) -> str:
    head = ["slice", "samples", "correct", "top1", "top1_low", "top1_high", "top5", "loss", "mean_confidence"]
    lines = (
        [
            row["slice"],
            row["samples"],
            row["correct"],
            row["top1"],
            *row["interval"],
            row["top5"],
            row["loss"],
            row["mean_confidence"],
        ]
        for row in rows
    )
    return _csv(head, lines)


def _predictions(folder: Path, figures: EvaluationFigures, names: Sequence[str]) -> str:
    """Write a row per sample, as Parquet if pyarrow is installed, else as CSV. Returns the name of the file."""
    columns = _columns(figures, names)
    with suppress(ImportError):
        import pyarrow as pa
        import pyarrow.parquet as pq

        content = pa.BufferOutputStream()  # Arrow would hide which file does not fit on the disk
        pq.write_table(pa.table({name: _arrow(pa, values) for name, values in columns.items()}), content)
        with replacing(folder / PARQUET) as file:
            file.write(content.getvalue())
        return PARQUET
    flat = {
        name: [" ".join(map(str, row)) for row in v] if name.startswith("top5") else v for name, v in columns.items()
    }
    lists = [values.tolist() if isinstance(values, np.ndarray) else values for values in flat.values()]
    write_text(folder / CSV, _csv(list(flat), zip(*lists, strict=True)))
    return CSV


def _columns(figures: EvaluationFigures, names: Sequence[str]) -> dict[str, Any]:
    samples, scores = figures.samples, figures.scores
    ids = samples.ids.tolist()
    suspected = np.zeros(len(ids), bool)
    suspected[figures.label_errors] = True
    columns: dict[str, Any] = {
        "index": samples.ids,
        "path": [samples.name(number) for number in ids],
        "label": scores.labels,
        "label_name": [names[number] for number in scores.labels.tolist()],
        "predicted": scores.predicted,
        "predicted_name": [names[number] for number in scores.predicted.tolist()],
        "correct": scores.correct,
        "likely_label_error": suspected,
    }
    columns |= {
        name: getattr(scores, name).astype(np.float32)
        for name in ("confidence", "p_label", "loss", "entropy", "margin")
    }
    columns |= {"top5": scores.top_ids, "top5_probabilities": scores.top_probabilities.astype(np.float32)}
    if samples.slices:
        columns["slice"] = [samples.slices[number] for number in ids]
    return columns


def _arrow(pa: Any, values: Any) -> Any:
    if isinstance(values, np.ndarray) and values.ndim == 2:
        return pa.ListArray.from_arrays(np.arange(0, values.size + 1, values.shape[1]), values.ravel())
    return pa.array(values)
