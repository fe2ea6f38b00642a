"""The options of `launch ec2`, and the command `ec2`, which manages instances, volumes and images."""

import argparse
import ipaddress
import os
import re
import sys
from pathlib import Path
from typing import Any

from paceline.cli.options import count, make_parser, positive
from paceline.errors import UserError

_EC2 = """Manage the instances, volumes and images of jobs on EC2, found by their tags.

    paceline ec2 ls                                    list what costs money now
    paceline ec2 ssh NAME [COMMAND ...]                log in to an instance, or run a command on it
    paceline ec2 stop JOB                              stop its instances: only their volumes cost money
    paceline ec2 start JOB                             start them again
    paceline ec2 terminate JOB                         terminate its instances, and delete its other resources
    paceline ec2 volumes                               list the volumes that jobs can attach by name
    paceline ec2 snapshot VOLUME --name NAME           create a snapshot of a volume
    paceline ec2 replicate SNAPSHOT --name NAME --nodes N --zone ZONE       create volumes NAME_0 ... from it
    paceline ec2 image INSTANCE --name NAME            create an image of an instance with its data and code
    paceline ec2 prices TYPE [TYPE ...]                show current prices, spot and on demand"""


def add_ec2_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `launch ec2`."""
    group = parser.add_argument_group("ec2")
    group.add_argument("--instance-type", default="", metavar="TYPE", help="e.g. g4dn.2xlarge")
    group.add_argument("--spot", action="store_true", help="spot instances, which can be preempted")
    group.add_argument("--max-price", type=positive, metavar="DOLLARS", help="maximum spot price per hour")
    group.add_argument("--region", default="", help="default: from your AWS configuration")
    group.add_argument("--zone", default="", help="availability zone (default: the first with a subnet)")
    group.add_argument("--subnet", default="", metavar="ID", help="default: a subnet of the default VPC")
    group.add_argument("--image-id", default="", metavar="AMI", help="default: the newest AWS Deep Learning AMI")
    group.add_argument("--image-name", default="", metavar="NAME", help="use the newest image with this name")
    group.add_argument("--user", default="ubuntu", metavar="NAME", help="user to log in as (default: ubuntu)")
    group.add_argument(
        "--public-key", type=Path, metavar="FILE", help="your key (default: ~/.ssh/id_ed25519.pub, or a new pair)"
    )
    group.add_argument("--ssh-from", default="", metavar="CIDR", help="addresses allowed to ssh (default: yours)")
    group.add_argument("--private", action="store_true", help="connect to private addresses (VPN)")
    group.add_argument(
        "--addresses", default="", metavar="A,B", help="private addresses of the instances and their replacements"
    )
    group.add_argument("--root-gb", type=count, default=100, metavar="N", help="size of the root volume (default: 100)")
    group.add_argument("--attach-volume", default="", metavar="NAME", help="attach volumes NAME_0, NAME_1 ...")
    group.add_argument("--from-snapshot", default="", metavar="ID", help="create a volume from it for each instance")
    group.add_argument("--user-data", type=Path, metavar="FILE", help="script for the first boot (starts with #!)")
    group.add_argument("--mount", default="/data", metavar="DIR", help="mount point of volumes (default: /data)")
    group.add_argument("--efs", default="", metavar="fs-ID[:/DIR]", help="shared file system to mount at /efs")
    group.add_argument(
        "--security-groups", default="", metavar="A,B", help="further security groups, e.g. one that EFS admits"
    )
    group.add_argument("--volume-gb", type=count, metavar="N", help="size of volumes from a snapshot")
    group.add_argument("--volume-type", default="gp3", metavar="TYPE", help="type of these volumes (default: gp3)")
    group.add_argument("--iops", type=count, metavar="N", help="IOPS of these volumes")
    group.add_argument("--throughput", type=count, metavar="MB/S", help="throughput of these volumes")
    group.add_argument(
        "--linger", type=count, default=600, metavar="S", help="terminate S seconds after the job (default: 600)"
    )
    group.add_argument(
        "--idle", type=count, default=3600, metavar="S", help="terminate after S seconds without a job (default: 3600)"
    )
    group.add_argument("--keep", action="store_true", help="do not terminate instances; they cost money until you do")


def ec2_spec(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `launch ec2` after checking them."""
    from paceline.launch.values import user_name

    if not options.instance_type:
        message = "launch ec2 needs --instance-type, e.g. g4dn.2xlarge. `paceline ec2 prices TYPE` shows its price."
        raise UserError("missing-option", message, option="--instance-type")
    if options.max_price and not options.spot:
        message = "--max-price applies to spot instances only. Add --spot, or omit --max-price."
        raise UserError("conflicting-options", message, option="--max-price")
    addresses = [address for address in options.addresses.split(",") if address]
    if addresses and len(addresses) < options.nodes:
        message = f"--addresses {options.addresses} is too short. Give {options.nodes} or more, one per instance."
        raise UserError("too-few-addresses", message, needed=options.nodes)
    default_key = Path.home() / ".ssh" / "id_ed25519.pub"
    key = options.public_key or (default_key if default_key.is_file() else None)
    if key and not key.is_file():
        raise UserError("file-not-found", f"--public-key {key} does not exist.", path=key)
    if options.attach_volume and options.from_snapshot:
        message = "--attach-volume and --from-snapshot exclude each other: an instance gets one volume. Omit one."
        raise UserError("conflicting-options", message, option="--attach-volume")
    if not options.mount.startswith("/") or options.mount == "/":
        message = f"--mount {options.mount} is not a folder that can be mounted. Write an absolute path, e.g. /data."
        raise UserError("invalid-mount", message, path=options.mount)
    user_name("--user", options.user)
    if options.efs and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*(:/.*)?", options.efs):
        raise UserError("invalid-efs", f"--efs {options.efs!r} is invalid. Write fs-ID or fs-ID:/DIR.", efs=options.efs)
    if options.user_data:
        _check_script(options.user_data)
    spec = {name: getattr(options, name) for name in _UNCHANGED}
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
        message = f"cannot read --user-data {path}: {error.strerror}"
        raise UserError("file-unreadable", message, path=path) from None
    if not content.startswith(b"#!") or len(content) > 10_000:
        message = f"--user-data {path} is not a script. It must start with #! and have at most 10 kB."
        raise UserError("invalid-user-data", message, path=path)


