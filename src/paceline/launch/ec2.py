"""Jobs on machines rented from EC2: rent, then as over ssh, then give everything back, also when a step fails."""

import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.launch import control
from paceline.launch import job as jobs
from paceline.launch.cloud import Cloud, tag, tagged
from paceline.launch.control import Say, say
from paceline.launch.hosts import HostError, SshHost
from paceline.launch.job import Job

_MY_ADDRESS = "https://checkip.amazonaws.com"


def plan(job: Job) -> list[object]:
    """What would be rented, and then done on each machine."""
    wish, count = job.extra["ec2"], len(job.hosts)
    limit = f" at most {wish['max_price']} $ an hour" if wish["max_price"] else ""
    how = f"spot{limit}" if wish["spot"] else "on demand"
    ssh_from = wish["ssh_from"] or "your address"
    rented = "\n".join(
        [
            f"# EC2, {wish['region'] or 'the default region'}, everything tagged paceline-job={job.id}",
            f"# image: {wish['image_id'] or wish['image_name'] or 'the newest deep-learning image of AWS'}",
            f"# key pair {job.id}: {wish['public_key'] or 'a new one, its private half in the job folder'}",
            f"# security group {job.id}: ssh from {ssh_from}, and everything between its machines",
            f"# placement group {job.id}: a cluster" if count > 1 else "# no placement group",
            f"# {count} x {wish['instance_type']}, {how}, {wish['root_gb']} GB",
            *([f"# attaches volumes {wish['attach_volume']}_0 ..."] if wish["attach_volume"] else []),
            *([f"# makes a volume from {wish['snapshot']} for each"] if wish["snapshot"] else []),
            f"# ends them {wish['linger']} s after the job, also without this machine",
        ]
    )
    return [rented, *control.plan(job)]


def submit(job: Job) -> Job:
    """Rent and start; if anything fails, nothing that costs money is left."""
    cloud = Cloud(job.extra["ec2"]["region"])
    jobs.save(job)
    try:
        job = _rent(job, cloud)
        jobs.save(job)
        _wait_for_ssh(job)
        return control.submit(job)
    except BaseException:
        for line in cloud.release(job.id):
            say(f"left over: {line}")
        raise


def _rent(job: Job, cloud: Cloud) -> Job:
    wish, count = job.extra["ec2"], len(job.hosts)
    subnet = cloud.subnet(wish["subnet"], wish["zone"])
    zone = subnet["AvailabilityZone"]
    named = _named_volumes(cloud, wish["attach_volume"], count, zone)
    _check_price(cloud, wish, zone)
    image = cloud.image(wish["image_id"], wish["image_name"])
    private = jobs.folder_of(job.id) / "key"
    cloud.key(job.id, job.id, Path(wish["public_key"]) if wish["public_key"] else None, private)
    group = cloud.firewall(job.id, subnet["VpcId"], wish["ssh_from"] or f"{_my_address()}/32")
    placement = cloud.placement(job.id) if count > 1 else ""
    machines = []
    for number in range(count):
        machine = cloud.run(_request(job, number, image, subnet["SubnetId"], group, placement, zone))
        machines.append(machine["InstanceId"])
    cloud.wait_until_running(machines)
    for number, machine in enumerate(machines):
        for volume in _volumes_for(job, cloud, number, zone, named):
            cloud.attach(volume, machine)
    hosts = tuple(_address(machine, wish["private"]) for machine in cloud.machines(job.id, ("running",)))
    identity = [] if wish["public_key"] else ["-i", str(private)]
    known_hosts = jobs.folder_of(job.id) / "known_hosts"
    known = ["-o", f"UserKnownHostsFile={known_hosts}", "-o", "StrictHostKeyChecking=accept-new"]
    config = job.extra.get("ssh", [])
    return replace(job, hosts=hosts, extra=job.extra | {"ssh": [*config, "-l", wish["user"], *identity, *known]})


