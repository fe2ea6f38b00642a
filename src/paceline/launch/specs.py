"""Typed specs: what the command line asks a backend to launch. They are stored in the job's file."""

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import ClassVar, Literal

from pydantic import ConfigDict

from paceline.config.seeds import run_names
from paceline.errors import UserError
from paceline.launch.values import host_name, run_name, variable

STRICT = ConfigDict(extra="forbid", strict=True)
"""A job's file may be corrupt or untrusted: unknown fields and wrong types are errors."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to train and on which nodes: the same for all backends. Fields are named after the options."""

    __pydantic_config__: ClassVar = STRICT

    recipe: str
    """The whole recipe as YAML."""
    hosts: tuple[str, ...]
    """One per node."""
    name: str = ""
    """Name of the run and of its folder; empty: the id of the job."""
    procs: int | Literal["auto"] = "auto"
    """Processes per node; auto: one per GPU, one on CPUs."""
    procs_by_host: dict[str, int] = field(default_factory=dict)
    """What `procs` comes to; a host that is missing counts its own GPUs."""
    procs_source: str = ""
    """Where these numbers come from."""
    selftest: bool = False
    """Run `paceline selftest` on every node before training, and train only if it passes."""
    rank_timeout: int = 600
    """Seconds without a response after which a rank is considered failed."""
    code: str = ""
    """Source tree that is copied to the hosts."""
    results: str = ""
    """URL in an object store that the run folder is copied to during training."""
    seeds: tuple[int, ...] = ()
    """Seeds to train, each in a run of its own; empty: one run, with the seed of the recipe."""
    extensions: dict[str, str] = field(default_factory=dict)
    """Files of the packages that the recipe imports, by path; nodes find them in PYTHONPATH."""

    @property
    def run_names(self) -> list[str]:
        """The names of the run folders."""
        return run_names(self.name, self.seeds)

    def __post_init__(self) -> None:
        """Check again what becomes a folder name or stands unquoted in a script."""
        if self.name:
            run_name("--name", self.name)
        if self.procs != "auto" and (not isinstance(self.procs, int) or self.procs < 1):
            message = f"procs={self.procs!r} is not a number of processes. Use a positive integer, or auto."
            raise UserError("invalid-procs", message, procs=str(self.procs))
        for host in self.hosts:
            host_name("--hosts", host)
        for path in self.extensions:
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise UserError("extension-path-unsafe", f"extensions: {path!r} is not a relative path.", path=path)


@dataclass(frozen=True, kw_only=True)
class LaunchSpec(JobSpec):
    """A job that paceline starts itself, and follows."""

    python: str = ""
    """Interpreter on the hosts that has paceline; empty: an environment is created from the copied code."""
    container: str = ""
    """Container image with paceline, used instead of an interpreter."""
    pass_env: tuple[str, ...] = ()
    """Names of environment variables passed to the ranks; their values are never stored here."""
    runs: str = "runs"
    """Folder on the launching machine that the run folder is fetched to."""

    def __post_init__(self) -> None:
        """Check also the names of variables."""
        super().__post_init__()
        for name in self.pass_env:
            variable("--pass", name)


@dataclass(frozen=True, kw_only=True)
class ElasticSpec(LaunchSpec):
    """A job whose nodes may fail and rejoin."""

    min_nodes: int = 1
    """Fewest nodes that training continues with."""
    rank_timeout: int = 15
    """Short, because the other ranks continue without a failed one."""
    resume: str = ""
    """Results in an object store to resume from."""


@dataclass(frozen=True, kw_only=True)
class LocalSpec(ElasticSpec):
    """Nodes that are folders and sessions on this machine."""

    backend: Literal["local"] = "local"
    node_variables: dict[str, dict[str, str]] = field(default_factory=dict)
    """Environment variables of each node, which leave it its own GPUs."""


@dataclass(frozen=True, kw_only=True)
class RemoteSpec(ElasticSpec):
    """Nodes that are reached with ssh."""

    ssh_config: str = ""
    """File to use instead of ~/.ssh/config."""
    rendezvous_host: str = "auto"
    """Where the rendezvous store runs: auto, here, or one of the hosts."""


@dataclass(frozen=True, kw_only=True)
class SshSpec(RemoteSpec):
    """Hosts that the user can ssh to."""

    backend: Literal["ssh"] = "ssh"


@dataclass(frozen=True, kw_only=True)
class SlurmSpec(LaunchSpec):
    """An allocation of a SLURM cluster; with seeds, an array with a task per seed."""

    backend: Literal["slurm"] = "slurm"
    sbatch_options: dict[str, str | None] = field(default_factory=dict)
    """Further options of sbatch; None: an option without a value."""
    notice: int = 120
    """Seconds before the time limit at which the job checkpoints."""
    container_runtime: Literal["apptainer", "pyxis"] = "apptainer"


@dataclass(frozen=True, kw_only=True)
class Ec2Spec(RemoteSpec):
    """EC2 instances, which are launched for the job and terminated after it."""

    backend: Literal["ec2"] = "ec2"
    instance_type: str
    spot: bool = False
    max_price: float | None = None
    """Maximum spot price in dollars per hour."""
    region: str = ""
    zone: str = ""
    subnet: str = ""
    image_id: str = ""
    image_name: str = ""
    user: str = "ubuntu"
    public_key: str = ""
    """File with the user's public key; empty: a new pair is created."""
    ssh_from: str = ""
    """Addresses allowed to ssh, as CIDR; empty: the public address of this machine."""
    private: bool = False
    """Connect to private addresses."""
    addresses: tuple[str, ...] = ()
    """Private addresses of the instances and of their replacements."""
    root_gb: int = 100
    attach_volume: str = ""
    """Attach existing volumes NAME_0, NAME_1 ..."""
    from_snapshot: str = ""
    """Create a volume from this snapshot for each instance."""
    mount: str = "/data"
    efs: str = ""
    user_data: str = ""
    """Script for the first boot."""
    security_groups: tuple[str, ...] = ()
    volume_gb: int | None = None
    volume_type: str = "gp3"
    iops: int | None = None
    throughput: int | None = None
    linger: int = 600
    """Seconds after the job at which instances terminate themselves."""
    idle: int = 3600
    """Seconds without a job after which instances terminate themselves."""
    keep: bool = False
    """Do not terminate the instances."""
    efa: bool = False
    """Connect the instances with Elastic Fabric Adapters."""
    instance_profile: str = ""
    """IAM instance profile: a name or an ARN. Its role gives the job access to AWS without keys."""


@dataclass(frozen=True, kw_only=True)
class ManifestSpec(JobSpec):
    """A file for an engine that the user already runs. It is printed, so there is no job."""

    backend: Literal["manifest"] = "manifest"
    engine: str
    """skypilot, kubeflow or kubernetes."""
    image: str = ""
    gpus_per_node: int = 0
    gpu_type: str = ""
    rdma: str = ""
    """Resource of a node in Kubernetes that is its RDMA devices, RESOURCE=N."""


Spec = LocalSpec | SshSpec | SlurmSpec | Ec2Spec
"""What a job can be launched from."""
