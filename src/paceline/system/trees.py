"""Nested dictionaries and lists as flat tensors and a skeleton in JSON, and back: reading them can never run code."""

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
        raise TypeError(f"{path} is a {type(node).__name__}, which cannot be written as JSON")

    return walk(tree, ""), tensors


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def unflatten(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree again; ValueError for what `flatten` cannot have made. Each tensor has one place."""
    left = dict(tensors)

    def build(node: Any) -> Any:
        match node:
            case {"__tensor__": str(name), **more} if not more:
                if name not in left:
                    raise ValueError(f"there is no tensor {name!r}, or it is used twice")
                return left.pop(name)
            case {"pairs": list(pairs), **more} if not more:
                tree = {key: build(value) for key, value in map(_pair, pairs)}
                if len(tree) < len(pairs):
                    raise ValueError("a key is given twice")
                return tree
            case dict():
                raise ValueError(f"neither a tensor nor pairs of keys and values: {str(node)[:100]}")
            case list():
                return [build(value) for value in node]
        return node

    tree = build(skeleton)
    if left:
        raise ValueError(f"{len(left)} tensors have no place, e.g. {min(left)!r}")
    return tree


def _pair(pair: Any) -> tuple[str | int, Any]:
    match pair:
        case [str(key) | int(key), value]:
            return key, value
    raise ValueError(f"not a key and its value: {str(pair)[:100]}")
