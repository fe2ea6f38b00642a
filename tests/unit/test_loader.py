"""The loader of prepared images: order, crops, exactness, damage."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import one_epoch
from sample_images import sample_image, tree

from paceline.config.data import Augment, Data
from paceline.config.phases import Phase
from paceline.config.recipe import Evaluate, Recipe, Train
from paceline.config.timeline import Timeline
from paceline.data.images import Files, ImageSplit
from paceline.data.load.augment import mirrored
from paceline.data.load.crops import centre_boxes, random_boxes
from paceline.data.load.loader import ImageEvaluator, ImageLoader
from paceline.data.load.order import Plan
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import listing
from paceline.data.prepare.sources import tree as source
from paceline.data.shards import Dataset
from paceline.errors import UserError

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
def test_any_number_of_ranks_and_threads_sees_the_same_batches_and_pixels(dataset: Dataset, ranks: int) -> None:
    for epoch in (0, 1):
        alone = one_epoch(loader(dataset), epoch)
        parts = [one_epoch(loader(dataset, ranks, rank, threads=1 + rank), epoch) for rank in range(ranks)]
        assert len(alone) == 2
        for step, (whole,) in enumerate(alone):
            shares = [part[step][0] for part in parts]
            assert torch.equal(torch.cat([share.ids for share in shares]), whole.ids)
            assert torch.equal(torch.cat([share.images for share in shares]), whole.images)
            assert torch.equal(torch.cat([share.labels for share in shares]), whole.labels)


def test_an_epoch_entered_in_the_middle_goes_on_as_if_from_the_start(dataset: Dataset) -> None:
    whole, later = one_epoch(loader(dataset), 3), one_epoch(loader(dataset), 3, first_step=1)
    assert torch.equal(later[0][0].images, whole[1][0].images)
    micro = [batch.images for batch in one_epoch(loader(dataset, accumulation=3), 3)[0]]
    assert [len(images) for images in micro] == [4, 4, 4]
    assert torch.equal(torch.cat(micro), whole[0][0].images)


def test_labels_belong_to_their_images_and_sizes_change_on_the_way(dataset: Dataset) -> None:
    split = dataset.split("train")
    phases = Phase((0, 0.5), size=16), Phase((0.5, 10), size=48)
    (first,), (second,) = one_epoch(loader(dataset, phases=phases), 0)
    assert first.images.shape == (12, 3, 16, 16)
    assert second.images.shape == (12, 3, 48, 48)
    for batch in (first, second):
        assert batch.labels.tolist() == split.index["label"][batch.ids.numpy()].tolist()


def test_random_crops_are_torchvision_s() -> None:
    """The same distribution of area and aspect ratio, always inside the image; a sample's crop is its own."""
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
    assert long.tolist() == [[493, 0, 13, 10, 0], [0, 493, 10, 13, 0]]  # none fits: the middle, as large as allowed


