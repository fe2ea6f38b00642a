"""Copies of the training state."""

from typing import Any

import torch

from paceline.checkpoint.tensors import TensorChunk, own_chunk
from paceline.distributed.mesh import ShardId


class HostCopies:
    """Copies states to host memory. Copies of GPU tensors are in pinned memory, which the next checkpoint reuses.

    With `copies_cpu` false, tensors in host memory are not copied unless they share memory, which files cannot express.
    """

    def __init__(self, copies_cpu: bool = True) -> None:
        self._copies_cpu = copies_cpu
        self._pinned: dict[str, torch.Tensor] = {}
        self._devices: set[torch.device] = set()
        self._storages: set[int] = set()

    def take(self, tree: Any, shard: ShardId) -> Any:
        """Return a copy of what this rank writes, which training cannot change; None for tensors of other ranks.

        Waits for the GPU once, after all copies have been enqueued.
        """
        copy = self._copied(tree, shard, "")
        for device in self._devices:
            torch.accelerator.synchronize(device)
        self._devices.clear()
        self._storages.clear()
        return copy

    def _copied(self, tree: Any, shard: ShardId, path: str) -> Any:
        if isinstance(tree, torch.Tensor):
            own = own_chunk(tree.detach(), shard)
            if isinstance(own, TensorChunk):
                return TensorChunk(self._to_host(own.data, path), own.shape, own.offsets)
            return None if own is None else self._to_host(own, path)
        if isinstance(tree, dict):
            return {key: self._copied(value, shard, f"{path}.{key}") for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return [self._copied(value, shard, f"{path}.{number}") for number, value in enumerate(tree)]
        return tree

    def _to_host(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage().data_ptr()
            if self._copies_cpu or storage in self._storages:
                return tensor.clone(memory_format=torch.contiguous_format)
            self._storages.add(storage)
            return tensor.contiguous()
        kept = self._pinned.get(path)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self._pinned[path] = kept
        self._devices.add(tensor.device)
        return kept.copy_(tensor, non_blocking=True)


def num_bytes(tree: Any) -> int:
    """Return the total size of all tensors."""
    if isinstance(tree, TensorChunk):
        return tree.data.nbytes
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, dict | list | tuple):
        return sum(map(num_bytes, tree.values() if isinstance(tree, dict) else tree))
    return 0
