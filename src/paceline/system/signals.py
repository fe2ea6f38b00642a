"""Handling of SIGINT and SIGTERM."""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)
STOPPED = frozenset(status for signum in STOPS for status in (128 + signum, -signum))
"""Exit statuses of a process that such a signal ended."""


@contextmanager
def interrupts_end() -> Iterator[None]:
    """Let SIGINT end the process silently, as SIGTERM does: an import may turn KeyboardInterrupt into another error."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # background processes may ignore it
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_on_sigterm() -> None:
    """Let SIGTERM unwind the main thread, as Ctrl-C does, so that `finally` blocks run."""
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))


@contextmanager
def handling_signals(
    handle: Callable[[int], None], overdue: Callable[[], object] | None = None, seconds: float = 0.0
) -> Iterator[None]:
    """Call `handle` with every signal, and after the first one `overdue` every time `seconds` pass without another.

    Both run in a thread, because Python runs no signal handler while the main thread is inside a C call.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer)
    # an ignored signal stays ignored: Ctrl-C in a script must not stop its background jobs
    handled = [signum for signum in STOPS if signal.getsignal(signum) != signal.SIG_IGN]
    handlers = {signum: signal.signal(signum, lambda *_: None) for signum in handled}
    threading.Thread(target=_listen, args=(reader, handle, overdue, seconds), name="signals", daemon=True).start()
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(previous)
        os.close(writer)  # ends the thread


def _listen(reader: int, handle: Callable[[int], None], overdue: Callable[[], object] | None, seconds: float) -> None:
    poll, timeout = select.poll(), None
    poll.register(reader, select.POLLIN)
    while True:
        if not poll.poll(timeout) and overdue:
            overdue()
            continue
        if not (received := os.read(reader, 64)):
            os.close(reader)
            return
        for signum in received:
            if signum in STOPS:
                handle(signum)
                timeout = 1000 * seconds if overdue else None
