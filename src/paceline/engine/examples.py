"""A contact sheet of augmented training images, labeled by class."""

import numpy as np
import torch

from paceline.data.sheets import contact_sheet
from paceline.engine.build import Setup
from paceline.errors import UserError

_MOST, _COLUMNS, _SIDE = 128, 16, 96


def examples(setup: Setup) -> np.ndarray | None:
    """Return some images of each class, or one of each of evenly spaced classes, as uint8 (height, width, 3).

    Returns evenly spaced images if labels are unknown, and None for data that has neither 1 nor 3 channels, or that
    cannot be read.
    """
    if setup.source.channels not in (1, 3):
        return None
    classes, loader = setup.source.classes, setup.loader
    labels = loader.labels
    ids = evenly_spaced(setup.source.num_train) if labels is None else chosen(labels, len(classes))
    try:
        batch = loader.augmented(ids)
    except UserError:  # e.g. of an augmentation: training raises it too, where it ends the run
        return None
    mean, std = (torch.as_tensor(values).cpu().view(1, -1, 1, 1) for values in (loader.mean, loader.std))
    pixels = ((batch.images.float().cpu() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)
    names = [classes[label].name for label in batch.labels.tolist()]
    return np.asarray(contact_sheet(list(pixels.permute(0, 2, 3, 1).numpy()), names, _COLUMNS, _SIDE))


def evenly_spaced(num_images: int) -> torch.Tensor:
    """Return the indices of the images to show of data whose labels are unknown."""
    return torch.from_numpy(np.linspace(0, num_images - 1, min(num_images, _MOST)).round().astype(np.int64))


def chosen(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return the indices of the images to show: the first ones of each class, class by class."""
    numbers = labels.numpy()
    each = max(1, min(8, _MOST // num_classes))
    shown = np.unique(np.linspace(0, num_classes - 1, min(num_classes, _MOST)).round().astype(int))
    order = np.argsort(numbers, kind="stable")
    begins = np.searchsorted(numbers[order], shown)
    ends = np.searchsorted(numbers[order], shown, side="right")
    return torch.from_numpy(np.concatenate([order[a : min(a + each, b)] for a, b in zip(begins, ends, strict=True)]))
