"""How data.path decides the kind of data, and lists of images."""

import json
from pathlib import Path

import pytest
from conftest import complaint, raises
from sample_images import tree

from paceline.config.data import Data
from paceline.config.io import load_recipe
from paceline.config.recipe import Recipe
from paceline.data.assign import in_order
from paceline.data.kinds import kind_of, resolve
from paceline.data.listing import list_images, listing_fingerprint
from paceline.data.splits import Division
from paceline.errors import ConfigError, UserError
from paceline.track.records import RunFolder

SMALL = (
    *("--data.name", "", "--data.size", 24, "--data.augment", "{flip: random, translate: 0}"),
    *("--train.global_batch", 4),
    *("--model.options", "{widths: [8, 16], norm: group}", "--train.duration", "2ba", "--log.tensorboard", "false"),
)


def test_a_recipe_without_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: nothing\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    assert [problem.code for problem in caught.value.problems] == ["data-missing"]
    assert "data.path" in str(caught.value)


def test_a_path_for_built_in_data_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits", ["--data.path", "photos"])
    assert [problem.code for problem in caught.value.problems] == ["data-path-unused"]
    assert "data.name=digits" in str(caught.value)


def _shards(folder: Path) -> None:
    (folder / "dataset.json").write_text(json.dumps({"kind": "shards", "name": "folder"}))


def _cifar10(folder: Path) -> None:
    (folder / "dataset.json").write_text(json.dumps({"name": "cifar10"}))


def _split_tree(folder: Path) -> None:
    tree(folder, classes=2, images=1)


def _class_folders(folder: Path) -> None:
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        (folder / name / "1.jpg").touch()


@pytest.mark.parametrize(
    ("make", "kind"), [(_shards, "shards"), (_cifar10, "cifar10"), (_split_tree, "folder"), (_class_folders, "folder")]
)
def test_the_path_decides_the_kind_of_data(tmp_path: Path, make, kind: str) -> None:
    make(tmp_path)
    assert resolve(Recipe("x", data=Data(path=str(tmp_path)))).data.name == kind


def test_remote_data_must_be_prepared_data() -> None:
    assert kind_of("s3://bucket/photos") == "shards"


