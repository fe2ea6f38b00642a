"""Registered datasets: which images and labels they may return, and what happens if they return something else."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import raises
from PIL import Image
from sample_images import jpeg, sample_image

import paceline as pl
from paceline import extensions
from paceline.config.data import Data
from paceline.data.images import ImageFiles
from paceline.data.registered import RegisteredSplit, open_registered
from paceline.engine.examples import evenly_spaced
from paceline.engine.trained_model import Preprocess

WIDE = {
    "I;16": np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8),
    "I": np.linspace(0, 65535, 64).astype(np.int32).reshape(8, 8),
}
"""Images of more than 8 bits, by their mode in Pillow: ramps from black to white."""
RAMP = np.linspace(0, 255, 64).reshape(8, 8)
GRAY = np.full((8, 8), 100, np.uint8)


class Listed:
    """A dataset without `targets` that counts how often it is read."""

    classes = ("dark", "light")

    def __init__(self, items: Sequence[tuple[Any, Any]]):
        self._items, self.reads = items, 0

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return self._items[index]


@pytest.fixture
def opened(monkeypatch) -> Callable[..., tuple[dict[str, RegisteredSplit], str]]:
    """Open what a registered function returns."""

    def register(call: Callable[..., Any]) -> tuple[dict[str, RegisteredSplit], str]:
        extension = extensions.Extension("dataset", "mine", call)
        monkeypatch.setattr(extensions, "find", lambda kind, name: extension)
        return open_registered(Data(name="mine"))

    return register


def _read(split: RegisteredSplit, number: int) -> tuple[np.ndarray, dict[int, str]]:
    out = np.zeros((1, 3, 8, 8), np.uint8)
    return out[0], split.read(np.array([number]), _whole, out)


def _whole(sizes: np.ndarray, _keys: np.ndarray) -> np.ndarray:
    return np.array([[0, 0, width, height, 0] for width, height in sizes])


@pytest.mark.parametrize("mode", WIDE)
def test_preprocess_reads_wide_images_like_image_folders(tmp_path, mode: str) -> None:
    image = Image.fromarray(WIDE[mode])
    assert image.mode == mode
    image.save(path := tmp_path / "image.tiff")
    out = np.zeros((1, 3, 8, 8), np.uint8)
    assert not ImageFiles(tmp_path, [(0, path)]).read(np.array([0]), _whole, out)
    settings = {"size": (8, 8), "crop_pct": 1.0, "mean": [0.0] * 3, "std": [1.0] * 3, "interpolation": "bilinear"}
    ready = Preprocess(settings)(image)
    assert torch.equal((ready * 255).round().to(torch.uint8), torch.from_numpy(out[0]))
    assert abs(out[0] - RAMP).max() <= 1


def test_floating_point_images_are_left_out(opened) -> None:
    image = Image.fromarray(np.linspace(0, 1, 64).astype(np.float32).reshape(8, 8))
    splits, _ = opened(lambda split: Listed([(image, 0)] * 4))
    _, failures = _read(splits["train"], 1)
    assert "floating-point" in failures[0]


@pytest.mark.parametrize("mode", WIDE)
def test_wide_images_are_scaled_not_clipped(opened, mode: str) -> None:
    splits, _ = opened(lambda split: Listed([(Image.fromarray(WIDE[mode]), 0)] * 4))
    pixels, failures = _read(splits["train"], 1)
    assert not failures
    assert abs(pixels - RAMP).max() <= 1


@pytest.mark.parametrize("label", [1, True, np.int64(1), np.uint8(1), torch.tensor(1), np.array(1)])
def test_integers_are_labels(opened, label: Any) -> None:
    splits, _ = opened(lambda split: Listed([(GRAY, label)] * 4))
    _read(splits["val"], 2)
    assert splits["val"].labels(np.array([2])).tolist() == [1]


@pytest.mark.parametrize("label", [1.0, np.float32(1.9), torch.tensor(1.9), "1", None, 2, -1])
def test_other_labels_are_refused(opened, label: Any) -> None:
    with raises("extension-failed"):
        _read(opened(lambda split: Listed([(GRAY, label)] * 4))[0]["train"], 1)


@pytest.mark.parametrize(
    "image",
    [Image.new("RGB", (0, 8)), np.zeros((8, 0), np.uint8), np.zeros((8, 8, 4), np.uint8), np.zeros((8, 8)), "path.jpg"],
    ids=["empty image", "empty array", "four channels", "float", "path"],
)
def test_other_images_are_refused(opened, image: Any) -> None:
    with raises("extension-failed"):
        _read(opened(lambda split: Listed([(image, 0)] * 4))[0]["train"], 1)


def test_truncated_files_that_are_opened_lazily_are_corrupt(opened, tmp_path) -> None:
    (path := tmp_path / "truncated.jpg").write_bytes(jpeg(sample_image(64, 48))[:-500])

    class Lazy(Listed):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return (Image.open(path), 0) if index == 1 else super().__getitem__(index)

    splits, _ = opened(lambda split: Lazy([(GRAY, 0)] * 4))
    assert list(_read(splits["train"], 1)[1]) == [0]
    assert not _read(splits["train"], 2)[1]


def test_corrupt_images_have_some_size(opened) -> None:
    class Missing(Listed):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            if index == 1:
                raise FileNotFoundError("1.jpg")
            return super().__getitem__(index)

    splits, _ = opened(lambda split: Missing([(GRAY, 0)] * 4))
    assert splits["val"].sizes(np.arange(3)).tolist() == [[8, 8], [1, 1], [8, 8]]


def test_a_run_does_not_read_all_items_for_its_announcements(tmp_path, monkeypatch, capsys, one_thread) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extensions, "_registered", {})  # other tests must not import this module
    datasets = []

    @pl.register_dataset("without-targets")
    def without_targets(split: str) -> Listed:
        datasets.append(Listed([(GRAY, number % 2) for number in range(20_000 if split == "train" else 32)]))
        return datasets[-1]

    data = {"name": "without-targets", "size": 64, "augment": {"flip": "random", "translate": 0}}
    short = {"train.duration": "2ba", "train.global_batch": 16, "model.options": {"widths": [8, 16], "norm": "group"}}
    run = pl.train("digits", {"data": data, **short, "optim.schedule.warmup": "1ba"}, in_process=True)
    assert run.status == "finished"
    assert max(dataset.reads for dataset in datasets) < 5000
    assert list(run.path.glob("tensorboard/*"))
    assert f"data: without-targets (registered by {__name__}." in capsys.readouterr().err


def test_some_images_are_shown_of_data_whose_labels_are_unknown() -> None:
    assert evenly_spaced(3).tolist() == [0, 1, 2]
    ids = evenly_spaced(1_000_000)
    assert (len(ids), int(ids.min()), int(ids.max())) == (128, 0, 999_999)


def test_the_fingerprint_covers_targets_and_some_items(opened) -> None:
    def fingerprint(pixels: Sequence[int], targets: list[int] | None = None) -> str:
        def call(split: str) -> Listed:
            dataset = Listed([(np.full((8, 8), value, np.uint8), 0) for value in pixels])
            if targets:
                dataset.targets = targets
            return dataset

        return opened(call)[1]

    same = fingerprint(range(9))
    assert fingerprint(range(9)) == same
    found = {
        same,
        fingerprint([1, *range(1, 9)]),
        fingerprint([*range(8), 0]),
        fingerprint([0, 1, 2, 3, 9, 5, 6, 7, 8]),
    }
    assert len(found) == 4
    assert len({fingerprint(range(9), targets) for targets in ([0] * 9, [0, 1, *[0] * 7], None)}) == 3


def test_a_corrupt_first_item_has_a_fingerprint(opened) -> None:
    class Missing(Listed):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            raise FileNotFoundError(str(index))

    assert opened(lambda split: Missing([(GRAY, 0)]))[1] == opened(lambda split: Missing([(GRAY, 0)]))[1]


def test_a_dataset_may_have_a_test_split(opened) -> None:
    """It is called with split="test" only if it says so: others would return validation images."""

    class Tested(Listed):
        splits = ("train", "val", "test")

        def __init__(self, split: str):
            super().__init__([(GRAY, 0)] * {"train": 4, "val": 3, "test": 2}[split])
            self.classes = ("dark", "light") if split != "test" or agrees else ("dark", "other")

    agrees = True
    splits, _ = opened(Tested)
    assert {name: len(split) for name, split in splits.items()} == {"train": 4, "val": 3, "test": 2}
    assert opened(lambda split: Listed([(GRAY, 0)] * 4))[0].keys() == {"train", "val"}
    agrees = False
    with raises("extension-failed") as caught:
        opened(Tested)
    assert "'test'" in str(caught.value)


def test_images_are_upright(opened) -> None:
    """Pillow opens a photo as the sensor saw it; viewers apply its EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = sample_image(8, 4)
    image.info["exif"] = exif.tobytes()
    split = opened(lambda split: Listed([(image, 0)]))[0]["val"]
    assert split.sizes(np.array([0])).tolist() == [[4, 8]]
    seen = []
    split.read(
        np.array([0]),
        lambda sizes, _: seen.append(sizes) or np.array([[0, 0, 4, 8, 0]]),
        np.zeros((1, 3, 8, 4), np.uint8),
    )
    assert seen[0].tolist() == [[4, 8]]