_UNCHANGED = (
    "instance_type", "spot", "max_price", "region", "zone", "subnet", "image_id", "image_name", "user", "ssh_from",
    "private", "root_gb", "attach_volume", "mount", "efs", "volume_gb", "volume_type", "iops", "throughput", "linger",
    "idle", "keep",
)  # fmt: skip


def ec2(arguments: list[str]) -> int:
    """Manage instances, volumes and images."""
    parser = make_parser("ec2", "ls|ssh|stop|start|terminate|volumes|snapshot|replicate|image|prices ...", _EC2)
    parser.add_argument("action", choices=sorted(_ACTIONS), metavar="ACTION")
    parser.add_argument("words", nargs="*", metavar="...")
    parser.add_argument("--region", default="")
    parser.add_argument("--name", default="", help="name of the new resource")
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="replicate: number of volumes")
    parser.add_argument("--zone", default="", help="replicate, prices: availability zone")
    parser.add_argument("--user", default="ubuntu", metavar="NAME", help="ssh: user, for a job launched elsewhere")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    words = arguments[2:] if arguments[:1] == ["ssh"] else []  # the remote command has its own options
    options = parser.parse_args(arguments[:2] if words else arguments)
    options.words += words
    from paceline.launch.ec2_client import Ec2Client

    return _ACTIONS[options.action](Ec2Client(options.region), options)


def _ls(client: Any, options: argparse.Namespace) -> int:
    from paceline.launch.ec2_provision import listing

    lines = listing(client)
    for line in lines:
        print(line)
    print(f"{len(lines)} resource{'s' * (len(lines) != 1)} in use" if lines else "no resources in use")
    return 0


def _ssh(client: Any, options: argparse.Namespace) -> int:
    from paceline.launch.ec2_client import JOB, tag
    from paceline.launch.job import load
    from paceline.launch.values import user_name

    name, *command = options.words or [""]
    instance = _instance(client, name)
    address = instance.get("PublicIpAddress") or instance.get("PrivateIpAddress")
    user_name("--user", options.user)
    if not address:
        message = f"{name} has no address: it is {instance['State']['Name']}."
        raise UserError("instance-without-address", message, instance=name)
    try:
        ssh_options = load(tag(instance, JOB) or "-").extra["ssh"]
    except (UserError, KeyError):  # launched from another machine; it may still accept the user's key
        ssh_options = ["-l", options.user]
    host = ["-o", f"HostKeyAlias={instance['InstanceId']}", str(ipaddress.ip_address(address))]
    os.execvp("ssh", ["ssh", *ssh_options, *host, *(["--", *command] if command else [])])
    return 0


def _instance(client: Any, name: str) -> Any:
    """Return an instance by its name or id."""
    from paceline.launch.ec2_client import tag

    matches = [one for one in client.instances() if name and name in (tag(one, "Name"), one["InstanceId"])]
    if not matches:
        message = f"no instance has the name or id {name!r}. `paceline ec2 ls` lists them."
        raise UserError("unknown-instance", message, instance=name)
    return matches[0]


