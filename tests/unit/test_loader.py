"""The loader of prepared images: order, crops, exactness and corrupt samples."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import one_epoch, raises
from sample_images import sample_image, tree

from paceline.config.data import Augment, Data
from paceline.config.phases import Phase
from paceline.config.recipe import Evaluate, Recipe, Train
from paceline.config.timeline import Timeline
from paceline.data.center import center_boxes
from paceline.data.images import ImageFiles, ImageSplit
from paceline.data.listing import list_images
from paceline.data.load.augment import mirrored
from paceline.data.load.crops import random_boxes
from paceline.data.load.loader import ImageEvaluator, ImageLoader
from paceline.data.load.order import Plan
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.data.shards import Dataset

CPU = torch.device("cpu")
DATA = Data(name="shards", size=32, augment=Augment(flip="random"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("shards")
    prepare(source(tree(folder / "in", images=9), "folder"), folder / "out", [Variant()], 2)
    return Dataset.open(folder / "out")


def loader(
    source: Dataset | ImageSplit,
    ranks: int = 1,
    rank: int = 0,
    accumulation: int = 1,
    threads: int = 2,
    phases: tuple[Phase, ...] = (),
) -> ImageLoader:
    train = Train(global_batch=12, grad_accumulation=accumulation)
    recipe = Recipe("any", seed=7, data=DATA, train=train, phases=phases)
    split = source.split("train") if isinstance(source, Dataset) else source
    return ImageLoader(DATA, {"": split}, Plan.of(recipe, len(split), ranks, rank), CPU, threads)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_batches_and_pixels_do_not_depend_on_ranks_and_threads(dataset: Dataset, ranks: int) -> None:
    for epoch in (0, 1):
        alone = one_epoch(loader(dataset), epoch)
        parts = [one_epoch(loader(dataset, ranks, rank, threads=1 + rank), epoch) for rank in range(ranks)]
        assert len(alone) == 2
        for step, (whole,) in enumerate(alone):
            batches = [part[step][0] for part in parts]
            assert torch.equal(torch.cat([batch.ids for batch in batches]), whole.ids)
            assert torch.equal(torch.cat([batch.images for batch in batches]), whole.images)
            assert torch.equal(torch.cat([batch.labels for batch in batches]), whole.labels)


def test_loader_resumes_in_the_middle_of_an_epoch(dataset: Dataset) -> None:
    whole, later = one_epoch(loader(dataset), 3), one_epoch(loader(dataset), 3, first_step=1)
    assert torch.equal(later[0][0].images, whole[1][0].images)
    micro = [batch.images for batch in one_epoch(loader(dataset, accumulation=3), 3)[0]]
    assert [len(images) for images in micro] == [4, 4, 4]
    assert torch.equal(torch.cat(micro), whole[0][0].images)


def test_labels_match_images_when_the_size_changes(dataset: Dataset) -> None:
    split = dataset.split("train")
    phases = Phase((0, 0.5), size=16), Phase((0.5, 10), size=48)
    (first,), (second,) = one_epoch(loader(dataset, phases=phases), 0)
    assert first.images.shape == (12, 3, 16, 16)
    assert second.images.shape == (12, 3, 48, 48)
    for batch in (first, second):
        assert batch.labels.tolist() == split.index["label"][batch.ids.numpy()].tolist()


def test_random_crops_have_the_distribution_of_torchvision() -> None:
    """Also always inside the image, and independent of the other samples of a batch."""
    from paceline.system.torchvision_compat import allow_torchvision

    allow_torchvision()
    from torchvision.transforms import RandomResizedCrop

    ids = np.arange(20_000)
    sizes = np.tile([[500, 375]], (len(ids), 1))
    boxes = random_boxes(Augment(flip="random"), seed=1, epoch=2)(sizes, ids)
    x, y, width, height, mirrored = boxes.T
    assert (x >= 0).all()
    assert (y >= 0).all()
    assert (x + width <= 500).all()
    assert (y + height <= 375).all()
    assert abs(mirrored.mean() - 0.5) < 0.02
    torch.manual_seed(0)
    image = torch.zeros(3, 375, 500)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(5000)])
    for ours, other in ((height, theirs[:, 2]), (width, theirs[:, 3]), (x, theirs[:, 1]), (y, theirs[:, 0])):
        assert np.allclose(np.quantile(ours, [0.1, 0.5, 0.9]), np.quantile(other, [0.1, 0.5, 0.9]), rtol=0.06, atol=4)
    again = random_boxes(Augment(flip="random"), seed=1, epoch=2)(sizes[:5], np.array([9, 100, 3, 77, 0]))
    assert np.array_equal(again, boxes[[9, 100, 3, 77, 0]])
    long = random_boxes(Augment(crop_scale=(0.9, 1.0)), 0, 0)(np.array([[1000, 10], [10, 1000]]), np.array([0, 1]))
    assert long.tolist() == [[493, 0, 13, 10, 0], [0, 493, 10, 13, 0]]  # no attempt fits: the largest center crop


@pytest.mark.parametrize("flip", ["none", "random", "alternating"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_host_and_device_flip_the_same_samples(flip: str, epoch: int) -> None:
    """The native code and the code for the device use the same random numbers."""
    ids, augment = torch.arange(1 << 33, (1 << 33) + 500), Augment(flip=flip)
    boxes = random_boxes(augment, 5, epoch)(np.full((500, 2), 64), ids.numpy())
    expected = torch.zeros(500, dtype=torch.bool) if flip == "none" else mirrored(ids, augment, 5, epoch)
    assert boxes[:, 4].tolist() == expected.tolist()


def test_center_crops() -> None:
    boxes = center_boxes(np.array([[500, 400], [300, 600]]), 0.5, 224, 224)
    assert boxes.tolist() == [[150, 100, 200, 200, 0], [75, 225, 150, 150, 0]]
    assert center_boxes(np.array([[500, 400]]), 1.0, 200, 100).tolist() == [[0, 75, 500, 250, 0]]


@pytest.mark.parametrize("rectangular", [False, True])
def test_evaluation_has_every_sample_once_on_any_number_of_ranks(dataset: Dataset, rectangular: bool) -> None:
    evaluate = Evaluate(per_rank_batch=4, size=32, rectangular=rectangular)
    split = dataset.split("val")
    phase = Timeline.of(Recipe("any", data=DATA, evaluate=evaluate, train=Train(global_batch=12)), 27).phases[0]

    def batches(ranks: int) -> dict[tuple[int, ...], torch.Tensor]:
        evaluators = [ImageEvaluator(DATA, evaluate, phase, split, rank, ranks, CPU, 2) for rank in range(ranks)]
        assert sum(evaluator.rank_samples for evaluator in evaluators) == evaluators[0].num_samples == len(split) == 27
        return {tuple(batch.ids.tolist()): batch.images for evaluator in evaluators for batch in evaluator}

    alone = batches(1)
    assert sorted(number for ids in alone for number in ids) == list(range(27))
    for ranks in (2, 3, 7):
        several = batches(ranks)
        assert several.keys() == alone.keys()
        assert all(torch.equal(several[ids], alone[ids]) for ids in alone)
    assert (len({images.shape[2:] for images in alone.values()}) > 1) is rectangular


def test_aspect_ratio_of_rectangular_batches_is_limited(tmp_path: Path) -> None:
    root = tree(tmp_path / "in")
    sample_image(1900, 60).save(root / "val" / "n00000002" / "zzz.JPEG", "jpeg")
    prepare(source(root, "folder"), tmp_path / "out", [Variant()], 2)
    evaluate = Evaluate(per_rank_batch=4, size=36, rectangular=True)
    split = Dataset.open(tmp_path / "out").split("val")
    phase = Timeline.of(Recipe("any", data=DATA, evaluate=evaluate, train=Train(global_batch=4)), 12).phases[0]
    shapes = [batch.images.shape[2:] for batch in ImageEvaluator(DATA, evaluate, phase, split, 0, 1, CPU, 2)]
    assert shapes[-1] == (36, 144)
    assert all((min(shape) == 36 and max(shape) % 8 == 0) or shape == (36, 36) for shape in shapes)


def test_corrupt_sample_is_replaced_and_counted_up_to_max_corrupt(tmp_path: Path, caplog) -> None:
    root = tree(tmp_path / "in", images=20)
    prepare(source(root, "folder"), tmp_path / "out", [Variant()], 2)
    split = Dataset.open(tmp_path / "out").split("train")
    shard = split.folder / "shard-00000.pcl"

    def corrupt(number: int) -> None:
        content = bytearray(shard.read_bytes())
        content[int(split.index[number]["offset"]) + 200] ^= 1
        shard.write_bytes(content)

    corrupt(3)
    one_corrupt = loader(Dataset.open(tmp_path / "out"))
    from paceline.system.logs import log

    log.propagate = True
    ids = torch.cat([batch.ids for (batch,) in one_epoch(one_corrupt, 0)])
    assert one_corrupt.num_corrupt == 1
    assert 3 not in ids
    assert "shard-00000.pcl at byte" in caplog.text
    assert split.names[3] in caplog.text
    for number in (5, 8, 11):
        corrupt(number)
    several_corrupt = loader(Dataset.open(tmp_path / "out"))
    with raises("too-many-corrupt-samples") as caught:
        list(one_epoch(several_corrupt, 0))
    assert (caught.value.fields["corrupt"], caught.value.fields["samples"]) == (2, 60)
    assert "data.max_corrupt=0.001" in str(caught.value)


def test_corrupt_validation_sample_is_left_out(tmp_path: Path) -> None:
    prepare(source(tree(tmp_path / "in"), "folder"), tmp_path / "out", [Variant()], 2)
    split = Dataset.open(tmp_path / "out").split("val")
    shard = split.folder / "shard-00000.pcl"
    content = bytearray(shard.read_bytes())
    content[int(split.index[3]["offset"]) + 200] ^= 1
    shard.write_bytes(content)
    phase = Timeline.of(Recipe("any", data=DATA, train=Train(global_batch=4)), 12).phases[0]
    evaluator = ImageEvaluator(DATA, Evaluate(per_rank_batch=5), phase, split, 0, 1, CPU, 2)
    for _ in range(3):  # repeated evaluations count it once
        batches = list(evaluator)
        assert torch.cat([batch.ids for batch in batches]).tolist() == [0, 1, 2, *range(4, 12)]
        assert sum(len(batch.images) for batch in batches) == sum(len(batch.labels) for batch in batches) == 11


def test_corrupt_index_is_rejected(tmp_path: Path) -> None:
    prepare(source(tree(tmp_path / "in"), "folder"), tmp_path / "out", [Variant()], 2)
    index = tmp_path / "out" / "original" / "train" / "index.npy"
    content = bytearray(index.read_bytes())
    content[-6] ^= 1  # a label
    index.write_bytes(content)
    with raises("dataset-corrupt") as caught:
        Dataset.open(tmp_path / "out").split("train")
    assert caught.value.fields["path"] == index
    assert "checksum" in str(caught.value)


def test_missing_and_truncated_shards_and_unknown_variants_are_rejected(tmp_path: Path) -> None:
    prepare(source(tree(tmp_path / "in"), "folder"), tmp_path / "out", [Variant()], 2)
    split = Dataset.open(tmp_path / "out").split("train")
    shard = split.folder / "shard-00000.pcl"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with raises("dataset-corrupt") as caught:
        Dataset.open(tmp_path / "out").split("train")
    assert caught.value.fields["path"] == shard
    assert "15,503 bytes instead of 15,504" in str(caught.value)
    shard.unlink()
    with raises("dataset-unreadable") as caught:
        Dataset.open(tmp_path / "out").split("train")
    assert caught.value.fields["path"] == shard
    with raises("unknown-variant") as caught:
        Dataset.open(tmp_path / "out").split("train", "max-9")
    assert caught.value.fields["variant"] == "max-9"


def test_image_files_have_the_same_crops_except_for_rounding(tmp_path: Path) -> None:
    root = tree(tmp_path / "in")
    prepare(source(root, "folder"), tmp_path / "out", [Variant()], 2)
    prepared = loader(Dataset.open(tmp_path / "out"))
    files = loader(ImageFiles(root, list_images(root).splits["train"]))
    (ours,), (plain,) = next(prepared.steps()), next(files.steps())
    assert torch.equal(ours.ids, plain.ids)
    assert torch.equal(ours.labels, plain.labels)
    assert (ours.images - plain.images).abs().mean() < 0.05  # of a standard deviation


def test_closing_an_epoch_early_has_no_side_effects(dataset: Dataset) -> None:
    reused = loader(dataset)
    steps = reused.steps()
    first = next(steps)[0].images
    steps.close()
    assert torch.equal(next(reused.steps(0))[0].images, first)
