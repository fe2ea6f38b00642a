"""The fork server, from which ranks fork: it ends with the launcher, ranks end with it, and signals are the launcher's.

Ctrl-C in a terminal, or the end of a service, reaches every process. The launcher answers it for all of them.
"""

import os
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker

import psutil

from paceline.system.lifetime import PARENT, end_with_parent
from paceline.system.signals import STOPS


def start_server() -> None:
    """Start the process that ranks fork from, unless it runs; what it preloads has to call `enter_server` first."""
    os.environ[PARENT] = str(os.getpid())
    resource_tracker.ensure_running()  # first: it unblocks the signals that are blocked next
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def enter_server() -> None:
    """In the fork server: end with the launcher, and let ranks end with this process."""
    if sys.platform == "linux":  # elsewhere watching takes a thread, which fork forbids: it ends after the last rank
        end_with_parent()
    os.environ[PARENT] = str(os.getpid())


def enter_rank() -> None:
    """In a process that was just forked: end with the fork server, and take the launcher's SIGTERM."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def end_stopped_children() -> None:
    """Kill what SIGSTOP has stopped: it answers no other signal."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_STOPPED:
                child.kill()
