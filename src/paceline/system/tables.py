"""Tables for the terminal: aligned columns below a header, without borders.

Text that is not written to a terminal is plain, and neither cut nor wrapped.
"""

import shutil
import sys
from collections.abc import Sequence

from rich.console import Console, OverflowMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from paceline.system.files import printable
from paceline.system.logs import Screen

_ANY_WIDTH = 100_000
_ANY_HEIGHT = 25  # without a height, rich ignores the width if TERM is dumb
_LEAST_WIDTH = 40  # a narrower terminal wraps lines itself


def is_terminal() -> bool:
    """Return whether standard output is a terminal; rich would also take FORCE_COLOR for one."""
    return sys.stdout.isatty()


def output() -> Screen:
    """Return standard output, as wide as the terminal if it is one."""
    width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns) if is_terminal() else _ANY_WIDTH
    return Screen(highlight=False, markup=False, width=width, height=_ANY_HEIGHT)


def new_table(heads: Sequence[str], rows: Sequence[Sequence[str]], truncated: bool = False) -> Table:
    """Return a table of untrusted text.

    If the terminal is too narrow, long cells continue on the next line; `truncated`: the first column is truncated.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    overflow: OverflowMethod = "ellipsis" if truncated else "fold"

    def cell(text: str) -> Text:
        return Text(printable(text), no_wrap=truncated, overflow=overflow)

    for number, head in enumerate(heads):
        table.add_column(cell(head), no_wrap=truncated and number > 0)
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def fits(table: Table, screen: Console) -> bool:
    """Return whether a table needs no more than the width of the screen."""
    return Measurement.get(screen, screen.options.update(max_width=_ANY_WIDTH), table).maximum <= screen.width


def show(table: Table, screen: Console | None = None) -> None:
    """Print a table at once, without spaces at the ends of lines."""
    screen = screen or output()
    with screen.capture() as captured:
        screen.print(table)
    screen.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    screen.file.flush()


def print_list(heads: Sequence[str], rows: Sequence[Sequence[str]], droppable: Sequence[str]) -> None:
    """Print one line per row. On a narrow terminal, leave out `droppable` columns in that order, then truncate names.

    The first column has the names.
    """
    screen, kept = output(), list(heads)
    for head in [*droppable, ""]:
        cells = [[cell for cell, own in zip(row, heads, strict=True) if own in kept] for row in rows]
        table = new_table(kept, cells, truncated=True)
        if fits(table, screen) or not head:
            break
        kept.remove(head)
    show(table, screen)


def print_row(cells: Sequence[str], widths: Sequence[int]) -> None:
    """Print a row of a table whose rows come one by one; the last column takes the rest of the line."""
    table = new_table(cells, [cells])
    table.show_header = False
    for column, width in zip(table.columns, widths, strict=False):
        column.width = width
    show(table)


def lines_of(table: Table) -> list[str]:
    """Return a table as plain lines of any width, for logs."""
    screen = Screen(width=_ANY_WIDTH, height=_ANY_HEIGHT, color_system=None)
    with screen.capture() as captured:
        screen.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
