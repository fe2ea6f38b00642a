"""torch's elastic agent, run inside this process: starts the local ranks, watches them, ends with one clear message.

What it starts, and where the machines of a job meet, distributed/plan.py says.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

from paceline.distributed import preemption
from paceline.distributed.channel import ChannelError, token_of
from paceline.distributed.elastic_agent import Agent, Entry
from paceline.distributed.env import AGENT
from paceline.distributed.forkserver import end_stopped_children
from paceline.distributed.plan import Plan
from paceline.distributed.rendezvous import ManyNodes, OneNode, Terms
from paceline.distributed.server import Server
from paceline.distributed.world import LOST_RANK, rank_timeout
from paceline.errors import UserError
from paceline.system.files import write_json
from paceline.system.logs import announce_stop
from paceline.system.signals import answering

_KILLED = (-signal.SIGKILL, 255)  # the latter is what multiprocessing tells of ranks that ended with their fork server


def run(plan: Plan, entry: Entry) -> int:
    """Start the ranks of a plan, each calling `entry`; the exit status, or why ranks failed as an error.

    A first SIGINT or SIGTERM is passed on to the ranks, which save and end by themselves (torchrun's own handling would
    print a traceback); a second one ends them at once. A stopped rank, which cannot answer, is killed in the end.
    """
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # its account of a failure hides the cause
    agent: Agent | None = None

    def pass_on(signum: int) -> None:
        first = not (agent and agent.received)
        if first:
            announce_stop(signum)
        if agent:
            agent.received.append(signum)
        reached = agent and agent.signal(signal.SIGTERM if first else signal.SIGKILL)
        if not first or not reached:  # before there are ranks nothing can be lost
            shutil.rmtree(scratch, ignore_errors=True)
            os._exit(128 + signum)

    with (
        tempfile.TemporaryDirectory(prefix="paceline-") as scratch,
        answering(pass_on, overdue=end_stopped_children, seconds=rank_timeout().total_seconds()),
    ):
        agent = Agent(_rendezvous(plan, Path(scratch)), plan, entry, Path(scratch))
        if os.environ.get(preemption.SPOT):
            preemption.heed()
        try:
            result = agent.run()
        except RendezvousClosedError:
            raise UserError("another machine ended the job; its own lines say why") from None
        except (DistError, RendezvousError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the rendezvous failed ({reason}); check that the same --nodes and --rendezvous are given on "
                "each, that every --node-rank is used once, and that node 0's port can be reached"
            ) from None
        finally:
            agent.leave()
        if result is None:  # one machine too many when the job ended
            raise UserError("the job ended without this machine; its lines on others say how")
        if agent.received and not any(map(_complaint, result.failures.values())):
            # ranks that had not begun die of the signal that was passed on, and others lose them
            if any(failure.exitcode in _KILLED for failure in result.failures.values()):
                print(f"paceline: {first_failure(result.failures)}", file=sys.stderr)
            return 128 + agent.received[0]
        if result.is_failed():
            raise UserError(first_failure(result.failures))
        return 128 + agent.stopped if agent.stopped else 0


def _rendezvous(plan: Plan, scratch: Path) -> OneNode | ManyNodes:
    join = plan.join
    if join.is_alone:
        return OneNode(scratch)
    token = token_of(os.environ)
    host, _, port = join.rendezvous.rpartition(":")
    if plan.listen:
        try:
            Server(plan.listen, int(port), token).start()
        except OSError as error:
            raise UserError(
                f"--rendezvous: port {port} of {plan.listen} cannot be used ({error.strerror}); end what uses it, or "
                "choose another port on every node"
            ) from None
    terms = Terms(plan.procs, join.min_nodes or join.nodes, join.nodes, join.node_rank, join.join_timeout)
    try:
        return ManyNodes(f"{plan.listen or host}:{port}", token, terms, join.job or "paceline")
    except ChannelError as error:
        raise UserError(f"--rendezvous {join.rendezvous}: {error}") from None


def _complaint(failure: ProcessFailure) -> str:
    """What a rank says to the user, if it is more than that it lost another one."""
    message = failure.error_file_data.get("message")
    return message if isinstance(message, str) and message != "<NONE>" and LOST_RANK not in message else ""


def first_failure(failures: dict[int, ProcessFailure]) -> str:
    # a rank that was killed is the cause, those that lost it or were ended by the agent are not
    def cause_first(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        lost = LOST_RANK in str(failure.error_file_data.get("message"))
        return failure.exitcode not in _KILLED, lost, failure.exitcode < 0, failure.timestamp

    rank = min(failures, key=cause_first)
    failure = failures[rank]
    if failure.exitcode in _KILLED:
        return (
            f"rank {rank} was killed (out of memory?); start the same command again to resume from the last checkpoint"
        )
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
