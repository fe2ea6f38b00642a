"""Writes predictions as lines of text, CSV, JSON lines or Parquet, one image after the other."""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from paceline.errors import UserError
from paceline.system.files import printable, replacing
from paceline.system.packages import needs_package

_ROWS = 1 << 16  # of a row group in Parquet, which are held in memory


@dataclass(frozen=True)
class ClassProbability:
    """One of the most probable classes of an image."""

    id: str
    name: str
    probability: float


Write = Callable[[str, Sequence[ClassProbability]], None]
"""Called with the name of each image and its most probable classes."""


def check_target(out: Path | None, source: Path | None = None) -> None:
    """Raise UserError if predictions cannot be written to this file, or would replace the list of names."""
    if out is None:
        return
    if out.suffix.lower() not in _FORMATS:
        message = f"--out {out}: predictions are written as {', '.join(_FORMATS)}. Choose a name with such a suffix."
        raise UserError("wrong-suffix", message, path=out)
    if out.is_dir():
        raise UserError("output-is-a-folder", f"--out {out} is a folder. Give a file.", path=out)
    if source and out.exists() and source.exists() and out.samefile(source):
        message = f"--out {out} is the file of --files-from, which it would replace. Choose another name."
        raise UserError("output-is-an-input", message, path=out)
    if not out.parent.is_dir():
        message = f"--out {out}: the folder {out.parent} does not exist. Create it first."
        raise UserError("output-folder-not-found", message, path=out.parent)
    if out.suffix.lower() == ".parquet":
        _pyarrow()


@contextmanager
def writing(out: Path | None, top: int) -> Iterator[Write]:
    """Yield a function that writes predictions: to standard output, or to a file that gets its name when complete."""
    if out is None:
        with _lines(sys.stdout) as write:
            yield write
        return
    with replacing(out) as file, _FORMATS[out.suffix.lower()](file, top) as write:
        yield write


@contextmanager
def _lines(stream: TextIO) -> Iterator[Write]:
    """One line per image. The stream is kept, because a progress bar replaces sys.stdout."""

    def write(name: str, topk: Sequence[ClassProbability]) -> None:
        found = ", ".join(f"{each.name} {each.probability:.2%}" for each in topk)
        stream.write(printable(f"{_text(name)}: {found}") + "\n")

    yield write
    stream.flush()


@contextmanager
def _csv(file: BinaryIO, top: int) -> Iterator[Write]:
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=False)
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns(top))
    yield lambda name, topk: rows.writerow(cells(name, topk))
    text.flush()
    text.detach()


@contextmanager
def _jsonl(file: BinaryIO, top: int) -> Iterator[Write]:
    def write(name: str, topk: Sequence[ClassProbability]) -> None:
        row = {"path": _text(name), "top": [vars(each) for each in topk]}
        file.write(json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")

    yield write


@contextmanager
def _parquet(file: BinaryIO, top: int) -> Iterator[Write]:
    pyarrow = _pyarrow()
    from pyarrow import parquet

    types = [pyarrow.string(), *(pyarrow.string(), pyarrow.string(), pyarrow.float32()) * top]
    schema = pyarrow.schema(list(zip(columns(top), types, strict=True)))
    pending: list[list[Any]] = []

    def flush() -> None:
        columns = [pyarrow.array(list(column), type_) for column, type_ in zip(zip(*pending), types, strict=True)]  # noqa: B905
        writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
        pending.clear()

    def write(name: str, topk: Sequence[ClassProbability]) -> None:
        pending.append(cells(name, topk))
        if len(pending) >= _ROWS:
            flush()

    with parquet.ParquetWriter(file, schema) as writer:
        yield write
        if pending:
            flush()


def _pyarrow() -> Any:
    with needs_package("pyarrow", "Parquet", extra="parquet", otherwise="use .csv or .jsonl"):
        import pyarrow
    return pyarrow


def columns(top: int) -> list[str]:
    """Return the names of the columns of a table of predictions."""
    return ["path", *(f"{name}_{rank}" for rank in range(1, top + 1) for name in ("class", "id", "probability"))]


def cells(name: str, topk: Sequence[ClassProbability]) -> list[Any]:
    """Return a row of such a table."""
    return [_text(name), *(cell for each in topk for cell in (each.name, each.id, each.probability))]


def _text(name: str) -> str:
    """File names may be invalid Unicode, which no format can hold."""
    return name.encode(errors="backslashreplace").decode()


_FORMATS = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
