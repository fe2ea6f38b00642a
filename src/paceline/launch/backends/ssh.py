"""The ssh backend: hosts that the user can ssh to."""

from paceline.launch import execution, planning, rendezvous
from paceline.launch import job as jobs
from paceline.launch.doctor import refuse_different_code
from paceline.launch.fetching import fetch
from paceline.launch.job import Job
from paceline.launch.job_hosts import hosts_of
from paceline.launch.procs import described
from paceline.launch.specs import RemoteSpec, SshSpec
from paceline.launch.supervising import clean_up, follow, status, stop

__all__ = ["clean_up", "fetch", "follow", "launch", "plan", "resume", "status", "stop"]


def plan(spec: SshSpec) -> list[object]:
    """Return the processes per node, then the steps that launch() would take."""
    return [f"# {described(spec)}", *planning.preview(jobs.draft(spec))]


def launch(spec: SshSpec) -> Job:
    """Start a new job; return it with its rendezvous."""
    plan(spec)  # refuses values that no script can hold, before anything starts
    with jobs.new_job(spec) as job:
        return resume(job)


def resume(job: Job) -> Job:
    """Start the nodes of a job; an unfinished run of that name continues from its last checkpoint."""
    assert isinstance(job.spec, RemoteSpec)
    secrets, hosts, python = execution.secrets_of(job), hosts_of(job), job.spec.python
    if python:
        refuse_different_code([hosts[name] for name in job.spec.hosts], python)
    return execution.start(rendezvous.choose(job, job.spec.rendezvous_host), secrets)
