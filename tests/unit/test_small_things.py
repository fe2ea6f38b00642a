"""Regression tests of bugs that were silent or ended in a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import complaint, environment, raises
from processes import run_ranks
from sample_images import tree

from paceline.analysis.charts import sparkline
from paceline.config.data import Data
from paceline.launch.checks import reachable
from paceline.track.records import RunFolder

SMALL = (
    *("--data.name", "", "--data.path", "photos", "--data.size", 24, "--data.augment", "null"),
    *("--model.options", "{widths: [8, 16], norm: group}", "--train.global_batch", 4, "--train.duration", "2ba"),
    *("--log.tensorboard", "false", "--precision", "fp32", "--evaluate.per_rank_batch", 2),
)


def test_a_sparkline_of_few_values_shows_all_of_them() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0]) == " ▃▅█"
    assert len(sparkline([1.0] * 1000, width=72)) == 72


def test_relative_data_paths_work_on_local_nodes_only(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert reachable(Data(path="data/p1"), "local").path == str(tmp_path / "data" / "p1")
    assert reachable(Data(name="digits"), "local").path == ""
    assert reachable(Data(path="s3://bucket/p1"), "ssh").path == "s3://bucket/p1"
    assert reachable(Data(path="/data/p1"), "ssh").path == "/data/p1"
    with raises("data-path-relative") as caught:
        reachable(Data(path="data/p1"), "ssh")
    assert "data/p1" in str(caught.value)


def test_torch_can_be_imported_with_a_stub_of_torchvision() -> None:
    stub = "import sys, types; sys.modules['torchvision'] = types.ModuleType('torchvision'); import torch"
    subprocess.run([sys.executable, "-c", stub], check=True)


def test_timm_can_be_imported_without_paceline() -> None:
    subprocess.run([sys.executable, "-c", "import timm"], check=True, env=environment())


BOUND = """
import os, subprocess, sys
from paceline.system import host
before = os.sched_getaffinity(0)
host.bind_openmp()
import torch
torch.ones(1 << 20).exp_()
assert host.cores() == len(before), host.cores()
assert len(os.sched_getaffinity(0)) == 1, os.sched_getaffinity(0)
found = []
thread = host.BackgroundThread(lambda: found.append(os.sched_getaffinity(0)), "other")
thread.start()
thread.join()
assert found == [before], found
assert "OMP_PROC_BIND" not in os.environ
host.unbind()
assert os.sched_getaffinity(0) == before
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are bound by GNU's OpenMP on Linux")
def test_only_compute_threads_are_bound_to_cores() -> None:
    variables = {name: value for name, value in environment().items() if name != "PACELINE_THREADS"}
    subprocess.run([sys.executable, "-c", BOUND], check=True, env=variables)


def test_local_ranks_divide_the_cores(monkeypatch) -> None:
    from paceline.system import host

    given: list[list[int]] = []
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(host.os, "sched_setaffinity", lambda _, mask: given.append(list(mask)), raising=False)
    host.confine(1, 2)
    host.confine(0, 3)  # 8 cores cannot be divided by 3, so no rank is bound
    assert given == [[4, 5, 6, 7]]


@pytest.fixture
def corrupt(tmp_path: Path) -> Path:
    root = tree(tmp_path / "photos", classes=2, images=6)
    for name in ("val_1.JPEG", "val_3.JPEG"):
        (root / "val" / "n00000001" / name).write_bytes(b"not an image")
    return tmp_path


@pytest.mark.parametrize("procs", [1, 2])
def test_corrupt_validation_images_are_counted_over_all_ranks(corrupt: Path, procs: int) -> None:
    run_ranks(corrupt, procs, "train", "digits", *SMALL, "--data.max_corrupt", 0.5)
    assert RunFolder(corrupt / "runs" / "digits").read_summary()["final"]["samples"] == 10
    answer = run_ranks(corrupt, procs, "evaluate", "runs/digits")
    assert "2 corrupt images left out" in answer.stdout


@pytest.mark.parametrize("procs", [1, 2])
def test_too_many_corrupt_validation_images_are_refused_on_any_number_of_ranks(corrupt: Path, procs: int) -> None:
    with pytest.raises(AssertionError, match=r"2 of 12 images to evaluate.* \[too-many-corrupt-samples\]"):
        run_ranks(corrupt, procs, "train", "digits", *SMALL, "--data.max_corrupt", 0.1)


def test_a_validation_split_without_readable_images_is_refused(here, tmp_path: Path) -> None:
    root = tree(tmp_path / "photos", classes=2, images=2)
    for path in (root / "val").rglob("*.JPEG"):
        path.write_bytes(b"not an image")
    assert "[no-validation-image-readable]" in complaint(here("train", "digits", *SMALL))


def test_classes_without_validation_or_training_images_cause_a_warning(here, tmp_path: Path) -> None:
    root = tree(tmp_path / "photos", classes=3, images=4)
    for path in (root / "val" / "n00000002").iterdir():
        path.unlink()
    (root / "val" / "n00000002").rmdir()
    answer = here("train", "digits", *SMALL)
    assert answer.returncode == 0, answer.stderr
    assert "photos: the val split has no images of n00000002" in answer.stderr
    for path in (root / "train" / "n00000001").iterdir():
        path.write_bytes(b"not an image")
    assert here("prepare", "folder", "photos", "--out", "out", "--allow-empty-classes").returncode == 0
    answer = here("train", "digits", *SMALL, "--data.path", "out", "--name", "prepared")
    assert "1 of 3 classes have no training images: n00000001" in answer.stderr


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    from paceline.data.listing import list_images

    root = tree(tmp_path / "photos", classes=2, images=2)
    elsewhere = tree(tmp_path / "more", classes=1, images=3) / "train" / "n00000000"
    (root / "train" / "n00000000" / "linked").symlink_to(elsewhere)
    (root / "train" / "n00000000" / "loop").symlink_to(root / "train" / "n00000000")
    assert len(list_images(root).splits["train"]) == 4 + 3
    assert os.path.islink(root / "train" / "n00000000" / "loop")
