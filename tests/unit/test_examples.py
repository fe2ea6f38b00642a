"""The contact sheet of training images in TensorBoard."""

import numpy as np
import torch

from paceline.data.sheets import contact_sheet
from paceline.engine.examples import chosen


def test_every_class_is_shown() -> None:
    labels = torch.tensor([2, 0, 1, 0, 0, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    ids = chosen(labels, 3)
    assert labels[ids].tolist() == [0] * 3 + [1] * 8 + [2] * 2
    assert ids.tolist()[:3] == [1, 3, 4]


def test_some_of_many_classes_are_shown_without_empty_ones() -> None:
    labels = torch.arange(999).repeat(2)  # the last of 1000 has no image
    found = labels[chosen(labels, 1000)]
    assert len(found) == len(found.unique()) == 127
    assert found.min() == 0


def test_tiles_of_any_size_and_number_of_channels() -> None:
    for shape in ((8, 8, 1), (300, 200, 3)):
        sheet = contact_sheet([np.full(shape, 200, np.uint8)] * 5, list("abcde"), columns=2, side=32)
        assert sheet.size == (64, 3 * (32 + 14))
        assert sheet.getpixel((5, 5)) == (200, 200, 200)
