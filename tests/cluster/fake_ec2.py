"""Launch on moto's EC2, and provide the block devices that the kernels of instances would show."""

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
from jobs import Launcher, cleaned_up
from machines import Cluster
from networks import until

SMALL = ("--train.duration", "30ba", "--checkpoint.every", "10ba", "--log.every", "1ba", "--log.tensorboard", "false")


def no_disks() -> str:
    """Return why loop devices cannot be created here, or ""."""
    if missing := networks.missing(**{"losetup": "mount", "mkfs.ext4": "e2fsprogs"}):
        return missing
    probe = subprocess.run(["losetup", "--find"], capture_output=True, text=True, check=False)
    return f"needs loop devices: {probe.stderr.strip()}" if probe.returncode else ""


@contextmanager
def loop_device(image: Path) -> Iterator[Path]:
    created = subprocess.run(["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True)
    device = Path(created.stdout.strip())

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


class VolumeDevices(threading.Thread):
    """Creates a device with a file system on a host for each volume attached to its instance, as a kernel would."""

    def __init__(self, cluster: Cluster, client: Any, folder: Path, content: Path):
        super().__init__()
        self._hosts = {host.address: host for host in cluster.machines.values()}
        self._client, self._folder, self._content = client, folder, content
        self._known: set[str] = set()
        self._stopping = threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        with ExitStack() as stack:
            try:
                while not self._stopping.wait(0.2):
                    self._update(stack)
            except Exception as error:
                self.failure = error
                self._stopping.wait()

    def _update(self, stack: ExitStack) -> None:
        groups = self._client.describe_instances()["Reservations"]
        addresses = {one["InstanceId"]: one.get("PrivateIpAddress") for group in groups for one in group["Instances"]}
        for volume in self._client.describe_volumes()["Volumes"]:
            name = volume["VolumeId"]
            if volume["Attachments"] and volume.get("SnapshotId") and name not in self._known:
                self._known.add(name)
                image = self._folder / f"{name}.img"
                subprocess.run(["mkfs.ext4", "-q", "-d", str(self._content), str(image), "16M"], check=True)
                device = stack.enter_context(loop_device(image))
                host = self._hosts[addresses[volume["Attachments"][0]["InstanceId"]]]
                node = f"dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{name.replace('-', '')}"
                os.mknod(f"/proc/{host.pid}/root/{node}", stat.S_IFBLK | 0o600, device.stat().st_rdev)
                unmount = ["nsenter", "--target", str(host.pid), "--mount", "--pid", "umount", "--quiet", f"/{node}"]
                stack.callback(subprocess.run, unmount, check=False, capture_output=True)

    def end(self) -> None:
        self._stopping.set()
        self.join()
        if self.failure:
            raise self.failure


@contextmanager
def volume_devices(cluster: Cluster, client: Any, folder: Path, content: Path) -> Iterator[None]:
    thread = VolumeDevices(cluster, client, folder, content)
    thread.start()
    try:
        yield
    finally:
        thread.end()


def launch_command(cluster: Cluster, aws: dict[str, Any], *more: object) -> list[str]:
    addresses = ",".join(host.address for host in cluster.machines.values())
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
    with cleaned_up(cluster, tmp_path):
        job = Launcher([*words, "--pass", names], tmp_path, environment() | aws["variables"])
        try:
            yield job
        finally:
            job.kill()


def all_instances(client: Any) -> list[dict[str, Any]]:
    return [one for group in client.describe_instances()["Reservations"] for one in group["Instances"]]


def resources_in_use(client: Any) -> list[str]:
    """Return the names of all resources that are not released."""
    found = [one["InstanceId"] for one in all_instances(client) if one["State"]["Name"] != "terminated"]
    found += [one["VolumeId"] for one in client.describe_volumes()["Volumes"]]
    found += [one["KeyName"] for one in client.describe_key_pairs()["KeyPairs"]]
    groups = client.describe_security_groups()["SecurityGroups"]
    return found + [one["GroupName"] for one in groups if one["GroupName"] != "default"]
