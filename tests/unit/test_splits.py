"""Dividing images into train, val and test."""

from collections import Counter
from pathlib import Path

import pytest
from conftest import raises
from hypothesis import given
from hypothesis import strategies as st
from sample_images import tree

from paceline.data.assign import assign
from paceline.data.listing import list_images, list_one_split
from paceline.data.splits import SPLITS, Division, divide

ROOT = Path("/images")


def _files(counts: list[int]) -> list[tuple[int, Path]]:
    return [
        (label, ROOT / f"{label}/{number:04d}.jpg") for label, count in enumerate(counts) for number in range(count)
    ]


@given(st.lists(st.integers(1, 60), min_size=2, max_size=5), st.floats(0.01, 0.45), st.floats(0, 0.45))
def test_every_class_has_the_same_fraction_in_each_split(counts: list[int], val: float, test: float) -> None:
    files = _files(counts)
    splits = divide(files, Division(val, test), str)
    assert sorted(file for part in splits.values() for file in part) == files
    assert all(part == sorted(part) for part in splits.values())
    found = {split: Counter(label for label, _ in part) for split, part in splits.items()}
    for label, count in enumerate(counts):
        assert abs(found["val"][label] - val * count) <= 2
        assert abs(found["test"][label] - test * count) < 1


def test_without_a_test_split_every_nth_file_is_for_validation() -> None:
    val = divide(_files([10, 5]), Division(0.2), str)["val"]
    assert [path.stem for _, path in val] == ["0004", "0009", "0004"]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=2, max_size=40))
def test_groups_are_not_divided(groups: list[tuple[int, int]]) -> None:
    """A group is (label, images); file names are GROUP_NUMBER.jpg."""
    files = sorted(
        (label, ROOT / f"{label}/object{number}_{image}.jpg")
        for number, (label, count) in enumerate(groups)
        for image in range(count)
    )
    splits = divide(files, Division(0.2, 0.1, r"(object[0-9]+)_"), str)
    assert sorted(file for part in splits.values() for file in part) == files
    of_group = [{path.stem.partition("_")[0] for _, path in splits[split]} for split in SPLITS]
    assert sum(map(len, of_group)) == len(groups)


def test_groups_are_divided_by_class_as_asked() -> None:
    files = [
        (label, ROOT / f"{label}/{group:02d}_{image}.jpg")
        for label in range(3)
        for group in range(20)
        for image in range(5)
    ]
    splits = divide(files, Division(0.2, 0.1, r"/([0-9]+)_"), str)  # the same object in all three classes
    assert {split: Counter(label for label, _ in part) for split, part in splits.items()} == {
        "train": dict.fromkeys(range(3), 70),
        "val": dict.fromkeys(range(3), 20),
        "test": dict.fromkeys(range(3), 10),
    }


@pytest.mark.parametrize("groups", [3, 4, 5])
def test_classes_with_few_groups_are_divided_together(groups: int) -> None:
    files = [
        (label, ROOT / f"{label}/{label}-{group}_{image}.jpg")
        for label in range(60)
        for group in range(groups)
        for image in range(4)
    ]
    splits = divide(files, Division(0.1, 0.1, r"/([0-9-]+)_"), str)
    for split in ("val", "test"):
        assert 0.08 < len(splits[split]) / len(files) < 0.12


def test_every_class_has_a_group_for_training() -> None:
    sizes = {0: [30, 30, 30, 30], 1: [8], 2: [7, 1]}
    files = [
        (label, ROOT / f"{label}/{label}-{group}_{image}.jpg")
        for label, counts in sizes.items()
        for group, count in enumerate(counts)
        for image in range(count)
    ]
    for val in (0.1, 0.3, 0.5, 0.7):
        splits = divide(files, Division(val, 0.1, r"/([0-9-]+)_"), str)
        assert {label for label, _ in splits["train"]} == {0, 1, 2}
        assert splits["val"]


def test_groups_of_each_split_are_spread_over_their_names() -> None:
    files = [(number % 2, ROOT / f"{number % 2}/{number // 4:03d}_{number % 4}.jpg") for number in range(800)]
    splits = divide(files, Division(0.1, 0.1, r"/([0-9]+)_"), str)
    assert splits == divide(files, Division(0.1, 0.1, r"/([0-9]+)_"), str)
    for split in ("val", "test"):
        groups = {int(path.stem.partition("_")[0]) for _, path in splits[split]}
        assert len(groups) == 20
        assert 60 < sum(groups) / len(groups) < 140  # of 0 to 199: 3 standard errors
        assert min(groups) < 40


def test_groups_of_all_sizes_are_in_every_split() -> None:
    files = [
        (0, ROOT / f"0/{group:03d}_{image}.jpg")
        for group in range(120)
        for image in range(1 + group % 2 * 4)  # every other group has five images
    ]
    splits = divide(files, Division(0.1, 0.1, r"/([0-9]+)_"), str)
    for split, part in splits.items():
        large = {group for _, path in part if int(group := path.stem.partition("_")[0]) % 2}
        assert len(large) == (48 if split == "train" else 6), "as many large groups as the fraction says"


def test_a_group_larger_than_a_split_is_for_training() -> None:
    files = [
        (0, ROOT / f"0/{group}_{image}.jpg") for group, count in enumerate([30, 30, 30, 5, 5]) for image in range(count)
    ]
    splits = divide(files, Division(0.05, 0.05, r"/([0-9]+)_"), str)
    assert {split: len(part) for split, part in splits.items()} == {"train": 90, "val": 5, "test": 5}


