"""What a job rents from EC2: specs into requests, machines and their volumes into hosts."""

import base64
import ipaddress
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.launch import disks
from paceline.launch import job as jobs
from paceline.launch.control import hosts_of, say
from paceline.launch.ec2_client import Cloud, tag, tagged
from paceline.launch.hosts import HostError
from paceline.launch.job import Job
from paceline.launch.nodes import remote_data
from paceline.launch.values import in_ssh_option

_MY_ADDRESS = "https://checkip.amazonaws.com"
_SSH_WITHIN = 300.0

# ending itself is what terminates a machine, whatever became of the one that rented it
_USER_DATA = """(
    busy=$(date +%s)
    while sleep 30; do
        now=$(date +%s)
        if pgrep -f 'paceline (train|data|meet)' > /dev/null; then busy=$now; fi
        for file in /home/*/.paceline/jobs/{job}/*/node.exit /root/.paceline/jobs/{job}/*/node.exit; do
            if [ -f "$file" ] && [ $((now - $(stat -c %Y "$file"))) -gt {linger} ]; then shutdown -h now; fi
        done
        if [ $((now - busy)) -gt {idle} ]; then shutdown -h now; fi
    done
) > /dev/null 2>&1 &
"""

# images come without it; packages are for all users
_VENV = """python3 -c 'import ensurepip' 2> /dev/null ||
    (umask 022; sudo -n apt-get -qq update && sudo -n apt-get -qq install -y python3-venv > /dev/null)"""


def rent(job: Job, cloud: Cloud) -> Job:
    """All that the job needs; the job with what was made and found, of which `disks` and addresses are of its hosts."""
    spec, count = job.extra["ec2"], len(job.hosts)
    subnet = cloud.subnet(spec["subnet"], spec["zone"])
    zone = subnet["AvailabilityZone"]
    _check_volumes(job, cloud, zone)
    price = _price(cloud, spec, zone)
    kind = cloud.kind(spec["instance_type"])
    image = cloud.image(spec["image_id"], spec["image_name"], kind["ProcessorInfo"]["SupportedArchitectures"])
    private = jobs.folder_of(job.id) / "key"
    cloud.key(job.id, job.id, Path(spec["public_key"]) if spec["public_key"] else None, private)
    group = cloud.firewall(job.id, subnet["VpcId"], spec["ssh_from"] or f"{_my_address()}/32")
    close = count > 1 and "cluster" in kind.get("PlacementGroupInfo", {}).get("SupportedStrategies", [])
    placement = cloud.placement(job.id) if close else ""
    hosts = in_ssh_option(jobs.folder_of(job.id) / "known_hosts")
    settings = [f'UserKnownHostsFile="{hosts}"', "StrictHostKeyChecking=accept-new"]
    settings += [] if spec["public_key"] else [f'IdentityFile="{in_ssh_option(private)}"']
    ssh = [*job.extra.get("ssh", []), "-l", spec["user"], *(word for own in settings for word in ("-o", own))]
    where: dict[str, Any] = {
        "Image": image["ImageId"],
        "Root": image.get("RootDeviceName", "/dev/sda1"),
        "Subnet": subnet["SubnetId"],
        "Group": group,
        "Placement": placement,
        "Zone": zone,
    }
    where["Used"] = []
    told = {"PACELINE_PRICE": f"{price:g}" if price else "", "PACELINE_SPOT": "1" if spec["spot"] else ""}
    job = replace(
        job,
        variables=job.variables | {name: value for name, value in told.items() if value},
        extra=job.extra | {"ssh": ssh, "where": where, "machines": {}, "ec2": spec | {"region": cloud.region}},
    )
    say(f"renting {count} x {spec['instance_type']} in {zone}{f' for {price:g} $ an hour each' if price else ''} ...")
    machines = [cloud.run(_request(job, number)) for number in range(count)]
    cloud.wait_until_running([machine["InstanceId"] for machine in machines])
    for number, machine in enumerate(machines):
        job = _settled(job, cloud, number, machine["InstanceId"])
    return job