@pytest.mark.parametrize("flip", ["none", "random", "alternating"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_host_and_device_mirror_the_same_samples(flip: str, epoch: int) -> None:
    """The native code and the device's go through the same random numbers."""
    ids, augment = torch.arange(1 << 33, (1 << 33) + 500), Augment(flip=flip)
    boxes = random_boxes(augment, 5, epoch)(np.full((500, 2), 64), ids.numpy())
    expected = torch.zeros(500, dtype=torch.bool) if flip == "none" else mirrored(ids, augment, 5, epoch)
    assert boxes[:, 4].tolist() == expected.tolist()


def test_middle_crops() -> None:
    boxes = centre_boxes(np.array([[500, 400], [300, 600]]), 0.5, 224, 224)
    assert boxes.tolist() == [[150, 100, 200, 200, 0], [75, 225, 150, 150, 0]]
    assert centre_boxes(np.array([[500, 400]]), 1.0, 200, 100).tolist() == [[0, 75, 500, 250, 0]]


@pytest.mark.parametrize("rectangular", [False, True])
def test_evaluation_sees_every_sample_once_on_any_number_of_ranks(dataset: Dataset, rectangular: bool) -> None:
    evaluate = Evaluate(per_rank_batch=4, size=32, rectangular=rectangular)
    split = dataset.split("val")
    phase = Timeline.of(Recipe("any", data=DATA, evaluate=evaluate, train=Train(global_batch=12)), 27).phases[0]

    def batches(ranks: int) -> dict[tuple[int, ...], torch.Tensor]:
        evaluators = [ImageEvaluator(DATA, evaluate, phase, split, rank, ranks, CPU, 2) for rank in range(ranks)]
        assert sum(evaluator.own_samples for evaluator in evaluators) == evaluators[0].num_samples == len(split) == 27
        return {tuple(batch.ids.tolist()): batch.images for evaluator in evaluators for batch in evaluator}

    alone = batches(1)
    assert sorted(number for ids in alone for number in ids) == list(range(27))
    for ranks in (2, 3, 7):
        several = batches(ranks)
        assert several.keys() == alone.keys()
        assert all(torch.equal(several[ids], alone[ids]) for ids in alone)
    assert (len({images.shape[2:] for images in alone.values()}) > 1) is rectangular


def test_a_panorama_alone_in_its_batch_is_cut_to_what_can_be_shown(tmp_path: Path) -> None:
    root = tree(tmp_path / "in")
    sample_image(1900, 60).save(root / "val" / "n00000002" / "zzz.JPEG", "jpeg")
    prepare(source(root, "folder"), tmp_path / "out", [Variant()], 2)
    evaluate = Evaluate(per_rank_batch=4, size=36, rectangular=True)
    split = Dataset.open(tmp_path / "out").split("val")
    phase = Timeline.of(Recipe("any", data=DATA, evaluate=evaluate, train=Train(global_batch=4)), 12).phases[0]
    shapes = [batch.images.shape[2:] for batch in ImageEvaluator(DATA, evaluate, phase, split, 0, 1, CPU, 2)]
    assert shapes[-1] == (36, 144)
    assert all((min(shape) == 36 and max(shape) % 8 == 0) or shape == (36, 36) for shape in shapes)


def test_a_corrupt_sample_is_named_counted_and_replaced_until_there_are_too_many(tmp_path: Path, caplog) -> None:
    root = tree(tmp_path / "in", images=20)
    prepare(source(root, "folder"), tmp_path / "out", [Variant()], 2)
    split = Dataset.open(tmp_path / "out").split("train")
    shard = split.folder / "shard-00000.pcl"

    def corrupt(number: int) -> None:
        content = bytearray(shard.read_bytes())
        content[int(split.index[number]["offset"]) + 200] ^= 1
        shard.write_bytes(content)

    corrupt(3)
    once = loader(Dataset.open(tmp_path / "out"))
    from paceline.system.logs import log

    log.propagate = True
    ids = torch.cat([batch.ids for (batch,) in one_epoch(once, 0)])
    assert once.num_corrupt == 1
    assert 3 not in ids
    assert "shard-00000.pcl at byte" in caplog.text
    assert split.names[3] in caplog.text
    for number in (5, 8, 11):
        corrupt(number)
    often = loader(Dataset.open(tmp_path / "out"))
    with pytest.raises(UserError, match=r"2 of 60 samples have been found corrupt, more than data.max_corrupt=0.001"):
        list(one_epoch(often, 0))


def test_a_corrupt_validation_sample_is_left_out_of_the_count(tmp_path: Path) -> None:
    prepare(source(tree(tmp_path / "in"), "folder"), tmp_path / "out", [Variant()], 2)
    split = Dataset.open(tmp_path / "out").split("val")
    shard = split.folder / "shard-00000.pcl"
    content = bytearray(shard.read_bytes())
    content[int(split.index[3]["offset"]) + 200] ^= 1
    shard.write_bytes(content)
    phase = Timeline.of(Recipe("any", data=DATA, train=Train(global_batch=4)), 12).phases[0]
    evaluator = ImageEvaluator(DATA, Evaluate(per_rank_batch=5), phase, split, 0, 1, CPU, 2)
    for _ in range(3):  # the same sample at every evaluation: still one
        batches = list(evaluator)
        assert torch.cat([batch.ids for batch in batches]).tolist() == [0, 1, 2, *range(4, 12)]
        assert sum(len(batch.images) for batch in batches) == sum(len(batch.labels) for batch in batches) == 11


def test_a_corrupt_index_is_refused(tmp_path: Path) -> None:
    prepare(source(tree(tmp_path / "in"), "folder"), tmp_path / "out", [Variant()], 2)
    index = tmp_path / "out" / "original" / "train" / "index.npy"
    content = bytearray(index.read_bytes())
    content[-6] ^= 1  # a label
    index.write_bytes(content)
    with pytest.raises(
        UserError, match=r"index.npy is missing or corrupt \(it does not match its checksum in dataset.json\); remove"
    ):
        Dataset.open(tmp_path / "out").split("train")


def test_shards_that_are_missing_or_of_another_length_are_named(tmp_path: Path) -> None:
    prepare(source(tree(tmp_path / "in"), "folder"), tmp_path / "out", [Variant()], 2)
    split = Dataset.open(tmp_path / "out").split("train")
    shard = split.folder / "shard-00000.pcl"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"shard-00000.pcl has 15,503 bytes instead of 15,504"):
        Dataset.open(tmp_path / "out").split("train")
    shard.unlink()
    with pytest.raises(UserError, match=r"shard-00000.pcl is missing"):
        Dataset.open(tmp_path / "out").split("train")
    with pytest.raises(UserError, match=r"data.variant='max-9' is not in"):
        Dataset.open(tmp_path / "out").split("train", "max-9")


def test_plain_files_give_the_same_crops_but_for_rounding(tmp_path: Path) -> None:
    root = tree(tmp_path / "in")
    prepare(source(root, "folder"), tmp_path / "out", [Variant()], 2)
    prepared = loader(Dataset.open(tmp_path / "out"))
    files = loader(Files(root, listing(root).train))
    (ours,), (plain,) = next(prepared.steps()), next(files.steps())
    assert torch.equal(ours.ids, plain.ids)
    assert torch.equal(ours.labels, plain.labels)
    assert (ours.images - plain.images).abs().mean() < 0.05  # of a standard deviation


def test_leaving_an_epoch_early_leaves_nothing_behind(dataset: Dataset) -> None:
    own = loader(dataset)
    steps = own.steps()
    first = next(steps)[0].images
    steps.close()
    assert torch.equal(next(own.steps(0))[0].images, first)
