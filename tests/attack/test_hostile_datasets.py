"""Untrusted prepared data with valid checksums: rejected with a message, or the same data."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import complaint, raises

from attack.datasets import Change, change, crops, describe_files, make_arrays, make_shards, train
from paceline.data import arrays, description
from paceline.data.description import DESCRIPTION, sealed
from paceline.data.files import file_entry, npy_header
from paceline.data.index import INDEX
from paceline.data.shards import Dataset


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return make_shards(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data")


# ---- dataset.json ----

VALUES: list[Any] = [
    *(None, True, -1, 0, 1.0, 1.5, 1e308, float("nan"), float("inf"), 1 << 63, 1 << 64, 10**30),
    *("", "..", "../x", "/etc/passwd", "a\0b", "\x1b[2J", "x" * 100_000, "\ud800"),
    *([], {}, [[]], {"x": 1}, [1] * 70_000),
]
HARMLESS = {"name", "classes", "prepared", "remarks", "splits", "bytes", "max_side", "short_side", "quality"}


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value, including containers."""
    if path:
        yield path
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from _paths(value, (*path, key))


def _set(node: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


def test_invalid_values_with_valid_checksums_are_rejected_or_harmless(here, data: Path, survived) -> None:
    """Every value of a description is replaced by invalid ones: an error, or the same pixels and labels."""
    text, expected = (data / DESCRIPTION).read_text(), crops(data)
    paths = [path for path in _paths(json.loads(text)) if path[0] not in ("sha256", "fingerprint")]
    tried = random.Random(0).sample([(path, value) for path in paths for value in VALUES], 1500)
    rejected = 0
    for path, value in tried:
        changed = json.loads(text)
        _set(changed, path, value)
        (data / DESCRIPTION).write_text(json.dumps(sealed(changed)))
        answer = here("data", data, "--check")
        assert "\x1b" not in answer.stdout + answer.stderr
        if answer.returncode:
            complaint(answer)
            rejected += 1
        else:
            assert {path[0], path[-1]} & HARMLESS, (path, value)
            assert all(np.array_equal(one, other) for one, other in zip(crops(data), expected, strict=True))
    assert rejected > 1000
    survived("invalid values in dataset.json with valid checksums", len(tried))


def _files(it: dict[str, Any]) -> dict[str, Any]:
    return it["variants"]["original"]["splits"]["train"]


@pytest.mark.parametrize(
    ("how", "part"),
    [
        (lambda it: it["classes"][1].update(id="n00000000"), "two classes have the id 'n00000000'"),
        (lambda it: it["classes"].pop(), "per_class does not add up to 12 samples of 2 classes"),
        (lambda it: it["splits"]["train"].update(per_class=[4, 4, 5]), "per_class does not add up to 12 samples"),
        (lambda it: it["splits"].pop("val"), "variants.original does not have the splits train"),
        (lambda it: it["splits"]["train"].update(samples=1 << 40), "splits.train.samples: Input should be less than"),
        (lambda it: it.update(classes=[{"id": f"c{n}", "name": ""} for n in range(70_000)]), "at most 65535 items"),
        (lambda it: it["classes"][0].update(id="../../x"), "classes.0.id: String should match pattern"),
        (lambda it: _files(it)["lists"].reverse(), "lists are not index.npy and names.txt"),
        (
            lambda it: _files(it)["shards"][0].update(file="shard-00001.pcl"),
            "shards are not numbered from shard-00000.pcl",
        ),
        (lambda it: _files(it)["shards"][0].update(samples=11), "shards do not hold 12 samples"),
        (lambda it: it["variants"].update({"../x": it["variants"]["original"]}), "variants.../x"),
        (lambda it: it["variants"].update({"\x1b[2J": it["variants"]["original"]}), r"variants.\x1b[2J"),
    ],
)
def test_contradictions_with_valid_checksums_are_rejected(here, data: Path, how: Change, part: str, survived) -> None:
    change(data, how)
    for words in (("data", data), train(data)):
        message = complaint(here(*words))
        assert "[dataset-corrupt]" in message
        assert str(data / DESCRIPTION) in message
        assert part in message
    survived("contradictions in dataset.json with valid checksums")


def test_fingerprint_covers_classes_and_splits_and_cannot_be_forged(data: Path, tmp_path: Path) -> None:
    text, found = (data / DESCRIPTION).read_text(), {before := Dataset.open(data).fingerprint}
    changes: list[Change] = [
        lambda it: it["classes"][0].update(name="another"),
        lambda it: it["classes"][0].update(id="another"),
        lambda it: it["classes"].reverse(),
        lambda it: it["variants"].pop("max-32-q90"),
        lambda it: it["splits"]["val"].update(left_out=1),
        lambda it: it.update(name="another"),
    ]
    for how in changes:
        (data / DESCRIPTION).write_text(text)
        change(data, how)
        found.add(Dataset.open(data).fingerprint)
    assert len(found) == 1 + len(changes)
    forged = json.loads((data / DESCRIPTION).read_text()) | {"fingerprint": before}
    forged["sha256"] = description._digest(forged)
    (data / DESCRIPTION).write_text(json.dumps(forged))
    with raises("dataset-corrupt") as caught:
        Dataset.open(data)
    assert "its fingerprint" in str(caught.value)
    (data / DESCRIPTION).write_text(text)
    change(data, lambda it: it["prepared"].update(source="elsewhere"))
    assert Dataset.open(data).fingerprint == before
    folder = make_arrays(tmp_path)
    before = arrays.read(folder, "cifar10")[0]["fingerprint"]
    change(folder, lambda it: it["classes"].reverse())
    assert arrays.read(folder, "cifar10")[0]["fingerprint"] != before


@pytest.mark.parametrize(
    "content",
    [b"[" * 1_000_000, b'{"a":' * 200_000, b"9" * 100_000, b"", b"\xff\xfe\x00", b"null", b"[]", b'"shards"', b"\0\0"],
    ids=range(9),
)
def test_json_that_is_a_bomb_or_not_a_description(here, data: Path, content: bytes, survived) -> None:
    (data / DESCRIPTION).write_bytes(content)
    for words in (("data", data, "--check"), train(data)):
        complaint(here(*words))
    survived("JSON that is not a description", 2)


# ---- index.npy and other arrays ----


def _forge(data: Path, field: str, number: int, value: int) -> None:
    """Change a value of the index, and update the checksums."""
    path = data / "original" / "train" / "index.npy"
    rows = np.load(path)
    rows[field][number] = value
    path.write_bytes(npy_header(INDEX, rows.shape) + rows.tobytes())
    change(data, describe_files(data))


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("label", 3, "a sample has the label 3, but there are 3 classes"),
        ("label", 65_535, "a sample has the label 65535, but there are 3 classes"),
        ("label", 1, "3 samples have the label 0 instead of 4"),
        ("shard", 1, "samples per shard do not match dataset.json"),
        ("shard", 65_535, "samples per shard do not match dataset.json"),
        ("offset", 1 << 40, "sample 0 lies outside its shard"),
        ("offset", (1 << 64) - 1, "sample 0 lies outside its shard"),
        ("offset", (1 << 64) - 900, "sample 0 lies outside its shard"),
        ("length", (1 << 32) - 1, "sample 0 lies outside its shard"),
        ("width", 0, "sample 0 has 0 x 30 pixels"),
        ("height", 0, "sample 0 has 40 x 0 pixels"),
    ],
)
def test_forged_rows_are_rejected_before_training(
    here, data: Path, field: str, value: int, part: str, survived
) -> None:
    _forge(data, field, 0, value)
    for words in (("data", data, "--check"), train(data)):
        message = complaint(here(*words))
        assert "[dataset-corrupt]" in message
        assert part in message
    assert not list(Path("runs").glob("*"))
    survived("forged rows in index.npy with valid checksums", 2)


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("width", 41, "40 x 30 pixels, but 41 x 30 in the index"),
        ("offset", 1, "the record's header is corrupt"),
        ("length", 100, "the record's header is corrupt"),
    ],
)
def test_rows_that_contradict_their_records_are_detected(
    here, data: Path, field: str, value: int, part: str, survived
) -> None:
    _forge(data, field, 0, value)
    message = complaint(here("data", data, "--check"))
    assert "[dataset-corrupt]" in message
    assert part in message
    survived("forged rows in index.npy with valid checksums")


