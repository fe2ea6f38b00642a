"""Counts in messages."""

from pathlib import Path

from conftest import raises
from sample_images import tree

from paceline.data.listing import list_images
from paceline.system.wording import counted


def test_one_thing_is_singular() -> None:
    assert counted(1, "image") == "1 image"
    assert counted(0, "image") == "0 images"
    assert counted(2000, "class", "classes") == "2,000 classes"


def test_messages_use_it(tmp_path: Path) -> None:
    with raises("too-few-classes") as caught:
        list_images(tree(tmp_path / "images", classes=1, images=1))
    assert "contains 1 class folder." in str(caught.value)
