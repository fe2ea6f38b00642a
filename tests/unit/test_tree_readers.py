"""Sorted trees as sources of `paceline prepare`: in folders, tars and object stores."""

import json
from pathlib import Path

import pytest
from conftest import raises
from photo_sources import CLASSES, files_of, make_photos, read_all, write_tar
from sample_images import contents

import paceline as pl
from paceline.data.listing import list_images
from paceline.data.prepare import pack
from paceline.data.prepare.readers import detect
from paceline.data.prepare.sources import open_source
from paceline.data.splits import AS_GIVEN, Division


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos") / "photos")


@pytest.mark.parametrize(
    ("name", "mode", "top"), [("a.tar", "w", ""), ("a.tar.gz", "w:gz", "my/photos/"), ("a.tgz", "w:gz", "./")]
)
def test_a_tar_of_a_sorted_tree(photos: Path, tmp_path: Path, name: str, mode: str, top: str) -> None:
    files = {f"{top}{path}": content for path, content in contents(photos).items()}
    path = write_tar(tmp_path / name, files | {f"{top}README": b"", f"{top}train/cat/.DS_Store": b""}, mode)
    assert detect(str(path)) == "tar"
    assert read_all(str(path)) == files_of(photos)


def test_a_tree_and_its_tar_have_the_same_classes_and_splits(tmp_path: Path) -> None:
    """Names of folders are sorted as text, as torchvision does, also if they are numbers."""
    for split, name in (("Training", "0"), ("Training", "2"), ("Training", "10"), ("valid", "10"), ("testing", "2")):
        (tmp_path / "photos" / split / name).mkdir(parents=True)
        (tmp_path / "photos" / split / name / "1.jpg").write_bytes(split.encode())
    (tmp_path / "photos" / "more" / "x").mkdir(parents=True)
    archive = write_tar(tmp_path / "a.tar", contents(tmp_path / "photos"))
    for source in (tmp_path / "photos", archive):
        found = open_source(str(source), "", {}, AS_GIVEN)
        assert [entry.id for entry in found.classes] == ["0", "10", "2"]
        assert found.sizes == {"train": 3, "val": 1, "test": 1}
    parts = {"train": str(tmp_path / "photos" / "Training"), "val": str(tmp_path / "list.jsonl")}
    rows = [{"path": "photos/valid/10/1.jpg", "label": 10}, {"path": "photos/testing/2/1.jpg", "label": 2}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [entry.id for entry in open_source(parts, "", {}, AS_GIVEN).classes] == ["0", "10", "2"]
    images = list_images(tmp_path / "photos")
    assert (images.ids, {split: len(part) for split, part in images.splits.items()}) == (["0", "10", "2"], found.sizes)


def test_two_folders_of_one_split_are_refused(tmp_path: Path) -> None:
    for split in ("train", "val", "valid"):
        for name in CLASSES:
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            (tmp_path / "photos" / split / name / "1.jpg").write_bytes(b"")
        write_tar(tmp_path / f"{split}-0.tar", {"1.jpg": b"", "1.txt": b"cat"})
    archive = write_tar(tmp_path / "photos.tgz", contents(tmp_path / "photos"), "w:gz")
    for source in (tmp_path / "photos", archive, tmp_path / "*-0.tar"):
        with raises("duplicate-splits") as caught:
            read_all(str(source))
        assert "val and valid" in str(caught.value)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("car", "train"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "photos" / name / f"{number}.jpg").write_bytes(b"")
    archive = write_tar(tmp_path / "photos.tar", contents(tmp_path / "photos"))
    for source in (tmp_path / "photos", archive):
        found = open_source(str(source), "", {}, Division(0.5))
        assert [entry.id for entry in found.classes] == ["car", "train"]
    for path in (tmp_path / "photos" / "car").iterdir():
        path.unlink()
    (tmp_path / "photos" / "car").rename(tmp_path / "photos" / "val")
    (tmp_path / "photos" / "val" / "1.jpg").write_bytes(b"")
    with raises("too-few-classes"):  # splits without classes
        read_all(str(tmp_path / "photos"))
    with raises("image-without-class"):
        read_all(str(write_tar(tmp_path / "photos.tar", contents(tmp_path / "photos"))))


def test_a_tar_of_class_folders_is_divided(photos: Path, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", contents(photos / "train"))
    with raises("no-val-split"):
        read_all(str(path))
    found = read_all(str(path), division=Division(0.25, 0.25))
    assert {split: len(part) for split, part in found.items()} == {"train": 6, "val": 3, "test": 3}
    assert sorted(image for part in found.values() for image in part) == files_of(photos)["train"]


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"1.jpg": b"", "2.jpg": b""}, "image-without-class"),
        ({"1.jpg": b"", "1.cls": b""}, "image-without-class"),
        ({"cat/notes.txt": b""}, "source-empty"),
        ({"cat/1.jpg": b"", "cat/2.jpg": b""}, "too-few-classes"),
        ({"cat/1.jpg": b"", "dog/2.jpg": b"", "./cat/1.jpg": b""}, "duplicate-images"),
        ({"train/cat/1.jpg": b"", "train/dog/1.jpg": b"", "val/cow/1.jpg": b""}, "empty-classes"),
    ],
)
def test_tars_that_are_not_a_sorted_tree_are_refused(tmp_path: Path, files: dict[str, bytes], code: str) -> None:
    with raises(code):
        read_all(
            str(write_tar(tmp_path / "a.tar", files)), division=AS_GIVEN if "val/cow/1.jpg" in files else Division(0.5)
        )


def test_the_preparation_of_a_tar_resumes(photos: Path, tmp_path: Path, monkeypatch) -> None:
    """The second of several shards is missing, and shards of two splits come from one stream."""
    archive = write_tar(tmp_path / "a.tar.gz", contents(photos / "train"), "w:gz")
    monkeypatch.setattr(pack, "SHARD_SAMPLES", 2)
    options = {"val_fraction": 0.25, "workers": 1}
    pl.prepare(archive, tmp_path / "whole", **options)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pack, "assemble", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pl.prepare(archive, tmp_path / "resumed", **options)
    (tmp_path / "resumed" / ".parts" / "train" / "00001.json").unlink()
    with raises("unfinished-preparation"):
        pl.prepare(archive, tmp_path / "resumed", val_fraction=0.5)
    pl.prepare(archive, tmp_path / "resumed", **options)
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")


def test_class_folders_and_tars_in_an_object_store(photos: Path, tmp_path: Path, monkeypatch) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        for name, value in (keys | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="images")
        for name, content in contents(photos).items():
            client.put_object(Bucket="images", Key=f"my photos/{name}", Body=content)
        client.put_object(Bucket="images", Key="my photos/train/", Body=b"")  # how consoles store folders
        client.upload_file(str(write_tar(tmp_path / "a.tar", contents(photos))), "images", "a.tar")
        assert read_all("s3://images/my photos") == files_of(photos)
        assert read_all("s3://images/a.tar") == files_of(photos)
        with raises("source-not-found"):
            read_all("s3://images/nowhere")
        with raises("url-unreadable"):
            read_all("s3://no-such-bucket/photos")
    finally:
        server.stop()