HEADERS = [
    b"\x93NUMPY\x01\x00" + (246).to_bytes(2, "little") + b"(" * 246,
    b"\x93NUMPY\x01\x00" + (246).to_bytes(2, "little") + b"-" * 246,
    b"\x93NUMPY\x01\x00" + b"\xff\xff" + b"[" * 65_535,
    b"\x93NUMPY\x02\x00" + (1 << 31).to_bytes(4, "little") + b"{" * 244,
    b"\x93NUMPY\x03\x00" + (244).to_bytes(4, "little") + b"\xff" * 244,
    b"\x93NUMPY\x09\x00" + b" " * 248,
    npy_header(np.dtype(object), (12,)),
    *(npy_header(INDEX, shape) for shape in [(-12,), (1 << 62,), (3, 4), (13,), ()]),
    npy_header(INDEX, (12,)).replace(b"False", b"True "),
    npy_header(INDEX, (12,)).replace(b"<u8", b">u8"),
    npy_header(INDEX, (12,)).replace(b"<u8", b"<f8"),
    npy_header(INDEX, (12,)).replace(b"'descr'", b"{1:{}}:"),
    b"PK\x03\x04" + bytes(252),
    b"\x80\x04cos\nsystem\n" + bytes(243),
    b"",
]


def test_forged_headers_are_never_parsed(here, data: Path, tmp_path: Path, survived) -> None:
    (tmp_path / "arrays").mkdir()
    folder = make_arrays(tmp_path / "arrays")
    index, labels = data / "original" / "train" / "index.npy", folder / "val_labels.npy"
    assert np.array_equal(np.load(labels), np.arange(20) % 10)  # NumPy reads valid ones
    contents = index.read_bytes()[256:], labels.read_bytes()[256:]
    for header in HEADERS:
        index.write_bytes(header + contents[0])
        change(data, describe_files(data))
        message = complaint(here("data", data, "--check"))
        assert "[dataset-corrupt]" in message
        assert str(index) in message
        labels.write_bytes(header + contents[1])
        change(folder, lambda it: it["splits"]["val"].update(labels=file_entry(labels)))
        message = complaint(here("data", folder, "--check"))
        assert "[dataset-corrupt]" in message
        assert str(labels) in message
    survived("forged headers of arrays with valid checksums", 2 * len(HEADERS))


