"""Preparation from small trees and ILSVRC-shaped archives made of generated images."""

import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from conftest import HANG, command, complaint, environment
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from sample_images import jpeg, sample_image, tree
from servers import FileServer

from paceline.data import codec
from paceline.data.prepare import pack
from paceline.data.prepare.convert import Variant, convert
from paceline.data.prepare.isolated import Unreadable
from paceline.data.shards import Dataset
from paceline.system import remote


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


WNIDS = ["n00000003", "n00000001", "n00000002"]  # ILSVRC2012_ID 1, 2, 3: not in the order of the ids
TRUTH = [3, 1, 1, 2, 3]


def devkit(path: Path) -> Path:
    rows = np.zeros(4, dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")])
    for number, wnid in enumerate([*WNIDS, "n99999999"], start=1):
        rows[number - 1] = (number, wnid, f"thing {wnid[-1]}, other name", 0 if number <= 3 else 3)
    mat = io.BytesIO()
    scipy.io.savemat(mat, {"synsets": rows})
    files = {"meta.mat": mat.getvalue(), "ILSVRC2012_validation_ground_truth.txt": "\n".join(map(str, TRUTH)).encode()}
    return tar(path, {f"ILSVRC2012_devkit_t12/data/{name}": content for name, content in files.items()}, "w:gz")


@pytest.fixture
def archives(tmp_path: Path) -> dict[str, Path]:
    inner = {}
    for number, wnid in enumerate(WNIDS):
        images = {f"{wnid}_{image}.JPEG": jpeg(sample_image(50, 40, 10 * number + image)) for image in range(3)}
        inner[f"{wnid}.tar"] = tar(tmp_path / f"{wnid}.tar", images).read_bytes()
    val = {f"ILSVRC2012_val_{n:08d}.JPEG": jpeg(sample_image(64, 48, 50 + n)) for n in range(len(TRUTH), 0, -1)}
    return {
        "train": tar(tmp_path / "ILSVRC2012_img_train.tar", inner),
        "val": tar(tmp_path / "ILSVRC2012_img_val.tar", val),
        "devkit": devkit(tmp_path / "ILSVRC2012_devkit_t12.tar.gz"),
    }


def words(archives: dict[str, Path]) -> list[str]:
    return [word for name, path in archives.items() for word in (f"--{name}", str(path))]


def test_imagenet_s_own_archives(here, tmp_path: Path, archives: dict[str, Path]) -> None:
    answer = here("prepare", "imagenet", *words(archives), "--out", "out", "--original", "--short-side", "20")
    assert answer.returncode == 0, answer.stderr
    dataset = Dataset.open(tmp_path / "out")
    assert [entry["id"] for entry in dataset.description["classes"]] == sorted(WNIDS)
    assert [own.name for own in dataset.classes] == ["thing 1", "thing 2", "thing 3"]
    train, val = dataset.split("train", "original"), dataset.split("val", "original")
    assert train.names[0] == "train/n00000003/n00000003_0.JPEG"
    assert train.index["label"].tolist() == [2, 2, 2, 0, 0, 0, 1, 1, 1]
    by_name = dict(zip(val.names, val.index["label"].tolist(), strict=True))
    # ground truth 3 1 1 2 3 in ILSVRC ids: n..2 n..3 n..3 n..1 n..2
    assert [by_name[f"val/ILSVRC2012_val_{n:08d}.JPEG"] for n in range(1, 6)] == [1, 2, 2, 0, 1]
    assert codec.describe(train.record(0)) == (50, 40, 3)
    assert codec.describe(dataset.split("train", "short-20-q90").record(0)) == (25, 20, 3)
    assert dataset.description["splits"]["train"]["per_class"] == [3, 3, 3]
    again = here("prepare", "imagenet", *words(archives), "--out", "out", "--original", "--short-side", "20")
    assert "nothing to do" in again.stderr
    assert "holds other data already" in complaint(here("prepare", "imagenet", *words(archives), "--out", "out"))


def test_archives_behind_addresses(here, tmp_path: Path, archives: dict[str, Path], monkeypatch) -> None:
    """Read as streams, over connections that break; the same bytes as from files."""
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    assert here("prepare", "imagenet", *words(archives), "--out", "files").returncode == 0
    with FileServer(tmp_path, break_after=3).running() as server:
        places = {name: f"{server.address}/{path.name}" for name, path in archives.items()}
        answer = here("prepare", "imagenet", *words(places), "--out", "fetched")
        assert answer.returncode == 0, answer.stderr
        assert server.break_after == 0
        missing = places | {"val": f"{server.address}/none.tar"}
        assert "none.tar cannot be read (HTTP Error 404" in complaint(
            here("prepare", "imagenet", *words(missing), "--out", "none")
        )
    assert contents(tmp_path / "fetched" / "original") == contents(tmp_path / "files" / "original")


def test_a_tree_that_is_sized_already(here, tmp_path: Path) -> None:
    """As DAWNBench's participants shared it: imagenet-sz/160/train and validation; its files are stored as they are."""
    sized = tree(tmp_path / "imagenet-sz" / "160", splits=("train", "validation"))
    assert here("prepare", "imagenet", "--from", sized, "--out", "out").returncode == 0
    dataset = Dataset.open(tmp_path / "out")
    assert {name: len(dataset.split(name)) for name in ("train", "val")} == {"train": 12, "val": 12}
    split = dataset.split("val")
    for number, name in enumerate(split.names):
        given, back = Image.open(sized / name), Image.open(io.BytesIO(codec.unpack(split.record(number))))
        assert np.array_equal(np.asarray(given), np.asarray(back))


def test_wrong_archives_are_named(here, tmp_path: Path, archives: dict[str, Path]) -> None:
    def says(**changed: Path) -> str:
        outs.append(f"out{len(outs)}")
        return complaint(here("prepare", "imagenet", *words(archives | changed), "--out", outs[-1]))

    outs: list[str] = []
    assert "not one tar for each class; give ILSVRC2012_img_train.tar" in says(train=archives["val"])
    assert "give ILSVRC2012_img_val.tar" in says(val=archives["train"])
    assert "holds no meta.mat; give ILSVRC2012_devkit_t12.tar.gz" in says(devkit=archives["val"])
    assert "nowhere.tar: no such file" in says(train=Path("nowhere.tar"))
    cut = tmp_path / "cut.tar"
    cut.write_bytes(archives["train"].read_bytes()[:9000])
    assert "cut.tar" in says(train=cut)
    rubbish = tmp_path / "rubbish.tar"
    rubbish.write_bytes(b"rubbish" * 1000)
    assert "rubbish.tar is not a complete tar archive" in says(train=rubbish)
    few = tar(tmp_path / "few.tar", {"ILSVRC2012_val_00000001.JPEG": b""})
    assert "holds 1 images, the devkit knows 5" in says(val=few)
    assert not any((tmp_path / out / "dataset.json").exists() for out in outs)


def test_trees_limits_and_fractions(here, tmp_path: Path) -> None:
    tree(tmp_path / "in")
    assert here("prepare", "imagenet", "--from", "in", "--out", "a", "--limit-per-class", "2").returncode == 0
    assert len(Dataset.open(tmp_path / "a").split("train")) == 6
    tree(tmp_path / "flat", images=10, splits=("",))
    assert "--val-fraction 0.1" in complaint(here("prepare", "folder", "flat", "--out", "b"))
    assert here("prepare", "folder", "flat", "--out", "b", "--val-fraction", "0.2").returncode == 0
    dataset = Dataset.open(tmp_path / "b")
    assert dataset.description["splits"]["val"]["per_class"] == [2, 2, 2]
    names = dataset.split("train").names + dataset.split("val").names
    assert len(set(names)) == 30


def test_files_that_are_not_what_they_should_be_are_handled_and_listed(here, tmp_path: Path) -> None:
    folder = tree(tmp_path / "in") / "train" / "n00000000"
    image = sample_image(48, 40)

    def saved(kind: str, picture: Image.Image = image) -> bytes:
        out = io.BytesIO()
        picture.save(out, kind)
        return out.getvalue()

    odd = {
        "a_progressive.jpg": jpeg(image, progressive=True),
        "b_cmyk.jpg": jpeg(image.convert("CMYK")),
        "c_png.JPEG": saved("png"),
        "d_16bit.png": saved("png", Image.fromarray(np.arange(0, 65000, 65, dtype=np.uint16).reshape(25, 40))),
        "e_palette.gif": saved("gif"),
        "f_alpha.png": saved("png", image.convert("RGBA")),
        "g_cut.jpg": jpeg(sample_image(300, 300), quality=95)[:30_000],
        "h_empty.jpg": b"",
        "i_text.jpg": b"<html>404 not found</html>",
        "j_cut_at_once.jpg": jpeg(image)[:300],
    }
    for name, content in odd.items():
        (folder / name).write_bytes(content)
    answer = here("prepare", "folder", "in", "--out", "out", "--original", "--max-side", "32")
    assert answer.returncode == 0, answer.stderr
    dataset = Dataset.open(tmp_path / "out")
    remarks = {Path(entry["file"]).name: entry["what"] for entry in dataset.description["remarks"]}
    assert remarks.keys() == odd.keys()
    assert [name[0] for name, what in remarks.items() if what.startswith("left out")] == ["h", "i", "j"]
    for letter, words in {
        "a": "progressive",
        "b": "CMYK",
        "c": "PNG",
        "d": "I;16",
        "e": "GIF",
        "g": "truncated",
    }.items():
        assert words in next(what for name, what in remarks.items() if name[0] == letter), letter
    assert dataset.description["splits"]["train"]["left_out"] == 3
    split = dataset.split("train", "original")
    assert len(split) == 12 + 7
    for number in range(len(split)):
        codec.describe(split.record(number))
    gray = split.names.index("train/n00000000/d_16bit.png")
    out = np.zeros((1, 3, 25, 40), np.uint8)
    codec.Decoder(split.shards).crop(split.places(np.array([gray])), np.array([[0, 0, 40, 25, 0]], np.int32), out)
    assert abs(out[0, 0].astype(int) - np.arange(0, 65000, 65).reshape(25, 40) // 257).max() < 12  # scaled, not cut off


def test_interrupted_by_kill_9_it_ends_byte_identical(tmp_path: Path) -> None:
    root = tmp_path / "in"
    small = [jpeg(sample_image(16, 16, number)) for number in range(8)]
    for label in range(2):
        (root / f"class {label}").mkdir(parents=True)
        for number in range(1300):
            (root / f"class {label}" / f"{number:05d}.jpg").write_bytes(small[number % 8])
    words = ("prepare", "folder", root, "--val-fraction", "0.1", "--original", "--max-side", "12", "--workers", "2")
    subprocess.run(command(*words, "--out", "whole"), cwd=tmp_path, env=environment(), check=True, capture_output=True)
    options = {"cwd": tmp_path, "env": environment(), "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command(*words, "--out", "torn"), **options)
    deadline = time.monotonic() + HANG
    while not (tmp_path / "torn" / ".parts" / "train" / "00000.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "torn" / "dataset.json").exists()
    other = subprocess.run(command(*words, "--quality", "50", "--out", "torn"), **options, check=False)
    assert "unfinished preparation with other options" in other.stderr
    first = (tmp_path / "torn" / "original" / "train" / "shard-00000.pcl").stat().st_mtime_ns
    again = subprocess.run(command(*words, "--out", "torn"), **options, check=True)
    assert "going on with it" in again.stderr
    assert (tmp_path / "torn" / "original" / "train" / "shard-00000.pcl").stat().st_mtime_ns == first
    whole, torn = contents(tmp_path / "whole"), contents(tmp_path / "torn")
    assert whole.keys() == torn.keys()
    assert all(whole[name] == torn[name] for name in whole)
    assert len(Dataset.open(tmp_path / "torn").split("train", "original")) == 2340


def test_what_else_lies_in_the_folder_is_left_alone(here, tmp_path: Path) -> None:
    tree(tmp_path / "in")
    for name in ("notes/old/.hidden", "original/train/.mine", ".top"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("precious")
    half = tmp_path / "out" / "original" / "train" / ".shard-00000.pcl.123"
    half.write_text("left by a kill")
    assert here("prepare", "folder", "in", "--out", "out").returncode == 0
    kept = [path.name for path in (tmp_path / "out").rglob(".*") if path.is_file()]
    assert sorted(kept) == [".hidden", ".lock", ".mine", ".top"]


def test_too_little_room_is_known_before_it_starts(here, tmp_path: Path, monkeypatch) -> None:
    tree(tmp_path / "in")
    usage = pack.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "free, but about" in complaint(here("prepare", "folder", "in", "--out", "out"))
    assert not list((tmp_path / "out").rglob("*.pcl"))


def test_what_is_in_it_is_described_checked_shown_and_given_back(here, tmp_path: Path) -> None:
    tree(tmp_path / "in")
    assert here("prepare", "folder", "in", "--out", "out").returncode == 0
    answer = here("data", "out", "--check", "--show", "sheet.png", "--export", "jpeg", "--out", "back")
    assert answer.returncode == 0, answer.stderr
    assert "train: 12 images, 4 to 4 a class" in answer.stdout
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
    text = complaint(here("data", "out", "--check"))
    assert "1 problem found" in text
    assert "shard-00000.pcl at byte" in text
    assert "does not match its checksum" in text


def test_folders_that_hold_no_data_are_named(here, tmp_path: Path) -> None:
    assert "no prepared data here" in complaint(here("data", "."))
    (tmp_path / "dataset.json").write_text(json.dumps({"kind": "shards", "format": 99}))
    assert "has format 99; this version reads format 2: upgrade paceline" in complaint(here("data", "."))
    (tmp_path / "dataset.json").write_text(json.dumps({"kind": "shards", "format": 1}))
    assert "reads format 2: remove the folder and prepare the data again" in complaint(here("data", "."))
    (tmp_path / "dataset.json").write_text("{")
    assert "is not readable" in complaint(here("data", "."))
    assert "nowhere: no such folder" in complaint(here("prepare", "folder", "nowhere", "--out", "out"))
    (tmp_path / "empty").mkdir()
    assert "one folder for each class" in complaint(here("prepare", "folder", "empty", "--out", "out"))


def test_labels_are_part_of_the_fingerprint(here, tmp_path: Path) -> None:
    """The last image of one class moved to be the first of the next: the same records in the same order."""
    root = tree(tmp_path / "in")
    moved = shutil.copytree(root, tmp_path / "moved")
    (moved / "train" / "n00000000" / "train_3.JPEG").rename(moved / "train" / "n00000001" / "train_.JPEG")
    prints = set()
    for name in ("in", "moved"):
        assert here("prepare", "folder", name, "--out", f"out-{name}").returncode == 0
        prints.add(Dataset.open(tmp_path / f"out-{name}").fingerprint)
    assert len(prints) == 2


def test_a_source_that_changed_is_not_mixed_with_what_it_was(here, tmp_path: Path) -> None:
    root = tree(tmp_path / "in")
    assert here("prepare", "folder", "in", "--out", "out").returncode == 0
    (root / "train" / "n00000000" / "train_3.JPEG").rename(root / "train" / "n00000000" / "train_9.JPEG")
    assert "holds other data already" in complaint(here("prepare", "folder", "in", "--out", "out"))
    assert "holds other data already" in complaint(here("prepare", "cifar10", "--out", "out", "--from", __file__))
    Dataset.open(tmp_path / "out")


def test_odd_names_and_contents_are_left_out_or_kept_but_never_end_it(here, tmp_path: Path) -> None:
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


def test_an_image_that_is_too_large_for_a_record_is_unreadable(monkeypatch) -> None:
    monkeypatch.setattr(codec, "pack", _refusing_wide_ones(codec.pack))
    with pytest.raises(Unreadable, match="641 x 8 pixels: too large"):
        convert(_png(641, 8), [Variant()])


def _refusing_wide_ones(pack: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    def refuse(content: bytes) -> bytes:
        if content.startswith(b"\xff\xd8") and Image.open(io.BytesIO(content)).width == 641:
            raise codec.CodecError("too large")
        return pack(content)

    return refuse


def test_options_without_a_bearing_are_refused(here, tmp_path: Path) -> None:
    tree(tmp_path / "in")
    (tmp_path / "in" / "train" / "n9").mkdir()
    assert "1 folders hold no images (n9)" in complaint(here("prepare", "folder", "in", "--out", "out"))
    (tmp_path / "in" / "train" / "n9").rmdir()
    assert "--from has no bearing" in complaint(here("prepare", "folder", "in", "--from", "x", "--out", "out"))
    assert "--out is empty" in complaint(here("prepare", "folder", "in", "--out", ""))
    assert here("prepare", "folder", "in", "--out", "out").returncode == 0
    assert "'bogus' is not in" in complaint(here("data", "out", "--variant", "bogus"))
    assert "give both or neither" in complaint(here("data", "out", "--out", "x"))
    assert "is not a whole number" in complaint(here("data", "out", "--show", "x.png", "--seed", "-1"))


def test_a_class_that_lost_all_its_images_is_an_error_unless_allowed(here, tmp_path: Path) -> None:
    tree(tmp_path / "in", classes=3, images=2)
    for file in (tmp_path / "in" / "train" / "n00000001").iterdir():
        file.write_bytes(b"not an image")
    words = ("prepare", "folder", "in", "--out", "out")
    text = complaint(here(*words))
    assert "not one train image of 1 class could be read (n00000001)" in text
    assert "train/n00000001/train_0.JPEG: not an image" in text
    assert "--allow-empty-classes" in text
    assert not (tmp_path / "out" / "dataset.json").exists()
    answer = here(*words, "--allow-empty-classes")
    assert answer.returncode == 0, answer.stderr
    assert Dataset.open(tmp_path / "out").description["splits"]["train"]["per_class"] == [2, 0, 2]


def test_what_was_left_out_is_counted_by_reason(here, tmp_path: Path) -> None:
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
