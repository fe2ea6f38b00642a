"""The readers of `paceline prepare`: every source gives the same images as the folder that it was made from."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import complaint, raises
from photo_sources import CLASSES, files_of, make_photos, read_all, write_tar
from sample_images import contents, tree

import paceline as pl
from paceline.data.prepare.readers import detect, read
from paceline.data.prepare.readers.webdataset import _splits, expand
from paceline.data.prepare.sources import open_source
from paceline.data.shards import Dataset
from paceline.data.splits import AS_GIVEN, Division


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos") / "photos")


# ---- WebDataset ----


def _shard(path: Path, images: list[tuple[str, bytes]], kind: str = "cls") -> None:
    """Labels come before the images in the first shard, and after them in others."""
    files: dict[str, bytes] = {}
    for number, (label, content) in enumerate(images):
        text = {"cls": str(CLASSES.index(label)), "txt": label, "json": json.dumps({"label": label, "width": 24})}[kind]
        files |= {f"{number:04d}.{kind}": text.encode(), f"{number:04d}.jpg": content}
    path.parent.mkdir(exist_ok=True, parents=True)
    write_tar(path, files if path.stem.endswith("0") else dict(reversed(files.items())))


@pytest.mark.parametrize("kind", ["cls", "json", "txt"])
def test_webdataset_shards(photos: Path, tmp_path: Path, kind: str) -> None:
    files = files_of(photos)
    _shard(tmp_path / "x-train-000.tar", files["train"][:5], kind)
    _shard(tmp_path / "x-train-001.tar", files["train"][5:], kind)
    _shard(tmp_path / "x-val-000.tar", files["val"], kind)
    (tmp_path / "names.txt").write_text("\n".join(CLASSES))
    names = tmp_path / "names.txt" if kind == "cls" else None
    for source in (tmp_path, tmp_path / "x-*.tar", tmp_path / "x-{train-00{0..1},val-000}.tar"):
        assert detect(str(source)) == "webdataset"
        found = open_source(str(source), "", {}, AS_GIVEN, 0, names)
        classes = [entry.name for entry in found.classes]
        assert classes == list(CLASSES)
        read = {s: sorted((classes[one.label], one.read()) for one in part()) for s, part in found.splits.items()}
        assert read == files


def test_splits_of_shards_from_folders_or_as_given(photos: Path, tmp_path: Path) -> None:
    files = files_of(photos)
    _shard(tmp_path / "test" / "train" / "0.tar", files["train"], "txt")
    _shard(tmp_path / "test" / "validation" / "0.tar", files["val"], "txt")
    assert read_all(str(tmp_path / "test")) == files
    both = {"train": str(tmp_path / "test/train/*.tar"), "val": str(tmp_path / "test/validation")}
    assert read_all(both, "webdataset") == files
    assert read_all({"train": str(photos / "train"), "val": both["val"]}) == files  # two kinds of sources
    divided = read_all(str(tmp_path / "test/train/0.tar"), "webdataset", Division(0.25))
    assert sorted(divided["train"] + divided["val"]) == files["train"]


def test_the_query_string_of_a_url_names_no_split() -> None:
    shards = [f"https://host/{name}-0.tar?for=test/train" for name in ("val", "other")]
    assert list(_splits(shards, "https://host").values()) == ["val", ""]
    assert detect("https://host/photos.tar?version={1}*") == "tar"
    assert detect("https://host/train-{0..1}.tar?key=a") == "webdataset"


def test_braces_expand_as_in_a_shell() -> None:
    assert expand("a-{008..011}.tar") == [f"a-{number}.tar" for number in ("008", "009", "010", "011")]
    assert expand("{a,b}-{0..1}") == ["a-0", "a-1", "b-0", "b-1"]
    assert expand("plain") == ["plain"]


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"1.jpg": b"", "2.jpg": b"", "2.cls": b"1"}, "sample-without-label"),
        ({"1.jpg": b"", "1.json": b"{broken"}, "sample-without-label"),
        ({"1.jpg": b"", "1.png": b"", "1.cls": b"1"}, "duplicate-images"),
        ({"1.jpg": b"", "1.txt": b"a caption\nof two lines"}, "label-invalid"),
        ({"1.cls": b"1"}, "source-empty"),
        ({"1.jpg": b"", "1.cls": b"1", "2.jpg": b"", "2.cls": b"1"}, "too-few-classes"),
    ],
)
def test_shards_that_cannot_be_meant_are_refused(tmp_path: Path, files: dict[str, bytes], code: str) -> None:
    write_tar(tmp_path / "shard-0.tar", files)
    with raises(code):
        read_all(str(tmp_path / "shard-0.tar"), "webdataset", Division(0.5))


def test_missing_shards_and_names_are_refused(photos: Path, tmp_path: Path) -> None:
    _shard(tmp_path / "train-0.tar", files_of(photos)["train"])
    with raises("source-not-found") as caught:
        read_all(str(tmp_path / "train-{0..3}.tar"))
    assert "train-3.tar (3 in total)" in str(caught.value)
    (tmp_path / "names.txt").write_text("cat\n")
    with raises("class-names-mismatch"):
        open_source(str(tmp_path / "train-0.tar"), "webdataset", {}, Division(0.5), 0, tmp_path / "names.txt")
    _shard(tmp_path / "other-0.tar", files_of(photos)["val"])
    with raises("splits-incomplete"):
        read_all(str(tmp_path))


def test_names_of_classes_may_have_a_byte_order_mark(photos: Path, tmp_path: Path) -> None:
    files = [path for path in sorted(photos.rglob("*")) if path.is_file()][:4]
    (tmp_path / "names.txt").write_bytes(b"\xef\xbb\xbfcat\r\ndog\r\n")
    for labels, code in ((("0", "1"), ""), (("0", "9" * 5000), "class-names-mismatch")):
        rows = [f"{path},{labels[number % 2]},{'train' if number < 2 else 'val'}" for number, path in enumerate(files)]
        (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]))
        with raises(code) if code else nullcontext():
            found = open_source(str(tmp_path / "list.csv"), "list", {}, Division(), 0, tmp_path / "names.txt")
            assert [entry.name for entry in found.classes] == ["cat", "dog"]


# ---- extensions and the command ----

_MODULE = """
import paceline as pl