def rent_again(job: Job, cloud: Cloud, host: str) -> Job:
    """Another machine in the place of one that was taken."""
    number = job.hosts.index(host)
    lost = job.extra["machines"][host]["id"]
    cloud.end([lost])
    machine = cloud.run(_request(job, number))["InstanceId"]
    try:
        cloud.wait_until_running([machine])
        job = _settled(job, cloud, number, machine)
        wait_for_ssh(job, (host,))
        return job
    except BaseException:
        cloud.end([machine])  # the next attempt rents another
        raise


def is_taken(job: Job, host: str, cloud: Cloud) -> bool:
    """Whether its machine is gone, or was never rented."""
    known = {own["InstanceId"] for own in cloud.machines(job.id, ("pending", "running"))}
    return job.extra.get("machines", {}).get(host, {}).get("id") not in known


def _settled(job: Job, cloud: Cloud, number: int, machine: str) -> Job:
    """A machine that runs, with its volume; the job with how it is reached and what is to be mounted there."""
    spec, host = job.extra["ec2"], job.hosts[number]
    volume = _volume_for(job, cloud, number)
    if volume:
        cloud.attach(volume, machine, ends_with_it=bool(spec["snapshot"]))
    found = next(own for own in cloud.machines(job.id) if own["InstanceId"] == machine)
    public = "" if spec["private"] else found.get("PublicIpAddress")
    reached = {"id": machine, "address": str(ipaddress.ip_address(public or found["PrivateIpAddress"]))}
    return replace(
        job,
        setup_scripts=job.setup_scripts | {host: before(job, volume)},
        extra=job.extra | {"machines": job.extra["machines"] | {host: reached}},
    )


def before(job: Job, volume: str) -> str:
    """What has to be done on a machine before anything else."""
    spec = job.extra["ec2"]
    mounts = disks.script(volume, spec["mount"], spec["efs"], spec["region"] or "REGION", bool(remote_data(job)))
    return mounts if job.python or job.container else f"{mounts}\n{_VENV}".strip()


