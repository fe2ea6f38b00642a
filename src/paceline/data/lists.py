"""Lists of images: CSV, TSV, JSONL or Parquet files with the columns path, label and optionally split."""

import csv
import errno
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.data.splits import split_named
from paceline.errors import UserError
from paceline.system.packages import needs_package

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
_COLUMNS = {"path": ("path", "image", "file", "filename"), "label": ("label", "class"), "split": ("split",)}
_SHOWN = 10  # missing files
_MAX_SHOWN = 300  # characters of a path

ListRow = tuple[str, str, Path]
"""Split (empty if not given), label and file."""
_Record = tuple[str, dict[int, Any]]
"""Where it is, e.g. line 2, and its values by the position of their column: two columns may have the same name."""


def read_list(path: Path, image_column: str = "", label_column: str = "") -> list[ListRow]:
    """Return all rows of a list. File names are relative to the folder of the list."""
    given = {"path": image_column, "label": label_column}
    columns, records = _read(path, (*sum(_COLUMNS.values(), ()), *given.values()))
    return _rows(records, {kind: _position(columns, kind, path, given.get(kind, "")) for kind in _COLUMNS}, path)


def columns_of(path: Path) -> list[str]:
    """Return the names of the columns of a list."""
    return _read(_checked(path), ())[0]


def column_values(path: Path, column: str) -> dict[str, str]:
    """Return the value of every image in a column, by its path relative to the folder of the list."""
    columns, records = _read(_checked(path), (*_COLUMNS["path"], column))
    names, wanted = _position(columns, "path", path), _position(columns, column, path, column)
    values: dict[str, str] = {}
    for where, row in records:
        place, line = f"{path}: {where}", _number(where)
        file = _text(row.get(names), "path", place, path, line)
        if not file:
            raise UserError("list-value-missing", f"{place} has no path. Complete or remove it.", path=path, line=line)
        name = os.path.relpath(path.parent / file, path.parent)
        value = _text(row.get(wanted), f"value of {column}", place, path, line)
        if values.setdefault(name, value) != value:
            message = f"{place}: {name} already has another {column}. Keep one of them."
            raise UserError("list-image-duplicate", message, path=path, line=line)
    return values


def _checked(path: Path) -> Path:
    if path.suffix.lower() not in SUFFIXES:
        message = f"{path} is not a list: its name must end in {' or '.join(SUFFIXES)}."
        raise UserError("list-unreadable", message, path=path)
    return path


