"""Untrusted sources of `paceline prepare`: mutated tars, shards, lists and saved datasets, and names that lead out."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

from hostile import in_a_process, mutated, tar_of

from paceline.data.prepare.raw import RawDataset
from paceline.data.prepare.sources import open_source
from paceline.data.splits import Division
from paceline.errors import UserError


def _json_lines() -> bytes:
    return b'{"path": "1.jpg", "label": "a"}\n{"path": "2.jpg", "label": "b"}\n'


def _parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet

    out = io.BytesIO()
    table = {"path": ["1.jpg", "2.jpg"] * 8, "label": ["a", "b"] * 8}
    parquet.write_table(pyarrow.table(table), out)
    return out.getvalue()


def _checked(source: str, reader: str) -> RawDataset | None:
    try:
        found = open_source(source, reader, {}, Division(0.5))
        for samples in found.splits.values():
            for sample in samples():
                assert len(sample.read()) < 1 << 16
        return found
    except (UserError, OSError):
        return None


def _tried(folder: Path, name: str, reader: str, contents: Callable[[], bytes], number: int) -> int:
    for image in ("1.jpg", "2.jpg"):
        (folder / image).touch()
    for content in mutated(contents(), number, 0):
        (folder / name).write_bytes(content)
        _checked(str(folder / name), reader)
    return number


def _tree() -> bytes:
    return tar_of({f"train/{label}/{number}.jpg": b"image" for label in "ab" for number in range(4)})


def _shard() -> bytes:
    return tar_of({f"{number}.{kind}": b"%d" % (number % 2) for number in range(8) for kind in ("jpg", "cls")})


def test_mutated_sources_are_read_or_refused(tmp_path: Path, survived) -> None:
    for name, reader, contents, number in (
        ("x.tar", "tar", _tree, 400),
        ("x.tar", "webdataset", _shard, 400),
        ("x.jsonl", "list", _json_lines, 400),
        ("x.parquet", "list", _parquet, 400),
    ):
        survived(
            f"mutated {name} of the reader {reader}", in_a_process(_tried, tmp_path, name, reader, contents, number)
        )


def test_names_that_lead_out_are_only_names(tmp_path: Path, survived) -> None:
    """Links and devices are not read; folders such as .. are not classes."""
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for number in range(8):
            member = tarfile.TarInfo(f"../../../..{'/etc' * (number % 2)}/{'ab'[number % 2]}/{number}.jpg")
            archive.addfile(member)
            link = tarfile.TarInfo(f"a/link{number}.jpg")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)
    found = _checked(str(tmp_path / "x.tar"), "tar")
    assert found
    assert [entry.id for entry in found.classes] == ["a", "etc"]
    assert sum(size or 0 for size in found.sizes.values()) == 8
    survived("names in tars that lead out", 16)
