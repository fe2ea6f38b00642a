"""Augmentation and loaders of datasets in memory."""

import numpy as np
import pytest
import torch
from conftest import one_epoch, raises

from paceline.config.data import Augment, Data, Synthetic
from paceline.config.phases import Phase
from paceline.config.recipe import Recipe, Train
from paceline.data.load.augment import cut_out_, erase_, gather
from paceline.data.load.in_memory import ResidentEvaluator, ResidentLoader, statistics
from paceline.data.load.order import Plan
from paceline.data.load.policy import policy
from paceline.data.sets import ImageSet, load

IMAGES = torch.randint(0, 256, (40, 9, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
PIXELS = IMAGES.reshape(-1, 3)
IDS = torch.tensor([5, 39, 0, 17, 5])


def _gather(augment: Augment, epoch: int = 0, ids: torch.Tensor = IDS) -> torch.Tensor:
    return gather(PIXELS, (9, 7, 3), ids, ids, augment, seed=1, epoch=epoch)


def test_images_are_unchanged_without_augmentation() -> None:
    assert torch.equal(_gather(Augment()), IMAGES[IDS])


def test_translation_is_a_crop_of_the_reflected_image() -> None:
    everything = torch.arange(40)
    shifted = _gather(Augment(translate=2), ids=everything).numpy()
    padded = np.pad(IMAGES.numpy(), ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    seen = set()
    for number in range(40):
        places = [(y, x) for y in range(5) for x in range(5)]
        matches = [(y, x) for y, x in places if (padded[number, y : y + 9, x : x + 7] == shifted[number]).all()]
        assert len(matches) == 1
        seen.update(matches)
    assert len(seen) > 15  # of 25 places, with 40 images


def test_alternating_flips_mirror_half_the_images_and_then_the_other_half() -> None:
    everything = torch.arange(40)
    first, second, third = (_gather(Augment(flip="alternating"), epoch, everything) for epoch in range(3))
    mirrored = (first != IMAGES).flatten(1).any(1)
    assert 8 < mirrored.sum() < 32
    assert torch.equal(first[mirrored], IMAGES[mirrored].flip(2))
    assert torch.equal(second, first.flip(2))
    assert torch.equal(third, first)


def test_random_flips_differ_between_epochs() -> None:
    everything = torch.arange(40)
    epochs = torch.stack([_gather(Augment(flip="random"), epoch, everything) for epoch in range(8)])
    mirrored = (epochs != IMAGES).flatten(2).any(2)
    assert 0.3 < mirrored.float().mean() < 0.7
    assert len({tuple(row.tolist()) for row in mirrored}) == 8


def test_cutout_clears_one_square_per_image() -> None:
    images = torch.ones(200, 3, 12, 12)
    cut = cut_out_(images, torch.arange(200), 4, seed=0, epoch=0)
    cleared = (cut == 0).sum((2, 3))
    assert (cleared[:, 0] == cleared[:, 1]).all()
    assert cleared.max() == 16
    assert cleared.min() >= 4  # a quarter of the square, when its center is a corner


@pytest.mark.parametrize("mode", ["const", "pixel"])
def test_erasing_depends_only_on_seed_epoch_and_key(mode: str) -> None:
    augment = Augment(random_erasing=0.5, random_erasing_mode=mode)  # type: ignore[arg-type]
    keys = torch.arange(40)
    images = torch.randn(40, 3, 12, 9, generator=torch.Generator().manual_seed(0))
    erased = erase_(images.clone(), keys, augment, seed=1, epoch=2)
    part = torch.tensor([31, 4, 17])
    assert torch.equal(erase_(images[part], keys[part], augment, seed=1, epoch=2), erased[part])
    changed = (erased != images).flatten(1).any(1)
    assert 8 < changed.sum() < 32
    for other in ({"seed": 2, "epoch": 2}, {"seed": 1, "epoch": 3}):
        assert not torch.equal(erase_(images.clone(), keys, augment, **other), erased)


POLICIES = (
    Augment(policy="trivialaugment"),
    Augment(policy="randaugment", num_ops=3),
    Augment(policy="timm-randaugment", magnitude_std=0.5, increasing=True, random_interpolation=True),
)


@pytest.mark.parametrize("augment", POLICIES)
def test_policies_depend_only_on_seed_epoch_and_key(augment: Augment) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 3, 16, 12), np.uint8)

    def augmented(part: list[int], seed: int = 1, epoch: int = 2) -> np.ndarray:
        changed = images[part]
        change = policy(augment, seed, epoch, "bilinear", (0.5, 0.4, 0.3))
        assert change
        change(changed, np.array(part))
        return changed

    everything = augmented([*range(60)])
    assert np.array_equal(augmented([31, 4, 17]), everything[[31, 4, 17]])
    assert (everything != images).any((1, 2, 3)).sum() > 30
    for other in ({"seed": 2}, {"epoch": 3}):
        assert not np.array_equal(augmented([*range(60)], **other), everything)


def _loader(data: Data, images: ImageSet, batch: int, phases: tuple[Phase, ...] = ()) -> ResidentLoader:
    recipe = Recipe("any", data=data, train=Train(global_batch=batch), phases=phases)
    return ResidentLoader(data, images, Plan.of(recipe, len(images.train)), torch.device("cpu"))


def test_batches_are_normalized_with_statistics_of_the_training_set() -> None:
    data = Data(name="synthetic", synthetic=Synthetic(train_samples=512, channels=2, size=8))
    images = load(data)
    mean, std = statistics(data, images)
    reference = images.train.images.double() / 255
    assert torch.allclose(mean.double(), reference.mean((0, 1, 2)), atol=1e-6)
    assert torch.allclose(std.double(), reference.std((0, 1, 2), correction=0), atol=1e-6)
    loader = _loader(data, images, 512)
    batch = next(loader.steps())[0].images
    assert batch.mean((0, 2, 3)).abs().max() < 1e-5
    assert torch.allclose(batch.var((0, 2, 3), correction=0), torch.ones(2), atol=1e-4)


def test_images_are_resized_and_invalid_options_are_rejected() -> None:
    data = Data(name="digits", size=16)
    images = load(data)
    loader = _loader(data, images, 8)
    assert next(loader.steps())[0].images.shape == (8, 1, 16, 16)
    with raises("batch-too-large") as caught:
        _loader(data, images, 2000)
    assert (caught.value.fields["batch"], caught.value.fields["samples"]) == (2000, 1437)
    with raises("translate-too-large") as caught:
        _loader(Data(augment=Augment(translate=8)), images, 8)
    assert "data.augment.translate=8" in str(caught.value)
    with raises("channels-mismatch") as caught:
        statistics(Data(mean=(0.5,) * 3, std=(0.5,) * 3), images)
    assert caught.value.fields["channels"] == 1
    assert "data.mean has 3 values" in str(caught.value)


def test_size_follows_the_phases_also_after_resuming() -> None:
    data = Data(name="digits", size=8)
    phases = Phase((0, 2.5), size=4), Phase((2.5, 4), size=6), Phase((4, 10), size=12)
    loader = _loader(data, load(data), 479, phases)
    sides = [batch.images.shape[-1] for epoch in range(5) for (batch,) in one_epoch(loader, epoch)]
    assert sides == [4] * 8 + [6] * 4 + [12] * 3
    assert [batch.images.shape[-1] for (batch,) in one_epoch(loader, 2, first_step=1)] == [4, 6]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_evaluation_has_every_sample_once_in_the_same_batches(ranks: int) -> None:
    data = Data(name="digits")
    images = load(data)
    device = torch.device("cpu")
    evaluators = [ResidentEvaluator(data, images, 0, 50, rank, ranks, device) for rank in range(ranks)]
    batches = [batch.ids for evaluator in evaluators for batch in evaluator]
    assert sorted(torch.cat(batches).tolist()) == list(range(360))
    assert {tuple(ids.tolist()) for ids in batches} == {tuple(range(at, min(at + 50, 360))) for at in range(0, 360, 50)}