def _job_of(client: Any, start: str) -> str:
    """Return the id of a job that has resources on EC2, by its id or the start of it."""
    from paceline.launch.ec2_client import JOB, tag

    known = sorted({tag(one, JOB) for one in (*client.instances(), *client.volumes(job="*"))} - {""})
    matches = [job for job in known if job == start] or [job for job in known if start and job.startswith(start)]
    listed = ", ".join(known) or "none"
    if not matches:
        raise UserError("unknown-job", f"{start!r} is not a job with resources on EC2. Jobs: {listed}.", job=start)
    if len(matches) > 1:
        raise UserError("ambiguous-job", f"several jobs start with {start!r}. Jobs: {listed}.", job=start)
    return matches[0]


def _start_or_stop(client: Any, options: argparse.Namespace) -> int:
    job = _job_of(client, _argument(options))
    instances = [instance["InstanceId"] for instance in client.instances(job)]
    starts = options.action == "start"
    (client.start if starts else client.stop)(instances)
    print(f"{len(instances)} instance{'s' * (len(instances) != 1)} {'started' if starts else 'stopped'}")
    return 0


def _terminate(client: Any, options: argparse.Namespace) -> int:
    job = _job_of(client, _argument(options))
    failures = client.release(job)
    for line in failures:
        print(f"not released: {line}", file=sys.stderr)
    print(f"{job}: {'not all resources were released' if failures else 'all resources were released'}")
    return 1 if failures else 0


def _volumes(client: Any, options: argparse.Namespace) -> int:
    from paceline.launch.ec2_client import tag
    from paceline.system.tables import new_table, show

    fields = ("VolumeId", "VolumeType", "AvailabilityZone", "State")
    rows = [
        (tag(volume, "Name") or "-", f"{volume['Size']} GB", *(volume[field] for field in fields))
        for volume in client.volumes()
    ]
    show(new_table(("name", "size", "volume", "type", "zone", "state"), rows))
    return 0


def _snapshot(client: Any, options: argparse.Namespace) -> int:
    from paceline.launch.aws_errors import translate_aws_errors
    from paceline.launch.ec2_client import tag_specifications

    name = _argument(options)
    named = client.volumes(name)
    volume = named[0]["VolumeId"] if named else name
    with translate_aws_errors("creating a snapshot"):
        tags = tag_specifications("snapshot", options.name or volume, options.name or volume)
        print(client.ec2.create_snapshot(VolumeId=volume, TagSpecifications=tags)["SnapshotId"])
    return 0


def _replicate(client: Any, options: argparse.Namespace) -> int:
    snapshot = _argument(options)
    if not options.name or not options.zone:
        message = "ec2 replicate needs --name NAME and --zone ZONE, and creates volumes NAME_0 ... there."
        raise UserError("missing-option", message, option="--zone" if options.name else "--name")
    names = [f"{options.name}_{number}" for number in range(options.nodes)]
    if existing := [name for name in names if client.volumes(name)]:
        message = f"volume {', '.join(existing)} already exists. Choose another --name, or delete it."
        raise UserError("ec2-volume-exists", message, volumes=existing)
    for name in names:
        volume = client.create_volume("", name, SnapshotId=snapshot, AvailabilityZone=options.zone, VolumeType="gp3")
        print(f"{name}  {volume}")
    return 0


def _image(client: Any, options: argparse.Namespace) -> int:
    from paceline.launch.aws_errors import translate_aws_errors
    from paceline.launch.ec2_client import tag_specifications

    instance = _instance(client, _argument(options))["InstanceId"]
    if not options.name:
        message = "ec2 image needs --name NAME, for `launch ec2 --image-name NAME`."
        raise UserError("missing-option", message, option="--name")
    with translate_aws_errors("creating an image"):
        tags = tag_specifications("image", options.name, options.name)
        print(client.ec2.create_image(InstanceId=instance, Name=options.name, TagSpecifications=tags)["ImageId"])
    return 0


def _prices(client: Any, options: argparse.Namespace) -> int:
    from paceline.system.tables import new_table, show

    rows = []
    for kind in options.words or [_argument(options)]:
        prices = (client.spot_price(kind, options.zone), client.on_demand_price(kind))
        rows.append((kind, *("unknown" if price is None else f"{price:g} $ per hour" for price in prices)))
    show(new_table(("instance type", "spot", "on demand"), rows))
    return 0


def _argument(options: argparse.Namespace) -> str:
    """Return the only argument of an action."""
    if len(options.words) != 1 or not options.words[0]:
        message = f"ec2 {options.action} needs one name. See `paceline ec2 --help`."
        raise UserError("missing-argument", message)
    return str(options.words[0])


_ACTIONS = {
    "ls": _ls, "ssh": _ssh, "stop": _start_or_stop, "start": _start_or_stop, "terminate": _terminate,
    "volumes": _volumes, "snapshot": _snapshot, "replicate": _replicate, "image": _image, "prices": _prices,
}  # fmt: skip
