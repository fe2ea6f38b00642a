"""Lists of images: CSV or TSV files with a header; columns path and label, and optionally split (train or val)."""

import csv
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import UserError

SUFFIXES = (".csv", ".tsv")
_COLUMNS = {"path": ("path", "image", "file", "filename"), "label": ("label", "class"), "split": ("split",)}
_SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val"}

Row = tuple[str, str, Path]
"""Split (empty: not given), label and file."""


def read_list(path: Path) -> list[Row]:
    """All rows of a list; file names are relative to the list's own folder."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator = "\t" if path.suffix.lower() == ".tsv" else ","
            return list(_rows(csv.reader(file, delimiter=separator, strict=True), path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not readable as a list ({error}); write a UTF-8 file with a header line") from None


def _rows(reader: Any, path: Path) -> Iterator[Row]:
    head = [name.strip().lower() for name in next(reader, [])]
    places = {kind: _column(head, kind, known, path) for kind, known in _COLUMNS.items()}
    seen: dict[Path, int] = {}
    for row in reader:
        line = f"{path}: line {reader.line_num}"
        if not row:
            continue
        if len(row) != len(head):
            raise UserError(f"{line} has {len(row)} fields, the header {len(head)}; quote values that hold a comma")
        file, label, split = (row[place].strip() if place >= 0 else "" for place in places.values())
        label = unicodedata.normalize("NFC", label)
        if not file or not label:
            raise UserError(f"{line} has no {'label' if file else 'path'}; complete or remove it")
        if "\n" in label or "\n" in file:
            raise UserError(f"{line}: a quoted value spans several lines; close the quote")
        if places["split"] >= 0 and split.lower() not in _SPLITS:
            raise UserError(f"{line} has the split {split!r}; use train or val, and remove other rows")
        place = path.parent / file
        if not place.is_file():
            raise UserError(f"{line}: {place} does not exist; correct or remove the line")
        if (real := place.resolve()) in seen:
            raise UserError(f"{line}: {file} is in line {seen[real]} already; an image has one label and one split")
        seen[real] = reader.line_num
        yield _SPLITS.get(split.lower(), ""), label, place


def _column(head: list[str], kind: str, known: tuple[str, ...], path: Path) -> int:
    found = [number for number, name in enumerate(head) if name in known]
    if not found and kind != "split":
        names = ", ".join(head) or "it is empty"
        raise UserError(f"{path}: line 1 names no {kind} column ({names}); begin the file with path,label,split")
    if len(found) > 1:
        raise UserError(f"{path}: line 1 names {' and '.join(head[number] for number in found)}; keep one of them")
    return found[0] if found else -1
