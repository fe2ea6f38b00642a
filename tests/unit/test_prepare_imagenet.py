"""Preparation of archives and folders laid out like ImageNet's, with generated images."""

import io
from pathlib import Path

import numpy as np
import pytest
from conftest import complaint
from imagenet_archives import WNIDS, tar, write_archives
from PIL import Image
from sample_images import contents, tree
from servers import FileServer

from paceline.data import codec
from paceline.data.shards import Dataset
from paceline.system import remote


@pytest.fixture
def archives(tmp_path: Path) -> dict[str, Path]:
    return write_archives(tmp_path)


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
    check("devkit-mismatch", "few.tar", "1 image", "5", val=few)
    assert not any((tmp_path / out / "dataset.json").exists() for out in outs)
