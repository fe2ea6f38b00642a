"""A backend whose nodes are in given states, for tests of the commands that manage jobs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import NoRunFolder
from paceline.launch import backends, final_state, lifecycle, states
from paceline.launch import job as jobs
from paceline.launch.job import Job
from paceline.launch.specs import Ec2Spec, LocalSpec, SlurmSpec, SshSpec
from paceline.launch.states import NodeState, NodeStatus

RECIPE = "name: a\ndata: {name: digits}\n"
RUNNING, FINISHED = NodeState.RUNNING, 0
_KINDS = {"local": LocalSpec, "ssh": SshSpec, "slurm": SlurmSpec, "ec2": Ec2Spec}

Run = Callable[..., tuple[int, str]]
"""Run a command; return its exit status and its output."""


def runner(here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))

    def run(*words: str) -> tuple[int, str]:
        answer = here(*words)
        assert "Traceback" not in answer.stderr
        return answer.returncode, answer.stdout + answer.stderr

    return run


def saved_job(tmp_path: Path, name: str = "j", backend: str = "ssh", **more: Any) -> Job:
    """Save a job with two nodes; `more` are fields of its spec."""
    fields = {"name": name, "recipe": RECIPE, "hosts": ("n1", "n2"), "runs": str(tmp_path / "runs")}
    job = Job(name, _KINDS[backend](**fields, **more), slurm_id="7" if backend == "slurm" else "")
    jobs.save(job)
    return job


def nodes(*wanted: NodeState | int | NodeStatus) -> list[NodeStatus]:
    """Return nodes n1, n2 ... from their states or exit statuses."""
    found = []
    for number, one in enumerate(wanted, 1):
        if isinstance(one, NodeStatus):
            found.append(replace(one, name=f"n{number}"))
        elif isinstance(one, NodeState):
            found.append(NodeStatus(f"n{number}", one))
        else:
            found.append(states.ended(f"n{number}", one))
    return found


@dataclass
class FakeBackend:
    """Nodes in given states; records the calls."""

    parts: list[NodeStatus]
    then: list[NodeStatus] | None = None
    """Their states after a stop."""
    not_stopped: list[str] = field(default_factory=list)
    folder: Path | None = None
    calls: list[str] = field(default_factory=list)

    def status(self, job: Job) -> list[NodeStatus]:
        return self.parts

    def stop(self, job: Job, grace: float) -> list[str]:
        self.calls.append("stop")
        final_state.mark_stopped(job)
        self.parts = self.then or self.parts
        return self.not_stopped

    def resume(self, job: Job) -> Job:
        self.calls.append("resume")
        final_state.clear_final_state(job)
        self.parts = nodes(*(FINISHED for _ in self.parts))
        return job

    def follow(self, job: Job, **options: Any) -> int:
        self.calls.append("follow")
        return 0 if any(node.exit_status == 0 for node in self.parts) else 1

    def fetch(self, job: Job) -> list[Path]:
        if self.folder is None:
            raise NoRunFolder("no-run-folder", f"no node of {job.id} has a run folder")
        return [self.folder]

    def clean_up(self, job: Job) -> None:
        self.calls.append("clean_up")


def use_backend(monkeypatch: pytest.MonkeyPatch, *wanted: NodeState | int | NodeStatus, **more: Any) -> FakeBackend:
    """Let all commands use a backend whose nodes have these states or exit statuses."""
    backend = FakeBackend(nodes(*wanted), **more)
    for module in (backends, lifecycle):
        monkeypatch.setattr(module, "backend_of", lambda spec: backend)
    return backend


def is_marked_stopped(job: Job) -> bool:
    return (jobs.folder_of(job.id) / final_state.STOPPED).exists()


def finished_run(folder: Path, job: Job) -> Path:
    """Write the run folder of a job that has finished."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "summary.json").write_text('{"status": "finished"}')
    (folder / ".job").write_text(job.id)
    return folder
