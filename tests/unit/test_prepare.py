"""Preparation of small image folders, with generated images."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from conftest import HANG, command, complaint, environment
from sample_images import contents, jpeg, sample_image, tree

from paceline.data.prepare import pack
from paceline.data.shards import Dataset


def test_limit_per_class_and_val_fraction(here, tmp_path: Path) -> None:
    tree(tmp_path / "in")
    assert here("prepare", "imagenet", "--from", "in", "--out", "a", "--limit-per-class", "2").returncode == 0
    assert len(Dataset.open(tmp_path / "a").split("train")) == 6
    tree(tmp_path / "flat", images=10, splits=("",))
    message = complaint(here("prepare", "folder", "flat", "--out", "b"))
    assert "[no-val-split]" in message
    assert "--val-fraction 0.1" in message
    assert here("prepare", "folder", "flat", "--out", "b", "--val-fraction", "0.2").returncode == 0
    dataset = Dataset.open(tmp_path / "b")
    assert dataset.description["splits"]["val"]["per_class"] == [2, 2, 2]
    names = dataset.split("train").names + dataset.split("val").names
    assert len(set(names)) == 30


def test_preparation_resumes_byte_identically_after_sigkill(tmp_path: Path) -> None:
    root = tmp_path / "in"
    small = [jpeg(sample_image(16, 16, number)) for number in range(8)]
    for label in range(2):
        (root / f"class {label}").mkdir(parents=True)
        for number in range(1300):
            (root / f"class {label}" / f"{number:05d}.jpg").write_bytes(small[number % 8])
    words = ("prepare", "folder", root, "--val-fraction", "0.1", "--original", "--max-side", "12", "--workers", "2")
    subprocess.run(
        command(*words, "--out", "reference"), cwd=tmp_path, env=environment(), check=True, capture_output=True
    )
    options = {"cwd": tmp_path, "env": environment(), "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command(*words, "--out", "resumed"), **options)
    deadline = time.monotonic() + HANG
    while not (tmp_path / "resumed" / ".parts" / "train" / "00000.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "resumed" / "dataset.json").exists()
    other = subprocess.run(command(*words, "--quality", "50", "--out", "resumed"), **options, check=False)
    assert "[unfinished-preparation]" in other.stderr
    first = (tmp_path / "resumed" / "original" / "train" / "shard-00000.pcl").stat().st_mtime_ns
    again = subprocess.run(command(*words, "--out", "resumed"), **options, check=True)
    assert "resuming" in again.stderr
    assert (tmp_path / "resumed" / "original" / "train" / "shard-00000.pcl").stat().st_mtime_ns == first
    reference, resumed = contents(tmp_path / "reference"), contents(tmp_path / "resumed")
    assert reference.keys() == resumed.keys()
    assert all(reference[name] == resumed[name] for name in reference)
    assert len(Dataset.open(tmp_path / "resumed").split("train", "original")) == 2340


def test_other_files_in_the_output_folder_are_kept(here, tmp_path: Path) -> None:
    tree(tmp_path / "in")
    for name in ("notes/old/.hidden", "original/train/.mine", ".top"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("precious")
    incomplete = tmp_path / "out" / "original" / "train" / ".shard-00000.pcl.123"
    incomplete.write_text("left by a kill")
    assert here("prepare", "folder", "in", "--out", "out").returncode == 0
    kept = [path.name for path in (tmp_path / "out").rglob(".*") if path.is_file()]
    assert sorted(kept) == [".hidden", ".lock", ".mine", ".top"]


def test_disk_space_is_checked_before_writing(here, tmp_path: Path, monkeypatch) -> None:
    tree(tmp_path / "in")
    usage = pack.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "[disk-full]" in complaint(here("prepare", "folder", "in", "--out", "out"))
    assert not list((tmp_path / "out").rglob("*.pcl"))


def test_labels_are_part_of_the_fingerprint(here, tmp_path: Path) -> None:
    """Moving the last image of a class to the start of the next one keeps all records in the same order."""
    root = tree(tmp_path / "in")
    moved = shutil.copytree(root, tmp_path / "moved")
    (moved / "train" / "n00000000" / "train_3.JPEG").rename(moved / "train" / "n00000001" / "train_.JPEG")
    fingerprints = set()
    for name in ("in", "moved"):
        assert here("prepare", "folder", name, "--out", f"out-{name}").returncode == 0
        fingerprints.add(Dataset.open(tmp_path / f"out-{name}").fingerprint)
    assert len(fingerprints) == 2


def test_changed_source_is_not_mixed_with_prepared_data(here, tmp_path: Path) -> None:
    root = tree(tmp_path / "in")
    assert here("prepare", "folder", "in", "--out", "out").returncode == 0
    (root / "train" / "n00000000" / "train_3.JPEG").rename(root / "train" / "n00000000" / "train_9.JPEG")
    assert "[output-has-other-data]" in complaint(here("prepare", "folder", "in", "--out", "out"))
    assert "[output-has-other-data]" in complaint(here("prepare", "cifar10", "--out", "out", "--from", __file__))
    Dataset.open(tmp_path / "out")


def test_options_that_do_not_apply_are_rejected(here, tmp_path: Path) -> None:
    tree(tmp_path / "in")
    (tmp_path / "in" / "train" / "n9").mkdir()
    message = complaint(here("prepare", "folder", "in", "--out", "out"))
    assert "[empty-classes]" in message
    assert "n9" in message
    (tmp_path / "in" / "train" / "n9").rmdir()
    message = complaint(here("prepare", "folder", "in", "--from", "x", "--out", "out"))
    assert "[option-not-applicable]" in message
    assert "--from" in message
    message = complaint(here("prepare", "folder", "in", "--out", ""))
    assert "[empty-option]" in message
    assert "--out" in message
    assert here("prepare", "folder", "in", "--out", "out").returncode == 0
    message = complaint(here("data", "out", "--variant", "bogus"))
    assert "[unknown-variant]" in message
    assert "'bogus'" in message
    message = complaint(here("data", "out", "--out", "x"))
    assert "[missing-option]" in message
    assert "--export" in message
    assert "--seed" in complaint(here("data", "out", "--show", "x.png", "--seed", "-1"))