def _read(path: Path, wanted: Collection[str]) -> tuple[list[str], list[_Record]]:
    """Return the names of all columns, and the records with at least the wanted columns."""
    suffix = path.suffix.lower()
    form = {".jsonl": "one JSON object per line", ".parquet": "a Parquet file"}.get(suffix, "UTF-8 with a header line")
    try:
        if suffix == ".parquet":
            return _parquet(path, {name.lower() for name in wanted})
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _json_lines(file, path) if suffix == ".jsonl" else _separated(file, path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        message = f"{path} is not readable as a list ({error}). It must be {form}."
        raise UserError("list-unreadable", message, path=path) from None


# ---- formats: the columns, and the records ----


def _separated(file: Any, path: Path) -> tuple[list[str], list[_Record]]:
    reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
    head = [name.strip() for name in next(reader, [])]
    records = []
    for row in _valid(reader, path):
        if len(row) not in (0, len(head)):
            message = f"{path}: line {reader.line_num} has {len(row)} fields, but the header has {len(head)}."
            fix = "Quote values that contain a comma."
            raise UserError("list-fields-mismatch", f"{message} {fix}", path=path, line=reader.line_num)
        if row:
            records.append((f"line {reader.line_num}", dict(enumerate(row))))
    return head, records


def _valid(reader: Any, path: Path) -> Iterator[list[str]]:
    """Yield the rows of a CSV file. Raises if a quote is not closed, naming the line where the row begins."""
    begin = reader.line_num + 1
    try:
        for row in reader:
            begin = reader.line_num + 1
            yield row
    except csv.Error as error:
        message = f"{path}: line {begin} is not valid CSV ({error}). Close its quotes, and double those in values."
        raise UserError("list-unreadable", message, path=path, line=begin) from None


def _json_lines(file: Any, path: Path) -> tuple[list[str], list[_Record]]:
    columns: dict[str, int] = {}
    records = []
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            message = f'{path}: line {number} is not a JSON object. Write one per line: {{"path": ..., "label": ...}}'
            raise UserError("list-unreadable", message, path=path, line=number)
        row = {columns.setdefault(name, len(columns)): value for name, value in values.items()}
        records.append((f"line {number}", row))
    return [name.strip() for name in columns], records


def _parquet(path: Path, wanted: Collection[str]) -> tuple[list[str], list[_Record]]:
    with needs_package("pyarrow", str(path), extra="parquet"):
        from pyarrow import ArrowException, parquet
    try:
        names = parquet.ParquetFile(path).schema_arrow.names
        # other columns may hold whole images; of columns with the same name, none can be meant
        read = {at: name for at, name in enumerate(names) if name.strip().lower() in wanted and names.count(name) == 1}
        table = parquet.read_table(path, columns=list(read.values()))
        rows = zip(*(table.column(name).to_pylist() for name in read.values()), strict=True)
    except ArrowException as error:
        raise OSError(" ".join(str(error).split())[:200]) from None
    records = [(f"row {number}", dict(zip(read, row, strict=True))) for number, row in enumerate(rows, 1)]
    return [name.strip() for name in names], records


# ---- the same rules for all formats ----


def _position(columns: Sequence[str], kind: str, path: Path, given: str = "") -> int:
    """Return the position of a kind of column, or of the given one; -1 for a missing split column."""
    place = f"{path}: line 1" if path.suffix.lower() in (".csv", ".tsv") else path
    wanted = (given.lower(),) if given else _COLUMNS[kind]
    found = [number for number, name in enumerate(columns) if name.lower() in wanted]
    if not found and kind != "split":
        message = f"{place} has no {kind} column ({', '.join(columns) or 'it is empty'})."
        fix = f"Name it {wanted[0]}; a CSV list starts with the line path,label,split"
        raise UserError("list-column-missing", f"{message} {fix}", path=path, column=kind)
    if len(found) > 1:
        message = f"{place} has the columns {' and '.join(columns[number] for number in found)}. Keep one of them."
        raise UserError("list-column-ambiguous", message, path=path, column=kind)
    return found[0] if found else -1


def _number(where: str) -> int:
    return int(where.rpartition(" ")[2])


def _rows(records: list[_Record], chosen: dict[str, int], path: Path) -> list[ListRow]:
    seen: dict[Path, str] = {}
    rows, missing = list[ListRow](), list[str]()
    for where, values in records:
        place = f"{path}: {where}"
        number = _number(where)
        file, label, split = (_text(values.get(key), kind, place, path, number) for kind, key in chosen.items())
        if not file or not label:
            message = f"{place} has no {'label' if file else 'path'}. Complete or remove it."
            raise UserError("list-value-missing", message, path=path, line=number)
        if "\n" in label or "\n" in file:
            message = f"{place}: a quoted value spans several lines. Close the quote."
            raise UserError("list-quote-open", message, path=path, line=number)
        if chosen["split"] >= 0 and not split_named(split):
            message = f"{place} has the split {split!r}. Use train, val or test."
            raise UserError("list-split-invalid", message, path=path, line=number)
        image = path.parent / file
        if not _is_file(image):
            missing.append(f"{where}: {str(image)[:_MAX_SHOWN]}")
            continue
        if (real := image.resolve()) in seen:
            message = f"{place}: {file} is already in {seen[real]}. Keep one of them."
            raise UserError("list-image-duplicate", message, path=path, line=number)
        seen[real] = where
        rows.append((split_named(split), label, image))
    if missing:
        more = f"\n  and {len(missing) - _SHOWN:,} more" if missing[_SHOWN:] else ""
        listed = "".join(f"\n  {line}" for line in missing[:_SHOWN]) + more
        message = f"{path}: {len(missing):,} of {len(records):,} images do not exist:{listed}\nFix or remove them."
        raise UserError("list-image-not-found", message, path=path, missing=len(missing))
    return rows


def _is_file(image: Path) -> bool:
    try:
        return image.is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def _text(value: Any, kind: str, place: str, path: Path, line: int) -> str:
    if value is None:
        return ""
    if kind == "label":
        valid, form = isinstance(value, str | int) and not isinstance(value, bool), "text or a whole number"
    elif kind in _COLUMNS:
        valid, form = isinstance(value, str), "text"
    else:
        valid, form = not isinstance(value, dict | list | bytes), "text or a number"
    if not valid:
        message = f"{place} has the {kind} {value!r:.40}. Write it as {form}."
        raise UserError("list-value-invalid", message, path=path, line=line)
    return str(value).lower() if isinstance(value, bool) else str(value).strip()
