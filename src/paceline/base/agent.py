"""torchrun's agent, run inside this process: starts the local ranks, watches them, ends with one clear message.

Its place among the machines of a job comes from torchrun's own arguments (launch/torchrun.py writes them). With
--max-restarts it goes on when ranks or machines are lost, and when machines leave or join; see base/ranks.py.
"""

import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

from paceline.base import notice
from paceline.base.files import write_json
from paceline.base.logs import announce_stop
from paceline.base.ranks import Agent, Entry
from paceline.base.world import LOST_RANK
from paceline.config.launched import AGENT
from paceline.errors import UserError


def run(arguments: list[str], entry: Entry) -> int:
    """Run torchrun with these arguments, every rank calling `entry`; the exit status, or why ranks failed as an error.

    A first SIGINT or SIGTERM is passed on to the ranks, which save and end by themselves (torchrun's own handling would
    print a traceback); a second one ends them at once.
    """
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its account of a failure hides the cause
    config, _, command = torchrun.config_from_args(torchrun.get_args_parser().parse_args(arguments))
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        os.environ[AGENT] = scratch
        agent = Agent(config, entry, command[command.index("paceline") + 1 :], Path(scratch))

        def pass_on(signum: int, _frame: FrameType | None) -> None:
            agent.received.append(signum)
            if len(agent.received) == 1:
                announce_stop(signum)
            reached = agent.signal(signal.SIGTERM if len(agent.received) == 1 else signal.SIGKILL)
            if len(agent.received) > 1 or not reached:  # before there are ranks nothing can be lost
                os._exit(128 + signum)

        if os.environ.get(notice.SPOT):
            notice.heed()
        previous = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            result = agent.run()
        except RendezvousClosedError:
            raise UserError("another machine ended the job; its own lines say why") from None
        except (DistError, RendezvousError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the machines did not meet ({reason}); check that the same --nodes and --rendezvous are given on "
                "each, that every --node-rank is used once, and that node 0's port can be reached"
            ) from None
        finally:
            agent.leave()
            for signum, handler in previous.items():
                signal.signal(signum, handler)
        if result is None:  # one machine too many when the job ended
            raise UserError("the job ended without this machine; its lines on others say how")
        received = agent.received
        # ranks that had not begun yet die of the signal that was passed on
        if received and all(failure.exitcode == -signal.SIGTERM for failure in result.failures.values()):
            if result.failures:
                print("paceline: interrupted", file=sys.stderr)
            return 128 + received[0]
        if result.is_failed():
            raise UserError(first_failure(result.failures))
        return 128 + agent.stopped if agent.stopped else 0


def first_failure(failures: dict[int, ProcessFailure]) -> str:
    # a rank that was killed is the cause, those that lost it or were ended by the agent are not
    def cause_first(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        lost = LOST_RANK in str(failure.error_file_data.get("message"))
        return failure.exitcode != -signal.SIGKILL, lost, failure.exitcode < 0, failure.timestamp

    rank = min(failures, key=cause_first)
    failure = failures[rank]
    if failure.exitcode == -signal.SIGKILL:
        return f"rank {rank} was killed (out of memory?); start the same command again to go on from the last save"
    if failure.exitcode < 0:
        return f"rank {rank} died of {failure.signal_name()}"
    message = failure.error_file_data.get("message")
    return message if isinstance(message, str) and message != "<NONE>" else f"rank {rank} failed; see the lines above"


def report_stop(signum: int) -> None:
    """From a rank that a signal reached, perhaps only it: let the agent end with the status that says so."""
    (Path(os.environ[AGENT]) / "stopped").write_text(str(signum))


def report(message: str) -> bool:
    """From a rank: hand the message to the agent, so that it is printed once; whether there is one to take it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if AGENT not in os.environ or not path:
        return False
    # whole or not at all: the agent may end this rank, and read the file, at any moment
    write_json(Path(path), {"message": message, "timestamp": int(time.time())})
    return True
