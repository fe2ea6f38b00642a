"""The report's section about what models get wrong: the data of its script."""

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paceline.analysis.details.read import Details
from paceline.analysis.details.text import summary_lines
from paceline.analysis.page_parts import assets, script_data
from paceline.analysis.run import shows_top5
from paceline.errors import UserError

_MAX_CELLS = 60_000
_MAX_THUMBNAIL_BYTES = 2_000_000
"""Of all evaluations on a page together; later images have none."""
_NOTES = {
    "worst": (
        "Highest loss",
        "Wrong predictions, the highest loss first.",
    ),
    "least_certain": (
        "Least certain",
        "The smallest gap between the two most probable classes first.",
    ),
    "label_errors": (
        "Likely label errors",
        "Confident learning: the prediction is wrong, and the probability of another class is at least the mean that "
        "this class has over the images with its label. Look at an image before you change its label.",
    ),
}
_KINDS = {"ema": "EMA weights", "model": "trained weights"}


def details_html(found: Sequence[tuple[str, Details]], paired: str) -> tuple[str, str]:
    """Return the section of the page and its script, both empty without evaluations; `found`: by name of the run.

    `paired`: HTML of the comparison between runs.
    """
    if not found:
        return "", ""
    text, code = script_data(list(_evaluations(found))), assets("confusion.js", "details.js")
    section = f'<section id="details"><h2>What the models get wrong</h2>{paired}</section>'
    return section, f'<script type="application/json" id="details-data">{text}</script>\n<script>\n{code}\n</script>'


def _evaluations(found: Sequence[tuple[str, Details]]) -> Iterator[dict[str, Any]]:
    several, left = len({name for name, _ in found}) > 1, _MAX_THUMBNAIL_BYTES
    for name, details in found:
        thumbnails = {}
        for image in details.record["images"]:
            content = details.thumbnail(image["index"])
            if content and len(content) <= left:
                left -= len(content)
                thumbnails[image["index"]] = base64.b64encode(content).decode()
        yield {"title": f"{name}: {details.title}" if several else details.title, "thumbnails": thumbnails} | _data(
            details
        )


def _data(details: Details) -> dict[str, Any]:
    record = details.record
    settings = f"{record['checkpoint']} (step {record['step']:,}), {_KINDS.get(record['weights'], record['weights'])}"
    facts = f"{settings}, TTA {record['tta']}, {record['precision']}, {record['overall']['samples']:,} images"
    cells, note = _cells(details)
    return {
        "top1": record["overall"]["top1"],
        "showsTop5": shows_top5(len(record["classes"])),
        "lines": [*summary_lines(record), facts, *note],
        "names": [entry["name"] for entry in record["classes"]],
        "classes": [_class_row(row) for row in record["per_class"]],
        "cells": cells,
        "order": record["class_order"],
        "pairs": record["confused_pairs"],
        "galleries": [
            {"title": title, "note": text, "images": record["examples"].get(name, [])}
            | ({"total": record["num_label_errors"]} if name == "label_errors" else {})
            for name, (title, text) in _NOTES.items()
        ],
        "images": {image["index"]: _rounded(image) for image in record["images"]},
        "calibration": _rounded(record["calibration"]),
        "slices": _rounded(record.get("slices")),
    }


def _cells(details: Details) -> tuple[list[int], list[str]]:
    """Return label, prediction, count, label, ... of the confusion matrix, and notes about what is left out."""
    try:
        cells = details.confusion()
    except UserError as error:
        return [], [error.report]
    more = len(cells) - _MAX_CELLS
    if more > 0:
        cells = cells[np.sort(np.argsort(-cells[:, 2], kind="stable")[:_MAX_CELLS])]
    note = [f"the confusion matrix leaves out its {more:,} cells with the lowest counts"] if more > 0 else []
    flat: list[int] = cells.ravel().tolist()
    return flat, note


def _class_row(row: dict[str, Any]) -> list[Any]:
    low, high = row["interval"] or (None, None)
    return _rounded([row["recall"], low, high, row["precision"], row["f1"], row["support"], row["predicted"]])


def _rounded(value: Any) -> Any:
    """Return a JSON value with fewer digits, which makes the page smaller, but enough to show the same percentages."""
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
