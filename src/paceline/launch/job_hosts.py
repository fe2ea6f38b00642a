"""The hosts of a job, and how ssh reaches them."""

from paceline.launch.hosts import Host, SshHost
from paceline.launch.job import Job, folder_of
from paceline.launch.specs import Ec2Spec, LocalSpec, RemoteSpec
from paceline.launch.values import in_ssh_option

HERE = "here"
"""Name of the launching machine in plans."""
PRIVATE_KEY = "key"
"""File in the folder of a job with the private key that AWS created for it."""


def hosts_of(job: Job) -> dict[str, Host]:
    """Return the hosts of a job by name, and this machine as HERE."""
    here = Host(HERE, str(folder_of(job.id)))
    return {name: _host(job, name, here) for name in job.spec.hosts} | {HERE: here}


def _host(job: Job, name: str, here: Host) -> Host:
    """Return one host; each has its own folder, since hosts may share the home folder."""
    if isinstance(job.spec, LocalSpec):
        return Host(name, f"{here.folder}/{name}")
    return SshHost(name, f"$HOME/.paceline/jobs/{job.id}/{name}", (*ssh_options(job), *_instance_options(job, name)))


def ssh_options(job: Job) -> tuple[str, ...]:
    """Return the arguments of ssh for all hosts of a job; instances have a user, key and known_hosts of their own."""
    spec = job.spec
    assert isinstance(spec, RemoteSpec)
    config = ("-F", spec.ssh_config) if spec.ssh_config else ()
    if not isinstance(spec, Ec2Spec):
        return config
    folder = folder_of(job.id)
    settings = [f'UserKnownHostsFile="{in_ssh_option(folder / "known_hosts")}"', "StrictHostKeyChecking=accept-new"]
    settings += [] if spec.public_key else [f'IdentityFile="{in_ssh_option(folder / PRIVATE_KEY)}"']
    return (*config, "-l", spec.user, *(word for setting in settings for word in ("-o", setting)))


def _instance_options(job: Job, host: str) -> tuple[str, ...]:
    """Return how to find the instance of a host: addresses change and are reused, so keys belong to instance ids."""
    instance = job.ec2.instances.get(host) if job.ec2 else None
    return ("-o", f"HostName={instance.address}", "-o", f"HostKeyAlias={instance.id}") if instance else ()
