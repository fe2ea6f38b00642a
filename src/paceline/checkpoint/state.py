"""What training changes, as a copy."""

from typing import Any

import torch


def snapshot(tree: Any) -> Any:
    """A copy in host memory that training can no longer change."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True).contiguous()
    if isinstance(tree, dict):
        return {key: snapshot(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [snapshot(value) for value in tree]
    return tree


def num_bytes(tree: Any) -> int:
    """Of all tensors."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, dict | list | tuple):
        return sum(map(num_bytes, tree.values() if isinstance(tree, dict) else tree))
    return 0
