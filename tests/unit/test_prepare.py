"""Preparation of small image folders and of archives laid out like ImageNet's, with generated images."""

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


WNIDS = ["n00000003", "n00000001", "n00000002"]  # ILSVRC2012_ID 1, 2, 3: not sorted by WordNet id
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


def test_imagenet_archives_are_prepared(here, tmp_path: Path, archives: dict[str, Path]) -> None:
    answer = here("prepare", "imagenet", *words(archives), "--out", "out", "--original", "--short-side", "20")
    assert answer.returncode == 0, answer.stderr
    dataset = Dataset.open(tmp_path / "out")
    assert [entry["id"] for entry in dataset.description["classes"]] == sorted(WNIDS)
    assert [entry.name for entry in dataset.classes] == ["thing 1", "thing 2", "thing 3"]
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
    assert "[output-has-other-data]" in complaint(here("prepare", "imagenet", *words(archives), "--out", "out"))


def test_archives_are_read_from_urls(here, tmp_path: Path, archives: dict[str, Path], monkeypatch) -> None:
    """Streamed over broken connections, with the same result as from files."""
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    assert here("prepare", "imagenet", *words(archives), "--out", "files").returncode == 0
    with FileServer(tmp_path, break_after=3).running() as server:
        urls = {name: f"{server.address}/{path.name}" for name, path in archives.items()}
        answer = here("prepare", "imagenet", *words(urls), "--out", "downloaded")
        assert answer.returncode == 0, answer.stderr
        assert server.break_after == 0
        missing = urls | {"val": f"{server.address}/none.tar"}
        message = complaint(here("prepare", "imagenet", *words(missing), "--out", "none"))
        assert "[url-unreadable]" in message
        assert f"{server.address}/none.tar" in message
        assert "404" in message
    assert contents(tmp_path / "downloaded" / "original") == contents(tmp_path / "files" / "original")


def test_resized_image_folder_is_stored_unchanged(here, tmp_path: Path) -> None:
    """The layout that DAWNBench participants shared: imagenet-sz/160/train and validation."""
    sized = tree(tmp_path / "imagenet-sz" / "160", splits=("train", "validation"))
    assert here("prepare", "imagenet", "--from", sized, "--out", "out").returncode == 0
    dataset = Dataset.open(tmp_path / "out")
    assert {name: len(dataset.split(name)) for name in ("train", "val")} == {"train": 12, "val": 12}
    split = dataset.split("val")
    for number, name in enumerate(split.names):
        given, back = Image.open(sized / name), Image.open(io.BytesIO(codec.unpack(split.record(number))))
        assert np.array_equal(np.asarray(given), np.asarray(back))


def test_wrong_archives_are_rejected(here, tmp_path: Path, archives: dict[str, Path]) -> None:
    outs: list[str] = []

    def check(code: str, *parts: str, **changed: Path) -> None:
        outs.append(f"out{len(outs)}")
        message = complaint(here("prepare", "imagenet", *words(archives | changed), "--out", outs[-1]))
        assert f"[{code}]" in message
        assert all(part in message for part in parts), message

    check("wrong-archive", "--train", "ILSVRC2012_img_train.tar", train=archives["val"])
    check("wrong-archive", "--val", "ILSVRC2012_img_val.tar", val=archives["train"])
    check("wrong-archive", "--devkit", "meta.mat", "ILSVRC2012_devkit_t12.tar.gz", devkit=archives["val"])
    check("source-not-found", "nowhere.tar", train=Path("nowhere.tar"))
    truncated = tmp_path / "truncated.tar"
    truncated.write_bytes(archives["train"].read_bytes()[:9000])
    check("archive-corrupt", "truncated.tar", train=truncated)
    invalid = tmp_path / "invalid.tar"
    invalid.write_bytes(b"rubbish" * 1000)
    check("archive-corrupt", "invalid.tar", train=invalid)
    few = tar(tmp_path / "few.tar", {"ILSVRC2012_val_00000001.JPEG": b""})
    check("devkit-mismatch", "few.tar", "1 images", "5", val=few)
    assert not any((tmp_path / out / "dataset.json").exists() for out in outs)


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
    assert [name[0] for name, what in remarks.items() if what.startswith("left out")] == ["h", "i", "j"]
    for letter, expected in {
        "a": "progressive",
        "b": "CMYK",
        "c": "PNG",
        "d": "I;16",
        "e": "GIF",
        "g": "truncated",
    }.items():
        assert expected in next(what for name, what in remarks.items() if name[0] == letter), letter
    assert dataset.description["splits"]["train"]["left_out"] == 3
    split = dataset.split("train", "original")
    assert len(split) == 12 + 7
    for number in range(len(split)):
        codec.describe(split.record(number))
    gray = split.names.index("train/n00000000/d_16bit.png")
    out = np.zeros((1, 3, 25, 40), np.uint8)
    codec.Decoder(split.shards).crop(split.places(np.array([gray])), np.array([[0, 0, 40, 25, 0]], np.int32), out)
    assert abs(out[0, 0].astype(int) - np.arange(0, 65000, 65).reshape(25, 40) // 257).max() < 12  # scaled, not clipped


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