def _request(job: Job, number: int) -> dict[str, Any]:
    """Of one machine; addresses that were given are used up one by one."""
    spec, where = job.extra["ec2"], job.extra["where"]
    network: dict[str, Any] = {"DeviceIndex": 0, "SubnetId": where["Subnet"]}
    network |= {"Groups": [where["Group"], *spec["groups"]], "AssociatePublicIpAddress": not spec["private"]}
    if free := [own for own in spec["addresses"] if own not in where["Used"]]:
        network["PrivateIpAddress"] = free[0]
        where["Used"].append(free[0])
    root = {"VolumeSize": spec["root_gb"], "VolumeType": "gp3", "DeleteOnTermination": True}
    placed = {"GroupName": where["Placement"]} if where["Placement"] else {}
    asked: dict[str, Any] = {
        "ImageId": where["Image"],
        "InstanceType": spec["instance_type"],
        "KeyName": job.id,
        "NetworkInterfaces": [network],
        "BlockDeviceMappings": [{"DeviceName": where["Root"], "Ebs": root}],
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": tagged("instance", job.id, f"{job.id}-{number}"),
        "Placement": {"AvailabilityZone": where["Zone"]} | placed,
    }
    own = "" if spec["keep"] else _USER_DATA.format(job=job.id, linger=spec["linger"], idle=spec["idle"])
    asked["UserData"] = f"#!/bin/sh\n{own}{_then(spec['user_data'])}"
    if spec["spot"]:
        limit = {"MaxPrice": str(spec["max_price"])} if spec["max_price"] else {}
        spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"} | limit
        asked["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
    return asked


def _then(path: str) -> str:
    """The user's own script for the first boot, whatever it is written in."""
    if not path:
        return ""
    packed = base64.b64encode(Path(path).read_bytes()).decode()
    return f"echo {packed} | base64 -d > /root/user-data && chmod 700 /root/user-data && /root/user-data\n"


def _check_volumes(job: Job, cloud: Cloud, zone: str) -> None:
    """NAME_0, NAME_1 ...: before anything is rented, whether they are there, free, and in the zone."""
    wanted = job.extra["ec2"]["attach_volume"]
    for number in range(len(job.hosts) if wanted else 0):
        name = f"{wanted}_{number}"
        own = _named(cloud, name)
        if own["AvailabilityZone"] != zone:
            there = own["AvailabilityZone"]
            raise UserError(f"volume {name} is in {there}, the machines in {zone}; say --zone {there}")
        if own["State"] != "available":
            raise UserError(f"volume {name} is {own['State']}; detach it, or replicate it from a snapshot")


def _named(cloud: Cloud, name: str) -> Any:
    found = cloud.volumes(name)
    if not found:
        raise UserError(f"no volume is named {name}; `paceline ec2 volumes` lists them, `ec2 replicate` makes them")
    return found[0]


def _volume_for(job: Job, cloud: Cloud, number: int) -> str:
    spec = job.extra["ec2"]
    if spec["attach_volume"]:
        return str(_named(cloud, f"{spec['attach_volume']}_{number}")["VolumeId"])
    if not spec["snapshot"]:
        return ""
    options = {"Size": spec["volume_gb"], "Iops": spec["iops"], "Throughput": spec["throughput"]}
    given = {key: value for key, value in options.items() if value}
    place = {"SnapshotId": spec["snapshot"], "AvailabilityZone": job.extra["where"]["Zone"]}
    return cloud.volume(job.id, f"{job.id}-{number}", **place, VolumeType=spec["volume_type"], **given)


def _price(cloud: Cloud, spec: dict[str, Any], zone: str) -> float | None:
    """Of a machine for an hour, if it can be found; not above the limit."""
    if not spec["spot"]:
        return cloud.price(spec["instance_type"])
    price = cloud.spot_price(spec["instance_type"], zone)
    if price is not None and spec["max_price"] and price > spec["max_price"]:
        raise UserError(
            f"a spot {spec['instance_type']} costs {price} $ an hour in {zone} now, above "
            f"--max-price {spec['max_price']}; raise it, try another --zone, or wait"
        )
    return price


def _my_address() -> str:
    try:
        with urllib.request.urlopen(_MY_ADDRESS, timeout=10) as answer:
            return str(ipaddress.IPv4Address(answer.read(100).decode().strip()))
    except (OSError, ValueError) as error:
        raise UserError(f"your own address could not be found ({error}); say --ssh-from ADDRESS/32") from None


def wait_for_ssh(job: Job, names: tuple[str, ...]) -> None:
    """A machine that runs does not listen yet."""
    say(f"waiting until {', '.join(names)} can be reached ...")
    deadline = time.monotonic() + _SSH_WITHIN
    hosts = hosts_of(job)
    for name in names:
        while True:
            try:
                hosts[name].call("true", timeout=30)
                break
            except HostError as error:
                if time.monotonic() > deadline:
                    raise UserError(f"{error}; it was rented, but cannot be reached") from None
                time.sleep(2)


def listing(cloud: Cloud) -> list[str]:
    """What costs money now: machines, volumes and snapshots."""
    lines, prices = [], {}
    for machine in cloud.machines():
        kind, where = machine["InstanceType"], machine["Placement"]["AvailabilityZone"]
        how = machine.get("InstanceLifecycle", "on demand")
        if (kind, how, where) not in prices:
            prices[kind, how, where] = cloud.spot_price(kind, where) if how == "spot" else cloud.price(kind)
        price = prices[kind, how, where]
        address = machine.get("PublicIpAddress") or machine.get("PrivateIpAddress", "")
        since = machine["LaunchTime"].isoformat(timespec="minutes")
        cost = f"{price:g} $/h" if price else "price unknown"
        place = f"{kind} {how}  {cost}  {where}  {machine['State']['Name']}  {address}  since {since}"
        lines.append(f"{tag(machine, 'Name')}  {machine['InstanceId']}  {place}")
    for volume in cloud.volumes(job="*"):
        size = f"{volume['Size']} GB {volume['VolumeType']}"
        place = f"{volume['AvailabilityZone']}  {volume['State']}"
        lines.append(f"{tag(volume, 'Name')}  {volume['VolumeId']}  volume of {size}  {place}")
    for snapshot in cloud.snapshots():
        size = f"snapshot of {snapshot['VolumeSize']} GB"
        lines.append(f"{tag(snapshot, 'Name')}  {snapshot['SnapshotId']}  {size}  {snapshot['State']}")
    return lines
