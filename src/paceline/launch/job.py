"""A job: what to train and where. It is stored in a small file, so that any terminal of the user can manage it."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from paceline.distributed.channel import new_token
from paceline.errors import UserError
from paceline.launch.values import host_name, run_name, variable
from paceline.system.files import LOCK_NAME, private_folder, sync, write_json, write_text


@dataclass(frozen=True)
class Job:
    id: str
    backend: str
    name: str
    """Name of the run and of its folder."""
    recipe: str
    """The whole recipe as YAML."""
    hosts: tuple[str, ...]
    """One per node."""
    procs: int = 1
    """Processes per node."""
    min_nodes: int = 1
    """Fewest nodes that training continues with."""
    rendezvous: str = ""
    """HOST:PORT of the rendezvous store."""
    join_timeout: int = 300
    """Seconds to wait for all nodes to join."""
    rendezvous_host: str = ""
    """Host that runs the rendezvous store; empty: the launching machine."""
    rank_timeout: int = 15
    """Seconds without a response after which a rank is considered failed."""
    python: str = ""
    """Interpreter on the hosts that has paceline; empty: an environment is created from the copied code."""
    container: str = ""
    """Container image with paceline, used instead of an interpreter."""
    code: str = ""
    """Source tree that is copied to the hosts."""
    pass_env: tuple[str, ...] = ()
    """Names of environment variables passed to the ranks; their values are never stored here."""
    variables: dict[str, str] = field(default_factory=dict)
    """Other environment variables, which are not secret."""
    setup_scripts: dict[str, str] = field(default_factory=dict)
    """Scripts per host that run before anything else."""
    runs: str = "runs"
    """Folder on the launching machine that the run folder is fetched to."""
    resume: str = ""
    """Results in an object store to resume from."""
    results: str = ""
    """URL in an object store that the run folder is copied to during training."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    extra: dict[str, Any] = field(default_factory=dict)
    """State of the backend."""

    def __post_init__(self) -> None:
        """Check again what becomes a folder name or stands unquoted in a script."""
        run_name("job", self.id)
        run_name("--name", self.name)
        for host in self.hosts:
            host_name("--hosts", host)
        for name in (*self.pass_env, *self.variables):
            variable("--pass", name)


class Backend(Protocol):
    """What each backend (ssh, slurm, ec2) implements as functions of its module."""

    def plan(self, job: Job) -> Sequence[object]:
        """Return the steps that submit() would take; str() of each is for the user."""

    def submit(self, job: Job) -> Job:
        """Start the job; return it with what the backend added."""

    def resume(self, job: Job) -> Job:
        """Start an unfinished job again from its last checkpoint; return it."""

    def follow(self, job: Job, *, until: Callable[[], bool] = ..., restart_lost: bool = ...) -> int:
        """Print logs until the job ends, restarting lost nodes; return its exit status."""

    def status(self, job: Job) -> list[tuple[str, str]]:
        """Return the name and the state of each part of the job."""

    def stop(self, job: Job, grace: float) -> list[str]:
        """Stop the job; return a line for each part that could not be stopped."""

    def clean_up(self, job: Job) -> None:
        """Release what the job still holds after its end."""

    def fetch(self, job: Job) -> Path:
        """Copy the run folder to this machine; return its path."""


def home() -> Path:
    return Path(os.environ.get("PACELINE_HOME") or Path.home() / ".paceline").absolute()


def folder_of(job_id: str) -> Path:
    return home() / "jobs" / job_id


def _check_home() -> None:
    """Refuse folders that others can write to: they could make this user run anything."""
    for folder in (home(), home() / "jobs"):
        private_folder(folder)


def new_id(name: str, reserve: bool) -> str:
    """Return an unused id that starts with the name and sorts by time."""
    stamp = datetime.now().strftime("%m%d-%H%M%S")
    prefix = re.sub(r"[^A-Za-z0-9.-]+", "-", name)[:100].strip("-.") or "job"
    names = (f"{prefix}-{stamp}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(name for name in names if _is_free(name, reserve))


def _is_free(name: str, reserve: bool) -> bool:
    """Reserve by creating the folder, so that two launches within a second get different ids."""
    if not reserve:
        return not folder_of(name).exists()
    _check_home()
    try:
        folder_of(name).mkdir(mode=0o700)
        return True
    except FileExistsError:
        return False


def save(job: Job) -> None:
    folder = folder_of(job.id)
    _check_home()
    private_folder(folder)
    sync(folder.parent)  # new_id has created the folder
    (folder / LOCK_NAME).touch(0o600)
    write_text(folder / "recipe.yaml", job.recipe, 0o600)
    fields = {key: value for key, value in dataclasses.asdict(job).items() if key != "recipe"}
    write_json(folder / "job.json", fields, 0o600)


def load(job_id: str) -> Job:
    """Return a job by its id or the start of it; by "" the newest."""
    known = all_ids()
    matches = [known_id for known_id in known if known_id == job_id] or [i for i in known if i.startswith(job_id)]
    if not known:
        folder = home() / "jobs"
        raise UserError("no-jobs", f"there are no jobs in {folder}. See `paceline launch --help`.", path=folder)
    newest = ", ".join(known[-5:])
    if not matches:
        raise UserError("unknown-job", f"no job is named {job_id!r}. The newest are {newest}.", job=job_id)
    if job_id and len(matches) > 1:
        message = f"several jobs start with {job_id!r}. Write more of the id; the newest are {newest}."
        raise UserError("ambiguous-job", message, job=job_id)
    folder = folder_of(matches[-1])
    _check_home()
    private_folder(folder)
    try:
        content = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        lists = {key: tuple(content[key]) for key in ("hosts", "pass_env")}
        return Job(**(content | lists), recipe=(folder / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError, UserError) as error:
        path = folder / "job.json"
        message = f"{path} is corrupt ({error}). Remove the folder {folder} to forget the job."
        raise UserError("job-corrupt", message, path=path) from None


def token_of(job: Job) -> str:
    """Return the secret that the nodes of a job share, created on first use and stored for restarts of nodes."""
    folder = folder_of(job.id)
    _check_home()
    private_folder(folder)
    path = folder / "token"
    with suppress(FileExistsError), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(new_token())
    return path.read_text(encoding="utf-8")


def is_known(job: Job) -> bool:
    return (folder_of(job.id) / "job.json").exists()


def forget(job: Job) -> None:
    shutil.rmtree(folder_of(job.id), ignore_errors=True)


def all_ids() -> list[str]:
    """Return the ids of all jobs, oldest first."""
    paths = (home() / "jobs").glob("*/job.json")
    return [path.parent.name for path in sorted(paths, key=lambda path: path.stat().st_mtime)]