@pytest.mark.parametrize("name", ["notes.txt", "empty"])
def test_a_path_without_images_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    with raises("unknown-data-kind") as caught:
        kind_of(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


def test_a_name_that_contradicts_the_path_is_refused(tmp_path: Path) -> None:
    """The message must not suggest `paceline prepare cifar10`, which would write into a folder of images."""
    _class_folders(tmp_path)
    with raises("data-kind-mismatch") as caught:
        resolve(Recipe("x", data=Data(name="cifar10", path=str(tmp_path))))
    assert "data.name to folder" in str(caught.value)
    assert "paceline prepare" not in str(caught.value)


def test_an_image_folder_is_trained_without_data_name(here, tmp_path: Path) -> None:
    tree(tmp_path / "photos", classes=3, images=4)
    answer = here("train", "digits", *SMALL, "--data.path", "photos")
    assert answer.returncode == 0, answer.stderr
    assert "data: photos (folder), 12 training and 12 validation images, 3 classes, fingerprint" in answer.stderr
    assert load_recipe(str(RunFolder(tmp_path / "runs" / "digits").recipe)).data.name == "folder"


# ---- lists ----


def _list(tmp_path: Path, *lines: str, name: str = "list.csv") -> Path:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir(exist_ok=True)
        for number in range(4):
            (tmp_path / label / f"{number}.jpg").touch()
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_list_can_name_the_splits(tmp_path: Path) -> None:
    path = _list(tmp_path, "path,label,split", "dog/0.jpg,dog,train", "cat/0.jpg,cat,train", "cat/1.jpg,cat,val")
    found = list_images(path)
    assert (found.ids, [label for label, _ in found.splits["train"]], [label for label, _ in found.splits["val"]]) == (
        ["cat", "dog"],
        [1, 0],
        [0],
    )


def test_labels_of_a_list_are_part_of_its_fingerprint(tmp_path: Path) -> None:
    """Renamed classes in the same order have the same files and the same class numbers."""
    prints = set()
    for dog in ("dog", "wolf"):
        path = _list(tmp_path, "path,label,split", f"dog/0.jpg,{dog},train", "cat/0.jpg,cat,train", "cat/1.jpg,cat,val")
        prints.add(listing_fingerprint(list_images(path), path))
    assert len(prints) == 2


def test_a_list_without_splits_needs_a_val_fraction(tmp_path: Path) -> None:
    rows = [f"{label}/{number}.jpg\t{label}" for label in ("cat", "dog") for number in range(4)]
    path = _list(tmp_path, "file\tclass", *rows, name="list.tsv")
    with raises("no-val-split"):
        list_images(path)
    found = list_images(path, Division(0.25))
    assert (len(found.splits["train"]), len(found.splits["val"])) == (6, 2)


@pytest.mark.parametrize(
    ("lines", "codes", "names"),
    [
        (["cat/0.jpg,cat"], "list-column-missing", "line 1"),
        (["path,kind", "cat/0.jpg,cat"], "list-column-missing", "label"),
        (["path,label", "cat/9.jpg,cat"], "list-image-not-found", "cat/9.jpg"),
        (["path,label", "cat/0.jpg,"], "list-value-missing", "line 2"),
        (["path,label", "cat/0.jpg,cat, tabby"], "list-fields-mismatch", "line 2"),
        (["path,label", "cat/0.jpg,cat", 'cat/1.jpg,"cat', "cat/2.jpg,dog"], "list-unreadable", "line 3"),
        (["path,label", "cat/0.jpg,cat", f"{'a' * 5000}.jpg,cat"], "list-image-not-found", "line 3"),
        (["path,label,split", "cat/0.jpg,cat,train", "cat/0.jpg,cat,val"], "list-image-duplicate", "line 3: cat/0.jpg"),
        (["path,label,Label", "cat/0.jpg,cat,dog"], "list-column-ambiguous", "line 1"),
        (["path,label,split", "cat/0.jpg,cat,later"], "list-split-invalid", "'later'"),
        (["path,label,split", "cat/0.jpg,cat,train", "cat/1.jpg,cat,val"], "too-few-classes", "1 class"),
        (["path,label,split", "cat/0.jpg,cat,train", "dog/0.jpg,dog,val"], "empty-classes", "dog"),
        (["path,label,split", "cat/0.jpg,cat,train", "dog/0.jpg,dog,train"], "no-val-split", "val"),
    ],
)
def test_an_invalid_list_is_refused(tmp_path: Path, lines: list[str], codes: str, names: str) -> None:
    with pytest.raises(UserError) as caught:
        list_images(_list(tmp_path, *lines))
    assert caught.value.code in codes.split(), caught.value.report
    assert names in str(caught.value)


def _records(lines: list[str]) -> list[dict[str, str]]:
    """The rows of a CSV list whose values have no quotes."""
    head, *rows = (line.split(",") for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


def _write_as(suffix: str, tmp_path: Path, lines: list[str]) -> Path:
    _list(tmp_path)
    path = tmp_path / f"list{suffix}"
    if suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(_records(lines)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n\n" for row in _records(lines)))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_other_lists_are_read_as_csv_lists(tmp_path: Path, suffix: str) -> None:
    lines = ["path,label,split", "dog/0.jpg,dog,train", "cat/0.jpg,cat,train", "cat/1.jpg,cat,val"]
    path = _write_as(suffix, tmp_path, lines)
    assert list_images(path) == list_images(_list(tmp_path, *lines))
    assert kind_of(str(path)) == "list"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("lines", "code", "names"),
    [
        (["path,kind", "cat/0.jpg,cat"], "list-column-missing", "label"),
        (["path,label", "cat/0.jpg,"], "list-value-missing", "1 has no label"),
        (["path,label,split", "cat/0.jpg,cat,later"], "list-split-invalid", "'later'"),
        (
            ["path,label,split", "cat/0.jpg,cat,train", "cat/0.jpg,cat,val"],
            "list-image-duplicate",
            "cat/0.jpg is already",
        ),
        (["path,label,class", "cat/0.jpg,cat,dog"], "list-column-ambiguous", "label and class"),
        (["path,label,split", "cat/0.jpg,cat,train", "dog/0.jpg,dog,val"], "empty-classes", "which only val has"),
    ],
)
def test_other_lists_have_the_same_errors(tmp_path: Path, suffix: str, lines: list[str], code: str, names: str) -> None:
    with raises(code) as caught:
        list_images(_write_as(suffix, tmp_path, lines))
    assert names in str(caught.value)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("[1]\n", "list-unreadable"),
        ("{broken\n", "list-unreadable"),
        ("[" * 100_000, "list-unreadable"),
        ('{"path": "cat/0.jpg", "label": 1.5}\n', "list-value-invalid"),
        ('{"path": 7, "label": "cat"}\n', "list-value-invalid"),
        ('{"path": "cat/0.jpg"}\n', "list-column-missing"),
        ("", "list-column-missing"),
    ],
)
def test_invalid_json_lines_are_refused(tmp_path: Path, content: str, code: str) -> None:
    path = _list(tmp_path, name="list.jsonl")
    path.write_text(content)
    with raises(code):
        list_images(path)


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    path = _list(tmp_path, "path,label", name="list.parquet")
    with raises("list-unreadable"):
        list_images(path)


def test_all_missing_files_of_a_list_are_counted(tmp_path: Path) -> None:
    rows = [f"cat/{number}.jpg,cat" for number in range(30)]
    with raises("list-image-not-found") as caught:
        list_images(_list(tmp_path, "path,label", *rows))
    assert caught.value.fields["missing"] == 26
    assert "line 6: " in str(caught.value)
    assert "and 16 more" in str(caught.value)


def test_numbered_labels_are_in_the_order_of_their_values(tmp_path: Path) -> None:
    rows = [
        f"{label}/{number}.jpg,{'10' if label == 'cat' else '9'}" for label in ("cat", "dog") for number in range(4)
    ]
    assert list_images(_list(tmp_path, "path,label", *rows), Division(0.25)).ids == ["9", "10"]
    large = "9" * 5000  # more digits than int() takes
    assert in_order([large, "10", "09", "9", "0"]) == ["0", "09", "9", "10", large]


def test_a_list_is_prepared_and_trained(here, tmp_path: Path) -> None:
    root = tree(tmp_path / "photos", classes=2, images=3)
    files = sorted(root.rglob("*.JPEG"))
    rows = [f"{file.relative_to(tmp_path)},{file.parent.name},{file.parent.parent.name}" for file in files]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    assert here("prepare", "folder", "list.csv", "--out", "out").returncode == 0
    for place, kind in (("list.csv", "list"), ("out", "folder, variant original")):
        answer = here("train", "digits", *SMALL, "--data.path", place, "--name", kind.partition(",")[0])
        assert answer.returncode == 0, answer.stderr
        assert f"data: {place} ({kind}), 6 training and 6 validation images, 2 classes" in answer.stderr
    message = complaint(here("train", "digits", *SMALL, "--data.path", "nowhere"))
    assert "[data-not-found]" in message
    assert "nowhere" in message
