"""Datasets that fit in memory."""

import numpy as np
import torch
from sklearn.datasets import load_digits

from paceline.config.data import Data, Synthetic
from paceline.data.sets import load


def test_digits_equal_scikit_learn() -> None:
    ours, theirs = load(Data(name="digits")), load_digits()
    held_out = np.arange(1797) % 5 == 0
    assert (len(ours.train), len(ours.val), ours.shape) == (1437, 360, (8, 8, 1))
    assert np.array_equal(ours.val.labels.numpy(), theirs.target[held_out])
    assert np.array_equal(np.round(ours.val.images[..., 0].numpy() * (16 / 255)), theirs.images[held_out])


def test_synthetic_images_are_deterministic_and_can_be_learned() -> None:
    data = Data(name="synthetic", synthetic=Synthetic(train_samples=3000, val_samples=7, channels=2, size=5, classes=3))
    first, again = load(data), load(data)
    assert (len(first.train), len(first.val), first.shape, len(first.classes)) == (3000, 7, (5, 5, 2), 3)
    assert torch.equal(first.train.images, again.train.images)
    assert first.fingerprint == again.fingerprint
    means = torch.stack([first.train.images[first.train.labels == label].float().mean(0) for label in range(3)])
    distances = (first.val.images.float()[:, None] - means).square().flatten(2).sum(2)
    assert torch.equal(distances.argmin(1), first.val.labels)
