"""What a selftest measures in rank processes. Each probe is a function of Probing that returns figures on rank 0."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.selftest.settings import Settings

if TYPE_CHECKING:
    from paceline.distributed.world import World


@dataclass(frozen=True)
class Probing:
    """A rank process and its settings."""

    world: "World"
    settings: Settings


class Probe(NamedTuple):
    module: str
    one_rank: bool = False
    """It runs on one rank, of the first host."""
    is_first: bool = False
    """It runs in the first processes, which find out about the devices."""
    own_session: bool = False
    """It trains with the code of `paceline train`, which connects the ranks itself, so it needs new processes."""


PROBES = {
    "facts": Probe("facts", one_rank=True, is_first=True),
    "precision": Probe("losses", one_rank=True, is_first=True),
    "one_rank_losses": Probe("losses", one_rank=True, is_first=True),
    "many_rank_losses": Probe("losses"),
    "syncs": Probe("syncs"),
    "steps": Probe("steps"),
    "loading": Probe("loading"),
    "bandwidth": Probe("network"),
    "whole_run": Probe("runs", own_session=True),
    "killed_run": Probe("runs", own_session=True),
    "resumed_run": Probe("runs", own_session=True),
    "round_trip": Probe("runs", one_rank=True, own_session=True),
}
"""By name, in the order in which they run. The function of a probe has its name."""


def measure(name: str, probing: Probing) -> dict[str, Any]:
    """Run a probe on this rank."""
    module = import_module(f"paceline.selftest.probes.{PROBES[name].module}")
    figures: dict[str, Any] = getattr(module, name)(probing)
    return figures
