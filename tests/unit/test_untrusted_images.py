"""Untrusted images and archives: what `paceline prepare` leaves out or rejects."""

import os
from pathlib import Path

import pytest
from conftest import complaint
from hostile import deep_mat, disguised, jpeg_of_scans, png_of, tar_of
from PIL import Image
from sample_images import jpeg, sample_image, tree

from paceline.data.pillow import open_image
from paceline.data.shards import Dataset
from paceline.system.untrusted import Unreadable

PILLOW_LIMIT = (1 << 30) // 4 // 3  # the default of Pillow


def test_other_file_formats_start_no_program(here, tmp_path: Path, monkeypatch) -> None:
    folder = tree(tmp_path / "in") / "train" / "n00000000"
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path / 'canary'}\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    others = disguised(tmp_path / "canary")
    for number, content in enumerate(others.values()):
        (folder / f"{number}.jpg").write_bytes(content)
    assert here("prepare", "folder", "in", "--out", "out", "--max-side", "32").returncode == 0
    remarks = [entry["what"] for entry in Dataset.open(tmp_path / "out").description["remarks"]]
    assert remarks == ["left out: not an image (cannot identify image file)"] * len(others)
    assert not (tmp_path / "canary").exists()


def test_images_over_the_limits_are_left_out_with_the_reason(here, tmp_path: Path) -> None:
    folder = tree(tmp_path / "in") / "train" / "n00000000"
    (folder / "png.png").write_bytes(png_of(50_000, 50_000))
    (folder / "scans.jpg").write_bytes(jpeg_of_scans(400, 400, 200))
    (folder / "file.png").write_bytes(b"\x89PNG")
    os.truncate(folder / "file.png", 300_000_000)
    assert here("prepare", "folder", "in", "--out", "out").returncode == 0
    remarks = {Path(one["file"]).name: one["what"] for one in Dataset.open(tmp_path / "out").description["remarks"]}
    assert remarks == {
        "png.png": "left out: more than 200,000,000 pixels",
        "scans.jpg": "left out: a JPEG with more than 100 scans",
        "file.png": "left out: 300.0 MB is more than 250.0 MB",
    }


@pytest.mark.parametrize(("pillow_limit", "expected"), [(PILLOW_LIMIT, 2 * PILLOW_LIMIT), (None, 200_000_000)])
def test_pixels_are_limited_whatever_the_limit_of_the_process(monkeypatch, pillow_limit: int | None, expected: int):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow_limit)
    with pytest.raises(Unreadable, match=f"more than {expected:,} pixels"):
        open_image(png_of(50_000, 50_000))


def test_preparing_leaves_the_limit_of_the_process_alone(here, tmp_path: Path) -> None:
    tree(tmp_path / "in")
    assert here("prepare", "folder", "in", "--out", "out", "--max-side", "32").returncode == 0
    assert Image.MAX_IMAGE_PIXELS == PILLOW_LIMIT


def test_scans_in_thumbnails_and_trailing_videos_are_not_counted() -> None:
    image = jpeg(sample_image(48, 40), progressive=True)
    thumbnails = b"\xff\xe3\x01\x2c" + b"\xff\xda" * 149
    assert open_image(image[:2] + thumbnails + image[2:] + b"\xff\xda" * 1000)[0].size == (48, 40)


def test_devkit_that_crashes_scipy_is_an_error(paceline, tmp_path: Path) -> None:
    files = {"meta.mat": deep_mat(100_000), "ILSVRC2012_validation_ground_truth.txt": b"1"}
    (tmp_path / "deep.tar").write_bytes(tar_of(files))
    words = ("--train", "train.tar", "--val", "val.tar", "--devkit", "deep.tar", "--out", "out")
    message = complaint(paceline("prepare", "imagenet", *words))
    assert "[devkit-corrupt]" in message
    assert "deep.tar: meta.mat" in message
