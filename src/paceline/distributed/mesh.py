"""How FSDP divides the ranks: into nodes that each hold a replica of the model, sharded over the node's ranks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.distributed.process_group import add_subgroup
from paceline.distributed.world import World
from paceline.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ShardId:
    """Which part of the state a rank holds: shard `index` of `count`."""

    index: int = 0
    count: int = 1
    is_first_replica: bool = True
    """False if a rank of another node holds the same shard and writes it to checkpoints."""


def ranks_per_replica(world: World, choice: str) -> int:
    """Return over how many ranks the model is sharded; `choice` is fsdp.mesh. A collective."""
    if choice == "flat":
        return world.size
    nodes = world.all_gather_object((world.rank - world.local_rank, world.local_size))
    equal = [tuple(node) for node in nodes] == [
        (rank - rank % world.local_size, world.local_size) for rank in range(world.size)
    ]
    if equal and world.local_size > 1:
        return world.local_size
    if choice == "hybrid":
        raise UserError(
            "fsdp-mesh-unsupported",
            f"fsdp.mesh=hybrid needs the same number of ranks on every node, and at least 2; this node has "
            f"{world.local_size} of {world.size}. Use fsdp.mesh=flat.",
            ranks=world.size,
            local_ranks=world.local_size,
        )
    return world.size


def create_mesh(world: World, choice: str) -> "DeviceMesh":
    """Return the mesh of all ranks: one dimension, or two (replicas, shards) with several replicas. A collective."""
    from torch.distributed.device_mesh import init_device_mesh  # imported late because it takes a second

    shards = ranks_per_replica(world, choice)
    if shards == world.size:
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    shape = (world.size // shards, shards)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():
        add_subgroup(group)
    if world.device.type == "cpu":
        world.close_ports()  # of the groups that the mesh created; NCCL connects through its ports when it is used
    return mesh


def shard_id(mesh: "DeviceMesh") -> ShardId:
    """Return what this rank holds of a model that is sharded over a mesh."""
    first = mesh.ndim == 1 or mesh.get_local_rank("replicate") == 0
    return ShardId(mesh.get_local_rank("shard"), mesh.size(mesh.ndim - 1), first)
