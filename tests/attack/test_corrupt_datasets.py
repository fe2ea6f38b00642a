"""Prepared data on failing disks: every flipped bit and truncation is detected, or affects at most one sample."""

import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import HANG, complaint, raises
from processes import start, wait_for_step
from sample_images import tree

from attack.datasets import FILES, crops, flips, make_arrays, make_shards, train, truncations
from paceline.data import arrays
from paceline.data.description import DESCRIPTION
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.track.records import RunFolder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return make_shards(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data")


@pytest.mark.parametrize("kind", ["shards", "arrays"])
def test_flipped_bits_and_truncations_of_dataset_json_are_detected(
    here, data: Path, tmp_path: Path, kind: str, survived
) -> None:
    (tmp_path / "arrays").mkdir()
    folder = data if kind == "shards" else make_arrays(tmp_path / "arrays")
    path = folder / DESCRIPTION
    content = path.read_bytes()
    for flipped in flips(content, 2500):
        path.write_bytes(flipped)
        complaint(here("data", folder, "--check"))
    survived("flipped bits in dataset.json", 2500)
    for truncated in truncations(content.rstrip(), 60):  # losing only the final newline changes nothing
        path.write_bytes(truncated)
        complaint(here("data", folder, "--check"))
    survived("truncated dataset.json", 60)
    path.write_bytes(content)
    assert here("data", folder, "--check").returncode == 0


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_and_truncations_of_files_of_shards_are_detected(here, data: Path, name: str, survived) -> None:
    path = data / "original" / "train" / name
    content = path.read_bytes()
    words = ("data", data, "--check", "--variant", "original")
    for flipped in flips(content, 250):
        path.write_bytes(flipped)
        message = complaint(here(*words))
        assert "[dataset-corrupt]" in message
        assert name in message
    survived(f"flipped bits in {name}", 250)
    for truncated in truncations(content, 50):
        path.write_bytes(truncated)
        message = complaint(here(*words))
        assert "[dataset-corrupt]" in message
        assert name in message
    survived(f"truncated {name}", 50)


def test_flipped_bits_and_truncations_of_arrays_are_detected_on_reading(tmp_path: Path, survived) -> None:
    folder = make_arrays(tmp_path)
    for path in folder.glob("*.npy"):
        content = path.read_bytes()
        for changed in (*flips(content, 250), *truncations(content, 50)):
            path.write_bytes(changed)
            with raises("dataset-corrupt") as caught:
                arrays.read(folder, "cifar10")
            assert caught.value.fields["path"] == path
        path.write_bytes(content)
        survived("flipped bits in arrays", 250)
        survived("truncated arrays", 50)


def test_flipped_bit_in_a_shard_affects_at_most_one_sample(data: Path, survived) -> None:
    path = data / "original" / "train" / "shard-00000.pcl"
    content, (pixels, labels, statuses) = path.read_bytes(), crops(data)
    assert not statuses.any()
    for flipped in flips(content, 500, seed=1):
        path.write_bytes(flipped)
        found, found_labels, statuses = crops(data)
        assert np.count_nonzero(statuses) <= 1
        assert np.array_equal(found[statuses == 0], pixels[statuses == 0])
        assert np.array_equal(found_labels, labels)
    survived("flipped bits in shards that are trained on", 500)


def test_swapped_files_are_detected(here, data: Path, survived) -> None:
    folders = [data / variant / split for variant in ("original", "max-32-q90") for split in ("train", "val")]
    pairs = [(one / name, other / name) for name in FILES for one, other in pairwise(folders)]
    for one, other in pairs:
        contents = one.read_bytes(), other.read_bytes()
        assert contents[0] != contents[1]
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])
        assert one.name in complaint(here("data", data, "--check"))
        one.write_bytes(contents[0])
        other.write_bytes(contents[1])
    assert here("data", data, "--check").returncode == 0
    survived("swapped files", len(pairs))


# ---- links, pipes, devices and folders ----


def _link(path: Path, outside: Path) -> None:
    path.symlink_to(shutil.move(path, outside / path.name))


def _device(path: Path, _outside: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _pipe(path: Path, _outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, _outside: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", [DESCRIPTION, *(f"original/train/{name}" for name in FILES)])
@pytest.mark.parametrize("replace", [_link, _device, _pipe, _folder])
def test_links_pipes_and_devices_are_not_read(
    here, paceline, data: Path, tmp_path: Path, replace: Callable[[Path, Path], None], name: str, survived
) -> None:
    (tmp_path / "outside").mkdir()
    replace(data / name, tmp_path / "outside")
    run = paceline if replace is _pipe else here  # a process that blocks on a pipe can be killed
    assert Path(name).name in complaint(run("data", data, "--check"))
    survived("links, pipes and devices instead of files")


@pytest.mark.parametrize("name", ["original", "original/val"])
def test_folders_that_link_outside_are_not_read(here, data: Path, tmp_path: Path, name: str, survived) -> None:
    (tmp_path / "outside").mkdir()
    _link(data / name, tmp_path / "outside")
    message = complaint(here("data", data, "--check"))
    assert "[link-outside-folder]" in message
    assert str(data / "original" / "val") in message
    survived("links, pipes and devices instead of files")


def test_dataset_folder_may_be_a_link(here, data: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(data)
    assert here("data", "link", "--check").returncode == 0


def test_huge_description_is_rejected(here, data: Path, survived) -> None:
    os.truncate(data / DESCRIPTION, 1 << 40)  # sparse: it takes no disk space
    for words in (("data", data, "--check"), train(data)):
        message = complaint(here(*words))
        assert "[dataset-unreadable]" in message
        assert "too large" in message
    survived("huge files", 2)


# ---- during training ----


@pytest.mark.parametrize("procs", [1, 2])
def test_shard_truncated_during_training_is_an_error(tmp_path: Path, procs: int, survived) -> None:
    prepare(source(tree(tmp_path / "in", classes=4, images=40), "folder"), tmp_path / "out", [Variant()], 2)
    words = ("--data.name", "", "--data.path", tmp_path / "out", "--data.size", 24, "--data.augment", "null")
    size = ("--model.options", "{widths: [8, 16], norm: group}", "--train.global_batch", 16)
    times = ("--train.duration", "1000ep", "--checkpoint.every", "5ba", "--log.every", "1ba")
    process = start(tmp_path, "train", "digits", *words, *size, *times, "--log.tensorboard", "false", "--procs", procs)
    run = tmp_path / "runs" / "digits"
    wait_for_step(process, run, 11)
    os.truncate(tmp_path / "out" / "original" / "train" / "shard-00000.pcl", 1000)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    assert "the shard was truncated, or its disk failed, while it was read" in errors
    assert "paceline data DIR --check" in errors
    assert RunFolder(run).read_summary()["status"] == "failed"
    survived("shards truncated during training")
