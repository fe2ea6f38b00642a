"""Hugging Face datasets as a source of `paceline prepare`."""

import io
import shutil
import sys
from pathlib import Path

import pytest
from conftest import raises
from photo_sources import Found, files_of, make_photos, read_all
from PIL import Image
from sample_images import sample_image

from paceline.data.prepare.readers import detect
from paceline.data.prepare.sources import open_source
from paceline.data.splits import AS_GIVEN, Division


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos") / "photos")


def _saved(root: Path, splits: Found, **columns: object) -> str:
    import datasets

    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cat", "unused"])}
    tables = {}
    for split, images in splits.items():
        rows = {
            "image": [{"bytes": content, "path": f"{number}.jpg"} for number, (_, content) in enumerate(images)],
            "label": [label if label != "none" else None for label, _ in images],
        }
        more = {name: [value] * len(images) for name, value in columns.items()}
        known = features | {name: datasets.Value("string") for name in columns}
        tables[split] = datasets.Dataset.from_dict(rows | more, datasets.Features(known))
    datasets.DatasetDict(tables).save_to_disk(str(root))
    return str(root)


def test_a_saved_hugging_face_dataset(photos: Path, tmp_path: Path, caplog) -> None:
    files = files_of(photos)
    source = _saved(tmp_path / "saved", {"train": files["train"], "validation": files["val"], "extra": files["val"]})
    assert detect(source) == "hf"
    assert read_all(source) == files  # the bytes of the files: nothing was decoded
    assert [entry.id for entry in open_source(source, "", {}, AS_GIVEN).classes] == ["dog", "cat"]
    assert "extra are not used" in caplog.text
    assert "left out 1 class without images" in caplog.text


def test_columns_splits_and_labels_of_hugging_face_datasets(photos: Path, tmp_path: Path) -> None:
    train = files_of(photos)["train"]
    source = _saved(tmp_path / "one", {"train": train}, kind="x")
    assert len(read_all(source, division=Division(0.25))["val"]) == 3
    for options, code in (
        ({"label_column": "nothing"}, "hf-column-missing"),
        ({"image_column": "kind"}, "hf-column-invalid"),
        ({"label_column": "image"}, "hf-column-invalid"),
        ({"label_column": "kind"}, "too-few-classes"),
    ):
        with raises(code):
            read_all(source, division=Division(0.25), **options)
    with raises("image-without-class"):
        read_all(_saved(tmp_path / "two", {"train": [*train, ("none", train[0][1])]}), division=Division(0.25))
    with raises("empty-classes"):  # labels that differ between splits
        read_all(
            _saved(tmp_path / "three", {"train": train, "test": [("unused", train[0][1])]}), division=Division(0.25)
        )
    unlabeled = _saved(tmp_path / "four", {"train": train, "test": [("none", train[0][1])]})
    assert read_all(unlabeled, division=Division(0.25)).keys() == {"train", "val"}


@pytest.mark.parametrize(
    ("labels", "names"), [([0, 1, 2], ["a", "b"]), ([0, 1, -2], ["a", "b"]), ([0, 1, -2], []), (["a", "b", " "], [])]
)
def test_labels_that_name_no_class_are_refused(tmp_path: Path, labels: list[object], names: list[str]) -> None:
    import datasets
    from datasets.table import InMemoryTable

    rows = {"image": [{"bytes": bytes([number]), "path": None} for number in range(3)], "label": labels}
    kind = datasets.ClassLabel(names=names) if names else datasets.Value("string" if " " in labels else "int64")
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    # datasets itself checks the labels of from_dict, but not those of a table
    table = InMemoryTable.from_pydict(rows, schema=features.arrow_schema)
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    with raises("hf-label-invalid"):
        read_all(str(tmp_path / "saved"), division=Division(0.5))


def test_only_files_of_the_dataset_are_read(photos: Path, tmp_path: Path, monkeypatch) -> None:
    import datasets

    def saved(paths: list[Path]) -> datasets.Dataset:
        rows = {"image": [{"bytes": None, "path": str(path)} for path in paths], "label": ["a", "b"] * 2}
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
        return datasets.Dataset.from_dict(rows, features)

    own = tmp_path / "own"
    own.mkdir()
    files = sorted((photos / "train" / "cat").iterdir())[:4]
    inside = [Path(shutil.copy(file, own)) for file in files]
    monkeypatch.setattr(datasets, "load_from_disk", lambda _: saved(inside))
    found = read_all(str(own), "hf", Division(0.5))
    assert sorted(content for part in found.values() for _, content in part) == sorted(map(Path.read_bytes, files))
    (own / "link.jpg").symlink_to(files[0])
    for outside in (files[0], own / "link.jpg", Path("..") / "other.jpg"):
        monkeypatch.setattr(datasets, "load_from_disk", lambda _, path=outside: saved([*inside[:3], path]))
        with raises("hf-path-outside"):
            read_all(str(own), "hf", Division(0.5))


def test_a_hub_that_cannot_be_reached_names_the_fix(monkeypatch) -> None:
    import datasets

    def fail(*_: object) -> None:
        raise ConnectionError("Couldn't reach 'beans' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with raises("hf-unreadable") as caught:
        read_all("hf:beans")
    assert "save_to_disk" in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises("missing-package") as caught:
        read_all("hf:beans")
    assert "paceline[hf]" in str(caught.value)


def test_images_that_datasets_has_encoded(tmp_path: Path) -> None:
    """What datasets encodes itself, from decoded images, is read as any other file."""
    import datasets

    images = [sample_image(8, 8, number) for number in range(4)]
    rows = {"image": images, "label": ["a", "b"] * 2}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features).save_to_disk(str(tmp_path / "saved"))
    found = read_all(str(tmp_path / "saved"), division=Division(0.5))
    assert [Image.open(io.BytesIO(content)).size for _, content in found["val"]] == [(8, 8)] * 2
