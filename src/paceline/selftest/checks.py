"""The checks of a selftest: the probes that each needs, and how their figures are judged."""

from collections.abc import Callable
from typing import Any, NamedTuple

from paceline.selftest import judges
from paceline.selftest.judges import Verdict


class Check(NamedTuple):
    title: str
    probes: tuple[str, ...]
    judge: Callable[..., Verdict]
    needs_ranks: bool = False
    """It is skipped on one rank."""
    expects_failure: tuple[str, ...] = ()
    """Probes that must end with an error."""


ENVIRONMENT, HOSTS = "environment", "hosts"
"""Names of the checks that always run; HOSTS with --hosts only, by `paceline doctor`'s checks."""
HOSTS_TITLE = "hosts can train together"

CHECKS = {
    ENVIRONMENT: Check("software and devices", ("facts",), judges.environment),
    "precision": Check("same losses as a plain loop on the CPU", ("precision",), judges.precision),
    "ranks": Check(
        "same losses on one rank, all ranks and with FSDP",
        ("one_rank_losses", "many_rank_losses"),
        judges.same_losses,
        needs_ranks=True,
    ),
    "resume": Check(
        "kill -9 of a rank, then resume",
        ("whole_run", "killed_run", "resumed_run"),
        judges.resume,
        expects_failure=("killed_run",),
    ),
    "checkpoint": Check("checkpoint round trip", ("whole_run", "round_trip"), judges.round_trip),
    "sync": Check("no synchronization within a step", ("syncs",), judges.syncs),
    "memory": Check("memory per rank", ("steps",), judges.memory),
    "time-split": Check("time split adds up", ("whole_run",), judges.time_split),
    "step-time": Check("step time compared with a plain loop", ("steps",), judges.step_time),
    "rank-speed": Check("ranks equally fast", ("steps",), judges.rank_speed, needs_ranks=True),
    "loader": Check("loader compared with the device", ("loading",), judges.loading),
    "bandwidth": Check("all-reduce bandwidth", ("bandwidth",), judges.bandwidth, needs_ranks=True),
}
"""By name, in the order of the table."""


class Row(NamedTuple):
    """A line of the table."""

    name: str
    title: str
    status: str
    reason: str
    figures: dict[str, Any]
    seconds: float = 0.0
