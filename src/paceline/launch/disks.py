"""Disks of rented machines, as shell scripts: volumes and file systems mounted, the machine's own disk for data."""

import shlex

from paceline.launch.values import operand, plain

# what root makes on the machine is not the job's own, which is private
_ROOT = """root() ( umask 022; if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi )
fail() { echo "$*" >&2; exit 1; }"""

# a volume's device tells its id; on older kinds of machines it only has the name that was asked for
_VOLUME = """device=
i=0; while [ -z "$device" ] && [ $i -lt 60 ]; do
    for name in "/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_$serial" /dev/xvdf /dev/sdf; do
        if [ -z "$device" ] && [ -b "$name" ]; then device=$name; fi
    done
    [ -n "$device" ] || { sleep 1; i=$((i+1)); }
done
[ -n "$device" ] || fail "volume $volume is attached, but no device shows up"
for part in "$device-part1" "$device"p1 "$device"1; do [ ! -b "$part" ] || device=$part; done
root blkid "$device" > /dev/null || fail "volume $volume has no file system; make one, and put the data on it, once"
root mkdir -p "$place"
mountpoint -q "$place" || root mount "$device" "$place" || fail "volume $volume cannot be mounted at $place\""""

_SHARED = """root mkdir -p "$place"
mountpoint -q "$place" ||
    root mount -t nfs4 -o nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,noresvport "$server:$path" "$place" ||
    fail "$server cannot be mounted: the zone needs a mount target that lets NFS in, the image nfs-common\""""

# AWS's images for deep learning mount it themselves
_OWN_DISK = """place=/opt/dlami/nvme
if ! mountpoint -q $place; then
    place=/mnt/nvme
    device=$(lsblk -dpno NAME,MODEL | awk '/NVMe Instance Storage/ {print $1; exit}')
    if [ -n "$device" ] && ! mountpoint -q $place; then
        root blkid "$device" > /dev/null || root mkfs.ext4 -q "$device"
        root mkdir -p $place && root mount "$device" $place || fail "$device cannot be mounted at $place"
    fi
fi
if mountpoint -q $place; then
    root mkdir -p $place/paceline && root chown "$(id -u)" $place/paceline
    echo "export PACELINE_CACHE=$place/paceline" > disks
fi"""


def script(volume: str, place: str, shared: str, region: str, fetches: bool) -> str:
    """Mount a volume at a place, a shared file system (fs-ID[:/PATH]) at /efs; use the machine's own disk for what is
    fetched. Nothing if there is nothing to do."""
    parts = []
    if volume:
        parts.append(_assigned(volume=volume, serial=volume.replace("-", ""), place=place) + _VOLUME)
    if shared:
        name, _, path = operand("--efs", shared).partition(":")
        server = f"{name}.efs.{region}.amazonaws.com" if name.startswith("fs-") else name
        parts.append(_assigned(server=server, path=path or "/", place="/efs") + _SHARED)
    if fetches:
        parts.append(_OWN_DISK)
    return "\n".join([_ROOT, *parts]) if parts else ""


def _assigned(**values: str) -> str:
    """Values stand nowhere else: within other quotes, theirs would not hold."""
    return "".join(f"{name}={shlex.quote(plain(name, value))}\n" for name, value in values.items())
