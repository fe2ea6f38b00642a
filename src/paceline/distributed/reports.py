"""What a rank tells the agent that started it, in files of the agent's folder. Does not import torch."""

import os
import time
from contextlib import suppress
from pathlib import Path

from paceline.distributed.env import AGENT
from paceline.errors import UserError
from paceline.system.files import write_json

LOST_RANK = "rank-lost"
"""Code of the error of a rank that cannot communicate with another one, so that the other's failure is the cause."""
RUN_FILE, STOP_FILE, _PROGRESS_FILE = "run", "stopped", "progress"
_first_progress = 0


def report_run(path: Path) -> None:
    """Called in rank 0: name the run folder to the agent, whose error then has it as the field `run`."""
    if AGENT in os.environ:
        (Path(os.environ[AGENT]) / RUN_FILE).write_text(str(path), encoding="utf-8")


def begin_run(number: int) -> None:
    """Called in a rank that trains several runs, so that a later run counts as more progress than an earlier one."""
    global _first_progress
    _first_progress = number << 32


def report_progress(step: int) -> None:
    """Called in a rank: let the agent know which step is done, so that it can tell a crash that repeats itself."""
    if AGENT in os.environ and os.environ["LOCAL_RANK"] == "0":
        with suppress(OSError):
            (Path(os.environ[AGENT]) / _PROGRESS_FILE).write_text(str(_first_progress + step))


def reported_progress(folder: Path) -> int:
    """Return the last step that ranks reported to the agent with this folder; 0 if there is none."""
    try:
        return int((folder / _PROGRESS_FILE).read_text())
    except (OSError, ValueError):  # none yet, or a rank was killed while it wrote
        return 0


def report_stop(signum: int) -> None:
    """Called in a rank: let the agent exit with the status of this signal, which may have reached only one rank."""
    with suppress(OSError):  # the disk may be full; then only the exit status differs
        (Path(os.environ[AGENT]) / STOP_FILE).write_text(str(signum))


def report_leaving() -> None:
    """Called in a rank that has noticed a failure: ask the agent for time to finish its checkpoint and uploads."""
    if AGENT in os.environ:
        with suppress(OSError):
            leaving_file(Path(os.environ[AGENT]), int(os.environ["LOCAL_RANK"])).touch()


def leaving_file(folder: Path, local_rank: int) -> Path:
    """Return the file with which a rank reports that it is about to exit after a failure."""
    return folder / f"leaving-{local_rank}"


def report_error(error: UserError) -> bool:
    """Called in a rank: pass an error to the agent, which prints one for all ranks.

    Returns whether there is an agent.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if AGENT not in os.environ or not path:
        return False
    try:  # written atomically, because the agent may stop this rank and read the file at any moment
        write_json(Path(path), error.to_json() | {"timestamp": int(time.time())})
    except OSError:
        return False
    return True
