"""Bandwidth between all ranks and between pairs of them, beside what their links can do."""

from typing import Any

from paceline.distributed.bandwidth import all_reduce_bandwidth, pair_bandwidths
from paceline.selftest.links import gpu_link, network_link
from paceline.selftest.probes import Probing
from paceline.system.host import host_name


def bandwidth(probing: Probing) -> dict[str, Any]:
    """Return bytes per second over all ranks and per pair, the nominal ones, and the host of each rank."""
    world, quick = probing.world, probing.settings.quick
    total = all_reduce_bandwidth(world, seconds=1.0 if quick else 3.0)
    pairs = pair_bandwidths(world, seconds=0.2)
    nodes = world.all_gather_object(world.rank - world.local_rank)
    return {
        "all": total.bus_bytes_per_second,
        "pairs": [[*pair.ranks, pair.bus_bytes_per_second] for pair in pairs],
        "node_of_rank": nodes,
        "hosts": world.all_gather_object(host_name()),
        "network_link": min(world.all_gather_object(network_link() or 0.0)) or None,
        "gpu_link": min(world.all_gather_object(gpu_link(world.device) or 0.0)) or None,
    }
