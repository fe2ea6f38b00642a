"""Provision what a job needs on EC2: turn its spec into requests, and instances with their volumes into hosts."""

import ipaddress
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.launch import disks
from paceline.launch import job as jobs
from paceline.launch.ec2_client import Ec2Client, efa_interfaces_of, tag
from paceline.launch.ec2_request import request_of
from paceline.launch.hosts import HostError
from paceline.launch.job import Ec2Resources, Instance, Job
from paceline.launch.job_hosts import PRIVATE_KEY, hosts_of
from paceline.launch.planning import remote_data
from paceline.launch.rdma import EFA_PATH
from paceline.launch.specs import Ec2Spec
from paceline.system.files import say

_PUBLIC_ADDRESS_URL = "https://checkip.amazonaws.com"
_SSH_TIMEOUT = 300.0

# AMIs lack venv; 022, because packages are for all users
_VENV = """python3 -c 'import ensurepip' 2> /dev/null ||
    (umask 022; sudo -n apt-get -qq update && sudo -n apt-get -qq install -y python3-venv > /dev/null)"""


_EFA_SOFTWARE = f"""PATH="$PATH:{EFA_PATH}" fi_info -p efa > /dev/null || {{
    echo "--efa: fi_info -p efa fails. Use the default image, or one with the EFA software." >&2; exit 1
}}"""
_EFA_DEVICES = """ls /dev/infiniband/uverbs* > /dev/null || {
    echo "--efa: /dev/infiniband has no device. Use the default image, or one with the EFA driver." >&2; exit 1
}"""


def provision(job: Job, client: Ec2Client) -> Job:
    """Create everything that the job needs; return the job with its instances and setup scripts."""
    spec = _spec(job)
    count = len(spec.hosts)
    subnet = client.subnet(spec.subnet, spec.zone)
    zone = subnet["AvailabilityZone"]
    _check_volumes(spec, client, zone)
    price = _price(client, spec, zone)
    instance_type = client.instance_type(spec.instance_type)
    efa_interfaces = _efa_interfaces(spec, instance_type)
    image = client.image(spec.image_id, spec.image_name, instance_type["ProcessorInfo"]["SupportedArchitectures"])
    private_key = jobs.folder_of(job.id) / PRIVATE_KEY
    client.create_key_pair(job.id, Path(spec.public_key) if spec.public_key else None, private_key)
    ssh_from = spec.ssh_from or f"{_public_address()}/32"
    group = client.create_security_group(job.id, subnet["VpcId"], ssh_from, spec.efa)
    strategies = instance_type.get("PlacementGroupInfo", {}).get("SupportedStrategies", [])
    resources = Ec2Resources(
        region=client.region,
        zone=zone,
        subnet=subnet["SubnetId"],
        image=image["ImageId"],
        root_device=image.get("RootDeviceName", "/dev/sda1"),
        security_group=group,
        placement_group=client.create_placement_group(job.id) if count > 1 and "cluster" in strategies else "",
        efa_interfaces=efa_interfaces,
    )
    variables = {"PACELINE_PRICE": f"{price:g}" if price else "", "PACELINE_SPOT": "1" if spec.spot else ""}
    if spec.instance_profile and "AWS_REGION" not in spec.pass_env:  # the keys of a role come without a region
        variables["AWS_REGION"] = client.region
    job = replace(job, ec2=resources, variables={name: value for name, value in variables.items() if value})
    cost = f" for ${price:g} per hour each" if price else ""
    say(f"launching {count} x {spec.instance_type} in {zone}{cost} ...")
    instances = []
    for number in range(count):
        job, instance = _run_instance(job, client, number)
        instances.append(instance)
    client.wait_until_running(instances)
    for number, instance in enumerate(instances):
        job = _with_instance(job, client, number, instance)
    return job


def _efa_interfaces(spec: Ec2Spec, instance_type: dict[str, Any]) -> int:
    """Return the number of Elastic Fabric Adapters of each instance; raise UserError if the type has none."""
    count = efa_interfaces_of(instance_type) if spec.efa else 0
    if spec.efa and not count:
        message = (
            f"--efa: a {spec.instance_type} has no Elastic Fabric Adapter. Omit --efa, or choose a type that has it, "
            "e.g. p4d.24xlarge or g5.48xlarge."
        )
        raise UserError("ec2-efa-not-supported", message, instance_type=spec.instance_type)
    return count


