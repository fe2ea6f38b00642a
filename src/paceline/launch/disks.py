"""Shell scripts that mount the disks of EC2 instances: EBS volumes, EFS, and the instance store for data."""

import shlex

from paceline.launch.values import operand, plain

# 022: what root creates is for all users, unlike the job's files
_ROOT = """root() ( umask 022; if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi )
fail() { echo "$*" >&2; exit 1; }"""

# NVMe devices carry the volume's id; older instance types only have the requested device name
_VOLUME = """device=
i=0; while [ -z "$device" ] && [ $i -lt 60 ]; do
    for name in "/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_$serial" /dev/xvdf /dev/sdf; do
        if [ -z "$device" ] && [ -b "$name" ]; then device=$name; fi
    done
    [ -n "$device" ] || { sleep 1; i=$((i+1)); }
done
[ -n "$device" ] || fail "volume $volume is attached, but its device does not appear"
for part in "$device-part1" "$device"p1 "$device"1; do [ ! -b "$part" ] || device=$part; done
root blkid "$device" > /dev/null || fail "volume $volume has no file system. Create one and copy the data to it once."
root mkdir -p "$mount_point"
mountpoint -q "$mount_point" || root mount "$device" "$mount_point" ||
    fail "cannot mount volume $volume at $mount_point\""""

_EFS = """root mkdir -p "$mount_point"
options=nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,noresvport
mountpoint -q "$mount_point" || root mount -t nfs4 -o $options "$server:$path" "$mount_point" ||
    fail "cannot mount $server: the zone needs a mount target that allows NFS, and the image needs nfs-common\""""

# AWS Deep Learning AMIs mount it at /opt/dlami/nvme
_INSTANCE_STORE = """mount_point=/opt/dlami/nvme
if ! mountpoint -q $mount_point; then
    mount_point=/mnt/nvme
    device=$(lsblk -dpno NAME,MODEL | awk '/NVMe Instance Storage/ {print $1; exit}')
    if [ -n "$device" ] && ! mountpoint -q $mount_point; then
        root blkid "$device" > /dev/null || root mkfs.ext4 -q "$device"
        root mkdir -p $mount_point && root mount "$device" $mount_point || fail "cannot mount $device at $mount_point"
    fi
fi
if mountpoint -q $mount_point; then
    root mkdir -p $mount_point/paceline && root chown "$(id -u)" $mount_point/paceline
    echo "export PACELINE_CACHE=$mount_point/paceline" > disks
fi"""


def script(volume: str, mount_point: str, efs: str, region: str, fetches_data: bool) -> str:
    """Return a script that mounts a volume, and a shared file system (fs-ID[:/PATH]) at /efs.

    If the job fetches data, the script also prepares the instance store for it. Empty if there is nothing to do.
    """
    parts = []
    if volume:
        parts.append(_assign(volume=volume, serial=volume.replace("-", ""), mount_point=mount_point) + _VOLUME)
    if efs:
        name, _, path = operand("--efs", efs).partition(":")
        server = f"{name}.efs.{region}.amazonaws.com" if name.startswith("fs-") else name
        parts.append(_assign(server=server, path=path or "/", mount_point="/efs") + _EFS)
    if fetches_data:
        parts.append(_INSTANCE_STORE)
    return "\n".join([_ROOT, *parts]) if parts else ""


def _assign(**values: str) -> str:
    """Return assignments of quoted values; scripts use the variables, so that values never stand in other quotes."""
    return "".join(f"{name}={shlex.quote(plain(name, value))}\n" for name, value in values.items())
