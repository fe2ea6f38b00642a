"""`paceline data`: summarizes, checks, shows and exports prepared images."""

import json
from pathlib import Path

import numpy as np
from conftest import complaint
from PIL import Image
from sample_images import tree


def test_data_command_summarizes_checks_shows_and_exports(here, tmp_path: Path) -> None:
    tree(tmp_path / "in")
    assert here("prepare", "folder", "in", "--out", "out").returncode == 0
    answer = here("data", "out", "--check", "--show", "sheet.png", "--export", "jpeg", "--out", "back")
    assert answer.returncode == 0, answer.stderr
    lines = [line.split() for line in answer.stdout.splitlines()]
    assert ["train", "12", "4", "to", "4", "0"] in lines
    assert ["variant", "size", "shards", "per", "image"] in lines
    assert "every checksum matches" in answer.stderr
    assert Image.open(tmp_path / "sheet.png").size == (1024, 2 * (128 + 14))
    given, back = sorted((tmp_path / "in" / "val").rglob("*.JPEG")), sorted((tmp_path / "back" / "val").rglob("*.jpg"))
    assert len(given) == len(back) == 12
    for first, second in zip(given, back, strict=True):
        assert np.array_equal(np.asarray(Image.open(first)), np.asarray(Image.open(second)))
    shard = tmp_path / "out" / "original" / "train" / "shard-00000.pcl"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    message = complaint(here("data", "out", "--check"))
    assert "[dataset-corrupt]" in message
    assert "1 problem found" in message
    assert "shard-00000.pcl at byte" in message


def test_folders_without_data_are_rejected(here, tmp_path: Path) -> None:
    assert "[data-not-prepared]" in complaint(here("data", "."))
    (tmp_path / "dataset.json").write_text(json.dumps({"kind": "shards", "format": 99}))
    message = complaint(here("data", "."))
    assert "[dataset-format-newer]" in message
    assert "format 99" in message
    (tmp_path / "dataset.json").write_text(json.dumps({"kind": "shards", "format": 1}))
    message = complaint(here("data", "."))
    assert "[dataset-format-outdated]" in message
    assert "format 1" in message
    (tmp_path / "dataset.json").write_text("{")
    message = complaint(here("data", "."))
    assert "[dataset-unreadable]" in message
    assert "dataset.json" in message
    message = complaint(here("prepare", "folder", "nowhere", "--out", "out"))
    assert "[source-not-found]" in message
    assert "nowhere" in message
    (tmp_path / "empty").mkdir()
    message = complaint(here("prepare", "folder", "empty", "--out", "out"))
    assert "[too-few-classes]" in message
    assert "empty" in message


def test_images_are_exported_to_a_new_folder_only(here, tmp_path: Path) -> None:
    tree(tmp_path / "in")
    assert here("prepare", "folder", "in", "--out", "out", "--max-side", 16).returncode == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for place in ("in", "out"):
        assert "[output-has-other-data]" in complaint(here("data", "out", "--export", "jpeg", "--out", place))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (tmp_path / "new").mkdir()
    assert here("data", "out", "--export", "jpeg", "--out", "new").returncode == 0
