"""Makes processes end with their parent, however the parent ends.

On Linux the kernel does it (PR_SET_PDEATHSIG), also for a process that is suspended or inside a long C call.
Elsewhere a thread polls. This module imports nothing heavy, because it must run first in a new process.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

PARENT = "PACELINE_PARENT"
"""Set in the environment of a process that ends with its parent: the parent's process ID."""
# variables of a launcher, and colors that notebooks enable: progress bars would flood a cell
NOT_INHERITED = (
    *("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    *("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
)
"""What a training of its own does not inherit."""


def own_command(*words: object) -> list[str]:
    """Return the command line of a child that runs paceline. It imports no module of the current folder (-P)."""
    return [sys.executable, "-P", "-m", "paceline", *map(str, words)]


def child_env(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a Paceline process that ends with this one."""
    return {**environment, PARENT: str(os.getpid())}


def training_env(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, with some more variables, for a training of its own that ends with this process."""
    return child_env({name: value for name, value in os.environ.items() if name not in NOT_INHERITED} | dict(more))


def end_with_parent() -> None:
    """Kill this process when its parent ends, if the parent requested it or is torchrun. Call it first."""
    parent = int(os.environ.pop(PARENT, "0"))
    if not parent and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    else:
        # pass the ID, because the parent may end before the thread first reads it
        threading.Thread(target=_watch_parent, args=(os.getppid(),), name="parent", daemon=True).start()
    if _is_orphan(parent):  # the parent ended before prctl took effect
        _die()


def _is_orphan(parent: int) -> bool:
    now = os.getppid()
    if parent:
        return now != parent and parent not in _ancestors()
    try:  # torchrun does not pass its ID; in a container it may be process 1 itself
        return now == 1 and os.readlink("/proc/1/exe") != os.readlink("/proc/self/exe")
    except OSError:
        return sys.platform == "linux"


def _ancestors() -> set[int]:
    """Return the IDs of all ancestors: the interpreter may be a script that starts another one."""
    import psutil

    return {ancestor.pid for ancestor in psutil.Process().parents()}


def _watch_parent(parent: int) -> None:
    import multiprocessing

    if launcher := multiprocessing.parent_process():
        launcher.join()  # in a rank: its parent, the fork server, lives as long as there are ranks
    else:
        while os.getppid() == parent:
            time.sleep(0.5)
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
