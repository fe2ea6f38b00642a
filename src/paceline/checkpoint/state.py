"""Copies of the training state."""

from typing import Any

import torch


def snapshot(tree: Any) -> Any:
    """Return a copy in host memory that training cannot change."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True).contiguous()
    if isinstance(tree, dict):
        return {key: snapshot(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [snapshot(value) for value in tree]
    return tree


def num_bytes(tree: Any) -> int:
    """Return the total size of all tensors."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, dict | list | tuple):
        return sum(map(num_bytes, tree.values() if isinstance(tree, dict) else tree))
    return 0
