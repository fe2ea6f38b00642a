"""The options of `launch ec2`, and the fields of its spec."""

import argparse
import re
from pathlib import Path
from typing import Any

from paceline.cli.options import count, positive
from paceline.errors import UserError


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
    group.add_argument("--efa", action="store_true", help="connect the instances with Elastic Fabric Adapters")
    group.add_argument(
        "--instance-profile",
        default="",
        metavar="NAME",
        help="IAM instance profile (name or ARN) whose role replaces AWS keys",
    )
    group.add_argument("--keep", action="store_true", help="do not terminate instances; they cost money until you do")


def ec2_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Check the options of `launch ec2`; return the fields of its spec that differ from the options."""
    from paceline.launch.values import user_name

    if not options.instance_type:
        message = "launch ec2 needs --instance-type, e.g. g4dn.2xlarge. `paceline ec2 prices TYPE` shows its price."
        raise UserError("missing-option", message, option="--instance-type")
    if options.max_price and not options.spot:
        message = "--max-price applies to spot instances only. Add --spot, or omit --max-price."
        raise UserError("conflicting-options", message, option="--max-price")
    addresses = tuple(address for address in options.addresses.split(",") if address)
    if addresses and len(addresses) < options.nodes:
        message = f"--addresses {options.addresses} is too short. Give {options.nodes} or more, one per instance."
        raise UserError("too-few-addresses", message, needed=options.nodes)
    default_key = Path.home() / ".ssh" / "id_ed25519.pub"
    key = options.public_key or (default_key if default_key.is_file() else None)
    if key and not key.is_file():
        raise UserError("file-not-found", f"--public-key {key} does not exist.", path=key)
    if options.attach_volume and options.from_snapshot:
        message = "--attach-volume and --from-snapshot are mutually exclusive: an instance gets one volume. Omit one."
        raise UserError("conflicting-options", message, option="--attach-volume")
    options_of_new_volumes = (options.volume_gb, options.iops, options.throughput, options.volume_type != "gp3")
    if any(options_of_new_volumes) and not options.from_snapshot:
        message = "--volume-gb, --volume-type, --iops and --throughput need --from-snapshot. Add it, or omit them."
        raise UserError("conflicting-options", message, option="--from-snapshot")
    if not options.mount.startswith("/") or options.mount == "/":
        message = f"--mount {options.mount} is not a folder that can be mounted. Write an absolute path, e.g. /data."
        raise UserError("invalid-mount", message, path=options.mount)
    user_name("--user", options.user)
    keys = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
    if options.instance_profile and (passed := sorted(keys & set(options.pass_.split(",")))):
        message = f"--pass {passed[0]} would replace the role of --instance-profile. Omit one of them."
        raise UserError("conflicting-options", message, option="--instance-profile")
    if options.efs and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*(:/.*)?", options.efs):
        raise UserError("invalid-efs", f"--efs {options.efs!r} is invalid. Write fs-ID or fs-ID:/DIR.", efs=options.efs)
    if options.user_data:
        _check_script(options.user_data)
    return {
        "addresses": addresses,
        "public_key": str(key) if key else "",
        "user_data": str(options.user_data.resolve()) if options.user_data else "",
        "security_groups": tuple(group for group in options.security_groups.split(",") if group),
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
