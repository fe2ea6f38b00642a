"""Launch jobs from Python: `pl.launch.ssh(recipe, hosts=["a", "b"])` returns a job to wait for, follow or stop."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.config.io import load_recipe, recipe_from_tree, to_tree
from paceline.config.overrides import Overrides, words_of
from paceline.config.recipe import Recipe
from paceline.config.seeds import parse_seeds, seed_conflict
from paceline.errors import UserError
from paceline.launch.backends import backend_of
from paceline.launch.backends.manifest import plan as planned_manifest
from paceline.launch.checks import SpecT, new_spec, with_reachable_data
from paceline.launch.doctor import HostReport, check
from paceline.launch.hosts import SshHost
from paceline.launch.job import Job, all_ids, load
from paceline.launch.lifecycle import follow_to_end, resume, show_logs, state_of, stop
from paceline.launch.specs import Ec2Spec, LocalSpec, ManifestSpec, SlurmSpec, Spec, SshSpec
from paceline.launch.states import NodeStatus
from paceline.launch.values import host_name, operand, plain

_GRACE = 60.0


class LaunchedJob:
    """A job on several nodes."""

    def __init__(self, job_id: str):
        self._job = load(job_id)

    @property
    def id(self) -> str:
        """The id that `paceline status`, `logs`, `attach` and `stop` take."""
        return self._job.id

    @property
    def status(self) -> str:
        """State of the job: running, finished, failed, stopped, ..."""
        return str(state_of(self._job))

    @property
    def path(self) -> Path:
        """The run folder on this machine, after wait() or fetch(); with seeds that of the first one."""
        return self.paths[0]

    @property
    def paths(self) -> list[Path]:
        """The run folders on this machine, one per seed, after wait() or fetch()."""
        return [Path(self._job.spec.runs) / name for name in self._job.spec.run_names]

    @property
    def nodes(self) -> list[NodeStatus]:
        """The state of each node."""
        return backend_of(self._job.spec).status(self._job)

    def resume(self) -> None:
        """Start a job that ended early again, from its last checkpoint."""
        resume(self._job)

    def logs(self) -> None:
        """Print the logs of all nodes so far."""
        show_logs(self._job)

    def wait(self) -> Path:
        """Follow the job to its end, restarting lost nodes; return its run folder. Raise UserError if it fails."""
        status = follow_to_end(self._job)
        if status == 130:
            raise KeyboardInterrupt
        if status:
            message = f"{self.id} ended with exit status {status}. `paceline logs {self.id}` shows why."
            raise UserError("job-failed", message, job=self.id, status=status)
        return self.path

    def fetch(self) -> Path:
        """Copy the run folder, or that of each seed, to this machine, also while the job runs; return `path`."""
        return backend_of(self._job.spec).fetch(self._job)[0]

    def stop(self, grace: float = _GRACE) -> str:
        """Stop the job after a checkpoint; return its state and how to resume it."""
        return stop(self._job, grace)

    def __repr__(self) -> str:
        return f"LaunchedJob({self.id!r}: {self.status})"


def local(
    recipe: str | Path | Recipe, nodes: int = 2, overrides: Overrides | None = None, **options: Any
) -> LaunchedJob:
    """Launch on simulated nodes on this machine, each with its own folder."""
    return _launch(LocalSpec, recipe, overrides, nodes=nodes, **options)


def ssh(
    recipe: str | Path | Recipe, hosts: str | Sequence[str], overrides: Overrides | None = None, **options: Any
) -> LaunchedJob:
    """Launch on hosts that you can ssh to, e.g. ["a", "b"] or "a,b". Options are those of `paceline launch ssh`."""
    return _launch(SshSpec, recipe, overrides, hosts=hosts, **options)


def slurm(
    recipe: str | Path | Recipe, nodes: int = 1, overrides: Overrides | None = None, **options: Any
) -> LaunchedJob:
    """Submit to SLURM. `sbatch_options` are passed to sbatch, e.g. {"partition": "gpu"}."""
    return _launch(SlurmSpec, recipe, overrides, nodes=nodes, **options)


def ec2(
    recipe: str | Path | Recipe,
    instance_type: str,
    nodes: int = 1,
    overrides: Overrides | None = None,
    **options: Any,
) -> LaunchedJob:
    """Launch on new EC2 instances, which are terminated afterwards."""
    return _launch(Ec2Spec, recipe, overrides, nodes=nodes, instance_type=instance_type, **options)


def manifest(
    recipe: str | Path | Recipe, engine: str, nodes: int = 2, overrides: Overrides | None = None, **options: Any
) -> str:
    """Return a file for an engine that you already run: skypilot, kubeflow or kubernetes. It has a secret token."""
    spec = _spec(ManifestSpec, recipe, overrides, nodes=nodes, engine=engine, **options)
    return str(*planned_manifest(spec))


def dry_run(backend: str, recipe: str | Path | Recipe, overrides: Overrides | None = None, **options: Any) -> str:
    """Return the steps that a launch would take. `options` are those of its function, e.g. hosts=["a", "b"]."""
    kinds: dict[str, type[Spec]] = {kind.backend: kind for kind in (LocalSpec, SshSpec, SlurmSpec, Ec2Spec)}
    if backend not in kinds:
        raise UserError("unknown-backend", f"{backend!r} is not a backend. Use {', '.join(kinds)}.", backend=backend)
    if backend == "ec2" and "instance_type" not in options:
        raise UserError(
            "missing-option", 'launch.ec2 needs instance_type, e.g. "p4d.24xlarge".', option="instance_type"
        )
    if backend != "ssh" and "hosts" not in options:
        options.setdefault("nodes", 2 if backend == "local" else 1)
    spec = _spec(kinds[backend], recipe, overrides, **options)
    return "\n\n".join(map(str, backend_of(spec).plan(spec)))


def jobs() -> list[LaunchedJob]:
    """Return the jobs that were launched from this machine, oldest first."""
    return [LaunchedJob(job_id) for job_id in all_ids()]


def check_hosts(
    hosts: str | Sequence[str], *, python: str = "python3", data: str = "", ssh_config: str | Path = ""
) -> HostReport:
    """Check whether hosts can train together: same code, torch and data, links, disks; returns facts and problems."""
    operand("--python", python)
    plain("--data", data)
    options = ("-F", str(Path(ssh_config).resolve())) if ssh_config else ()
    return check([SshHost(host_name("--hosts", name), "$HOME", options) for name in listed(hosts)], python, data)


def _launch(kind: type[Spec], recipe: str | Path | Recipe, overrides: Overrides | None, **options: Any) -> LaunchedJob:
    spec = _spec(kind, recipe, overrides, **options)
    job: Job = backend_of(spec).launch(spec)
    return LaunchedJob(job.id)


def _spec(kind: type[SpecT], recipe: str | Path | Recipe, overrides: Overrides | None, **options: Any) -> SpecT:
    words = words_of(overrides)
    if isinstance(recipe, Recipe):
        loaded = recipe_from_tree(to_tree(recipe), recipe.name, words)
    else:
        loaded = load_recipe(str(recipe), words)
    options["hosts"] = _hosts(options, kind.backend)
    if options.get("seeds"):
        options["seeds"] = parse_seeds(options["seeds"])
        if "seed" in (overrides or {}):
            raise seed_conflict()
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in options if name not in known]:
        message = f"launch.{kind.backend} has no option {unknown[0]!r}. Use {', '.join(known)}."
        raise UserError("unknown-option", message, option=unknown[0])
    return new_spec(kind, with_reachable_data(loaded, kind.backend), options)


def _hosts(options: dict[str, Any], backend: str) -> tuple[str, ...]:
    """Return the hosts of ssh, or a name for each node of other backends."""
    if "nodes" not in options:
        return listed(options.get("hosts", ()))
    nodes = options.pop("nodes")
    if not isinstance(nodes, int) or nodes < 1 or backend == "ssh":
        message = f"launch.{backend}: nodes={nodes!r} is not valid. Use a positive integer, or hosts with ssh."
        raise UserError("invalid-nodes", message, nodes=str(nodes))
    return tuple(f"node-{number}" for number in range(nodes))


def listed(hosts: str | Sequence[str]) -> tuple[str, ...]:
    """Return names that are separated by commas, or in a sequence."""
    names = [name.strip() for name in hosts.split(",") if name.strip()] if isinstance(hosts, str) else hosts
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        message = f'hosts={hosts!r:.80} names no host. Write e.g. ["a", "b"] or "a,b".'
        raise UserError("missing-hosts", message)
    return tuple(names)
