"""Launching on EC2's stand-in, and what its machines' kernels would do."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import command, environment
from machines import Cluster

SMALL = ("--train.duration", "30ba", "--checkpoint.every", "10ba", "--log.every", "1ba", "--log.tensorboard", "false")


@contextmanager
def devices(client: Any, folder: Path, content: Path) -> Iterator[None]:
    """What a machine's kernel does: a device shows up for a volume that is attached, with a file system on it."""
    shown: dict[Path, str] = {}
    over = threading.Event()

    def watch() -> None:
        by_id = Path("/dev/disk/by-id")
        by_id.mkdir(parents=True, exist_ok=True)
        while not over.wait(0.2):
            for volume in client.describe_volumes()["Volumes"]:
                serial = volume["VolumeId"].replace("-", "")
                link = by_id / f"nvme-Amazon_Elastic_Block_Store_{serial}"
                if volume["Attachments"] and volume.get("SnapshotId") and link not in shown:
                    image = folder / f"{serial}.img"
                    subprocess.run(["mkfs.ext4", "-q", "-d", str(content), str(image), "16M"], check=True)
                    made = subprocess.run(["losetup", "-f", "--show", str(image)], check=True, capture_output=True)
                    shown[link] = made.stdout.decode().strip()
                    link.symlink_to(shown[link])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        for link, device in shown.items():
            link.unlink()
            subprocess.run(["losetup", "-d", device], check=False)


def words_of(cluster: Cluster, aws: dict[str, Any], *more: object) -> list[str]:
    addresses = ",".join(machine.address for machine in cluster.machines.values())
    options = (
        *("--nodes", 2, "--instance-type", "g4dn.2xlarge", "--spot", "--subnet", aws["subnet"]),
        *("--image-id", aws["image"], "--private", "--addresses", addresses, "--user", "root"),
        *("--ssh-config", cluster.config, "--public-key", cluster.folder / "key.pub", "--ssh-from", "192.0.2.7/32"),
        *("--python", sys.executable, "--patience", 10),
    )
    return command("launch", "ec2", *options, "digits", *SMALL, *more)


def from_snapshot(aws: dict[str, Any]) -> tuple[object, ...]:
    return "--from-snapshot", aws["snapshot"], "--volume-gb", 9


@contextmanager
def launcher_of(
    cluster: Cluster, words: list[str], aws: dict[str, Any], tmp_path: Path
) -> Iterator[subprocess.Popen[str]]:
    names = ",".join(name for name in aws["variables"] if name.startswith("AWS_"))
    own = environment() | aws["variables"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen([*words, "--pass", names], cwd=tmp_path, env=own, **pipes)
    try:
        yield job
    finally:
        job.kill()
        job.wait()
        for machine in cluster.machines.values():
            shutil.rmtree(machine.root / ".paceline", ignore_errors=True)


def what_is_left(client: Any) -> list[str]:
    groups = client.describe_instances()["Reservations"]
    alive = [own for group in groups for own in group["Instances"] if own["State"]["Name"] != "terminated"]
    found = [own["InstanceId"] for own in alive]
    found += [own["VolumeId"] for own in client.describe_volumes()["Volumes"]]
    found += [own["KeyName"] for own in client.describe_key_pairs()["KeyPairs"]]
    groups = client.describe_security_groups()["SecurityGroups"]
    return found + [own["GroupName"] for own in groups if own["GroupName"] != "default"]
