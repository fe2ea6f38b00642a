"""The EC2 backend: launch instances, train as over ssh, then terminate everything, also when a step fails."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.errors import NoRunFolder, UserError
from paceline.launch import ec2_provision, fetching, planning, restarting, supervising
from paceline.launch import job as jobs
from paceline.launch.backends import ssh
from paceline.launch.ec2_client import Ec2Client
from paceline.launch.execution import exit_on_signals, ignore_signals
from paceline.launch.fetching import fetched_folders
from paceline.launch.final_state import is_stopped
from paceline.launch.hosts import HostError
from paceline.launch.job import Job
from paceline.launch.procs import described
from paceline.launch.sessions import NodeMonitor
from paceline.launch.specs import Ec2Spec
from paceline.launch.states import PREEMPTED, NodeState, NodeStatus
from paceline.system.files import say
from paceline.track.records import RunFolder


def plan(spec: Ec2Spec) -> list[object]:
    """Return what would be launched, then the steps on each instance."""
    job, count = jobs.draft(spec), len(spec.hosts)
    limit = f" at most ${spec.max_price} per hour" if spec.max_price else ""
    market = f"spot{limit}" if spec.spot else "on demand"
    ssh_from = spec.ssh_from or "your IP address"
    end = f"terminate themselves {spec.linger} s after the job, or after {spec.idle} s without one"
    volume = f"{spec.attach_volume}_0 ..." if spec.attach_volume else spec.from_snapshot
    summary = "\n".join(
        [
            f"# EC2, {spec.region or 'default region'}, all resources tagged paceline-job={job.id}",
            f"# image: {spec.image_id or spec.image_name or 'the newest AWS Deep Learning AMI'}",
            f"# key pair {job.id}: {spec.public_key or 'new, with the private key in the folder of the job'}",
            f"# security group {job.id}: ssh from {ssh_from}, all traffic between the instances",
            f"# placement group {job.id}: cluster" if count > 1 else "# no placement group",
            f"# {count} x {spec.instance_type}, {market}, {spec.root_gb} GB",
            f"# {described(spec)}",
            *(["# EFA interfaces: as many as the instance type has"] if spec.efa else []),
            *([f"# instance profile {spec.instance_profile}"] if spec.instance_profile else []),
            *([f"# attaches volumes {volume}"] if spec.attach_volume else []),
            *([f"# creates a volume from {volume} for each instance"] if spec.from_snapshot else []),
            "# instances keep running after the job" if spec.keep else f"# instances {end}",
        ]
    )
    setup = ec2_provision.setup_script(spec, "vol-ID" if volume else "", spec.region or "REGION")
    return [summary, *planning.preview(replace(job, setup_scripts=dict.fromkeys(spec.hosts, setup)))]


def launch(spec: Ec2Spec) -> Job:
    """Launch the instances and start a new job; if a step fails, terminate everything."""
    plan(spec)  # refuses values that no script can hold, before anything costs money
    client = Ec2Client(spec.region)
    client.subnet(spec.subnet, spec.zone)  # fails without valid keys, while there is nothing to release
    with jobs.new_job(spec) as job:
        jobs.save(job)
        with exit_on_signals():
            try:
                job = ec2_provision.provision(job, client)
                jobs.save(job)
                ec2_provision.wait_for_ssh(job, spec.hosts)
                return ssh.resume(job)
            except BaseException:
                with ignore_signals():
                    say("terminating the instances ...")
                    remaining = client.release(job.id)
                for line in remaining:
                    say(f"not released: {line}")
                if not remaining:
                    jobs.forget(job)
                raise


def _spec(job: Job) -> Ec2Spec:
    assert isinstance(job.spec, Ec2Spec)
    return job.spec


def _client(job: Job) -> Ec2Client:
    return Ec2Client(job.ec2.region if job.ec2 else _spec(job).region)


def resume(job: Job) -> Job:
    """Resume on instances that were kept; terminated ones are gone with their disks."""
    if any(node.state is NodeState.GONE for node in status(job)):
        raise _gone(job)
    return ssh.resume(job)


def _gone(job: Job) -> UserError:
    return UserError(
        "instances-terminated", f"the instances of {job.id} are terminated. {resume_hint(job)}.", job=job.id
    )


def resume_hint(job: Job) -> str:
    """Return how to resume a job whose instances are terminated."""
    spec = job.spec
    if not spec.results and (here := fetched_folders(job)):
        unfinished = [folder for folder in here if not RunFolder(folder).finished] or here
        return f"`paceline train --resume {unfinished[0]}` resumes it on this machine"
    url = f"{spec.results.rstrip('/')}/{spec.run_names[0]}" if spec.results else "s3://BUCKET/PREFIX/RUN"
    each = ", each seed by itself" if spec.seeds else ""
    return f"`paceline launch ec2 --resume {url}` resumes it from copied results (--results){each}"


def follow(job: Job, *, until: Callable[[], bool] = lambda: False, restart_lost: bool = True) -> int:
    """Follow as over ssh; replace a preempted instance while another one continues."""
    is_gone = partial(ec2_provision.is_gone, client=_client(job))
    status = supervising.follow(job, until=until, restart_lost=restart_lost, restart=_restart, is_gone=is_gone)
    if status and all(is_gone(job, name) for name in job.spec.hosts):
        say(f"all instances of {job.id} are terminated. {resume_hint(job)}.")
    return status


def _restart(job: Job, node: NodeMonitor) -> Job | None:
    """Restart a lost node, on a new instance if its own was preempted."""
    host, client = node.host.name, _client(job)
    if node.state is not NodeState.GONE and node.status.exit_status != PREEMPTED:
        return restarting.restart_if_lost(job, node)
    say(f"{host} was preempted: launching another instance")
    job = ec2_provision.replace_instance(job, client, host)
    if is_stopped(job):
        client.terminate([ec2_provision.resources_of(job).instances[host].id])
        return None
    jobs.save(job)
    return restarting.restart_node(job, host)


def fetch(job: Job) -> list[Path]:
    """Fetch as over ssh; if the instances are terminated, return what was fetched before."""
    try:
        return fetching.fetch(job)
    except NoRunFolder:
        raise
    except HostError as error:
        if any(node.state is not NodeState.GONE for node in status(job)):
            raise
        if here := fetched_folders(job):
            return here
        raise _gone(job) from error


def status(job: Job) -> list[NodeStatus]:
    """Return the status of each node; if all instances are terminated, no host is asked."""
    client, names = _client(job), job.spec.hosts
    if all(ec2_provision.is_gone(job, name, client) for name in names):
        return [NodeStatus(name, NodeState.GONE) for name in names]
    return supervising.status(job)


def stop(job: Job, grace: float) -> list[str]:
    """Stop the job, fetch its run folder, and terminate the instances; return what was not stopped."""
    remaining = supervising.stop(job, grace)
    if any(node.state is not NodeState.GONE for node in status(job)):
        try:
            for folder in fetch(job):
                say(f"run folder: {folder}")
        except NoRunFolder:
            pass
        except UserError as error:
            if not job.spec.results:
                hint = f"`paceline ec2 terminate {job.id}` terminates the instances without it."
                return [*remaining, f"the run folder was not fetched: {error.report} {hint}"]
    return remaining + _client(job).release(job.id)


def clean_up(job: Job) -> None:
    """Terminate the instances, unless they are to be kept."""
    remaining = supervising.stop_sessions(job, grace=5)
    if _spec(job).keep:
        say(f"the instances keep running and cost money. `paceline ec2 terminate {job.id}` terminates them.")
    else:
        remaining += _client(job).release(job.id)
    for line in remaining:
        say(f"not released: {line}")