def _spec(job: Job) -> Ec2Spec:
    assert isinstance(job.spec, Ec2Spec)
    return job.spec


def resources_of(job: Job) -> Ec2Resources:
    """Return what was created for a job whose instances were launched."""
    assert job.ec2
    return job.ec2


def replace_instance(job: Job, client: Ec2Client, host: str) -> Job:
    """Launch an instance in place of a preempted one; return the job with it."""
    number = job.spec.hosts.index(host)
    client.terminate([resources_of(job).instances[host].id])
    job, instance = _run_instance(job, client, number)
    try:
        client.wait_until_running([instance])
        job = _with_instance(job, client, number, instance)
        wait_for_ssh(job, (host,))
        return job
    except BaseException:
        client.terminate([instance])  # the next attempt launches another one
        raise


def is_gone(job: Job, host: str, client: Ec2Client) -> bool:
    """Return whether the instance of a host is terminated, or was never launched."""
    running = {instance["InstanceId"] for instance in client.instances(job.id, ("pending", "running"))}
    return not job.ec2 or host not in job.ec2.instances or job.ec2.instances[host].id not in running


def _run_instance(job: Job, client: Ec2Client, number: int) -> tuple[Job, str]:
    """Launch an instance, with the next unused address of --addresses; return the job and the instance's id."""
    resources = resources_of(job)
    unused = [address for address in _spec(job).addresses if address not in resources.used_addresses]
    instance = client.run_instance(request_of(job.id, _spec(job), resources, number, unused[0] if unused else ""))[
        "InstanceId"
    ]
    used = (*resources.used_addresses, *unused[:1])
    return replace(job, ec2=replace(resources, used_addresses=used)), instance


def _with_instance(job: Job, client: Ec2Client, number: int, instance: str) -> Job:
    """Attach the volume of a running instance; return the job with the address and setup script of its host."""
    spec, resources, host = _spec(job), resources_of(job), job.spec.hosts[number]
    volume = _volume_for(job, client, number)
    if volume:
        client.attach_volume(volume, instance, delete_on_termination=bool(spec.from_snapshot))
    description = next(one for one in client.instances(job.id) if one["InstanceId"] == instance)
    public = "" if spec.private else description.get("PublicIpAddress")
    if not spec.private and resources.efa_interfaces > 1:
        public = client.associate_address(job.id, description)
    address = str(ipaddress.ip_address(public or description["PrivateIpAddress"]))
    instances = resources.instances | {host: Instance(instance, address)}
    return replace(
        job,
        setup_scripts=job.setup_scripts | {host: setup_script(spec, volume, resources.region)},
        ec2=replace(resources, instances=instances),
    )


def setup_script(spec: Ec2Spec, volume: str, region: str) -> str:
    """Return the script that runs on an instance before anything else."""
    parts = [disks.script(volume, spec.mount, spec.efs, region, bool(remote_data(spec)))]
    parts += [_EFA_DEVICES if spec.container else _EFA_SOFTWARE] if spec.efa else []
    parts += [] if spec.python or spec.container else [_VENV]
    return "\n".join(filter(None, parts))


def _check_volumes(spec: Ec2Spec, client: Ec2Client, zone: str) -> None:
    """Refuse volumes NAME_0, NAME_1 ... that are missing, in use or in another zone, before anything is launched."""
    prefix = spec.attach_volume
    for number in range(len(spec.hosts) if prefix else 0):
        name = f"{prefix}_{number}"
        volume = _named_volume(client, name)
        if (other := volume["AvailabilityZone"]) != zone:
            message = f"volume {name} is in {other}, but the instances are in {zone}. Pass --zone {other}."
            raise UserError("ec2-volume-in-other-zone", message, volume=name, zone=other)
        if volume["State"] != "available":
            message = f"volume {name} is {volume['State']}. Detach it, or replicate it from a snapshot."
            raise UserError("ec2-volume-in-use", message, volume=name)


def _named_volume(client: Ec2Client, name: str) -> Any:
    volumes = client.volumes(name)
    if not volumes:
        fix = "`paceline ec2 volumes` lists volumes, `paceline ec2 replicate` creates them."
        raise UserError("ec2-unknown-volume", f"no volume is named {name}. {fix}", volume=name)
    return volumes[0]


