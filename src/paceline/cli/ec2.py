"""The command `ec2`: manage instances, volumes and images."""

import argparse
import ipaddress
import os
import sys
from typing import Any

from paceline.cli.options import count, make_parser
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
    from paceline.launch.ec2_provision import resources_in_use
    from paceline.system.tables import new_table, show

    rows = resources_in_use(client)
    if rows:
        show(new_table(("name", "id", "kind", "price", "zone", "state", "address", "since"), rows))
    print(f"{len(rows)} resource{'s' * (len(rows) != 1)} in use" if rows else "no resources in use")
    return 0


def _ssh(client: Any, options: argparse.Namespace) -> int:
    from paceline.launch.ec2_client import JOB, tag
    from paceline.launch.values import user_name

    name, *command = options.words or [""]
    instance = _instance(client, name)
    address = instance.get("PublicIpAddress") or instance.get("PrivateIpAddress")
    user_name("--user", options.user)
    if not address:
        message = f"{name} has no address: it is {instance['State']['Name']}."
        raise UserError("instance-without-address", message, instance=name)
    words = _ssh_words(tag(instance, JOB), options.user)
    host = ["-o", f"HostKeyAlias={instance['InstanceId']}", str(ipaddress.ip_address(address))]
    os.execvp("ssh", ["ssh", *words, *host, *(["--", *command] if command else [])])
    return 0


def _ssh_words(job_id: str, user: str) -> tuple[str, ...]:
    """Return the arguments of ssh for an instance of a job."""
    from paceline.launch.job import load
    from paceline.launch.job_hosts import ssh_options

    try:
        job = load(job_id or "-")
    except UserError:  # launched from another machine; it may still accept the user's key
        return "-l", user
    return ssh_options(job) if job.ec2 else ("-l", user)


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
        rows.append((kind, *("unknown" if price is None else f"${price:g} per hour" for price in prices)))
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
