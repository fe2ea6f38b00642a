"""SIGINT and SIGTERM in a process that has something to do before it ends, and in one that has not."""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_end() -> Iterator[None]:
    """Let SIGINT end the process as SIGTERM does, silently: within imports KeyboardInterrupt comes up as any error."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # in the background it may be ignored
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def answering(answer: Callable[[int], None], overdue: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `answer` with every signal, and `overdue` each time that so many seconds have passed since.

    From a thread: Python calls no handler while the main thread is inside a C call, such as waiting for other nodes.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer)
    handlers = {signum: signal.signal(signum, lambda *_: None) for signum in STOPS}
    threading.Thread(target=_listen, args=(reader, answer, overdue, seconds), name="signals", daemon=True).start()
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(previous)
        os.close(writer)  # which ends the thread


def _listen(reader: int, answer: Callable[[int], None], overdue: Callable[[], None], seconds: float) -> None:
    poll, timeout = select.poll(), None
    poll.register(reader, select.POLLIN)
    while True:
        if not poll.poll(timeout):
            overdue()
            continue
        if not (received := os.read(reader, 64)):
            os.close(reader)
            return
        for signum in received:
            if signum in STOPS:
                answer(signum)
                timeout = 1000 * seconds
