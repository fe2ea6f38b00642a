"""State as tensors and JSON, so that reading it can never run code.

Nested dictionaries and lists become flat tensors and a skeleton, and back.
"""

from typing import Any

import torch

_TENSOR = "__tensor__"


def flatten(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A JSON skeleton in which tensors are named, and the tensors by name."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, torch.Tensor):
            tensors[path] = node
            return {_TENSOR: path}
        if isinstance(node, dict):
            # pairs, because JSON turns the optimizer's whole-number keys into text
            return {"pairs": [[key, walk(value, _join(path, key))] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            return [walk(value, _join(path, index)) for index, value in enumerate(node)]
        if node is None or isinstance(node, bool | int | float | str):
            return node
        raise TypeError(f"{path} is a {type(node).__name__}, which a checkpoint cannot hold")

    return walk(tree, ""), tensors


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def unflatten(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(skeleton, dict):
        if _TENSOR in skeleton:
            return tensors[skeleton[_TENSOR]]
        return {key: unflatten(value, tensors) for key, value in skeleton["pairs"]}
    if isinstance(skeleton, list):
        return [unflatten(value, tensors) for value in skeleton]
    return skeleton


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
