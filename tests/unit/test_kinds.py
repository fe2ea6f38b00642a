"""Which data a recipe means: the path decides, and what cannot be meant is refused."""

import json
from pathlib import Path

import pytest
from conftest import complaint
from sample_images import tree

from paceline.config.data import Data
from paceline.config.io import load_recipe
from paceline.config.recipe import Recipe
from paceline.data.kinds import kind_of, resolve
from paceline.data.prepare.sources import fingerprint, listing
from paceline.errors import ConfigError, UserError
from paceline.track.records import RunFolder

SMALL = (
    *("--data.name", "", "--data.size", 24, "--data.augment", "{flip: random}", "--train.global_batch", 4),
    *("--model.options", "{widths: [8, 16], norm: group}", "--train.duration", "2ba", "--log.tensorboard", "false"),
)


def test_a_recipe_without_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: nothing\n")
    with pytest.raises(ConfigError, match=r"data: missing; set data\.path"):
        load_recipe(str(path))


def test_a_path_beside_built_in_data_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.name=digits is built in and reads no files"):
        load_recipe("digits", ["--data.path", "photos"])


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
def test_the_path_decides(tmp_path: Path, make, kind: str) -> None:
    make(tmp_path)
    assert resolve(Recipe("x", data=Data(path=str(tmp_path)))).data.name == kind


def test_remote_data_is_prepared_data() -> None:
    assert kind_of("s3://bucket/photos") == "shards"


@pytest.mark.parametrize("name", ["notes.txt", "empty"])
def test_what_holds_no_images_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=rf"{name}' (is a file, but not a list|holds neither prepared data)"):
        kind_of(str(tmp_path / name))


def test_a_name_that_contradicts_the_path_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    """The message must not advise to prepare CIFAR-10 into somebody's images."""
    _class_folders(tmp_path)
    with pytest.raises(UserError) as caught:
        resolve(Recipe("x", data=Data(name="cifar10", path=str(tmp_path))))
    assert "is an image folder, not prepared cifar10" in str(caught.value)
    assert "set data.name to folder" in str(caught.value)
    assert "paceline prepare" not in str(caught.value)


def test_images_in_a_folder_are_trained_without_naming_the_kind(here, tmp_path: Path) -> None:
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


def test_a_list_has_splits_of_its_own(tmp_path: Path) -> None:
    path = _list(tmp_path, "path,label,split", "dog/0.jpg,dog,train", "cat/0.jpg,cat,train", "cat/1.jpg,cat,val")
    found = listing(path)
    assert (found.ids, [label for label, _ in found.train], [label for label, _ in found.val]) == (
        ["cat", "dog"],
        [1, 0],
        [0],
    )


def test_labels_of_a_list_are_part_of_its_fingerprint(tmp_path: Path) -> None:
    """Renamed, but in the same order: the same files with the same numbers."""
    prints = set()
    for dog in ("dog", "wolf"):
        path = _list(tmp_path, "path,label,split", f"dog/0.jpg,{dog},train", "cat/0.jpg,cat,train", "cat/1.jpg,cat,val")
        prints.add(fingerprint(listing(path), path))
    assert len(prints) == 2


def test_a_list_without_splits_is_divided(tmp_path: Path) -> None:
    rows = [f"{label}/{number}.jpg\t{label}" for label in ("cat", "dog") for number in range(4)]
    path = _list(tmp_path, "file\tclass", *rows, name="list.tsv")
    with pytest.raises(UserError, match="has no validation split"):
        listing(path)
    found = listing(path, val_fraction=0.25)
    assert (len(found.train), len(found.val)) == (6, 2)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["cat/0.jpg,cat"], "line 1 names no path column"),
        (["path,kind", "cat/0.jpg,cat"], "line 1 names no label column"),
        (["path,label", "cat/9.jpg,cat"], "line 2: .*cat/9.jpg does not exist"),
        (["path,label", "cat/0.jpg,"], "line 2 has no label"),
        (["path,label", "cat/0.jpg,cat, tabby"], "line 2 has 3 fields, the header 2; quote values that hold a comma"),
        (["path,label", 'cat/0.jpg,"cat', "cat/1.jpg,dog"], "is not readable as a list|spans several lines"),
        (["path,label,split", "cat/0.jpg,cat,train", "cat/0.jpg,cat,val"], "line 3: cat/0.jpg is in line 2 already"),
        (["path,label,Label", "cat/0.jpg,cat,dog"], "line 1 names label and label; keep one of them"),
        (["path,label,split", "cat/0.jpg,cat,later"], "line 2 has the split 'later'; use train or val"),
        (["path,label,split", "cat/0.jpg,cat,train", "cat/1.jpg,cat,val"], "has 1 classes"),
        (["path,label,split", "cat/0.jpg,cat,train", "dog/0.jpg,dog,val"], "no training images of dog"),
        (["path,label,split", "cat/0.jpg,cat,train", "dog/0.jpg,dog,train"], "no images for val"),
    ],
)
def test_mistakes_in_a_list_are_named(tmp_path: Path, lines: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        listing(_list(tmp_path, *lines))


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
    assert "does not exist (looked for " in complaint(here("train", "digits", *SMALL, "--data.path", "nowhere"))
