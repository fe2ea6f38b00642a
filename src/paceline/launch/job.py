"""A job: what is to be trained, and where; kept in a small file, so that any terminal can go on with it."""

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
    """Of the run, and of its folder."""
    recipe: str
    """All of it, as YAML."""
    hosts: tuple[str, ...]
    procs: int = 1
    """Processes on each host."""
    min_nodes: int = 1
    """Hosts that are enough to go on."""
    rendezvous: str = ""
    """HOST:PORT where the hosts find each other."""
    join_timeout: int = 300
    """Seconds to wait there until all are there."""
    rendezvous_host: str = ""
    """The host that keeps it; empty: the machine that launched."""
    rank_timeout: int = 15
    """Seconds after which a silent rank counts as lost."""
    python: str = ""
    """Interpreter on the hosts that has paceline; empty: an environment is made from the code that is copied."""
    container: str = ""
    """Image with paceline in it, instead of an interpreter."""
    code: str = ""
    """Folder that is copied to the hosts."""
    pass_env: tuple[str, ...] = ()
    """Names of variables that ranks get; their values are never written down here."""
    variables: dict[str, str] = field(default_factory=dict)
    """Others, which are no secrets."""
    setup_scripts: dict[str, str] = field(default_factory=dict)
    """Scripts of single hosts, to be run before anything else."""
    runs: str = "runs"
    """Where the run folder is brought to."""
    resume: str = ""
    """Results in an object store to go on with, instead of beginning."""
    results: str = ""
    """Object store that it is copied to while the run goes on."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    extra: dict[str, Any] = field(default_factory=dict)
    """What a back end has to remember."""

    def __post_init__(self) -> None:
        """What becomes a folder, or stands in a script without quotes; the command line has refused others before."""
        run_name("job", self.id)
        run_name("--name", self.name)
        for host in self.hosts:
            host_name("--hosts", host)
        for name in (*self.pass_env, *self.variables):
            variable("--pass", name)


class Backend(Protocol):
    """What a kind of place can do with jobs: modules of this package do."""

    def plan(self, job: Job) -> Sequence[object]:
        """What would be done, as text."""

    def submit(self, job: Job) -> Job:
        """Start it; the job with what was found out on the way."""

    def resume(self, job: Job) -> Job:
        """Start one again that ended before its time, from its last checkpoint."""

    def follow(self, job: Job, *, until: Callable[[], bool] = ..., bring_back: bool = ...) -> int:
        """Show what it prints until it is over, and bring lost machines back; its exit status."""

    def status(self, job: Job) -> list[tuple[str, str]]:
        """Parts of the job and what they do."""

    def stop(self, job: Job, grace: float) -> list[str]:
        """End it; what could not be ended."""

    def tidy(self, job: Job) -> None:
        """After its end."""

    def fetch(self, job: Job) -> Path:
        """Bring the run folder here."""


def home() -> Path:
    return Path(os.environ.get("PACELINE_HOME") or Path.home() / ".paceline").absolute()


def folder_of(job_id: str) -> Path:
    return home() / "jobs" / job_id


def _check_home() -> None:
    """Who can write there can make this user run anything."""
    for folder in (home(), home() / "jobs"):
        private_folder(folder)


def new_id(name: str, reserve: bool) -> str:
    """Readable, in order of time, and free."""
    stamp = datetime.now().strftime("%m%d-%H%M%S")
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", name)[:100].strip("-.") or "job"
    names = (f"{plain}-{stamp}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(name for name in names if _is_free(name, reserve))


def _is_free(name: str, reserve: bool) -> bool:
    """Two launches in one second must not get the same."""
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
    sync(folder.parent)  # a new id has made the folder already
    (folder / LOCK_NAME).touch(0o600)
    write_text(folder / "recipe.yaml", job.recipe, 0o600)
    fields = {key: value for key, value in dataclasses.asdict(job).items() if key != "recipe"}
    write_json(folder / "job.json", fields, 0o600)


def load(job_id: str) -> Job:
    """By its id, the beginning of one, or without any the newest."""
    known = all_ids()
    found = [known_id for known_id in known if known_id == job_id] or [i for i in known if i.startswith(job_id)]
    if not known:
        raise UserError(f"there is no job yet in {home() / 'jobs'}; `paceline launch --help`")
    if not found or (job_id and len(found) > 1):
        which = f"{job_id!r} is {'no job' if not found else 'the beginning of several jobs'}"
        raise UserError(f"{which}; there are {', '.join(known[-5:])}")
    folder = folder_of(found[-1])
    _check_home()
    private_folder(folder)
    try:
        content = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        lists = {key: tuple(content[key]) for key in ("hosts", "pass_env")}
        return Job(**(content | lists), recipe=(folder / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError, UserError) as error:
        raise UserError(f"{folder / 'job.json'} is corrupt ({error}); remove the folder to forget the job") from None


def token_of(job: Job) -> str:
    """The secret of its nodes, made when it is first asked for; any terminal of the user can start a node again."""
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
    """Oldest first."""
    paths = (home() / "jobs").glob("*/job.json")
    return [path.parent.name for path in sorted(paths, key=lambda path: path.stat().st_mtime)]
