"""Launching on EC2's stand-in, and what its machines' kernels would do."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import networks
from conftest import command, environment
from jobs import Launcher, cleared
from machines import Cluster
from networks import until

SMALL = ("--train.duration", "30ba", "--checkpoint.every", "10ba", "--log.every", "1ba", "--log.tensorboard", "false")


def no_disks() -> str:
    """Why devices cannot be made here."""
    if lacking := networks.missing(**{"losetup": "mount", "mkfs.ext4": "e2fsprogs"}):
        return lacking
    found = subprocess.run(["losetup", "--find"], capture_output=True, text=True, check=False)
    return f"needs loop devices: {found.stderr.strip()}" if found.returncode else ""


@contextmanager
def loop_device(image: Path) -> Iterator[Path]:
    made = subprocess.run(["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True)
    device = Path(made.stdout.strip())

    def detached() -> bool:
        try:
            return Path(f"/sys/block/{device.name}/loop/backing_file").read_text().strip() != str(image)
        except OSError:
            return True

    def detach() -> None:
        subprocess.run(["losetup", "--detach", str(device)], check=False, capture_output=True)

    try:
        yield device
    finally:
        until(detached, f"{device} for {image}", detach)


class Volumes(threading.Thread):
    """What a machine's kernel does: a device shows up for a volume that is attached, with a file system on it."""

    def __init__(self, cluster: Cluster, client: Any, folder: Path, content: Path):
        super().__init__()
        self._machines = {machine.address: machine for machine in cluster.machines.values()}
        self._client, self._folder, self._content = client, folder, content
        self._shown: set[str] = set()
        self._over = threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        with ExitStack() as stack:
            try:
                while not self._over.wait(0.2):
                    self._look(stack)
            except Exception as error:
                self.failure = error
                self._over.wait()

    def _look(self, stack: ExitStack) -> None:
        groups = self._client.describe_instances()["Reservations"]
        addresses = {own["InstanceId"]: own.get("PrivateIpAddress") for group in groups for own in group["Instances"]}
        for volume in self._client.describe_volumes()["Volumes"]:
            name = volume["VolumeId"]
            if volume["Attachments"] and volume.get("SnapshotId") and name not in self._shown:
                self._shown.add(name)
                image = self._folder / f"{name}.img"
                subprocess.run(["mkfs.ext4", "-q", "-d", str(self._content), str(image), "16M"], check=True)
                device = stack.enter_context(loop_device(image))
                machine = self._machines[addresses[volume["Attachments"][0]["InstanceId"]]]
                node = f"dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{name.replace('-', '')}"
                os.mknod(f"/proc/{machine.pid}/root/{node}", stat.S_IFBLK | 0o600, device.stat().st_rdev)
                unmount = ["nsenter", "--target", str(machine.pid), "--mount", "--pid", "umount", "--quiet", f"/{node}"]
                stack.callback(subprocess.run, unmount, check=False, capture_output=True)

    def end(self) -> None:
        self._over.set()
        self.join()
        if self.failure:
            raise self.failure


@contextmanager
def devices(cluster: Cluster, client: Any, folder: Path, content: Path) -> Iterator[None]:
    volumes = Volumes(cluster, client, folder, content)
    volumes.start()
    try:
        yield
    finally:
        volumes.end()


def words_of(cluster: Cluster, aws: dict[str, Any], *more: object) -> list[str]:
    addresses = ",".join(machine.address for machine in cluster.machines.values())
    options = (
        *("--nodes", 2, "--instance-type", "g4dn.2xlarge", "--spot", "--subnet", aws["subnet"]),
        *("--image-id", aws["image"], "--private", "--addresses", addresses, "--user", "root"),
        *("--ssh-config", cluster.config, "--public-key", cluster.folder / "key.pub", "--ssh-from", "192.0.2.7/32"),
        *("--python", sys.executable, "--rank-timeout", 10),
    )
    return command("launch", "ec2", *options, "digits", *SMALL, *more)


def from_snapshot(aws: dict[str, Any]) -> tuple[object, ...]:
    return "--from-snapshot", aws["snapshot"], "--volume-gb", 9


@contextmanager
def launcher_of(cluster: Cluster, words: list[str], aws: dict[str, Any], tmp_path: Path) -> Iterator[Launcher]:
    names = ",".join(name for name in aws["variables"] if name.startswith("AWS_"))
    with cleared(cluster, tmp_path):
        job = Launcher([*words, "--pass", names], tmp_path, environment() | aws["variables"])
        try:
            yield job
        finally:
            job.kill()


def what_is_left(client: Any) -> list[str]:
    groups = client.describe_instances()["Reservations"]
    alive = [own for group in groups for own in group["Instances"] if own["State"]["Name"] != "terminated"]
    found = [own["InstanceId"] for own in alive]
    found += [own["VolumeId"] for own in client.describe_volumes()["Volumes"]]
    found += [own["KeyName"] for own in client.describe_key_pairs()["KeyPairs"]]
    groups = client.describe_security_groups()["SecurityGroups"]
    return found + [own["GroupName"] for own in groups if own["GroupName"] != "default"]
