"""Reads the folders of evaluations. Like the rest of a run folder, they may be untrusted."""

import csv
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from paceline.analysis.details.record import VERSION
from paceline.analysis.details.schema import is_details
from paceline.analysis.details.write import CSV, DETAILS, PARQUET, THUMBNAILS
from paceline.data.splits import TEST, VAL, split_title
from paceline.errors import UserError
from paceline.system.files import printable_tree
from paceline.system.packages import needs_package
from paceline.system.untrusted import leads_out, read_regular
from paceline.track.sealed import is_intact

_MAX_JSON, _MAX_TABLE, _MAX_THUMBNAIL = 1 << 27, 1 << 32, 1 << 16
_MAX_SAMPLES = 1 << 26


@dataclass(frozen=True)
class Details:
    """The details of one evaluation of a run."""

    path: Path
    """Its folder."""
    record: dict[str, Any]
    """The content of details.json."""

    @property
    def title(self) -> str:
        """The data and its split."""
        data = self.record["data"]
        variant = f", {data['variant']}" if data.get("variant") else ""
        return f"{data['name']}, {split_title(data['split'])}{variant}"

    def confusion(self) -> np.ndarray:
        """Return the non-zero cells of the confusion matrix: int64 (n, 3) of label, prediction and count."""
        classes = len(self.record["classes"])
        content = self._read("confusion.csv")
        try:
            lines = csv.DictReader(StringIO(content.decode()))
            cells = [[int(line[name]) for name in ("label", "predicted", "count")] for line in lines]
            found = np.array(cells, np.int64).reshape(-1, 3)
        except (KeyError, TypeError, ValueError, OverflowError, csv.Error):
            raise self._corrupt("confusion.csv") from None
        is_whole = found[:, 2].sum() == self.record["overall"]["samples"]
        if not is_whole or (found < 0).any() or (found[:, :2] >= classes).any():
            raise self._corrupt("confusion.csv")
        return found

    def thumbnail(self, number: int) -> bytes | None:
        """Return the WebP file of a sample, None if there is none."""
        try:
            content = read_regular(self.path / THUMBNAILS / f"{number:d}.webp", _MAX_THUMBNAIL, self.path)
        except OSError:
            return None
        return content if content[:4] == b"RIFF" and content[8:12] == b"WEBP" else None

    def predictions(self) -> dict[str, np.ndarray]:
        """Return index, label and predicted class of every sample, from predictions.parquet or .csv."""
        names = ("index", "label", "predicted")
        try:
            columns = self._parquet(names) if (self.path / PARQUET).is_file() else self._csv(names)
        except UserError:
            raise
        except Exception as error:  # of Arrow's reader
            raise self._corrupt(f"the table of predictions ({error})") from None
        index, *rest = columns.values()
        classes = len(self.record["classes"])
        is_whole = 0 < len(index) == len(set(index.tolist())) == self.record["overall"]["samples"]
        if not is_whole or any((each < 0).any() or (each >= classes).any() for each in rest):
            raise self._corrupt("the table of predictions")
        return columns

    def _parquet(self, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        with needs_package("pyarrow", str(self.path / PARQUET), extra="parquet"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        file = pq.ParquetFile(pa.BufferReader(self._read(PARQUET)))
        if file.metadata.num_rows > _MAX_SAMPLES:
            raise self._corrupt(PARQUET)
        table = file.read(columns=list(names))
        return {name: table[name].to_numpy().astype(np.int64) for name in names}

    def _csv(self, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        lines = list(csv.DictReader(StringIO(self._read(CSV).decode())))
        return {name: np.array([int(line[name]) for line in lines], np.int64) for name in names}

    def _read(self, name: str) -> bytes:
        try:
            return read_regular(self.path / name, _MAX_TABLE, self.path)
        except OSError as error:
            raise self._corrupt(f"{name} ({error.strerror})") from None

    def _corrupt(self, name: str) -> UserError:
        message = f"{self.path}: {name} is missing or corrupt. Run `paceline evaluate RUN --details` again."
        return UserError("details-corrupt", message, path=self.path)


def read_details(folder: Path) -> Details:
    """Return the details in a folder; UserError if they are missing or corrupt."""
    again = "Run `paceline evaluate RUN --details` again."
    try:
        text = read_regular(folder / DETAILS, _MAX_JSON, folder)
        record = from_json(text) if is_intact(text) else None
    except (OSError, ValueError):
        record = None
    if record is None or not is_details(record):
        message = f"{folder / DETAILS} is missing or corrupt. {again}"
        raise UserError("details-corrupt", message, path=folder / DETAILS)
    if record["version"] != VERSION:
        message = f"{folder / DETAILS} has version {record['version']}, not {VERSION}. {again}"
        raise UserError("details-version", message, path=folder / DETAILS)
    return Details(folder, printable_tree(record))


def details_of(run: Path) -> tuple[list[Details], list[str]]:
    """Return the details in a run folder, and why some were left out.

    The test split of the run's own data comes first, then its val split, other data, and images that it was trained on.
    """
    found, problems = list[Details](), list[str]()
    root = run / "evaluations"
    if leads_out(run, root) or not root.is_dir():
        return found, problems
    for path in sorted(root.glob(f"*/{DETAILS}")):
        try:
            found.append(read_details(path.parent))
        except UserError as error:
            problems.append(error.report)
    return sorted(found, key=_importance), problems


def _importance(details: Details) -> tuple[int, str]:
    data = details.record["data"]
    if data["trained_on"]:
        return 3, details.title
    return {TEST: 0, VAL: 1}.get(data["split"], 2) if data["own"] else 2, details.title
