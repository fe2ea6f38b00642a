"""Weights of classes in the loss, and the imbalance they correct."""

import difflib
from collections.abc import Sequence

import torch

from paceline.config.recipe import Recipe
from paceline.data.classes import Class
from paceline.data.load.order import known
from paceline.errors import UserError


def class_weights(recipe: Recipe, classes: Sequence[Class], labels: torch.Tensor | None) -> torch.Tensor | None:
    """Return the weight of every class, float32; None if all images count the same.

    They are divided by their mean over the images as they are drawn, which keeps the scale of the loss. A division by
    the weights of each batch, as in torch, would make the loss depend on how the batch is divided among ranks.
    """
    given = recipe.train.class_weights
    if given == "none":
        return None
    counts = torch.bincount(known(labels, "train.class_weights"), minlength=len(classes)).double()
    present = counts > 0
    if given == "balanced":
        balanced = counts.sum() / (present.sum() * counts)
        return torch.where(present, balanced, 1.0).float()
    weights = torch.ones(len(classes), dtype=torch.float64)
    for name, weight in given.items():
        weights[_number(name, classes)] = weight
    drawn = present.double() if recipe.data.sampler == "balanced" else counts
    return (weights * drawn.sum() / (weights @ drawn)).float()


def _number(name: str, classes: Sequence[Class]) -> int:
    """Return the number of a class by its id or its readable name."""
    ids, names = [entry.id for entry in classes], [entry.name for entry in classes]
    if name in ids:
        return ids.index(name)
    if names.count(name) == 1:
        return names.index(name)
    if name in names:
        of_name = [entry.id for entry in classes if entry.name == name]
        fix = f"is the name of {len(of_name)} classes. Use their ids: {', '.join(of_name)}."
    else:
        close = difflib.get_close_matches(name, [*ids, *names], n=1)
        some = ", ".join(names[:8]) + (", ..." if names[8:] else "")
        fix = "is not a class of the data. " + (f"Did you mean {close[0]!r}?" if close else f"Its classes: {some}.")
    raise UserError("unknown-class", f"train.class_weights: {name!r} {fix}", name=name)
