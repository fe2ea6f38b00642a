"""The slice of every sample: what a regular expression finds in its path, or its value in a column of a list."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.data.lists import column_values, columns_of
from paceline.errors import UserError

_MAX_SLICES = 1000


@dataclass(frozen=True)
class DetailsSpec:
    """What `evaluate --details` writes, and where."""

    slice_by: str = ""
    """A column of the list or of `slice_file`, else a regular expression for the paths of images."""
    slice_file: Path | None = None
    """A list (CSV, TSV, JSONL or Parquet) with a column for the paths of images, and others to slice by."""
    out: Path | None = None
    """The folder to write; by default below the run."""

    def check(self) -> None:
        """UserError if an option is missing or invalid."""
        if self.slice_file and not self.slice_by:
            names = ", ".join(columns_of(self.slice_file))
            message = f"--slice-file {self.slice_file} needs --slice-by with one of its columns: {names}."
            raise UserError("missing-option", message, option="--slice-by")
        if self.slice_file:
            _check_column(self.slice_file, self.slice_by)
        elif self.slice_by:
            _compiled(self.slice_by, ())


def slice_values(spec: DetailsSpec, names: Sequence[str], listed: Path | None) -> list[str | None]:
    """Return the slice of every sample, None if it has none; `listed`: the list that the samples come from."""
    if not names:
        message = "--slice-by needs the paths of images, but this dataset has none. Leave --slice-by out."
        raise UserError("slice-without-paths", message, option="--slice-by")
    if spec.slice_file or (listed and spec.slice_by in columns_of(listed)):
        found = _from_column(spec.slice_file or listed or Path(), spec.slice_by, names)
    else:
        found = _from_paths(_compiled(spec.slice_by, columns_of(listed) if listed else ()), names)
    if (count := len(set(found))) > _MAX_SLICES:
        message = f"--slice-by {spec.slice_by!r} makes {count} slices, more than {_MAX_SLICES}. Choose larger groups."
        raise UserError("too-many-slices", message, option="--slice-by", slices=count)
    return found


def _from_column(file: Path, column: str, names: Sequence[str]) -> list[str | None]:
    _check_column(file, column)
    values = column_values(file, column)
    found = [values.get(name) for name in names]
    if not any(name in values for name in names):
        example = next(iter(values), "none")
        message = (
            f"{file}: none of its paths (e.g. {example}) is one of an evaluated image (e.g. {names[0]}). "
            "Write paths as predictions.parquet has them."
        )
        raise UserError("slice-paths-mismatch", message, path=file)
    return [value or None for value in found]


def _check_column(file: Path, column: str) -> None:
    if column not in (known := columns_of(file)):
        message = f"{file} has no column {column!r}. --slice-by must be one of {', '.join(known)}."
        raise UserError("slice-column-missing", message, path=file, column=column)


def _from_paths(expression: re.Pattern[str], names: Sequence[str]) -> list[str | None]:
    found = [_group(expression.search(name)) for name in names]
    if not any(value is not None for value in found):
        message = (
            f"--slice-by {expression.pattern!r} is not a column, and as a regular expression it finds nothing in any "
            f"of {len(names)} paths, e.g. {names[0]}. Fix it, or name a column of --slice-file."
        )
        raise UserError("slice-not-found", message, option="--slice-by")
    return found


def _group(match: re.Match[str] | None) -> str | None:
    """Return the named groups of a match if there are any, else the first group that took part, else the match."""
    if match is None:
        return None
    if named := match.groupdict():
        return " ".join(value or "" for value in named.values()).strip() or None
    return next((text for text in match.groups() if text), None) if match.re.groups else match.group() or None


def _compiled(expression: str, columns: Sequence[str]) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        known = f" nor a column ({', '.join(columns)})" if columns else ""
        message = (
            f"--slice-by {expression!r} is not a regular expression ({error}){known}. "
            "Use e.g. '(day|night)', or a column of --slice-file."
        )
        raise UserError("invalid-slice-by", message, option="--slice-by") from None
