"""Mutated, disguised and huge images of every format: they are left out or converted, and execute nothing."""

import os
from pathlib import Path

import numpy as np
import pytest
from conftest import complaint
from hostile import bombs, disguised, in_a_process, mutated, pictures, slow_bmp
from sample_images import tree

from paceline.data import codec
from paceline.data.images import ImageFiles
from paceline.data.pillow import open_image
from paceline.data.prepare.convert import convert_as
from paceline.data.prepare.isolated import Isolated
from paceline.data.shards import Dataset
from paceline.system.untrusted import Unreadable

_PROGRAMS = ("gs", "gswin64c", "magick", "convert", "inkscape", "rsvg-convert", "djpeg", "cjpeg", "sh", "xdg-open")


@pytest.fixture
def canary(tmp_path: Path, monkeypatch) -> Path:
    """A file that exists if any of the programs for other formats was started."""
    place, programs = tmp_path / "canary", tmp_path / "bin"
    programs.mkdir()
    for name in _PROGRAMS:
        (programs / name).write_text(f"#!/bin/sh\ntouch {place}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    return place


def _converted(files: list[bytes]) -> tuple[int, int]:
    """Return how many files became records, and how many did not."""
    made = left_out = 0
    with Isolated(convert_as, [{}, {"max_side": 20}]) as convert:
        for content in files:
            try:
                records, _ = convert(content)
            except Unreadable:
                left_out += 1
            else:
                assert len([codec.describe(record) for record in records]) == 2
                made += 1
    return made, left_out


@pytest.mark.parametrize("kind", pictures())
def test_mutated_images_are_left_out_or_converted(kind: str, survived) -> None:
    content = pictures()[kind]
    assert _converted([content]) == (1, 0)
    made, left_out = _converted(list(mutated(content, 250, seed=1)))
    assert left_out > 0
    survived("mutated images, prepared", made + left_out)


def _opened(count: int) -> int:
    tried = 0
    for content in pictures().values():
        for changed in mutated(content, count, seed=2):
            try:
                image, _ = open_image(changed)
            except Unreadable:
                pass
            else:
                assert image.mode in ("L", "RGB")
            tried += 1
    return tried


def test_mutated_images_do_not_crash_a_training_process(survived) -> None:
    survived("mutated images, opened in training", in_a_process(_opened, 100))


def test_disguised_files_start_no_program(here, tmp_path: Path, canary: Path, survived) -> None:
    folder = tree(tmp_path / "in") / "train" / "n00000000"
    for what, content in disguised(canary).items():
        for ending in ("jpg", "jpeg", "png", "bmp", "gif", "webp", "avif", "tif", "tiff", "ppm", "pgm"):
            (folder / f"{what}.{ending}").write_bytes(content)
    answer = here("prepare", "folder", "in", "--out", "out", "--original", "--max-side", "16")
    assert answer.returncode == 0, answer.stderr
    splits = Dataset.open(tmp_path / "out").description["splits"]
    assert splits["train"]["left_out"] == 11 * len(disguised(canary))
    assert not canary.exists()
    survived("other formats with the name of an image", splits["train"]["left_out"])


def _read_as_files(folder: Path) -> list[str]:
    paths = sorted(folder.iterdir())
    files = ImageFiles(folder, [(0, path) for path in paths])
    files.sizes(np.arange(len(paths)))
    whole = np.array([[0, 0, 1, 1, 0]])
    failures = files.read(np.arange(len(paths)), lambda *_: whole, np.zeros((len(paths), 3, 8, 8), np.uint8))
    return [path.name for number, path in enumerate(paths) if number not in failures]


def test_disguised_files_start_no_program_in_training(tmp_path: Path, canary: Path, survived) -> None:
    (tmp_path / "in").mkdir()
    for number, content in enumerate(disguised(canary).values()):
        (tmp_path / "in" / f"{number}.jpg").write_bytes(content)
    assert in_a_process(_read_as_files, tmp_path / "in") == []
    assert not canary.exists()
    survived("other formats with the name of an image", len(disguised(canary)))


def test_bombs_are_left_out(here, tmp_path: Path, survived) -> None:
    folder = tree(tmp_path / "in") / "train" / "n00000000"
    for name, content in bombs().items():
        (folder / name).write_bytes(content)
    for name in ("sparse.jpg", "sparse.tiff"):
        (folder / name).touch()
        os.truncate(folder / name, 1 << 40)
    # the estimate of the space needed uses the sizes of files
    assert "[disk-full]" in complaint(here("prepare", "folder", "in", "--out", "out"))
    for name in ("sparse.jpg", "sparse.tiff"):
        os.truncate(folder / name, 300_000_000)
    answer = here("prepare", "folder", "in", "--out", "out", "--max-side", "64")
    assert answer.returncode == 0, answer.stderr
    remarks = {Path(one["file"]).name: one["what"] for one in Dataset.open(tmp_path / "out").description["remarks"]}
    harmless = {"text.png", "profile.png"}  # Pillow limits these itself, and may read the image
    assert remarks.keys() >= (bombs().keys() | {"sparse.jpg", "sparse.tiff"}) - harmless
    assert {name for name, what in remarks.items() if not what.startswith("left out")} <= harmless
    survived("images that claim to be huge or decompress to huge data", len(bombs()) + 2)


def test_slow_file_is_stopped_and_does_not_affect_others(survived) -> None:
    with Isolated(convert_as, [{"max_side": 64}], cpu_seconds=1) as convert:
        with pytest.raises(Unreadable, match="s of CPU time"):
            convert(slow_bmp(15_000))
        assert codec.describe(convert(pictures()["jpeg"])[0][0]) == (40, 30, 3)
    survived("images that take long to decode", 1)
