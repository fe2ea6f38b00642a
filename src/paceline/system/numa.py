"""Divides the cores of a node among its GPU ranks, so that each rank uses those of its GPU's NUMA node.

A copy from pinned memory of another NUMA node crosses the link between the processors, which all ranks share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PCI = Path("/sys/bus/pci/devices")
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Share:
    """The cores of one rank."""

    near: frozenset[int]
    """On the NUMA node of its GPU, for the main thread and the threads of torch and NCCL."""
    spare: frozenset[int]
    """On NUMA nodes without a GPU of this job. Only decoding and other background threads use them."""


def divide(
    mask: frozenset[int], local: Sequence[frozenset[int]], rank: int, siblings: Mapping[int, int]
) -> Share | None:
    """Return the cores of a rank, or None if it should keep all of `mask`.

    `mask`: the cores that the ranks of this node may use. `local`: the cores of the NUMA node of each rank's GPU, empty
    if unknown. `siblings`: the first hardware thread of each core's physical core, which is not divided.
    """
    near = mask & local[rank]
    if not near:  # unknown, or excluded by SLURM or taskset
        return None
    neighbors = [number for number, cores in enumerate(local) if cores & local[rank]]
    if len(near) < len(neighbors):
        return None
    spare = mask.difference(*local)
    return Share(
        near=_part(near, neighbors.index(rank), len(neighbors), siblings),
        spare=_part(spare, rank, len(local), siblings),
    )


def _part(cores: frozenset[int], number: int, parts: int, siblings: Mapping[int, int]) -> frozenset[int]:
    ordered = sorted(cores, key=lambda core: (siblings.get(core, core), core))
    return frozenset(ordered[len(ordered) * number // parts : len(ordered) * (number + 1) // parts])


def cores_of(address: str) -> frozenset[int]:
    """Return the cores of the NUMA node of a PCI device, such as 0000:c1:00.0; empty if it is unknown."""
    try:
        if int((_PCI / address / "numa_node").read_text()) < 0:  # one node, or a virtual machine that hides them
            return frozenset()
        return frozenset(parse((_PCI / address / "local_cpulist").read_text()))
    except (OSError, ValueError):
        return frozenset()


def siblings_of(cores: frozenset[int]) -> dict[int, int]:
    """Return the first hardware thread of each core's physical core."""
    found = {}
    for core in cores:
        try:
            found[core] = min(parse((_CPUS / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()))
        except (OSError, ValueError):
            found[core] = core
    return found


def parse(text: str) -> set[int]:
    """Return the numbers of the kernel's lists: 0, 1, 2 and 64 of "0-2,64"."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
