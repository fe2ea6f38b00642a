"""Batches on their way to a device with streams: what is copied when and where, and what waits for it."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from sample_images import tree
from simulated_device import COMPUTE, COPY, SimulatedDevice

from paceline.config.data import Augment, Data, Synthetic
from paceline.config.recipe import Evaluate, Recipe, Train
from paceline.config.timeline import Timeline
from paceline.data import sets
from paceline.data.load.batch import Normalize
from paceline.data.load.in_memory import ResidentEvaluator, ResidentLoader
from paceline.data.load.loader import ImageEvaluator, ImageLoader
from paceline.data.load.order import Plan
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.data.shards import Dataset

CPU = torch.device("cpu")
MEAN, STD = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
CUT = Augment(flip="random", cutout=8, random_erasing=0.5)
SYNTHETIC = Data(name="synthetic", synthetic=Synthetic(train_samples=64, val_samples=20, size=8, channels=3, classes=4))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("shards")
    prepare(source(tree(folder / "in", images=9), "folder"), folder / "out", [Variant()], 2)
    return Dataset.open(folder / "out")


@pytest.fixture
def simulated(monkeypatch) -> SimulatedDevice:
    device = SimulatedDevice()
    device.install(monkeypatch.setattr)
    return device


def _loader(dataset: Dataset, augment: Augment, accumulation: int = 1) -> ImageLoader:
    data = Data(name="shards", size=32, augment=augment)
    recipe = Recipe("any", seed=7, data=data, train=Train(global_batch=12, grad_accumulation=accumulation))
    split = dataset.split("train")
    return ImageLoader(data, {"": split}, Plan.of(recipe, len(split)), CPU, threads=1)


def _resident(augment: Augment) -> ResidentLoader:
    data = Data(name="synthetic", synthetic=SYNTHETIC.synthetic, augment=augment)
    images = sets.load(data)
    recipe = Recipe("any", seed=7, data=data, train=Train(global_batch=16, grad_accumulation=2))
    return ResidentLoader(data, images, Plan.of(recipe, len(images.train)), CPU)


def test_pixels_and_labels_are_copied_on_the_copy_stream_then_the_event_then_the_compute_stream_waits(
    dataset: Dataset, simulated: SimulatedDevice
) -> None:
    steps = _loader(dataset, Augment(flip="random")).steps()
    next(steps)
    copy = [("pinned uint8", "host"), ("copy uint8", COPY), ("pinned int64", "host"), ("copy int64", COPY)]
    first = [*copy, ("record", COPY)]
    assert simulated.calls[:5] == first  # keys are not copied, because nothing on the device needs them
    after = simulated.calls[5:]
    if len(after) > 5:  # the second batch was decoded already, so its copy has begun
        assert after[:5] == first
        after = after[5:]
    assert after == [("wait_event", COMPUTE), ("record_stream", COMPUTE), ("record_stream", COMPUTE)]


def test_keys_are_copied_for_cutout_and_erasing_only(dataset: Dataset, simulated: SimulatedDevice) -> None:
    list(islice(_loader(dataset, CUT).steps(), 1))
    kinds = [call for call, stream in simulated.calls if stream == COPY][:4]
    assert kinds == ["copy uint8", "copy int64", "copy int64", "record"]


def test_the_next_batch_is_copied_before_the_current_one_is_used(
    dataset: Dataset, simulated: SimulatedDevice, monkeypatch
) -> None:
    monkeypatch.setattr("paceline.data.load.decode.Decoding.ready", True)  # the decoder is ahead
    steps = _loader(dataset, Augment()).steps()
    next(steps)
    assert [call for call in simulated.calls if call[0] in ("record", "wait_event")] == [
        ("record", COPY),
        ("record", COPY),
        ("wait_event", COMPUTE),
    ]


def test_a_batch_that_is_being_decoded_does_not_delay_the_current_one(
    dataset: Dataset, simulated: SimulatedDevice, monkeypatch
) -> None:
    monkeypatch.setattr("paceline.data.load.decode.Decoding.ready", False)
    steps = _loader(dataset, Augment()).steps()
    next(steps)
    assert [call for call, _ in simulated.calls].count("record") == 1


def test_a_buffer_is_reused_as_soon_as_its_copy_is_done_and_nobody_waits_for_it(
    dataset: Dataset, simulated: SimulatedDevice
) -> None:
    simulated.copy_seconds = 1.0
    steps = _loader(dataset, Augment(flip="random")).steps()
    for _ in range(9):
        next(steps)
    assert simulated.host == 0.0  # so no copy is done
    assert simulated.buffers >= 9
    allocated = simulated.buffers
    simulated.host = 100.0  # all copies are done, while the kernels of the steps are still running
    simulated.compute.done = 1000.0
    for _ in range(9):
        next(steps)
        simulated.host += 10.0
    assert simulated.buffers == allocated


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("augment", [Augment(flip="random"), CUT], ids=["flip", "cutout"])
def test_batches_are_the_same_with_and_without_streams(
    dataset: Dataset, monkeypatch, accumulation: int, augment: Augment
) -> None:
    alone = list(islice(_loader(dataset, augment, accumulation).steps(), 4))
    SimulatedDevice().install(monkeypatch.setattr)
    streamed = list(islice(_loader(dataset, augment, accumulation).steps(), 4))
    for ours, theirs in zip(streamed, alone, strict=True):
        assert len(ours) == accumulation
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine.labels, other.labels)
            assert torch.equal(mine.ids, other.ids)
            assert torch.allclose(mine.images, other.images, atol=1e-6)  # one fused multiply-add per value


def test_evaluation_is_the_same_with_and_without_streams(dataset: Dataset, monkeypatch) -> None:
    data, evaluate, split = Data(name="shards", size=32), Evaluate(per_rank_batch=5), dataset.split("val")
    phase = Timeline.of(Recipe("any", data=data, train=Train(global_batch=12)), 27).phases[0]
    alone = list(ImageEvaluator(data, evaluate, phase, split, 0, 1, CPU, 1))
    SimulatedDevice().install(monkeypatch.setattr)
    streamed = list(ImageEvaluator(data, evaluate, phase, split, 0, 1, CPU, 1))
    assert len(streamed) == len(alone) == 6
    for ours, theirs in zip(streamed, alone, strict=True):
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.allclose(ours.images, theirs.images, atol=1e-6)


def test_only_keys_and_labels_of_data_in_device_memory_are_copied(simulated: SimulatedDevice) -> None:
    next(_resident(Augment(flip="random")).steps())
    micro = ["copy int64", "copy int64", "record"]
    assert [call for call, stream in simulated.calls if stream == COPY] == 2 * micro


def test_data_in_device_memory_is_the_same_with_and_without_streams(monkeypatch) -> None:
    augment = Augment(flip="random", translate=2, cutout=3, random_erasing=0.5)
    alone = next(_resident(augment).steps())
    validated = list(ResidentEvaluator(SYNTHETIC, sets.load(SYNTHETIC), 0, 8, 0, 1, CPU))
    SimulatedDevice().install(monkeypatch.setattr)
    streamed = next(_resident(augment).steps())
    again = list(ResidentEvaluator(SYNTHETIC, sets.load(SYNTHETIC), 0, 8, 0, 1, CPU))
    for ours, theirs in zip(streamed + again, alone + validated, strict=True):
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.ids, theirs.ids)
        assert torch.allclose(ours.images, theirs.images, atol=1e-6)


def test_micro_batches_hold_bytes_until_they_are_used(dataset: Dataset, monkeypatch) -> None:
    used: list[torch.dtype] = []
    normalize = Normalize.__call__

    def noted(self, pixels: torch.Tensor, dtype=None) -> torch.Tensor:
        used.append(pixels.dtype)
        return normalize(self, pixels, dtype)

    monkeypatch.setattr(Normalize, "__call__", noted)
    micro_batches = next(_loader(dataset, Augment(), accumulation=3).steps())
    assert used == []
    assert micro_batches[1].images.dtype == torch.float32
    assert used == [torch.uint8]


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_normalized_values_are_those_of_autocast(dtype: torch.dtype, one_pass: bool, monkeypatch) -> None:
    if one_pass:
        SimulatedDevice().install(monkeypatch.setattr)
    pixels = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = (pixels / 255 - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1)
    found = Normalize(MEAN, STD, CPU, dtype)(pixels)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(found.float(), expected, atol=1e-5, rtol=2 * torch.finfo(dtype).eps)


def test_fp32_on_the_cpu_is_bit_identical_to_scale_and_shift() -> None:
    pixels = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale, shift = (1 / (255 * STD)).view(-1, 1, 1), (-MEAN / STD).view(-1, 1, 1)
    assert torch.equal(Normalize(MEAN, STD, CPU)(pixels), pixels.float().mul_(scale).add_(shift))


def test_images_of_a_batch_survive_later_batches(dataset: Dataset, tmp_path: Path) -> None:
    """Their pixels are in a buffer of the decoder, which must not be reused while the batch exists."""
    held = [step[0] for step in islice(_loader(dataset, Augment(flip="random")).steps(), 12)]
    for number, step in enumerate(islice(_loader(dataset, Augment(flip="random")).steps(), 12)):
        assert torch.equal(held[number].images, step[0].images)
