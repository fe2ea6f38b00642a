"""The fork server, from which ranks fork. It ends with the launcher, and ranks end with it.

Ctrl-C in a terminal, or stopping a service, signals every process. Only the launcher handles it, for all of them.
"""

import os
import signal
import sys
import tempfile
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker

import psutil

from paceline.errors import UserError
from paceline.system.lifetime import PARENT, end_with_parent
from paceline.system.signals import STOPS


def start_server() -> None:
    """Start the fork server unless it runs. The module that it preloads must call `enter_server` first."""
    os.environ[PARENT] = str(os.getpid())
    resource_tracker.ensure_running()  # before blocking signals, because it unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        forkserver.ensure_running()
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        folder = tempfile.gettempdir()
        message = f"TMPDIR={folder} is too long for the path of a Unix socket. Set TMPDIR to a shorter path."
        raise UserError("tmpdir-too-long", message, path=folder) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def enter_server() -> None:
    """Called in the fork server: end with the launcher, and let ranks end with this process."""
    # elsewhere this needs a thread, which is unsafe before a fork; there the server ends after the last rank
    if sys.platform == "linux":
        end_with_parent()
    os.environ[PARENT] = str(os.getpid())


def enter_child() -> None:
    """Called in a rank just after the fork: end with the fork server, and accept the launcher's SIGTERM."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def end_stopped_children() -> set[int]:
    """Kill children that SIGSTOP has suspended, which respond to no other signal. Returns their process IDs."""
    killed = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_STOPPED:
                child.kill()
                killed.add(child.pid)
    return killed
