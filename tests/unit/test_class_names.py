"""Names of classes: all readers check and normalize them alike, before any image is converted."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import raises
from photo_sources import write_tar
from sample_images import contents, jpeg, sample_image

import paceline as pl
from paceline.data.listing import list_images, list_one_split
from paceline.data.prepare.raw import RawImage, SourceImages, raw_dataset
from paceline.data.prepare.sources import open_source
from paceline.data.shards import Dataset
from paceline.data.splits import Division

HALF = Division(0.5)


def _folder(place: Path, names: list[str]) -> str:
    for name in names:
        (place / "tree" / name).mkdir(parents=True)
        for number in range(2):
            (place / "tree" / name / f"{number}.jpg").write_bytes(jpeg(sample_image(16, 16, number)))
    return str(place / "tree")


def _tar(place: Path, names: list[str]) -> str:
    return str(write_tar(place / "a.tar", contents(Path(_folder(place, names)))))


def _listed(place: Path, names: list[str], write: Callable[[list[dict[str, str]]], Path]) -> str:
    _folder(place, [str(number) for number in range(len(names))])
    rows = [{"path": f"tree/{n}/{k}.jpg", "label": name} for n, name in enumerate(names) for k in range(2)]
    return str(write(rows))


def _csv(place: Path, names: list[str]) -> str:
    def write(rows: list[dict[str, str]]) -> Path:
        lines = ["path,label", *(f'{row["path"]},"{row["label"]}"' for row in rows)]
        (place / "list.csv").write_text("\n".join(lines), encoding="utf-8")
        return place / "list.csv"

    return _listed(place, names, write)


def _jsonl(place: Path, names: list[str]) -> str:
    def write(rows: list[dict[str, str]]) -> Path:
        (place / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return place / "list.jsonl"

    return _listed(place, names, write)


def _parquet(place: Path, names: list[str]) -> str:
    from pyarrow import Table, parquet

    def write(rows: list[dict[str, str]]) -> Path:
        parquet.write_table(Table.from_pylist(rows), place / "list.parquet")
        return place / "list.parquet"

    return _listed(place, names, write)


def _webdataset(place: Path, names: list[str]) -> str:
    files: dict[str, bytes] = {}
    for number, name in enumerate(names * 2):
        image, label = jpeg(sample_image(16, 16, number)), json.dumps({"label": name})
        files |= {f"{number}.jpg": image, f"{number}.json": label.encode()}
    write_tar(place / "shard-0.tar", files)
    return str(place / "shard-*.tar")


def _hugging_face(place: Path, names: list[str]) -> str:
    import datasets

    rows = {
        "image": [{"bytes": jpeg(sample_image(16, 16, n)), "path": None} for n in range(2 * len(names))],
        "label": [*range(len(names))] * 2,
    }
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    datasets.Dataset.from_dict(rows, features).save_to_disk(str(place / "saved"))
    return str(place / "saved")


READERS = [_folder, _tar, _csv, _jsonl, _parquet, _webdataset, _hugging_face]
NOT_UNICODE = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize("make", READERS)
def test_spaces_are_removed_and_accents_are_composed(tmp_path: Path, make: Callable[[Path, list[str]], str]) -> None:
    source = make(tmp_path, [" cat ", "e\u0301mu", "two words"])
    pl.prepare(source, tmp_path / "out", val_fraction=0.5, workers=1)
    assert {entry.id for entry in Dataset.open(tmp_path / "out").classes} == {"cat", "two words", "\u00e9mu"}


@pytest.mark.parametrize("make", READERS)
def test_names_that_differ_only_in_composition_are_refused(
    tmp_path: Path, make: Callable[[Path, list[str]], str]
) -> None:
    with raises("duplicate-classes"):
        open_source(make(tmp_path, ["e\u0301mu", "\u00e9mu", "cat"]), "", {}, HALF)


@pytest.mark.parametrize("name", ["a\x07b", "a\u2028b", "a\nb"])
@pytest.mark.parametrize("make", READERS)
def test_control_characters_are_refused(tmp_path: Path, make: Callable[[Path, list[str]], str], name: str) -> None:
    code = "class-name-invalid"
    if "\n" in name and make in (_csv, _jsonl, _parquet, _webdataset):
        code = "label-invalid" if make is _webdataset else "list-quote-open"
    with raises(code) as caught:
        open_source(make(tmp_path, ["cat", name]), "", {}, HALF)
    assert str(tmp_path) in str(caught.value)
    assert repr(name)[1:-1] in str(caught.value) or code == "list-quote-open"


@pytest.mark.parametrize(
    ("make", "name"),
    [(_folder, NOT_UNICODE), (_tar, NOT_UNICODE), (_jsonl, "\ud800x"), (_webdataset, "\ud800x")],
)
def test_names_that_are_not_unicode_are_refused(
    tmp_path: Path, make: Callable[[Path, list[str]], str], name: str
) -> None:
    with raises("class-name-invalid") as caught:
        open_source(make(tmp_path, ["cat", name]), "", {}, HALF)
    str(caught.value).encode()  # the message can be printed


def test_a_label_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a-0.tar", {"1.jpg": b"", "1.txt": b"caf\xe9"})
    with raises("label-invalid"):
        open_source(str(tmp_path / "a-*.tar"), "", {}, HALF)


@pytest.mark.parametrize("label", ["", " ", "\ud800x", "a\tb"])
def test_names_of_registered_readers_are_checked_before_images_are_read(label: str) -> None:
    entries = [RawImage(f"{number}.jpg", name, bytes) for number, name in enumerate(["a", "a", label, label])]
    with raises("class-name-invalid") as caught:
        raw_dataset(SourceImages(entries), "some", "some", HALF)
    assert "2.jpg" in str(caught.value)


def test_names_of_numbered_classes_are_checked(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("a cat\na\x07dog\n")
    with raises("class-name-invalid"):
        open_source(_folder(tmp_path, ["0", "1"]), "", {}, HALF, 0, tmp_path / "names.txt")


def test_training_and_evaluation_on_files_use_the_same_names(tmp_path: Path) -> None:
    root = Path(_folder(tmp_path, ["cat ", "e\u0301mu"]))
    assert list_images(root, HALF).ids == list_one_split(root).ids == ["cat", "\u00e9mu"]
    assert [label for label, _ in list_one_split(root).splits["all"]] == [0, 0, 1, 1]


def test_a_file_name_that_is_not_unicode_can_be_listed_as_unreadable(tmp_path: Path) -> None:
    root = Path(_folder(tmp_path, ["a", "b"]))
    (root / "a" / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"no image")
    (root / "a" / "9.jpg").write_bytes(jpeg(sample_image(16, 16)))
    pl.prepare(root, tmp_path / "out", val_fraction=0.5, workers=1)
    (remark,) = Dataset.open(tmp_path / "out").description["remarks"]
    assert remark["file"].startswith("a/caf")


def test_names_that_differ_only_in_case_are_warned_about_once(tmp_path: Path, caplog) -> None:
    pl.prepare(_folder(tmp_path, ["Cat", "cat", "dog"]), tmp_path / "out", val_fraction=0.5)
    assert caplog.text.count("has the classes Cat and cat, whose names differ only in case") == 1
