"""States of nodes and jobs. What nodes, SLURM and the job's files report is parsed here, and nowhere else."""

import re
from dataclasses import dataclass
from enum import StrEnum

from paceline.errors import UserError
from paceline.system.files import printable


class NodeState(StrEnum):
    """State of a node, or of a whole job."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    """Its processes no longer exist, but wrote no exit status."""
    NOT_STARTED = "not started"
    UNREACHABLE = "unreachable"
    GONE = "gone"
    """Its instance is terminated, or SLURM no longer lists it."""
    UNKNOWN = "unknown"


ACTIVE = (NodeState.PENDING, NodeState.RUNNING)
FINAL = (NodeState.FINISHED, NodeState.FAILED, NodeState.STOPPED)
HAS_RUN = (NodeState.RUNNING, *FINAL, NodeState.LOST)
"""States of nodes that may have a run folder."""

KILLED, PREEMPTED = 137, 143
"""Exit statuses of a node that was killed, and of one that checkpointed and exited on an interruption notice."""
_INTERRUPTED = 130
_ENDED = re.compile(rb"ended ([0-9]{1,3})")
_OF_NODE = {b"running": NodeState.RUNNING, b"lost": NodeState.LOST, b"absent": NodeState.NOT_STARTED}
_OF_SLURM = {
    NodeState.PENDING: "PENDING REQUEUED REQUEUE_HOLD CONFIGURING",
    NodeState.RUNNING: "RUNNING COMPLETING SUSPENDED STOPPED SIGNALING",
    NodeState.FINISHED: "COMPLETED",
    NodeState.STOPPED: "CANCELLED",
    NodeState.FAILED: "FAILED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED",
}
_SLURM_STATES = {word: state for state, words in _OF_SLURM.items() for word in words.split()}


@dataclass(frozen=True)
class NodeStatus:
    """State of one node, or of one task of a SLURM array."""

    name: str
    state: NodeState
    exit_status: int | None = None
    """Only of a node that has ended."""
    text: str = ""
    """Description for the user; empty: the state says it all."""

    def __str__(self) -> str:
        return printable(self.text or self.state)


def ended(name: str, exit_status: int) -> NodeStatus:
    """Return the status of a node whose processes ended with this exit status."""
    if exit_status in (0, _INTERRUPTED, PREEMPTED):
        return NodeStatus(name, NodeState.STOPPED if exit_status else NodeState.FINISHED, exit_status)
    return NodeStatus(name, NodeState.FAILED, exit_status, f"failed with exit status {exit_status}")


def unreachable(name: str, reason: object) -> NodeStatus:
    return NodeStatus(name, NodeState.UNREACHABLE, text=f"unreachable: {reason}")


def parse_node(name: str, line: bytes) -> NodeStatus:
    """Return the status that the script on a node printed; raise UserError for any other text."""
    if match := _ENDED.fullmatch(line):
        return ended(name, int(match[1]))
    if line not in _OF_NODE:
        message = f"{name} sent {line[:100]!r} instead of a state. Check what runs on it."
        raise UserError("host-state-invalid", message, host=name)
    state = _OF_NODE[line]
    return NodeStatus(name, state, text="lost: its processes no longer exist" if state is NodeState.LOST else "")


def parse_squeue(line: str) -> NodeStatus:
    """Return the status in a line "ID STATE REASON" of squeue; states that SLURM may add are UNKNOWN."""
    name, text = line.split(maxsplit=1)
    return NodeStatus(name, _SLURM_STATES.get(text.split()[0], NodeState.UNKNOWN), text=text.rstrip())