@pytest.mark.parametrize(
    ("how", "part"),
    [
        (lambda it: it["classes"].pop(), "has the label 9, but there are 9 classes"),
        (lambda it: it["classes"].__setitem__(0, "class 1"), "two classes have the name 'class 1'"),
        (lambda it: it.update(classes=["one"]), "classes: List should have at least 2 items"),
        (lambda it: it.update(shape=[4, 4]), "shape: List should have at least 3 items"),
        (lambda it: it.update(shape=[4096, 4096, 4096]), "takes more than 17.2 GB of memory"),
        (lambda it: it.update(shape=[4, 4, -3]), "shape.2: Input should be greater than or equal to 1"),
        (lambda it: it["splits"]["val"].update(samples=19), "val_images.npy is corrupt"),
        (lambda it: it["splits"].pop("val"), "its splits are not train and val"),
        (lambda it: it["splits"]["val"]["labels"].update(bytes=1), "dataset.json lists 1 bytes"),
    ],
)
def test_forged_arrays_are_rejected(here, tmp_path: Path, how: Change, part: str, survived) -> None:
    change(make_arrays(tmp_path), how)
    for words in (("data", ".", "--check"), ("train", "cifar10-fast", "--data.path", ".")):
        message = complaint(here(*words))
        assert "[dataset-corrupt]" in message
        assert part in message
    survived("contradictions in dataset.json with valid checksums")


def test_arrays_of_an_outdated_format_are_rejected(here, tmp_path: Path, survived) -> None:
    change(make_arrays(tmp_path), lambda it: it.update(format=1))
    for words in (("data", ".", "--check"), ("train", "cifar10-fast", "--data.path", ".")):
        assert "[dataset-format-outdated]" in complaint(here(*words))
    survived("contradictions in dataset.json with valid checksums")
