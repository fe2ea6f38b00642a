"""Lists of images: CSV or TSV files with a header; columns path and label, and optionally split (train or val)."""

import csv
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import UserError

SUFFIXES = (".csv", ".tsv")
_PATHS, _LABELS = ("path", "image", "file", "filename"), ("label", "class")
_SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val"}

Row = tuple[str, str, Path]
"""Split (empty: not given), label and file."""


def read_list(path: Path) -> list[Row]:
    """All rows of a list; file names are relative to the list's own folder."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(_rows(csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","), path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not readable as a list ({error}); write a UTF-8 file with a header line") from None


def _rows(reader: "csv.DictReader[str]", path: Path) -> Iterator[Row]:
    names = {name.strip().lower(): name for name in reader.fieldnames or [] if name}
    columns = {}
    for kind, known in (("path", _PATHS), ("label", _LABELS)):
        if not (found := [names[name] for name in known if name in names]):
            raise UserError(
                f"{path}: line 1 names no {kind} column ({', '.join(names) or 'it is empty'}); begin the file with a "
                "header: path,label,split"
            )
        columns[kind] = found[0]
    for row in reader:
        line = reader.line_num
        file, label = ((row[columns[kind]] or "").strip() for kind in ("path", "label"))
        if not file or not label:
            raise UserError(f"{path}: line {line} has no {'label' if file else 'path'}; complete or remove it")
        split = (row.get(names.get("split", "")) or "").strip()
        if "split" in names and split.lower() not in _SPLITS:
            raise UserError(f"{path}: line {line} has the split {split!r}; use train or val, and remove other rows")
        place = path.parent / file
        if not place.is_file():
            raise UserError(f"{path}: line {line}: {place} does not exist; correct or remove the line")
        yield _SPLITS.get(split.lower(), ""), label, place
