"""`paceline data --duplicates` on prepared images."""

import csv
from pathlib import Path

import pytest
from conftest import complaint, raises
from PIL import Image
from sample_images import jpeg, sample_image

import paceline
from paceline.data import duplicates

SPLITS = ("train", "val", "test")


def _save(root: Path, name: str, image: Image.Image, quality: int = 90) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jpeg(image, quality=quality))


def _source(root: Path) -> Path:
    """Write different images in all splits, flat ones, and four changed copies."""
    for number, split in enumerate(SPLITS):
        for label in ("cat", "dog"):
            for image in range(3):
                seed = 100 * number + 10 * image + (label == "dog")
                _save(root, f"{split}/{label}/{seed}.jpg", sample_image(340, 300, seed))
            _save(root, f"{split}/{label}/flat.jpg", Image.new("RGB", (300, 300), (number * 90, 128, 60)))
    first = sample_image(340, 300, 0)
    _save(root, "test/cat/copy.jpg", first.resize((260, 230)), 60)
    _save(root, "test/dog/other-label.jpg", first.crop((1, 1, 340, 300)))
    _save(root, "val/dog/copy.jpg", sample_image(340, 300, 11).convert("L"))
    _save(root, "test/cat/small.jpg", sample_image(340, 300, 210).resize((120, 100)))
    return root


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("duplicates")
    return paceline.prepare(_source(folder / "in"), folder / "out", original=True, max_side=128, workers=1)


@pytest.mark.parametrize("variant", ["original", "max-128-q90"])
def test_copies_are_found_in_every_variant(prepared: Path, tmp_path: Path, variant: str) -> None:
    found = paceline.PreparedData(prepared, variant).duplicates(tmp_path / "pairs.csv", sheet=tmp_path / "pairs.png")
    clusters: dict[int, set[str]] = {}
    for pair in found.pairs:
        clusters.setdefault(pair.cluster, set()).update((pair.first.name, pair.second.name))
    assert sorted(map(sorted, clusters.values())) == [
        ["test/cat/210.jpg", "test/cat/small.jpg"],
        ["test/cat/copy.jpg", "test/dog/other-label.jpg", "train/cat/0.jpg"],
        ["train/dog/11.jpg", "val/dog/copy.jpg"],
    ]
    assert found.copies == {
        **{(split, other): 0 for split in SPLITS for other in SPLITS},
        ("train", "val"): 1,
        ("val", "train"): 1,
        ("train", "test"): 1,
        ("test", "train"): 2,
        ("test", "test"): 4,
    }
    assert (found.flat, found.unreadable, found.num_images) == (6, [], 28)
    with (tmp_path / "pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found.pairs) >= 4
    assert {row["labels_differ"] for row in rows if row["cluster"] == "1"} == {"yes", "no"}
    assert all(int(row["distance"]) <= 7 and float(row["correlation"]) >= 0.9 for row in rows)
    with Image.open(tmp_path / "pairs.png") as sheet:
        assert sheet.size == (8 * 128, -(-2 * len(rows) // 8) * (128 + 14))


def test_the_command_warns_and_writes_a_list_without_leaks(here, prepared: Path, tmp_path: Path) -> None:
    words = ("--variant", "original", "--duplicates", "--out", "pairs.csv", "--keep-list", "kept.csv")
    answer = here("data", prepared, *words)
    assert answer.returncode == 0, answer.stderr
    lines = [line.split() for line in answer.stdout.splitlines()]
    assert ["of", "test", "2", "0", "4"] in lines
    assert "warning: 2 test images have a near-duplicate in train; the test accuracy may be too high" in answer.stdout
    assert "warning: 1 val image has a near-duplicate in train" in answer.stdout
    assert "--group-by" in answer.stdout
    assert "(labels cat and dog)" in answer.stdout
    assert (tmp_path / "pairs.csv").is_file()
    before = (tmp_path / "kept.csv").read_text()
    assert "[output-exists]" in complaint(here("data", prepared, *words))  # it may be the list of the source
    assert (tmp_path / "kept.csv").read_text() == before
    source = prepared.parent / "in"
    (source / "kept.csv").write_text((tmp_path / "kept.csv").read_text())
    again = paceline.prepare(source / "kept.csv", tmp_path / "again", workers=1)
    found = paceline.PreparedData(again).duplicates()
    assert found.num_images == 26  # without the two training images
    assert {key for key, count in found.copies.items() if count} == {("test", "test")}
    assert "warning" not in here("data", "again", "--duplicates").stdout


def test_many_copies_make_one_pair_each(tmp_path: Path, monkeypatch) -> None:
    for number in range(12):
        _save(tmp_path / "in", f"train/{'ab'[number % 2]}/{number}.jpg", sample_image(280, 280, 1), 90)
        _save(tmp_path / "in", f"val/{'ab'[number % 2]}/{number}.jpg", sample_image(280, 280, 2 + number), 90)
    paceline.prepare(tmp_path / "in", tmp_path / "out", workers=1)
    data = paceline.PreparedData(tmp_path / "out")
    found = data.duplicates(max_distance=0)
    assert len(found.pairs) == 11
    assert found.copies["train", "train"] == 12
    monkeypatch.setattr(duplicates, "_MAX_PAIRS", 10)
    with raises("too-many-duplicates"):
        data.duplicates()


def test_no_pairs_and_corrupt_images(here, tmp_path: Path) -> None:
    for number in range(8):
        split, label = ("train", "val")[number % 2], "ab"[number // 2 % 2]
        _save(tmp_path / "in", f"{split}/{label}/{number}.jpg", sample_image(280, 280, number))
    assert here("prepare", "folder", "in", "--out", "out").returncode == 0
    shard = tmp_path / "out" / "original" / "train" / "shard-00000.pcl"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    answer = here("data", "out", "--duplicates", "--show", "pairs.png", "--out", "pairs.csv")
    assert answer.returncode == 0, answer.stderr
    assert "8 images: 0 pairs of near-duplicates" in answer.stdout
    assert "warning: 1 images cannot be read" not in answer.stdout
    assert "warning: 1 image cannot be read" in answer.stdout
    assert not (tmp_path / "pairs.png").exists()
    assert len((tmp_path / "pairs.csv").read_text().splitlines()) == 1


def test_options_that_do_not_fit_are_errors(here, prepared: Path) -> None:
    for words, code in (
        (("--duplicates", "--out", "pairs.txt"), "wrong-suffix"),
        (("--duplicates", "--split", "val"), "option-not-applicable"),
        (("--duplicates", "--export", "jpeg", "--out", "x"), "conflicting-options"),
        (("--keep-list", "x.csv"), "missing-option"),
        (("--max-distance", "3"), "missing-option"),
    ):
        assert f"[{code}]" in complaint(here("data", prepared, "--variant", "original", *words))
    assert "--max-distance" in complaint(here("data", prepared, "--duplicates", "--max-distance", "8"))
    with raises("invalid-distance"):
        paceline.PreparedData(prepared, "original").duplicates(max_distance=8)