def _volume_for(job: Job, client: Ec2Client, number: int) -> str:
    """Return the id of the volume to attach to an instance, or ""."""
    spec = _spec(job)
    if spec.attach_volume:
        return str(_named_volume(client, f"{spec.attach_volume}_{number}")["VolumeId"])
    if not spec.from_snapshot:
        return ""
    options = {"Size": spec.volume_gb, "Iops": spec.iops, "Throughput": spec.throughput}
    given = {key: value for key, value in options.items() if value}
    source = {"SnapshotId": spec.from_snapshot, "AvailabilityZone": resources_of(job).zone}
    return client.create_volume(job.id, f"{job.id}-{number}", **source, VolumeType=spec.volume_type, **given)


def _price(client: Ec2Client, spec: Ec2Spec, zone: str) -> float | None:
    """Return the price of an instance in dollars per hour, if known; raise UserError above --max-price."""
    if not spec.spot:
        return client.on_demand_price(spec.instance_type)
    price = client.spot_price(spec.instance_type, zone)
    if price is not None and spec.max_price and price > spec.max_price:
        message = (
            f"a spot {spec.instance_type} costs ${price} per hour in {zone} now, which is above "
            f"--max-price {spec.max_price}. Raise it, try another --zone, or wait."
        )
        raise UserError("ec2-price-above-limit", message, price=price)
    return price


def _public_address() -> str:
    """Return the public IP address of this machine."""
    try:
        with urllib.request.urlopen(_PUBLIC_ADDRESS_URL, timeout=10) as answer:
            return str(ipaddress.IPv4Address(answer.read(100).decode().strip()))
    except (OSError, ValueError) as error:
        message = f"the public IP address of this machine is unknown ({error}). Pass --ssh-from ADDRESS/32."
        raise UserError("public-address-unknown", message) from None


def wait_for_ssh(job: Job, names: tuple[str, ...]) -> None:
    """Wait until instances accept ssh: sshd starts later than the instance."""
    say(f"waiting for ssh on {', '.join(names)} ...")
    deadline = time.monotonic() + _SSH_TIMEOUT
    hosts = hosts_of(job)
    for name in names:
        while True:
            try:
                hosts[name].call("true", timeout=30)
                break
            except HostError as error:
                if time.monotonic() > deadline:
                    message = f"{name} was launched, but is not reachable within {_SSH_TIMEOUT:.0f} s: {error}"
                    raise UserError("instance-unreachable", message, host=name) from None
                time.sleep(2)


def resources_in_use(client: Ec2Client) -> list[tuple[str, ...]]:
    """Return name, id, kind, price, zone, state, address and start of all instances, volumes and snapshots."""
    rows: list[tuple[str, ...]] = []
    prices: dict[tuple[str, str, str], float | None] = {}
    for instance in client.instances():
        kind, zone = instance["InstanceType"], instance["Placement"]["AvailabilityZone"]
        market = instance.get("InstanceLifecycle", "on demand")
        if (kind, market, zone) not in prices:
            price = client.spot_price(kind, zone) if market == "spot" else client.on_demand_price(kind)
            prices[kind, market, zone] = price
        price = prices[kind, market, zone]
        address = instance.get("PublicIpAddress") or instance.get("PrivateIpAddress", "-")
        since = instance["LaunchTime"].isoformat(timespec="minutes")
        cost = f"{price:g} $/h" if price else "unknown"
        state = instance["State"]["Name"]
        kind = f"{kind}, {market}"
        rows.append((_name_of(instance), instance["InstanceId"], kind, cost, zone, state, address, since))
    for volume in client.volumes(job="*"):
        kind, place = f"volume, {volume['Size']} GB {volume['VolumeType']}", volume["AvailabilityZone"]
        rows.append((_name_of(volume), volume["VolumeId"], kind, "-", place, volume["State"], "-", "-"))
    for snapshot in client.snapshots():
        kind = f"snapshot, {snapshot['VolumeSize']} GB"
        rows.append((_name_of(snapshot), snapshot["SnapshotId"], kind, "-", "-", snapshot["State"], "-", "-"))
    return rows


def _name_of(resource: Any) -> str:
    return tag(resource, "Name") or "-"
