"""What EC2 adds to launching, and the verb ec2, which looks after what is rented."""

import argparse
import ipaddress
import os
import re
import sys
from pathlib import Path
from typing import Any

from paceline.cli.options import count, make_parser, positive
from paceline.errors import UserError

_EC2 = """Look after machines, volumes and images on EC2 that jobs have made; all are found by their tags.

    paceline ec2 ls                                    what costs money now
    paceline ec2 ssh NAME [COMMAND ...]                on a machine
    paceline ec2 stop JOB                              switch its machines off: only their disks cost money
    paceline ec2 start JOB                             switch them on again
    paceline ec2 terminate JOB                         end its machines, and delete what it made
    paceline ec2 volumes                               that jobs can attach by name
    paceline ec2 snapshot VOLUME --name NAME           of a volume
    paceline ec2 replicate SNAPSHOT --name NAME --nodes N --zone ZONE       volumes NAME_0 ... from it
    paceline ec2 image MACHINE --name NAME             an image of a machine that has data and code on it
    paceline ec2 prices TYPE [TYPE ...]                of machines now, spot and on demand"""


def add_ec2_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ec2")
    group.add_argument("--instance-type", default="", metavar="TYPE", help="e.g. g4dn.2xlarge")
    group.add_argument("--spot", action="store_true", help="spot machines, which may be taken away")
    group.add_argument("--max-price", type=positive, metavar="DOLLARS", help="of a spot machine for an hour")
    group.add_argument("--region", default="", help="default: that of your AWS settings")
    group.add_argument("--zone", default="", help="availability zone (default: the first with a subnet)")
    group.add_argument("--subnet", default="", metavar="ID", help="default: of the default network")
    group.add_argument("--image-id", default="", metavar="AMI", help="default: AWS's own for deep learning")
    group.add_argument("--image-name", default="", metavar="NAME", help="newest image of that name")
    group.add_argument("--user", default="ubuntu", metavar="NAME", help="to log in as (default ubuntu)")
    group.add_argument(
        "--public-key", type=Path, metavar="FILE", help="yours (default: ~/.ssh/id_ed25519.pub, or a new pair)"
    )
    group.add_argument("--ssh-from", default="", metavar="CIDR", help="addresses that may ssh (default: yours)")
    group.add_argument("--private", action="store_true", help="reach machines by their private addresses (VPN)")
    group.add_argument(
        "--addresses", default="", metavar="A,B", help="private addresses to give them, and those that replace them"
    )
    group.add_argument("--root-gb", type=count, default=100, metavar="N", help="size of the root volume (default 100)")
    group.add_argument("--attach-volume", default="", metavar="NAME", help="volumes NAME_0, NAME_1 ... to attach")
    group.add_argument("--from-snapshot", default="", metavar="ID", help="a volume of it for each machine")
    group.add_argument("--user-data", type=Path, metavar="FILE", help="a script for the first boot (begins with #!)")
    group.add_argument("--mount", default="/data", metavar="DIR", help="where volumes are mounted (default /data)")
    group.add_argument("--efs", default="", metavar="fs-ID[:/DIR]", help="a shared file system, mounted at /efs")
    group.add_argument(
        "--security-groups", default="", metavar="A,B", help="others to be in, e.g. one that EFS lets in"
    )
    group.add_argument("--volume-gb", type=count, metavar="N", help="size of such volumes")
    group.add_argument("--volume-type", default="gp3", metavar="TYPE", help="of such volumes (default gp3)")
    group.add_argument("--iops", type=count, metavar="N", help="of such volumes")
    group.add_argument("--throughput", type=count, metavar="MB/S", help="of such volumes")
    group.add_argument(
        "--linger", type=count, default=600, metavar="S", help="machines end themselves so long after the job (600)"
    )
    group.add_argument("--idle", type=count, default=3600, metavar="S", help="and after so long without one (3600)")
    group.add_argument("--keep", action="store_true", help="do not end them; they cost money until you do")


