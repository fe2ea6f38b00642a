"""Jobs on machines rented from EC2: rent, then as over ssh, then give everything back, also when a step fails."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.errors import NoRunFolder, UserError
from paceline.launch import control, ec2_provision, following
from paceline.launch import job as jobs
from paceline.launch.control import say
from paceline.launch.ec2_client import Cloud
from paceline.launch.hosts import HostError
from paceline.launch.job import Job
from paceline.launch.sessions import Progress


def plan(job: Job) -> list[object]:
    """What would be rented, and then done on each machine."""
    spec, count = job.extra["ec2"], len(job.hosts)
    limit = f" at most {spec['max_price']} $ an hour" if spec["max_price"] else ""
    how = f"spot{limit}" if spec["spot"] else "on demand"
    ssh_from = spec["ssh_from"] or "your address"
    idle = f"ends them {spec['linger']} s after the job, and after {spec['idle']} s of idleness, also by themselves"
    volume = f"{spec['attach_volume']}_0 ..." if spec["attach_volume"] else spec["snapshot"]
    rented = "\n".join(
        [
            f"# EC2, {spec['region'] or 'the default region'}, everything tagged paceline-job={job.id}",
            f"# image: {spec['image_id'] or spec['image_name'] or 'the newest deep-learning image of AWS'}",
            f"# key pair {job.id}: {spec['public_key'] or 'a new one, its private half in the job folder'}",
            f"# security group {job.id}: ssh from {ssh_from}, and everything between its machines",
            f"# placement group {job.id}: a cluster" if count > 1 else "# no placement group",
            f"# {count} x {spec['instance_type']}, {how}, {spec['root_gb']} GB",
            *([f"# attaches volumes {volume}"] if spec["attach_volume"] else []),
            *([f"# makes a volume from {volume} for each"] if spec["snapshot"] else []),
            "# keeps them after the job" if spec["keep"] else f"# {idle}",
        ]
    )
    before = ec2_provision.before(job, "vol-ID" if volume else "")
    return [rented, *control.plan(replace(job, setup_scripts=dict.fromkeys(job.hosts, before)))]


def submit(job: Job) -> Job:
    """Rent and start; if anything fails, nothing that costs money is left."""
    cloud = Cloud(job.extra["ec2"]["region"])
    jobs.save(job)
    with control.interruptible():
        try:
            job = ec2_provision.rent(job, cloud)
            jobs.save(job)
            ec2_provision.wait_for_ssh(job, job.hosts)
            return control.submit(job)
        except BaseException:
            with control.uninterruptible():
                say("giving everything back ...")
                left = cloud.release(job.id)
            for line in left:
                say(f"left over: {line}")
            if not left:
                jobs.forget(job)
            raise


def resume(job: Job) -> Job:
    """On machines that were kept; others are gone, and what was on their disks with them."""
    if any(state.startswith(following.GONE) for _, state in status(job)):
        raise UserError(f"the machines of {job.id} are gone; {elsewhere(job)}")
    return control.submit(job)


def elsewhere(job: Job) -> str:
    """How a job whose machines are gone is resumed."""
    if not job.results and (here := control.fetched(job)):
        return f"`paceline train --resume {here}` resumes it on this machine"
    place = f"{job.results.rstrip('/')}/{job.name}" if job.results else "s3://BUCKET/PREFIX/RUN"
    return f"`paceline launch ec2 --resume {place}` resumes it from results that were copied (--results)"


def follow(job: Job, *, until: Callable[[], bool] = lambda: False, bring_back: bool = True) -> int:
    """As over ssh; a machine that was taken is replaced as long as another goes on."""
    cloud = Cloud(job.extra["ec2"]["region"])
    is_gone = partial(ec2_provision.is_taken, cloud=cloud)
    found = following.follow(job, until=until, bring_back=bring_back, revive=_revive, is_gone=is_gone)
    if found and all(is_gone(job, name) for name in job.hosts):
        say(f"all machines of {job.id} are gone; {elsewhere(job)}")
    return found


def _revive(job: Job, own: Progress) -> Job | None:
    """Start again what was lost on a machine, or rent another in its place."""
    host, cloud = own.host.name, Cloud(job.extra["ec2"]["region"])
    if own.state in (following.LEFT, following.GONE):
        say(f"{host} was taken: renting another")
        job = ec2_provision.rent_again(job, cloud, host)
        if control.is_stopped(job):
            cloud.end([job.extra["machines"][host]["id"]])
            return None
        jobs.save(job)
        return following.start_again(job, host)
    return following.revive(job, own)


def fetch(job: Job) -> Path:
    """As over ssh; when the machines are gone, what was brought before."""
    try:
        return control.fetch(job)
    except NoRunFolder:
        raise
    except HostError as error:
        if any(state != following.GONE for _, state in status(job)):
            raise
        if here := control.fetched(job):
            return here
        raise UserError(f"the machines of {job.id} are gone; {elsewhere(job)}") from error


def status(job: Job) -> list[tuple[str, str]]:
    cloud = Cloud(job.extra["ec2"]["region"])
    if all(ec2_provision.is_taken(job, host=name, cloud=cloud) for name in job.hosts):
        return [(name, following.GONE) for name in job.hosts]
    return control.status(job)


def stop(job: Job, grace: float) -> list[str]:
    """End the job, bring its run folder here, and give the machines back."""
    left = control.stop(job, grace)
    if any(state != following.GONE for _, state in status(job)):
        try:
            say(f"run folder: {fetch(job)}")
        except NoRunFolder:
            pass
        except UserError as error:
            if not job.results:
                return [*left, f"{error}; `paceline ec2 terminate {job.id}` gives the machines back without it"]
    return left + Cloud(job.extra["ec2"]["region"]).release(job.id)


def tidy(job: Job) -> None:
    left = control.end_sessions(job, grace=5)
    if job.extra["ec2"]["keep"]:
        say(f"the machines are kept, and cost money: `paceline ec2 terminate {job.id}` gives them back")
    else:
        left += Cloud(job.extra["ec2"]["region"]).release(job.id)
    for line in left:
        say(f"left over: {line}")
