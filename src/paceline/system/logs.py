"""Logging: rank 0 logs to the terminal and to log.txt; other ranks log only warnings and errors."""

import logging
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.segment import Segment

from paceline.system.files import printable_lines


class Screen(Console):
    """A console that escapes control characters, because names and messages may be untrusted."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


log = logging.getLogger("paceline")
console = Screen(stderr=True, highlighter=NullHighlighter(), markup=False)  # names may contain brackets


class _NoDiskTraceback:
    """Prints no traceback per line when the disk is full; training itself reports what it cannot write."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)  # type: ignore[misc]


class _StreamHandler(_NoDiskTraceback, logging.StreamHandler): ...


class _FileHandler(_NoDiskTraceback, logging.FileHandler): ...


def set_up(rank: int = 0, ranks: int = 1) -> None:
    """Send log lines to standard error: in color on a terminal, plain otherwise."""
    handler: logging.Handler
    if console.is_terminal and rank == 0:
        handler = RichHandler(console=console, show_path=False, show_level=False, highlighter=NullHighlighter())
        handler.setFormatter(_Formatter("%(message)s", "%H:%M:%S"))
    else:
        handler = _StreamHandler(sys.stderr)
        prefix = f"[rank {rank}] " if ranks > 1 and rank else ""
        handler.setFormatter(_Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)


def announce_stop(signum: int) -> None:
    """Acknowledge a signal at once. Bypasses the log, which the signal may have interrupted."""
    text = f"\n{signal.Signals(signum).name} received: stopping. Send it again to exit immediately.\n"
    with suppress(OSError, ValueError):  # a closed terminal must not prevent the stop
        os.write(sys.stderr.fileno(), text.encode())


def also_to(path: Path) -> logging.Handler:
    """Also write log lines to a file. Returns the handler, to be removed later."""
    handler = _FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    return handler


def to_file_only(message: str) -> None:
    """Write a message to the log file only; the terminal shows it in another way."""
    record = log.makeRecord(log.name, logging.ERROR, "", 0, message, (), None)
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(record)
