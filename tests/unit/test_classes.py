"""Class names in checkpoints, exports and evaluation on other data."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import complaint, raises
from safetensors import safe_open
from sample_images import tree
from saved_checkpoints import read

from paceline.checkpoint import store
from paceline.data.classes import Class, match

WORDS = (
    *(
        "--data.name",
        "",
        "--data.size",
        24,
        "--data.augment",
        "null",
        "--train.global_batch",
        6,
        "--log.tensorboard",
        "false",
    ),
    *("--model.options", "{widths: [8, 16], norm: group}", "--train.duration", "12ba", "--precision", "fp32"),
)


def _classes(*names: str) -> list[Class]:
    return [Class(name, name) for name in names]


def test_classes_are_matched_by_id_then_by_name() -> None:
    model = [Class("n1", "crane"), Class("n2", "crane"), Class("n3", "dog")]
    assert match(model, [Class("n3", "hound"), Class("n2", "crane")], "run", "data") == [2, 1]
    assert match(model, [Class("x", "dog")], "run", "data") == [2]
    with raises("unknown-classes") as caught:
        match(model, [Class("x", "crane")], "run", "data")  # two classes of the model have that name
    assert caught.value.fields["classes"] == ["x"]
    with raises("duplicate-classes"):
        match(_classes("a", "b"), [Class("a", "x"), Class("c", "a")], "run", "data")


@pytest.fixture
def trained(here, tmp_path: Path) -> Path:
    tree(tmp_path / "photos", classes=3, images=4)
    assert here("train", "digits", *WORDS, "--data.path", "photos").returncode == 0
    return tmp_path / "runs" / "digits"


def _rename(root: Path, names: dict[str, str]) -> None:
    """Rename in two steps, since names may be swapped."""
    for split in ("train", "val"):
        for old in names:
            (root / split / old).rename(root / split / f"was-{old}")
        for old, new in names.items():
            (root / split / f"was-{old}").rename(root / split / new)


def _counts(text: str) -> str:
    return text.partition("top-1 ")[2]


def test_evaluation_on_reordered_partial_and_unknown_classes(here, tmp_path: Path, trained: Path) -> None:
    whole = here("evaluate", trained)
    assert whole.returncode == 0, whole.stderr
    shutil.copytree(tmp_path / "photos", tmp_path / "other")
    files = sorted((tmp_path / "other").rglob("*.JPEG"))
    rows = [f"{file.relative_to(tmp_path)},{file.parent.name},{file.parent.parent.name}" for file in files]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    assert _counts(here("evaluate", trained, "--data.path", "list.csv").stdout) == _counts(whole.stdout)
    for split in ("train", "val"):
        shutil.rmtree(tmp_path / "other" / split / "n00000000")
    part = here("evaluate", trained, "--data.path", "other")
    assert "2 of the model's 3 classes" in part.stdout, part.stderr
    assert "of 8)" in part.stdout
    _rename(tmp_path / "other", {"n00000001": "cat"})
    message = complaint(here("evaluate", trained, "--data.path", "other"))
    assert "[unknown-classes]" in message
    assert "3 (n00000000, n00000001, n00000002)" in message
    assert "2 (cat, n00000002)" in message


def _figures(text: str) -> tuple[int, float]:
    """Return the number of correct predictions and the loss."""
    found = re.search(r"\((\d+) of \d+\),.* loss ([\d.]+)", text)
    assert found, text
    return int(found[1]), float(found[2])


def test_labels_follow_their_names(here, tmp_path: Path, trained: Path) -> None:
    """Every class is in two of three subsets, with other label numbers: together they count every image twice."""
    correct, loss = _figures(here("evaluate", trained).stdout)
    parts = []
    for left_out in range(3):
        root = shutil.copytree(tmp_path / "photos" / "val", tmp_path / f"part-{left_out}")
        shutil.rmtree(root / f"n{left_out:08d}")
        parts.append(_figures(here("evaluate", trained, "--data.path", root).stdout))
    assert sum(part_correct for part_correct, _ in parts) == 2 * correct
    assert abs(sum(part_loss for _, part_loss in parts) / 3 - loss) < 2e-4  # of rounding


def test_evaluation_on_one_class_without_a_training_split(here, tmp_path: Path, trained: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "photos" / "val" / "n00000001").rename(tmp_path / "test" / "n00000001")
    answer = here("evaluate", trained, "--data.path", "test")
    assert "test (all images), 1 of the model's 3 classes" in answer.stdout, answer.stderr
    assert "of 4)" in answer.stdout
    assert "prepare folder" not in answer.stderr  # it needs both splits


def test_checkpoints_and_exports_describe_classes_and_preprocessing(here, tmp_path: Path, trained: Path) -> None:
    _, parts = read(next(store.committed(trained / "checkpoints")))
    assert here("export", trained, "--checkpoint", "last", "--to", "weights.safetensors").returncode == 0
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["paceline"])
    same = {name: value for name, value in parts["progress"].items() if name not in ("scaler", "evaluations", "recipe")}
    assert {name: metadata[name] for name in same} == same
    assert metadata["recipe"]["data"]["path"] == "photos"  # without the folders of this machine
    assert metadata["classes"] == [[name, name] for name in ("n00000000", "n00000001", "n00000002")]
    preprocessing = metadata["preprocessing"]
    assert (preprocessing["size"], preprocessing["crop_pct"]) == ([24, 24], 0.875)
    assert (len(preprocessing["mean"]), preprocessing["interpolation"]) == (3, "bilinear")
    model = {"name": "airbench", "num_classes": 3, "in_chans": 3, "options": {"widths": [8, 16], "norm": "group"}}
    assert metadata["model"] == model
