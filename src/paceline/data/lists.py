"""Lists of images: CSV or TSV files with the columns path, label and optionally split (train, val or test)."""

import csv
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import UserError

SUFFIXES = (".csv", ".tsv")
_COLUMNS = {"path": ("path", "image", "file", "filename"), "label": ("label", "class"), "split": ("split",)}
_SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}

ListRow = tuple[str, str, Path]
"""Split (empty if not given), label and file."""


def read_list(path: Path) -> list[ListRow]:
    """Return all rows of a list. File names are relative to the folder of the list."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator = "\t" if path.suffix.lower() == ".tsv" else ","
            return list(_rows(csv.reader(file, delimiter=separator, strict=True), path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        message = f"{path} is not readable as a list ({error}). It must be a UTF-8 file with a header line."
        raise UserError("list-unreadable", message, path=path) from None


def _rows(reader: Any, path: Path) -> Iterator[ListRow]:
    head = [name.strip().lower() for name in next(reader, [])]
    places = {kind: _column(head, kind, known, path) for kind, known in _COLUMNS.items()}
    seen: dict[Path, int] = {}
    for row in reader:
        number = reader.line_num
        line = f"{path}: line {number}"
        if not row:
            continue
        if len(row) != len(head):
            message = (
                f"{line} has {len(row)} fields, but the header has {len(head)}. Quote values that contain a comma."
            )
            raise UserError("list-fields-mismatch", message, path=path, line=number)
        file, label, split = (row[place].strip() if place >= 0 else "" for place in places.values())
        label = unicodedata.normalize("NFC", label)
        if not file or not label:
            message = f"{line} has no {'label' if file else 'path'}. Complete or remove the line."
            raise UserError("list-value-missing", message, path=path, line=number)
        if "\n" in label or "\n" in file:
            message = f"{line}: a quoted value spans several lines. Close the quote."
            raise UserError("list-quote-open", message, path=path, line=number)
        if places["split"] >= 0 and split.lower() not in _SPLITS:
            message = f"{line} has the split {split!r}. Use train, val or test."
            raise UserError("list-split-invalid", message, path=path, line=number)
        place = path.parent / file
        if not place.is_file():
            message = f"{line}: {place} does not exist. Fix or remove the line."
            raise UserError("list-image-not-found", message, path=path, line=number)
        if (real := place.resolve()) in seen:
            message = f"{line}: {file} is already in line {seen[real]}. An image has one label and one split."
            raise UserError("list-image-duplicate", message, path=path, line=number)
        seen[real] = number
        yield _SPLITS.get(split.lower(), ""), label, place


def _column(head: list[str], kind: str, known: tuple[str, ...], path: Path) -> int:
    found = [number for number, name in enumerate(head) if name in known]
    if not found and kind != "split":
        names = ", ".join(head) or "it is empty"
        message = f"{path}: line 1 has no {kind} column ({names}). Start the file with a header: path,label,split"
        raise UserError("list-column-missing", message, path=path, column=kind)
    if len(found) > 1:
        message = f"{path}: line 1 has the columns {' and '.join(head[number] for number in found)}. Keep one of them."
        raise UserError("list-column-ambiguous", message, path=path, column=kind)
    return found[0] if found else -1