def _request(job: Job, number: int, image: str, subnet: str, group: str, placement: str, zone: str) -> dict[str, Any]:
    wish = job.extra["ec2"]
    network: dict[str, Any] = {"DeviceIndex": 0, "SubnetId": subnet, "Groups": [group]}
    network["AssociatePublicIpAddress"] = not wish["private"]
    if wish["addresses"]:
        network["PrivateIpAddress"] = wish["addresses"][number]
    root = {"VolumeSize": wish["root_gb"], "VolumeType": "gp3", "DeleteOnTermination": True}
    asked: dict[str, Any] = {
        "ImageId": image,
        "InstanceType": wish["instance_type"],
        "KeyName": job.id,
        "NetworkInterfaces": [network],
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": root}],
        "InstanceInitiatedShutdownBehavior": "terminate",
        "UserData": _USER_DATA.format(job=job.id, linger=wish["linger"]),
        "TagSpecifications": tagged("instance", job.id, f"{job.id}-{number}"),
        "Placement": {"AvailabilityZone": zone} | ({"GroupName": placement} if placement else {}),
    }
    if wish["spot"]:
        limit = {"MaxPrice": str(wish["max_price"])} if wish["max_price"] else {}
        spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"} | limit
        asked["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
    return asked


# ending itself is what terminates a machine, whatever became of the one that rented it
_USER_DATA = """#!/bin/sh
(
    begun=$(date +%s)
    while sleep 30; do
        now=$(date +%s)
        set -- /home/*/.paceline/jobs/{job}/*/node.exit /root/.paceline/jobs/{job}/*/node.exit
        for file in "$@"; do
            [ -f "$file" ] && [ $((now - $(stat -c %Y "$file"))) -gt {linger} ] && shutdown -h now
        done
        ls /home/*/.paceline/jobs/{job}/*/node.pid > /dev/null 2>&1 || [ $((now - begun)) -lt 3600 ] || shutdown -h now
    done
) &
"""


def _named_volumes(cloud: Cloud, name: str, count: int, zone: str) -> list[str]:
    """NAME_0, NAME_1 ...: before anything is rented, whether they are there, free, and in the zone."""
    found = []
    for number in range(count if name else 0):
        own = cloud.volumes(f"{name}_{number}")
        if not own:
            raise UserError(f"--attach-volume {name}: no volume is named {name}_{number}; see `paceline ec2 volumes`")
        if own[0]["AvailabilityZone"] != zone:
            there = own[0]["AvailabilityZone"]
            raise UserError(f"volume {name}_{number} is in {there}, the machines in {zone}; say --zone {there}")
        if own[0]["State"] != "available":
            raise UserError(f"volume {name}_{number} is {own[0]['State']}; detach it, or replicate it from a snapshot")
        found.append(str(own[0]["VolumeId"]))
    return found


def _volumes_for(job: Job, cloud: Cloud, number: int, zone: str, named: list[str]) -> Iterator[str]:
    wish = job.extra["ec2"]
    if named:
        yield named[number]
    if wish["snapshot"]:
        options = {"Size": wish["volume_gb"], "Iops": wish["iops"], "Throughput": wish["throughput"]}
        given = {key: value for key, value in options.items() if value}
        place = {"SnapshotId": wish["snapshot"], "AvailabilityZone": zone, "VolumeType": wish["volume_type"]}
        yield cloud.volume(job.id, f"{job.id}-{number}", **place, **given)


def _check_price(cloud: Cloud, wish: dict[str, Any], zone: str) -> None:
    if wish["spot"] and wish["max_price"]:
        price = cloud.spot_price(wish["instance_type"], zone)
        if price is not None and price > wish["max_price"]:
            raise UserError(
                f"a spot {wish['instance_type']} costs {price} $ an hour in {zone} now, above "
                f"--max-price {wish['max_price']}; raise it, try another --zone, or wait"
            )


def _my_address() -> str:
    try:
        with urllib.request.urlopen(_MY_ADDRESS, timeout=10) as answer:
            text: str = answer.read(100).decode().strip()
            return text
    except OSError as error:
        raise UserError(f"your own address could not be found ({error}); say --ssh-from ADDRESS/32") from None


def _address(machine: Any, private: bool) -> str:
    return str(
        machine["PrivateIpAddress"] if private else machine.get("PublicIpAddress") or machine["PrivateIpAddress"]
    )


def _wait_for_ssh(job: Job, seconds: float = 300) -> None:
    """A machine that runs does not listen yet."""
    deadline = time.monotonic() + seconds
    for name in job.hosts:
        host = SshHost(name, "$HOME", tuple(job.extra["ssh"]))
        while True:
            try:
                host.call("true", timeout=30)
                break
            except HostError as error:
                if time.monotonic() > deadline:
                    raise UserError(f"{error}; it was rented, but cannot be reached") from None
                time.sleep(2)


def follow(job: Job, tell: Say = say, every: float = 1.0, until: Callable[[], bool] = lambda: False) -> int:
    return control.follow(job, tell, every, until)


def status(job: Job) -> list[tuple[str, str]]:
    return control.status(job)


def fetch(job: Job, tell: Say = say) -> Path:
    return control.fetch(job, tell)


def stop(job: Job, grace: float) -> list[str]:
    """End the job, and give the machines back."""
    left = control.stop(job, grace)
    return left + Cloud(job.extra["ec2"]["region"]).release(job.id)


def tidy(job: Job) -> None:
    for line in stop(job, grace=5):
        say(f"left over: {line}")


def listing(cloud: Cloud) -> list[str]:
    """What costs money now."""
    lines = []
    for machine in cloud.machines():
        kind, where = machine["InstanceType"], machine["Placement"]["AvailabilityZone"]
        address = machine.get("PublicIpAddress") or machine.get("PrivateIpAddress", "")
        how = machine.get("InstanceLifecycle", "on demand")
        since = machine["LaunchTime"].isoformat(timespec="minutes")
        state = machine["State"]["Name"]
        place = f"{kind} {how}  {where}  {state}  {address}  since {since}"
        lines.append(f"{tag(machine, 'Name')}  {machine['InstanceId']}  {place}")
    return lines
