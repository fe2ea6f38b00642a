"""Launch jobs on several nodes, and manage them. Nothing here imports torch.

One launch, in the order of its calls:

    cli/launch.py           parses the command line into a typed spec (specs.py): SshSpec, SlurmSpec, Ec2Spec ...
    backends/ssh.py         launch(spec) makes a job of it (job.py); local, slurm and ec2 have the same functions
    rendezvous.choose(job)  decides where the nodes find each other
    planning.plan(job)      returns the steps: files to copy and scripts to run on each host; --dry-run prints them
    execution.start(job)    executes the steps on all hosts (hosts.py); the last one starts node.sh (sessions.py)
    node.sh                 runs `paceline train recipe.yaml --nodes 1:2 --rendezvous ...` on its host
    cli/train.py            starts the ranks of that node (distributed/run.py), which train (engine/train.py)

lifecycle.py then follows the job: supervising.py prints its logs, restarting.py restarts lost nodes, fetching.py
copies the run folder back. manifest.py only plans: the user's own engine runs the file.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.launch.api import LaunchedJob, check_hosts, dry_run, ec2, jobs, local, manifest, slurm, ssh

__all__ = ["LaunchedJob", "check_hosts", "dry_run", "ec2", "jobs", "local", "manifest", "slurm", "ssh"]


def __getattr__(name: str) -> Any:
    """Import the functions of the Python API on first use."""
    if name in __all__:
        from paceline.launch import api

        return getattr(api, name)
    raise AttributeError(f"module 'paceline.launch' has no attribute {name!r}")