def ec2_spec(options: argparse.Namespace) -> dict[str, Any]:
    from paceline.launch.values import user_name

    if not options.instance_type:
        raise UserError(
            "launch ec2 needs --instance-type, e.g. g4dn.2xlarge; `paceline ec2 prices TYPE` asks what it costs"
        )
    if options.max_price and not options.spot:
        raise UserError("--max-price is for spot machines; add --spot, or leave it out")
    addresses = [address for address in options.addresses.split(",") if address]
    if addresses and len(addresses) < options.nodes:
        raise UserError(f"--addresses {options.addresses}: give {options.nodes} or more, one for each machine")
    own = Path.home() / ".ssh" / "id_ed25519.pub"
    key = options.public_key or (own if own.is_file() else None)
    if key and not key.is_file():
        raise UserError(f"--public-key {key}: there is no such file")
    if options.attach_volume and options.from_snapshot:
        raise UserError("--attach-volume and --from-snapshot: a machine gets one volume; leave one of them out")
    if not options.mount.startswith("/") or options.mount == "/":
        raise UserError(f"--mount {options.mount}: write a folder of the machines, e.g. /data")
    user_name("--user", options.user)
    if options.efs and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*(:/.*)?", options.efs):
        raise UserError(f"--efs {options.efs!r}: write fs-ID or fs-ID:/DIR")
    if options.user_data:
        _check_script(options.user_data)
    spec = {name: getattr(options, name) for name in _PLAIN}
    return spec | {
        "addresses": addresses,
        "snapshot": options.from_snapshot,
        "public_key": str(key) if key else "",
        "user_data": str(options.user_data.resolve()) if options.user_data else "",
        "groups": [group for group in options.security_groups.split(",") if group],
    }


def _check_script(path: Path) -> None:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--user-data {path}: {error.strerror}") from None
    if not content.startswith(b"#!") or len(content) > 10_000:
        raise UserError(f"--user-data {path}: write a script that begins with #!, of at most 10 kB")


_PLAIN = (
    "instance_type", "spot", "max_price", "region", "zone", "subnet", "image_id", "image_name", "user", "ssh_from",
    "private", "root_gb", "attach_volume", "mount", "efs", "volume_gb", "volume_type", "iops", "throughput", "linger",
    "idle", "keep",
)  # fmt: skip


def ec2(arguments: list[str]) -> int:
    """Look after what is rented."""
    parser = make_parser("ec2", "ls|ssh|stop|start|terminate|volumes|snapshot|replicate|image|prices ...", _EC2)
    parser.add_argument("what", choices=sorted(_WHAT), metavar="WHAT")
    parser.add_argument("words", nargs="*", metavar="...")
    parser.add_argument("--region", default="")
    parser.add_argument("--name", default="", help="of what is made")
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="replicate: how many")
    parser.add_argument("--zone", default="", help="replicate, prices: where")
    parser.add_argument("--user", default="ubuntu", metavar="NAME", help="ssh: to log in as, of a job not rented here")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    words = arguments[2:] if arguments[:1] == ["ssh"] else []  # what runs there has options of its own
    options = parser.parse_args(arguments[:2] if words else arguments)
    options.words += words
    from paceline.launch.ec2_client import Cloud

    return _WHAT[options.what](Cloud(options.region), options)


def _ls(cloud: Any, options: argparse.Namespace) -> int:
    from paceline.launch.ec2_provision import listing

    lines = listing(cloud)
    for line in lines:
        print(line)
    print(
        f"{len(lines)} thing{'s' * (len(lines) != 1)} cost{'s' * (len(lines) == 1)} money now"
        if lines
        else "nothing is rented"
    )
    return 0


def _ssh(cloud: Any, options: argparse.Namespace) -> int:
    from paceline.launch.ec2_client import JOB, tag
    from paceline.launch.job import load
    from paceline.launch.values import user_name

    wanted, *command = options.words or [""]
    machine = _machine(cloud, wanted)
    address = machine.get("PublicIpAddress") or machine.get("PrivateIpAddress")
    user_name("--user", options.user)
    if not address:
        raise UserError(f"{wanted} has no address now; is it {machine['State']['Name']}?")
    try:
        own = load(tag(machine, JOB) or "-").extra["ssh"]
    except (UserError, KeyError):  # rented from another machine: the user's own key may be the one that it has
        own = ["-l", options.user]
    where = ["-o", f"HostKeyAlias={machine['InstanceId']}", str(ipaddress.ip_address(address))]
    os.execvp("ssh", ["ssh", *own, *where, *(["--", *command] if command else [])])
    return 0


def _machine(cloud: Any, wanted: str) -> Any:
    """By its name or id."""
    from paceline.launch.ec2_client import tag

    found = [own for own in cloud.machines() if wanted and wanted in (tag(own, "Name"), own["InstanceId"])]
    if not found:
        raise UserError(f"{wanted or 'which machine?'}: there is no such machine; `paceline ec2 ls` lists them")
    return found[0]


