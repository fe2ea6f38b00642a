"""Plain text tables that fit the terminal."""

import shutil
import sys
from collections.abc import Sequence

from paceline.system.files import printable


def terminal_width() -> int | None:
    """Columns of the terminal; None if the output is not a terminal and may be of any width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def lines_of(
    heads: Sequence[str], rows: Sequence[Sequence[str]], droppable: Sequence[str] = (), width: int | None = None
) -> list[str]:
    """Aligned lines below a header. If they are too wide, the `droppable` columns are removed in that order; then the
    first column is truncated."""
    columns = {head: [head, *map(printable, cells)] for head, *cells in zip(heads, *rows, strict=True)}
    widths = {head: max(map(len, cells)) for head, cells in columns.items()}
    removable = list(droppable)
    while width and removable and sum(widths[head] + 2 for head in columns) - 2 > width:
        columns.pop(removable.pop(0), None)
    first, *others = columns
    if width:
        room = width - sum(widths[head] + 2 for head in others)
        columns[first] = [_truncate(cell, max(8, room)) for cell in columns[first]]
        widths[first] = max(map(len, columns[first]))
    aligned = ([cell.ljust(widths[head]) for cell in cells] for head, cells in columns.items())
    lines = ("  ".join(cells).rstrip() for cells in zip(*aligned, strict=True))
    return [line[:width] for line in lines]


def _truncate(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
