"""A job: a spec that was launched. It is stored in a small file, so that any terminal of the user can manage it."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from paceline.distributed.channel import new_token
from paceline.errors import UserError
from paceline.launch.specs import STRICT, JobSpec, Spec
from paceline.launch.values import first_problem, run_name, variable
from paceline.system.files import LOCK_NAME, private_folder, sync, write_json, write_text


@dataclass(frozen=True)
class Instance:
    """An EC2 instance."""

    __pydantic_config__: ClassVar = STRICT

    id: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Ec2Resources:
    """What was created on EC2 for a job, and what its replacements need."""

    __pydantic_config__: ClassVar = STRICT

    region: str
    zone: str
    subnet: str
    image: str
    root_device: str
    security_group: str
    placement_group: str
    efa_interfaces: int = 0
    """Elastic Fabric Adapters of each instance; 0: an ordinary interface."""
    used_addresses: tuple[str, ...] = ()
    """Those of --addresses that an instance has had."""
    instances: dict[str, Instance] = field(default_factory=dict)
    """By host."""


@dataclass(frozen=True)
class Job:
    """A spec with an id, and what its launch added."""

    __pydantic_config__: ClassVar = STRICT

    id: str
    spec: Annotated[Spec, Field(discriminator="backend")]
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    rendezvous: str = ""
    """HOST:PORT of the rendezvous store."""
    rendezvous_host: str = ""
    """Host that runs the rendezvous store; empty: the launching machine."""
    join_timeout: int = 300
    """Seconds to wait for all nodes to join."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the ranks that are not secret."""
    setup_scripts: dict[str, str] = field(default_factory=dict)
    """Scripts per host that run before anything else."""
    slurm_id: str = ""
    """Id of the job in SLURM."""
    ec2: Ec2Resources | None = None

    def __post_init__(self) -> None:
        """Check again what becomes a folder name or stands unquoted in a script."""
        run_name("job", self.id)
        run_name("--name", self.spec.name)
        for name in self.variables:
            variable("variable", name)


@cache
def _adapter() -> TypeAdapter[Job]:
    return TypeAdapter(Job)


def home() -> Path:
    return Path(os.environ.get("PACELINE_HOME") or Path.home() / ".paceline").absolute()


def folder_of(job_id: str) -> Path:
    return home() / "jobs" / job_id


def _check_home() -> None:
    """Refuse folders that others can write to: they could make this user run anything."""
    for folder in (home(), home() / "jobs"):
        private_folder(folder)


def draft(spec: Spec) -> Job:
    """Return the job that a spec would become, for a plan: nothing is stored."""
    return _with_id(spec, new_id(spec, reserve=False))


@contextmanager
def new_job(spec: Spec) -> Iterator[Job]:
    """Yield a job with a new id and folder; if an error occurs before it is saved, remove the folder."""
    job = _with_id(spec, new_id(spec, reserve=True))
    try:
        yield job
    except BaseException:
        if not is_known(job):
            forget(job)
        raise


def _with_id(spec: Spec, job_id: str) -> Job:
    return Job(job_id, replace(spec, name=spec.name or job_id))


def new_id(spec: JobSpec, reserve: bool) -> str:
    """Return an unused id that starts with the name of the run or recipe and sorts by time."""
    name = spec.name or str(yaml.safe_load(spec.recipe).get("name", ""))
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
    content = dataclasses.asdict(job)
    write_text(folder / "recipe.yaml", content["spec"].pop("recipe"), 0o600)
    write_json(folder / "job.json", content, 0o600)


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
        return _read(folder)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, UserError) as error:
        path = folder / "job.json"
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        message = f"{path} is corrupt ({reason}). Remove the folder {folder} to forget the job."
        raise UserError("job-corrupt", message, path=path) from None


def _read(folder: Path) -> Job:
    content = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    content["spec"]["recipe"] = (folder / "recipe.yaml").read_text(encoding="utf-8")
    return _adapter().validate_json(json.dumps(content))


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