@pl.register_reader("pairs")
def pairs(source, prefix="", broken=False):
    for line in open(source).read().splitlines():
        path, label = line.split()
        if broken:
            raise KeyError(path)
        yield pl.RawImage(path, prefix + label, lambda path=path: open(path, "rb").read())
"""


def test_a_registered_reader(here, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "my_reader.py").write_text(_MODULE)
    rows = [f"{path} {path.parent.name}" for path in sorted((photos / "train").rglob("*.jpg"))]
    (tmp_path / "pairs.txt").write_text("\n".join([*rows, f"{tmp_path / 'gone.jpg'} cat"]))
    words = ("prepare", "pairs", "pairs.txt", "--out", "out", "--import", "my_reader", "--val-fraction", "0.25")
    try:
        message = complaint(here(*words, "--options", "{broken: true}"))
        assert "[extension-failed]" in message
        assert "my_reader.py" in message
        answer = here(*words, "--options", "{prefix: my-}", "--max-side", "16")
        assert answer.returncode == 0, answer.stderr
        dataset = Dataset.open(tmp_path / "out")
        assert [entry.id for entry in dataset.classes] == ["my-cat", "my-dog"]
        assert sum(entry["left_out"] for entry in dataset.description["splits"].values()) == 1
        assert "already prepared" in here(*words, "--options", "{prefix: my-}", "--max-side", "16").stderr
        assert "[output-has-other-data]" in complaint(here(*words, "--max-side", "16"))
    finally:
        pl.extensions._registered.pop(("reader", "pairs"), None)
        sys.modules.pop("my_reader", None)


def test_sources_are_prepared_with_the_same_records(here, photos: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "photos.tar", contents(photos))
    for source, out in ((photos, "a"), ("photos.tar", "b")):
        answer = here("prepare", source, "--out", out)
        assert answer.returncode == 0, answer.stderr
    for split in ("train", "val"):
        first, second = (Dataset.open(tmp_path / name).split(split, "original") for name in "ab")
        assert [first.record(number) for number in range(len(first))] == [
            second.record(number) for number in range(len(second))
        ]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), "missing-source"),
        (("folder",), "missing-source"),
        (("nowhere",), "source-not-found"),
        (("notes.md",), "unknown-source-kind"),
        (("nothing", "photos"), "unknown-reader"),
        (("folder", "nowhere"), "source-not-found"),
        (("https://127.0.0.1/photos",), "unknown-source-kind"),
        (("folder", "photos", "--label-column", "x"), "option-not-applicable"),
        (("photos", "--train", "photos"), "option-not-applicable"),
        (("photos", "--devkit", "x.tar"), "option-not-applicable"),
        (("photos", "--options", "[1]"), "invalid-option"),
        (("photos", "--import", "no_such_module"), "import-not-found"),
        (("cifar100", "--max-side", "8"), "option-not-applicable"),
        (("cifar100", "archive.tar"), "option-not-applicable"),
        (("cifar100", "--from", "notes.md"), "archive-corrupt"),
    ],
)
def test_commands_that_cannot_be_meant_are_refused(here, tmp_path: Path, words: tuple[str, ...], code: str) -> None:
    tree(tmp_path / "photos", classes=2, images=1)
    (tmp_path / "notes.md").touch()
    assert f"[{code}]" in complaint(here("prepare", *words, "--out", "out"))


def test_sources_of_the_python_api(photos: Path, tmp_path: Path) -> None:
    with raises("invalid-argument"):
        pl.prepare({"later": photos}, tmp_path / "out")
    with raises("option-not-applicable"):
        pl.prepare(photos, tmp_path / "out", reader="folder", options={"depth": 1})
    assert len(read("folder", str(photos), {}).entries) == 15
    folder = pl.prepare({"train": photos / "train", "val": photos / "val"}, tmp_path / "out", max_side=16, workers=1)
    assert len(Dataset.open(folder).split("train")) == 12
