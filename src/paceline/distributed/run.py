"""Runs torch's elastic agent inside this process, and reports why ranks failed in one message.

distributed/plan.py decides what it starts and where the nodes rendezvous.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from paceline.distributed import preemption
from paceline.distributed.channel import ChannelError, token_of
from paceline.distributed.elastic_agent import Agent, RankEntry
from paceline.distributed.failures import KILLED, first_failure, is_own_error
from paceline.distributed.forkserver import end_stopped_children
from paceline.distributed.plan import AgentPlan, endpoint
from paceline.distributed.rendezvous import JoinTerms, MultiNode, SingleNode
from paceline.distributed.reports import RUN_FILE
from paceline.distributed.server import Server, port_unavailable
from paceline.distributed.world import rank_timeout
from paceline.errors import UserError
from paceline.system.logs import announce_stop
from paceline.system.signals import handling_signals


def run(plan: AgentPlan, entry: RankEntry) -> int:
    """Start the ranks of a plan, each calling `entry`. Returns the exit status; raises the error that made ranks fail.

    The first SIGINT or SIGTERM is forwarded to the ranks, which checkpoint and exit (torchrun would print a traceback);
    a second one kills them. A suspended rank, which cannot respond, is killed after the rank timeout.
    """
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # torch's report of a failure hides the cause
    agent: Agent | None = None

    def forward(signum: int) -> None:
        first = not (agent and agent.received)
        if first:
            announce_stop(signum)
        if agent:
            agent.received.append(signum)
        reached = agent and agent.signal(signal.SIGTERM if first else signal.SIGKILL)
        if not first or not reached:  # without ranks there is nothing to checkpoint
            shutil.rmtree(scratch, ignore_errors=True)
            os._exit(128 + signum)

    with (
        tempfile.TemporaryDirectory(prefix="paceline-") as scratch,
        handling_signals(forward, overdue=end_stopped_children, seconds=rank_timeout().total_seconds()),
    ):
        agent = Agent(_rendezvous(plan, Path(scratch)), plan, entry, Path(scratch))
        if os.environ.get(preemption.SPOT):
            preemption.watch()
        try:
            result = agent.run()
        except RendezvousClosedError:
            raise UserError("job-ended", "another node ended the job; its log says why") from None
        except (DistError, RendezvousError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                "rendezvous-timeout" if isinstance(error, RendezvousTimeoutError) else "rendezvous-failed",
                f"the rendezvous failed ({reason}). Check that every node has the same --nodes and --rendezvous, that "
                "every --node-rank is used once, and that all nodes can reach the port of node 0.",
            ) from None
        finally:
            agent.leave()
        if result is None:  # this node was still waiting to join
            raise UserError("job-ended-without-node", "the job ended without this node; see the logs of other nodes")
        if agent.received and not any(map(is_own_error, result.failures.values())):
            # a forwarded signal kills ranks that are still starting, and other ranks report their loss
            if any(failure.exitcode in KILLED for failure in result.failures.values()):
                print(f"paceline: error: {first_failure(result.failures).report}", file=sys.stderr)
            return 128 + agent.received[0]
        if result.is_failed():
            failure = first_failure(result.failures)
            if (run_file := Path(scratch) / RUN_FILE).exists():
                failure.fields["run"] = run_file.read_text(encoding="utf-8")
            raise failure
        return 128 + agent.stopped if agent.stopped else 0


def _rendezvous(plan: AgentPlan, scratch: Path) -> SingleNode | MultiNode:
    join = plan.join
    if join.is_alone:
        return SingleNode(scratch)
    token = token_of(os.environ)
    host, port = endpoint(join.rendezvous)
    if plan.listen:
        try:
            Server(plan.listen, port, token).start()
        except OSError as error:
            raise port_unavailable(plan.listen, port, error, "choose another port in --rendezvous") from None
    terms = JoinTerms(plan.procs, join.min_nodes or join.nodes, join.nodes, join.node_rank, join.join_timeout)
    try:
        return MultiNode(f"{plan.listen or host}:{port}", token, terms, join.job or "paceline")
    except ChannelError as error:
        raise UserError(error.code, f"--rendezvous {join.rendezvous}: {error}") from None
