"""The backends that start jobs, each a module with the same functions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.launch.backends import ec2, local, slurm, ssh
from paceline.launch.job import Job
from paceline.launch.specs import Spec
from paceline.launch.states import NodeStatus


class Backend(Protocol):
    """What the module of each backend implements for its own kind of spec."""

    def plan(self, spec: Any) -> Sequence[object]:
        """Return the steps that launch() would take; str() of each is for the user."""

    def launch(self, spec: Any) -> Job:
        """Start a new job; return it with what the launch added."""

    def resume(self, job: Job) -> Job:
        """Start an unfinished job again from its last checkpoint; return it."""

    def follow(self, job: Job, *, until: Callable[[], bool] = ..., restart_lost: bool = ...) -> int:
        """Print logs until the job ends, restarting lost nodes; return its exit status."""

    def status(self, job: Job) -> list[NodeStatus]:
        """Return the status of each part of the job."""

    def stop(self, job: Job, grace: float) -> list[str]:
        """Stop the job; return a line for each part that could not be stopped."""

    def clean_up(self, job: Job) -> None:
        """Release what the job still holds after its end."""

    def fetch(self, job: Job) -> list[Path]:
        """Copy the run folders to this machine, one per seed; return their paths."""


_BACKENDS: dict[str, Backend] = {"local": local, "ssh": ssh, "slurm": slurm, "ec2": ec2}


def backend_of(spec: Spec) -> Backend:
    """Return the backend that a spec is for."""
    return _BACKENDS[spec.backend]