def _job_of(cloud: Any, wanted: str) -> str:
    """A job that something is tagged with, by its name or the beginning of it."""
    from paceline.launch.ec2_client import JOB, tag

    known = sorted({tag(own, JOB) for own in (*cloud.machines(), *cloud.volumes(job="*"))} - {""})
    found = [job for job in known if job == wanted] or [job for job in known if wanted and job.startswith(wanted)]
    if len(found) != 1:
        which = "is the beginning of several" if found else "is no job that something is rented for"
        raise UserError(f"{wanted!r} {which}; there are {', '.join(known) or 'none'}")
    return found[0]


def _switch(cloud: Any, options: argparse.Namespace) -> int:
    job = _job_of(cloud, _needed(options))
    machines = [machine["InstanceId"] for machine in cloud.machines(job)]
    cloud.switch(machines, on=options.what == "start")
    print(f"{len(machines)} switched {'on' if options.what == 'start' else 'off'}")
    return 0


def _terminate(cloud: Any, options: argparse.Namespace) -> int:
    job = _job_of(cloud, _needed(options))
    left = cloud.release(job)
    for line in left:
        print(f"left over: {line}", file=sys.stderr)
    print(f"{job}: {'not all of it could be given back' if left else 'everything was given back'}")
    return 1 if left else 0


def _volumes(cloud: Any, options: argparse.Namespace) -> int:
    from paceline.launch.ec2_client import tag

    for volume in cloud.volumes():
        place = f"{volume['AvailabilityZone']}  {volume['State']}"
        print(
            f"{tag(volume, 'Name') or '-'}  {volume['VolumeId']}  {volume['Size']} GB {volume['VolumeType']}  {place}"
        )
    return 0


def _snapshot(cloud: Any, options: argparse.Namespace) -> int:
    from paceline.launch.ec2_client import tagged, translate_aws_errors

    wanted = _needed(options)
    named = cloud.volumes(wanted)
    volume = named[0]["VolumeId"] if named else wanted
    with translate_aws_errors("making a snapshot"):
        tags = tagged("snapshot", options.name or volume, options.name or volume)
        print(cloud.ec2.create_snapshot(VolumeId=volume, TagSpecifications=tags)["SnapshotId"])
    return 0


def _replicate(cloud: Any, options: argparse.Namespace) -> int:
    snapshot = _needed(options)
    if not options.name or not options.zone:
        raise UserError("replicate needs --name NAME and --zone ZONE: volumes NAME_0 ... are made there")
    names = [f"{options.name}_{number}" for number in range(options.nodes)]
    if there := [name for name in names if cloud.volumes(name)]:
        raise UserError(f"there is a volume {', '.join(there)} already; choose another --name, or delete it")
    for name in names:
        made = cloud.volume("", name, SnapshotId=snapshot, AvailabilityZone=options.zone, VolumeType="gp3")
        print(f"{name}  {made}")
    return 0


def _image(cloud: Any, options: argparse.Namespace) -> int:
    from paceline.launch.ec2_client import tagged, translate_aws_errors

    machine = _machine(cloud, _needed(options))["InstanceId"]
    if not options.name:
        raise UserError("image needs --name NAME, which `launch ec2 --image-name NAME` finds")
    with translate_aws_errors("making an image"):
        tags = tagged("image", options.name, options.name)
        print(cloud.ec2.create_image(InstanceId=machine, Name=options.name, TagSpecifications=tags)["ImageId"])
    return 0


def _prices(cloud: Any, options: argparse.Namespace) -> int:
    for kind in options.words or [_needed(options)]:
        prices = {"spot": cloud.spot_price(kind, options.zone), "on demand": cloud.price(kind)}
        told = ", ".join(
            f"{'unknown' if price is None else f'{price:g} $ an hour'} ({how})" for how, price in prices.items()
        )
        print(f"{kind}  {told}")
    return 0


def _needed(options: argparse.Namespace) -> str:
    if len(options.words) != 1 or not options.words[0]:
        raise UserError(f"ec2 {options.what} needs one name; `paceline ec2 --help`")
    return str(options.words[0])


_WHAT = {
    "ls": _ls, "ssh": _ssh, "stop": _switch, "start": _switch, "terminate": _terminate, "volumes": _volumes,
    "snapshot": _snapshot, "replicate": _replicate, "image": _image, "prices": _prices,
}  # fmt: skip
