"""torchrun's agent, run inside this process: starts the local ranks, watches them, ends with one clear message."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import elastic_launch

from paceline.base.files import write_json
from paceline.base.logs import announce_stop
from paceline.base.world import LOST_RANK
from paceline.config.launched import AGENT
from paceline.errors import UserError


def run(arguments: list[str]) -> int:
    """Run torchrun with these arguments; the exit status, or the first failed rank's message as an error.

    A first SIGINT or SIGTERM is passed on to the ranks, which save and end by themselves (torchrun's own handling would
    print a traceback); a second one ends them at once.
    """
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its account of a failure hides the cause
    received: list[int] = []

    def pass_on(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) == 1:
            announce_stop(signum)
        ranks = psutil.Process().children()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGTERM if len(received) == 1 else signal.SIGKILL)
        if len(received) > 1 or not ranks:  # before there are ranks nothing can be lost
            os._exit(128 + signum)

    previous = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGINT, signal.SIGTERM)}
    config, command, command_arguments = torchrun.config_from_args(
        torchrun.get_args_parser().parse_args(["--signals-to-handle", "SIGQUIT", *arguments])
    )
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
            os.environ[AGENT] = str(note := Path(scratch) / "stopped")
            elastic_launch(config, command)(*command_arguments)
            stopped = received or ([int(note.read_text())] if note.exists() else [])
            return 128 + stopped[0] if stopped else 0
    except ChildFailedError as error:
        # ranks that had not begun yet die of the signal that was passed on
        if received and all(failure.exitcode == -signal.SIGTERM for failure in error.failures.values()):
            print("paceline: interrupted", file=sys.stderr)
            return 128 + received[0]
        raise UserError(_first_failure(error)) from None
    except (DistError, RendezvousError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the machines did not meet ({reason}); check that the same --nodes and --rendezvous are given on each, "
            "that every --node-rank is used once, and that node 0's port can be reached"
        ) from None
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _first_failure(error: ChildFailedError) -> str:
    # a rank that was killed is the cause, those that lost it or were ended by the agent are not
    def cause_first(rank: int) -> tuple[bool, bool, bool, int]:
        failure = error.failures[rank]
        lost = LOST_RANK in str(failure.error_file_data.get("message"))
        return failure.exitcode != -signal.SIGKILL, lost, failure.exitcode < 0, failure.timestamp

    rank = min(error.failures, key=cause_first)
    failure = error.failures[rank]
    if failure.exitcode == -signal.SIGKILL:
        return f"rank {rank} was killed (out of memory?); start the same command again to go on from the last save"
    if failure.exitcode < 0:
        return f"rank {rank} died of {failure.signal_name()}"
    message = failure.error_file_data.get("message")
    return message if isinstance(message, str) and message != "<NONE>" else f"rank {rank} failed; see the lines above"


def report_stop(signum: int) -> None:
    """From a rank that a signal reached, perhaps only it: let the agent end with the status that says so."""
    Path(os.environ[AGENT]).write_text(str(signum))


def report(message: str) -> bool:
    """From a rank: hand the message to the agent, so that it is printed once; whether there is one to take it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if AGENT not in os.environ or not path:
        return False
    # whole or not at all: the agent may end this rank, and read the file, at any moment
    write_json(Path(path), {"message": message, "timestamp": int(time.time())})
    return True
