"""Finds the repeated blocks of a model, which are sharded, compiled and recomputed one by one."""

from collections.abc import Iterator

from torch import nn


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a ViT or the bottlenecks of a ResNet: children of sequences, two or more of one class."""
    for module in model.modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            # skip single layers and nested sequences, whose children are visited by themselves
            blocks = [child for child in module if not isinstance(child, nn.Sequential) and list(child.children())]
            kinds = [type(block) for block in blocks]
            yield from (block for block in blocks if kinds.count(type(block)) > 1)
