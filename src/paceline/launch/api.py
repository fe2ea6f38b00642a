"""Launch jobs from Python: `pl.launch.ssh(recipe, hosts=["a", "b"])` returns a job to wait for, follow or stop."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.config.io import dump_recipe, load_recipe, recipe_from_tree, to_tree, words_of
from paceline.config.recipe import Recipe
from paceline.errors import UserError
from paceline.launch.backends import backend_of
from paceline.launch.checks import check_spec, extension_files, source_tree, with_reachable_data
from paceline.launch.job import Job, load
from paceline.launch.lifecycle import follow_to_end, show_logs, state_of, stop
from paceline.launch.specs import Ec2Spec, LocalSpec, SlurmSpec, Spec, SshSpec

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
        """The run folder on this machine, after wait() or fetch()."""
        return Path(self._job.spec.runs) / self._job.spec.name

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
        """Copy the run folder to this machine, also while the job runs; return its path."""
        return backend_of(self._job.spec).fetch(self._job)

    def stop(self, grace: float = _GRACE) -> str:
        """Stop the job after a checkpoint; return its state and how to resume it."""
        return stop(self._job, grace)

    def __repr__(self) -> str:
        return f"LaunchedJob({self.id!r}: {self.status})"


def local(
    recipe: str | Path | Recipe, nodes: int = 2, overrides: Mapping[str, Any] | None = None, **options: Any
) -> LaunchedJob:
    """Launch on simulated nodes on this machine, each with its own folder."""
    return _launch(LocalSpec, recipe, overrides, hosts=_numbered(nodes), **options)


def ssh(
    recipe: str | Path | Recipe, hosts: Sequence[str], overrides: Mapping[str, Any] | None = None, **options: Any
) -> LaunchedJob:
    """Launch on hosts that you can ssh to. Options are those of `paceline launch ssh`: procs_per_node, ..."""
    return _launch(SshSpec, recipe, overrides, hosts=tuple(hosts), **options)


def slurm(
    recipe: str | Path | Recipe, nodes: int = 1, overrides: Mapping[str, Any] | None = None, **options: Any
) -> LaunchedJob:
    """Submit to SLURM. `sbatch_options` are passed to sbatch, e.g. {"partition": "gpu"}."""
    return _launch(SlurmSpec, recipe, overrides, hosts=_numbered(nodes), **options)


def ec2(
    recipe: str | Path | Recipe,
    instance_type: str,
    nodes: int = 1,
    overrides: Mapping[str, Any] | None = None,
    **options: Any,
) -> LaunchedJob:
    """Launch on new EC2 instances, which are terminated afterwards."""
    return _launch(Ec2Spec, recipe, overrides, hosts=_numbered(nodes), instance_type=instance_type, **options)


def _numbered(nodes: int) -> tuple[str, ...]:
    return tuple(f"node-{number}" for number in range(nodes))


def _launch(
    kind: type[Spec], recipe: str | Path | Recipe, overrides: Mapping[str, Any] | None, **options: Any
) -> LaunchedJob:
    words = words_of(overrides)
    if isinstance(recipe, Recipe):
        loaded = recipe_from_tree(to_tree(recipe), recipe.name, words)
    else:
        loaded = load_recipe(str(recipe), words)
    loaded = with_reachable_data(loaded, kind.backend)
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in options if name not in known]:
        message = f"launch.{kind.backend} has no option {unknown[0]!r}. Use {', '.join(known)}."
        raise UserError("unknown-option", message, option=unknown[0])
    options["runs"] = str(Path(options.get("runs", "runs")).resolve())
    given = {"python": "" if kind in (SshSpec, Ec2Spec) else sys.executable, "code": str(source_tree() or "")}
    spec: Spec = kind(**(given | options), recipe=dump_recipe(loaded), extensions=extension_files(loaded))
    check_spec(spec, loaded)
    job: Job = backend_of(spec).launch(spec)
    return LaunchedJob(job.id)
