"""What EC2 adds to launching, and the verb ec2, which looks after what is rented."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from paceline.cli.options import count, make_parser, positive
from paceline.errors import UserError

_EC2 = """Look after machines, volumes and images on EC2 that jobs have made; all are found by their tags.

    paceline ec2 ls                                    what costs money now
    paceline ec2 ssh NAME [COMMAND ...]                on a machine
    paceline ec2 terminate JOB                         end its machines, and delete what it made
    paceline ec2 volumes                               that jobs can attach by name
    paceline ec2 snapshot VOLUME --name NAME           of a volume
    paceline ec2 replicate SNAPSHOT --name NAME --nodes N --zone ZONE       volumes NAME_0 ... from it
    paceline ec2 image MACHINE --name NAME             an image of a machine that has data and code on it
    paceline ec2 prices TYPE [TYPE ...]                of spot machines now"""


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
    group.add_argument("--addresses", default="", metavar="A,B", help="private addresses to give them")
    group.add_argument("--root-gb", type=count, default=100, metavar="N", help="size of the root volume (default 100)")
    group.add_argument("--attach-volume", default="", metavar="NAME", help="volumes NAME_0, NAME_1 ... to attach")
    group.add_argument("--from-snapshot", default="", metavar="ID", help="a volume of it for each machine")
    group.add_argument("--volume-gb", type=count, metavar="N", help="size of such volumes")
    group.add_argument("--volume-type", default="gp3", metavar="TYPE", help="of such volumes (default gp3)")
    group.add_argument("--iops", type=count, metavar="N", help="of such volumes")
    group.add_argument("--throughput", type=count, metavar="MB/S", help="of such volumes")
    group.add_argument(
        "--linger",
        type=count,
        default=600,
        metavar="S",
        help="machines end themselves then (default 600)",
    )


def ec2_wish(options: argparse.Namespace) -> dict[str, Any]:
    if not options.instance_type:
        raise UserError(
            "launch ec2 needs --instance-type, e.g. g4dn.2xlarge; `paceline ec2 prices TYPE` asks what it costs"
        )
    if options.max_price and not options.spot:
        raise UserError("--max-price is for spot machines; add --spot, or leave it out")
    addresses = [address for address in options.addresses.split(",") if address]
    if addresses and len(addresses) != options.nodes:
        raise UserError(f"--addresses {options.addresses}: give {options.nodes}, one for each machine")
    own = Path.home() / ".ssh" / "id_ed25519.pub"
    key = options.public_key or (own if own.is_file() else None)
    if key and not key.is_file():
        raise UserError(f"--public-key {key}: there is no such file")
    names = (
        "instance_type",
        "spot",
        "max_price",
        "region",
        "zone",
        "subnet",
        "image_id",
        "image_name",
        "user",
        "ssh_from",
    )
    more = ("private", "root_gb", "attach_volume", "volume_gb", "volume_type", "iops", "throughput", "linger")
    wish = {name: getattr(options, name) for name in (*names, *more)}
    return wish | {"addresses": addresses, "snapshot": options.from_snapshot, "public_key": str(key) if key else ""}


def ec2(arguments: list[str]) -> int:
    """Look after what is rented."""
    parser = make_parser("ec2", "ls|ssh|terminate|volumes|snapshot|replicate|image|prices ...", _EC2)
    parser.add_argument("what", choices=sorted(_WHAT), metavar="WHAT")
    parser.add_argument("words", nargs="*", metavar="...")
    parser.add_argument("--region", default="")
    parser.add_argument("--name", default="", help="of what is made")
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="replicate: how many")
    parser.add_argument("--zone", default="", help="replicate: where")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options, rest = parser.parse_known_args(arguments)
    options.words += rest
    from paceline.launch.cloud import Cloud

    return _WHAT[options.what](Cloud(options.region), options)


def _ls(cloud: Any, options: argparse.Namespace) -> int:
    from paceline.launch.ec2 import listing

    lines = listing(cloud)
    for line in lines:
        print(line)
    print(f"{len(lines)} machine{'s' * (len(lines) != 1)} cost money now" if lines else "nothing is rented")
    return 0


def _ssh(cloud: Any, options: argparse.Namespace) -> int:
    from paceline.launch.cloud import JOB, tag
    from paceline.launch.job import load

    wanted, *command = _needed(options, 1)
    found = [machine for machine in cloud.machines() if tag(machine, "Name") == wanted]
    if not found:
        raise UserError(f"{wanted}: there is no such machine; `paceline ec2 ls` lists them")
    job = load(tag(found[0], JOB))
    address = next(
        host for host in job.hosts if host in (found[0].get("PublicIpAddress"), found[0]["PrivateIpAddress"])
    )
    os.execvp("ssh", ["ssh", *job.extra["ssh"], address, *command])
    return 0


def _terminate(cloud: Any, options: argparse.Namespace) -> int:
    (job,) = _needed(options, 1)
    left = cloud.release(job)
    for line in left:
        print(f"left over: {line}", file=sys.stderr)
    return 1 if left else 0


def _volumes(cloud: Any, options: argparse.Namespace) -> int:
    from paceline.launch.cloud import tag

    for volume in cloud.volumes():
        place = f"{volume['AvailabilityZone']}  {volume['State']}"
        print(
            f"{tag(volume, 'Name') or '-'}  {volume['VolumeId']}  {volume['Size']} GB {volume['VolumeType']}  {place}"
        )
    return 0


def _snapshot(cloud: Any, options: argparse.Namespace) -> int:
    from paceline.launch.cloud import tagged, told_clearly

    (volume,) = _needed(options, 1)
    with told_clearly("making a snapshot"):
        tags = tagged("snapshot", options.name or volume, options.name or volume)
        print(cloud.ec2.create_snapshot(VolumeId=volume, TagSpecifications=tags)["SnapshotId"])
    return 0


def _replicate(cloud: Any, options: argparse.Namespace) -> int:
    (snapshot,) = _needed(options, 1)
    if not options.name or not options.zone:
        raise UserError("replicate needs --name NAME and --zone ZONE: volumes NAME_0 ... are made there")
    for number in range(options.nodes):
        name = f"{options.name}_{number}"
        made = cloud.volume("", name, SnapshotId=snapshot, AvailabilityZone=options.zone, VolumeType="gp3")
        print(f"{name}  {made}")
    return 0


def _image(cloud: Any, options: argparse.Namespace) -> int:
    from paceline.launch.cloud import tagged, told_clearly

    (machine,) = _needed(options, 1)
    if not options.name:
        raise UserError("image needs --name NAME, which `launch ec2 --image-name NAME` finds")
    with told_clearly("making an image"):
        tags = tagged("image", options.name, options.name)
        print(cloud.ec2.create_image(InstanceId=machine, Name=options.name, TagSpecifications=tags)["ImageId"])
    return 0


def _prices(cloud: Any, options: argparse.Namespace) -> int:
    for kind in _needed(options, 1):
        price = cloud.spot_price(kind, options.zone)
        print(f"{kind}  {'unknown' if price is None else f'{price:g} $ an hour'} (spot)")
    return 0


def _needed(options: argparse.Namespace, least: int) -> list[str]:
    if len(options.words) < least:
        raise UserError(f"ec2 {options.what} needs a name; `paceline ec2 --help`")
    return list(options.words)


_WHAT = {
    "ls": _ls, "ssh": _ssh, "terminate": _terminate, "volumes": _volumes, "snapshot": _snapshot,
    "replicate": _replicate, "image": _image, "prices": _prices,
}  # fmt: skip
