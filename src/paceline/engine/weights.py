"""Loads the weights of a checkpoint into a model, whole or sharded."""

import torch
from torch import nn

from paceline.checkpoint.tensors import SavedTensor, fill
from paceline.errors import UserError
from paceline.optim.template import local


def load_weights(model: nn.Module, weights: dict[str, SavedTensor], origin: str) -> None:
    """Load the weights of a checkpoint, which may be untrusted.

    Names, shapes and types are checked before any is loaded.
    """
    expected: dict[str, torch.Tensor] = model.state_dict()
    wrong = sorted(expected.keys() ^ weights.keys())
    wrong += [name for name in weights if name in expected and _kind(expected[name]) != _kind(weights[name])]
    if wrong:
        raise UserError(
            "checkpoint-model-mismatch",
            f"{origin} is a checkpoint of another model: {len(wrong)} tensors differ ({', '.join(wrong[:3])} ...). "
            "Use the recipe it was trained with.",
            path=origin,
            tensors=wrong,
        )
    masks = {name for name, new in expected.items() if not local(new).isfinite().all()}  # of attention: -infinity
    fill(weights, expected)
    for name, tensor in expected.items():
        if problem := _invalid_values(name, local(tensor), name in masks):
            raise UserError(
                "checkpoint-weights-invalid",
                f"{origin}: {name} {problem}. Use an earlier checkpoint.",
                path=origin,
                tensor=name,
            )
    model.load_state_dict(expected)  # for models whose state_dict() returns copies


def _kind(tensor: torch.Tensor | SavedTensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _invalid_values(name: str, tensor: torch.Tensor, is_mask: bool) -> str:
    """Return why a model cannot use these values, or ""."""
    if tensor.is_floating_point():
        return "" if is_mask or tensor.isfinite().all() else "contains NaN or infinity"
    negative = name.endswith("num_batches_tracked") and tensor.min() < 0
    return "contains a negative count" if negative else ""
