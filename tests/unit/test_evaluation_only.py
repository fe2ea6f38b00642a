"""Prepared data without training images: it is evaluated, but not trained on."""

from pathlib import Path

import pytest
from conftest import complaint, raises
from photo_sources import write_tar
from sample_images import contents
from trained_model import CPU, train_model

import paceline as pl
from paceline.data.prepare.sources import open_source
from paceline.data.shards import Dataset
from paceline.data.splits import AS_GIVEN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model, and the same validation images in prepared data and in a folder TEST/test."""
    place = tmp_path_factory.mktemp("colors")
    train_model(place)
    (place / "alone").mkdir()
    (place / "alone" / "test").symlink_to(place / "images" / "val")
    return place


def _sources(folder: Path, tmp_path: Path) -> list[str | dict[str, str]]:
    images = folder / "images" / "val"
    rows = [f"{path},{path.parent.name},test" for path in sorted(images.rglob("*.jpg"))]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    files = {f"test/{name}": content for name, content in contents(images).items()}
    archive = write_tar(tmp_path / "images.tar", files)
    return [str(folder / "alone"), str(tmp_path / "list.csv"), str(archive), {"test": str(images)}]


def test_sources_may_have_a_test_split_only(folder: Path, tmp_path: Path) -> None:
    for source in _sources(folder, tmp_path):
        found = open_source(source, "", {}, AS_GIVEN)
        assert found.sizes == {"test": 27}
        assert [entry.id for entry in found.classes] == ["blue", "green", "red"]


def test_it_is_evaluated_like_the_same_images_elsewhere(folder: Path, tmp_path: Path, here) -> None:
    run = folder / "runs" / "colors"
    answer = here("prepare", "--test", folder / "images" / "val", "--out", "alone")
    assert answer.returncode == 0, answer.stderr
    assert list(Dataset.open(tmp_path / "alone").description["splits"]) == ["test"]
    expected = pl.evaluate(run, in_process=True)
    for split in ("test", ""):
        assert pl.evaluate(run, data=tmp_path / "alone", split=split, in_process=True) == expected
    with raises("unknown-split"):
        pl.evaluate(run, data=tmp_path / "alone", split="train", in_process=True)
    assert here("predict", run, "alone", "--split", "test", *CPU).returncode == 0


def test_training_on_it_names_the_missing_split(folder: Path, tmp_path: Path, here) -> None:
    pl.prepare(folder / "alone", tmp_path / "alone", workers=1)
    for place in ("alone", folder / "alone"):
        answer = here(
            "train", "finetune-full", "--data.path", place, "--model.weights", "random", "--model.name", "resnet18"
        )
        message = complaint(answer)
        assert "[no-train-split]" in message
        assert "only test" in message
    with raises("no-train-split"):
        pl.plan("finetune-full", {"data.path": str(tmp_path / "alone"), "model.weights": "random"})


def test_a_folder_without_splits_is_not_meant_for_testing_by_default(folder: Path) -> None:
    with raises("no-val-split") as caught:
        open_source(str(folder / "images" / "val"), "", {}, AS_GIVEN)
    assert "--test" in str(caught.value)