@pytest.mark.parametrize(
    ("division", "code"),
    [
        (Division(1.0), "invalid-val-fraction"),
        (Division(-0.1), "invalid-val-fraction"),
        (Division(0.1, 1.5), "invalid-test-fraction"),
        (Division(0.5, 0.5), "invalid-fractions"),
        (Division(group_by="x"), "missing-option"),
        (Division(0.1, group_by="("), "invalid-group-by"),
        (Division(0.5, group_by="no such name"), "group-not-found"),
        (Division(0.5, group_by="[.]"), "one-group"),
        (Division(0.0, 0.1), "no-val-split"),
        (Division(0.01, 0.01), "empty-split"),
    ],
)
def test_divisions_that_cannot_be_meant_are_refused(tmp_path: Path, division: Division, code: str) -> None:
    root = tree(tmp_path / "images", images=3, splits=("train",)) / "train"
    with raises(code):
        list_images(root, division)


def test_folders_and_lists_have_a_test_split(tmp_path: Path) -> None:
    root = tree(tmp_path / "images", images=2, splits=SPLITS)
    found = list_images(root)
    assert {split: len(part) for split, part in found.splits.items()} == dict.fromkeys(SPLITS, 6)
    files = sorted(root.rglob("*.JPEG"))
    rows = [f"{path.relative_to(root)},{path.parent.name},{path.parent.parent.name}\n" for path in files]
    (root / "list.csv").write_text("path,label,split\n" + "".join(rows))
    assert list_images(root / "list.csv") == found
    for place in (root, root / "list.csv"):
        assert list_one_split(place, "test").splits["test"] == found.splits["test"]
        assert list_one_split(place).splits["val"] == found.splits["val"]
        with raises("split-exists"):
            list_images(place, Division(0.0, 0.1))


def test_images_are_evaluated_as_the_split_they_have(tmp_path: Path) -> None:
    root = tree(tmp_path / "images", images=2, splits=("train", "test"))
    classes = root / "test"
    rows = [f"{path.relative_to(root)},{path.parent.name}" for path in sorted(classes.rglob("*.JPEG"))]
    (root / "no-split.csv").write_text("\n".join(["path,label", *rows]))
    for place, split in ((root, "test"), (classes, "all"), (root / "no-split.csv", "all")):
        found = list_one_split(place).splits
        assert [name for name, files in found.items() if files] == [split]
        assert len(found[split]) == 6
        with raises("unknown-split"):
            list_one_split(place, "val")


def test_a_test_folder_is_not_used_for_validation(tmp_path: Path) -> None:
    root = tree(tmp_path / "images", images=10, splits=("train", "test"))
    with raises("no-val-split"):
        list_images(root)
    assert {split: len(part) for split, part in list_images(root, Division(0.1)).splits.items()} == {
        "train": 27,
        "val": 3,
        "test": 30,
    }


def test_groups_that_a_given_split_shares_with_others_are_warned_of(caplog) -> None:
    def divided(test: range) -> list[tuple[int, str]]:
        groups = [("train", group) for group in range(10)] + [("test", group) for group in test]
        rows = [(split, label, f"{split}/p{group}_{label}") for split, group in groups for label in ("a", "b")]
        return assign(rows, "here", str, Division(0.2, group_by="p[0-9]+"))[1]["test"]

    assert len(divided(range(10, 14))) == 8
    assert "other splits" not in caplog.text
    assert len(divided(range(8, 12))) == 8
    assert "the given test split has images of 2 groups that other splits have as well, e.g. test/p8_a" in caplog.text


def test_a_list_without_training_images_is_refused(tmp_path: Path) -> None:
    root = tree(tmp_path / "images", classes=2, images=2, splits=("test",))
    rows = [f"{path},{path.parent.name},test\n" for path in root.rglob("*.JPEG")]
    (tmp_path / "list.csv").write_text("path,label,split\n" + "".join(rows))
    with raises("empty-split"):
        list_images(tmp_path / "list.csv", Division(0.5))


@pytest.mark.parametrize("division", [Division(0.3), Division(0.3, 0.3), Division(0.6, 0.3)])
def test_the_only_image_of_a_class_is_for_training(tmp_path: Path, caplog, division: Division) -> None:
    root = tree(tmp_path / "images", classes=3, images=10, splits=("train",)) / "train"
    for path in sorted((root / "n00000001").iterdir())[1:]:
        path.unlink()
    found = list_images(root, division)
    assert [split for split, part in found.splits.items() if any(label == 1 for label, _ in part)] == ["train"]
    assert "the val split has no images of n00000001" in caplog.text


def test_classes_that_differ_between_split_folders_are_refused(tmp_path: Path) -> None:
    root = tree(tmp_path / "images", classes=2, images=1)
    (root / "val" / "n00000001").rename(root / "val" / "other")
    with raises("empty-classes") as caught:
        list_images(root)
    assert caught.value.fields["classes"] == ["other"]
    assert "only val" in str(caught.value)


def test_one_class_is_refused(tmp_path: Path) -> None:
    with raises("too-few-classes"):
        list_images(tree(tmp_path / "images", classes=1, images=1))


def test_a_split_that_is_asked_for_and_gets_no_images_is_refused(tmp_path: Path) -> None:
    root = tree(tmp_path / "images", images=3, splits=("train",)) / "train"
    with raises("empty-split") as caught:
        list_images(root, Division(0.4, 0.01))
    assert "no images for test" in str(caught.value)
    with raises("empty-split") as caught:
        list_images(root, Division(0.1, group_by="n0+[0-9]"))
    assert "--group-by" in str(caught.value)
