"""Disks of EC2 instances, with loop devices in place of NVMe devices."""

import os
import subprocess
from pathlib import Path

import pytest
from fake_ec2 import loop_device, no_disks

from paceline.launch import disks


@pytest.mark.skipif(bool(no_disks()), reason=no_disks())
def test_instance_store_is_used_for_fetched_data(tmp_path: Path) -> None:
    """In a new mount namespace, with an empty device that lsblk reports as an instance store."""
    image, tools = tmp_path / "disk.img", tmp_path / "tools"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    tools.mkdir()
    script = disks.script("", "", "", "", fetches_data=True)
    report = "df --output=source,fstype /mnt/nvme | tail -1; cat disks"
    hide = "for folder in /mnt /opt; do mount -t tmpfs none $folder; done"  # other disks may be mounted there
    with loop_device(image) as device:
        (tools / "lsblk").write_text(f"#!/bin/sh\necho '{device} Amazon EC2 NVMe Instance Storage'\n")
        (tools / "lsblk").chmod(0o700)
        answer = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", f"{hide}; {script}; {report}"],
            cwd=tmp_path, env={"PATH": f"tools:{os.environ['PATH']}"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    mount, variable = answer.stdout.splitlines()
    assert mount.split() == [str(device), "ext4"]
    assert variable == "export PACELINE_CACHE=/mnt/nvme/paceline"
