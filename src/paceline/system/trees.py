"""Converts nested dicts and lists to a JSON skeleton and flat tensors, and back. Reading them cannot execute code."""

from collections.abc import Mapping
from typing import Any

import torch

_TENSOR = "__tensor__"


def flatten(tree: Any, *leaves: type) -> tuple[Any, dict[str, Any]]:
    """Return a JSON skeleton that refers to tensors and to values of the types `leaves` by name, and these by name."""
    tensors: dict[str, Any] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, (torch.Tensor, *leaves)):
            tensors[path] = node
            return {_TENSOR: path}
        if isinstance(node, dict):
            # pairs, because JSON turns the optimizer's integer keys into strings
            return {"pairs": [[key, walk(value, _join(path, key))] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            return [walk(value, _join(path, index)) for index, value in enumerate(node)]
        if node is None or isinstance(node, bool | int | float | str):
            return node
        raise TypeError(f"{path} is a {type(node).__name__}, which cannot be written as JSON")

    return walk(tree, ""), tensors


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def unflatten(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the tree; ValueError for what `flatten` cannot have produced. Each tensor is used once."""
    unused = dict(tensors)

    def build(node: Any) -> Any:
        match node:
            case {"__tensor__": str(name), **more} if not more:
                if name not in unused:
                    raise ValueError(f"tensor {name!r} does not exist or is used twice")
                return unused.pop(name)
            case {"pairs": list(pairs), **more} if not more:
                tree = {key: build(value) for key, value in map(_pair, pairs)}
                if len(tree) < len(pairs):
                    raise ValueError("a key occurs twice")
                return tree
            case dict():
                raise ValueError(f"neither a tensor nor a list of key-value pairs: {str(node)[:100]}")
            case list():
                return [build(value) for value in node]
        return node

    tree = build(skeleton)
    if unused:
        raise ValueError(f"{len(unused)} tensors are unused, e.g. {min(unused)!r}")
    return tree


def _pair(pair: Any) -> tuple[str | int, Any]:
    match pair:
        case [str(key) | int(key), value]:
            return key, value
    raise ValueError(f"not a key-value pair: {str(pair)[:100]}")
