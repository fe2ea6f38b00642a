"""Irregular image files: what `paceline prepare` re-encodes or leaves out, and how it reports it."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import complaint
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from sample_images import jpeg, sample_image, tree

from paceline.data import codec
from paceline.data.prepare.convert import Variant, convert
from paceline.data.shards import Dataset
from paceline.system.untrusted import Unreadable


def test_unusual_and_corrupt_files_are_converted_or_left_out_and_listed(here, tmp_path: Path) -> None:
    folder = tree(tmp_path / "in") / "train" / "n00000000"
    image = sample_image(48, 40)

    def encoded(kind: str, picture: Image.Image = image) -> bytes:
        out = io.BytesIO()
        picture.save(out, kind)
        return out.getvalue()

    odd = {
        "a_progressive.jpg": jpeg(image, progressive=True),
        "b_cmyk.jpg": jpeg(image.convert("CMYK")),
        "c_png.JPEG": encoded("png"),
        "d_16bit.png": encoded("png", Image.fromarray(np.arange(0, 65000, 65, dtype=np.uint16).reshape(25, 40))),
        "e_palette.gif": encoded("gif"),
        "f_alpha.png": encoded("png", image.convert("RGBA")),
        "g_truncated.jpg": jpeg(sample_image(300, 300), quality=95)[:30_000],
        "h_empty.jpg": b"",
        "i_text.jpg": b"<html>404 not found</html>",
        "j_header_only.jpg": jpeg(image)[:300],
    }
    for name, content in odd.items():
        (folder / name).write_bytes(content)
    answer = here("prepare", "folder", "in", "--out", "out", "--original", "--max-side", "32")
    assert answer.returncode == 0, answer.stderr
    dataset = Dataset.open(tmp_path / "out")
    remarks = {Path(entry["file"]).name: entry["what"] for entry in dataset.description["remarks"]}
    assert remarks.keys() == odd.keys()
    assert [name[0] for name, what in remarks.items() if what.startswith("left out")] == ["g", "h", "i", "j"]
    for letter, expected in {
        "a": "progressive",
        "b": "CMYK",
        "c": "PNG",
        "d": "I;16",
        "e": "GIF",
        "g": "truncated",
    }.items():
        assert expected in next(what for name, what in remarks.items() if name[0] == letter), letter
    assert dataset.description["splits"]["train"]["left_out"] == 4
    split = dataset.split("train", "original")
    assert len(split) == 12 + 6
    for number in range(len(split)):
        codec.describe(split.record(number))
    gray = split.names.index("train/n00000000/d_16bit.png")
    out = np.zeros((1, 3, 25, 40), np.uint8)
    codec.Decoder(split.shards).crop(split.places(np.array([gray])), np.array([[0, 0, 40, 25, 0]], np.int32), out)
    assert abs(out[0, 0].astype(int) - np.arange(0, 65000, 65).reshape(25, 40) // 257).max() < 12  # scaled, not clipped


def test_unusual_names_and_contents_do_not_stop_the_preparation(here, tmp_path: Path) -> None:
    root = tree(tmp_path / "in")
    folder = root / "train" / "n00000000"
    information = PngInfo()
    information.add_text("comment", "x" * 70_000)
    sample_image(40, 30).save(folder / "comment.png", pnginfo=information)
    (folder / "q[").mkdir()
    (folder / "q[" / "z].jpg").write_bytes(b"no image")
    os.link(folder / "train_0.JPEG", os.fsencode(folder) + b"/name\xff.jpg")
    (root / "val" / ".hidden").mkdir()
    answer = here("prepare", "folder", "in", "--out", "out[/x]")
    assert answer.returncode == 0, answer.stderr
    dataset = Dataset.open(tmp_path / "out[/x]")
    remarks = {Path(remark["file"]).name: remark["what"] for remark in dataset.description["remarks"]}
    assert remarks["comment.png"].startswith("a PNG file")
    assert remarks["z].jpg"].startswith("left out: not an image")
    assert dataset.description["splits"]["train"]["samples"] == 12 + 2


def test_image_too_large_for_a_record_is_unreadable(monkeypatch) -> None:
    monkeypatch.setattr(codec, "pack", _reject_wide_images(codec.pack))
    with pytest.raises(Unreadable, match="641 x 8 pixels: too large"):
        convert(_png(641, 8), [Variant()])


def _reject_wide_images(pack: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    def reject(content: bytes) -> bytes:
        if content.startswith(b"\xff\xd8") and Image.open(io.BytesIO(content)).width == 641:
            raise codec.CodecError("too large")
        return pack(content)

    return reject


def test_class_without_readable_images_is_an_error_unless_allowed(here, tmp_path: Path) -> None:
    tree(tmp_path / "in", classes=3, images=2)
    for file in (tmp_path / "in" / "train" / "n00000001").iterdir():
        file.write_bytes(b"not an image")
    words = ("prepare", "folder", "in", "--out", "out")
    message = complaint(here(*words))
    assert "[unreadable-classes]" in message
    assert "(n00000001)" in message
    assert "train/n00000001/train_0.JPEG: not an image" in message
    assert "--allow-empty-classes" in message
    assert not (tmp_path / "out" / "dataset.json").exists()
    answer = here(*words, "--allow-empty-classes")
    assert answer.returncode == 0, answer.stderr
    assert Dataset.open(tmp_path / "out").description["splits"]["train"]["per_class"] == [2, 0, 2]


def test_files_left_out_are_counted_by_reason(here, tmp_path: Path) -> None:
    tree(tmp_path / "in", classes=2, images=6)
    folder = tmp_path / "in" / "train" / "n00000001"
    for number in range(3):
        (folder / f"train_{number}.JPEG").write_bytes(b"" if number else b"not an image")
    (folder / "picture.png").write_bytes(_png(20, 20))
    answer = here("prepare", "folder", "in", "--out", "out")
    assert answer.returncode == 0, answer.stderr
    assert "2 left out: the file is empty, e.g. train train/n00000001/train_1.JPEG" in answer.stderr
    assert "1 left out: not an image" in answer.stderr
    assert "1 a PNG file" in answer.stderr or "re-encoded" in answer.stderr


def _png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    sample_image(width, height).save(out, "png")
    return out.getvalue()
