"""Jobs on machines rented from EC2: rent, then as over ssh, then give everything back, also when a step fails."""

import signal
import sys
from collections.abc import Callable
from dataclasses import replace

from paceline.errors import UserError
from paceline.launch import control, following, rent
from paceline.launch import job as jobs
from paceline.launch.cloud import Cloud
from paceline.launch.control import say
from paceline.launch.job import Job
from paceline.launch.nodes import Progress


def plan(job: Job) -> list[object]:
    """What would be rented, and then done on each machine."""
    wish, count = job.extra["ec2"], len(job.hosts)
    limit = f" at most {wish['max_price']} $ an hour" if wish["max_price"] else ""
    how = f"spot{limit}" if wish["spot"] else "on demand"
    ssh_from = wish["ssh_from"] or "your address"
    idle = f"ends them {wish['linger']} s after the job, and after {wish['idle']} s of idleness, also by themselves"
    volume = f"{wish['attach_volume']}_0 ..." if wish["attach_volume"] else wish["snapshot"]
    rented = "\n".join(
        [
            f"# EC2, {wish['region'] or 'the default region'}, everything tagged paceline-job={job.id}",
            f"# image: {wish['image_id'] or wish['image_name'] or 'the newest deep-learning image of AWS'}",
            f"# key pair {job.id}: {wish['public_key'] or 'a new one, its private half in the job folder'}",
            f"# security group {job.id}: ssh from {ssh_from}, and everything between its machines",
            f"# placement group {job.id}: a cluster" if count > 1 else "# no placement group",
            f"# {count} x {wish['instance_type']}, {how}, {wish['root_gb']} GB",
            *([f"# attaches volumes {volume}"] if wish["attach_volume"] else []),
            *([f"# makes a volume from {volume} for each"] if wish["snapshot"] else []),
            "# keeps them after the job" if wish["keep"] else f"# {idle}",
        ]
    )
    before = rent.before(job, "vol-ID" if volume else "")
    return [rented, *control.plan(replace(job, before=dict.fromkeys(job.hosts, before)))]


def submit(job: Job) -> Job:
    """Rent and start; if anything fails, nothing that costs money is left."""
    cloud = Cloud(job.extra["ec2"]["region"])
    jobs.save(job)
    for signum in (signal.SIGTERM, signal.SIGHUP):  # also a terminal that is closed gives back what was rented
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    try:
        job = rent.rent(job, cloud)
        jobs.save(job)
        rent.wait_for_ssh(job, job.hosts)
        job = control.submit(job)
    except BaseException:
        for line in cloud.release(job.id):
            say(f"left over: {line}")
        raise
    for signum in (signal.SIGTERM, signal.SIGHUP):  # from now on the job goes on without its launcher
        signal.signal(signum, signal.SIG_DFL)
    return job


def resume(job: Job) -> Job:
    """On machines that were kept; others are gone, and what was on their disks with them."""
    if not all(name in job.extra.get("machines", {}) for name in job.hosts) or any(
        rent.is_taken(job, Cloud(job.extra["ec2"]["region"]), name) for name in job.hosts
    ):
        place = f"{job.results}/{job.name}" if job.results else "s3://BUCKET/PREFIX/RUN"
        raise UserError(
            f"the machines of {job.id} are gone; `paceline launch ec2 --resume {place}` goes on with results that were "
            "copied (--results)"
        )
    return control.submit(job)


def follow(job: Job, *, until: Callable[[], bool] = lambda: False, bring_back: bool = True) -> int:
    """As over ssh; a machine that was taken is replaced."""
    return following.follow(job, until=until, bring_back=bring_back, revive=_revive)


def _revive(job: Job, own: Progress) -> Job | None:
    """Start again what was lost on a machine, or rent another in its place."""
    host, cloud = own.host.name, Cloud(job.extra["ec2"]["region"])
    if own.state == following.LEFT or (own.state.startswith("unreachable") and rent.is_taken(job, cloud, host)):
        say(f"{host} was taken: renting another")
        job = rent.rent_again(job, cloud, host)
        jobs.save(job)
        return following.start_again(job, host)
    return following.revive(job, own)


status, fetch = control.status, control.fetch


def stop(job: Job, grace: float) -> list[str]:
    """End the job, and give the machines back."""
    left = control.stop(job, grace)
    return left + Cloud(job.extra["ec2"]["region"]).release(job.id)


def tidy(job: Job) -> None:
    if job.extra["ec2"]["keep"]:
        control.tidy(job)
        say(f"the machines are kept, and cost money: `paceline ec2 terminate {job.id}` gives them back")
        return
    for line in stop(job, grace=5):
        say(f"left over: {line}")
