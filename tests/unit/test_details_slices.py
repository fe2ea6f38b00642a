"""Slices by the paths of images and by columns of lists, and what cannot be sliced."""

import json
from pathlib import Path

import pytest
from conftest import complaint, raises

from paceline.analysis.details.slices import DetailsSpec, slice_values
from paceline.data.lists import columns_of

NAMES = ["day/cat/1.jpg", "day/dog/2.jpg", "night/cat/3.jpg", "other/4.jpg"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("day|night", ["day", "day", "night", None]),
        ("^(day|night)/(cat|dog)", ["day", "day", "night", None]),
        ("(?P<time>day|night)/(?P<animal>cat|dog)", ["day cat", "day dog", "night cat", None]),
        ("^(day)|^(night)", ["day", "day", "night", None]),
        ("^[a-z]+", ["day", "day", "night", "other"]),
    ],
)
def test_a_regular_expression_slices_by_path(expression: str, expected: list[str | None]) -> None:
    assert slice_values(DetailsSpec(expression), NAMES, None) == expected


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    rows = [f"{name},{'ab'[number % 2]},{'' if number == 3 else number}" for number, name in enumerate(NAMES)]
    path = tmp_path / "list.csv"
    path.write_text("\n".join(["path,label,camera", *rows]))
    return path


def test_a_column_of_the_list_or_of_a_file_slices(listed: Path) -> None:
    expected = ["0", "1", "2", None]
    assert slice_values(DetailsSpec("camera"), NAMES, listed) == expected
    assert slice_values(DetailsSpec("camera", listed), [*NAMES, "new.jpg"], None) == [*expected, None]
    assert slice_values(DetailsSpec("camera", listed), [f"./{NAMES[0]}"[2:]], None) == ["0"]
    assert slice_values(DetailsSpec("cat"), NAMES, listed) == ["cat", None, "cat", None]  # not a column


@pytest.mark.parametrize("kind", ["tsv", "jsonl", "parquet"])
def test_columns_of_all_kinds_of_lists_slice(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"list.{kind}"
    rows = [
        {"path": name, "label": "a", "camera": None if number == 3 else number} for number, name in enumerate(NAMES)
    ]
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([{**row, "image bytes": b"x"} for row in rows]), path)
    elif kind == "jsonl":
        path.write_text(
            "\n".join(json.dumps({name: value for name, value in row.items() if value is not None}) for row in rows)
        )
    else:
        lines = ["\t".join("" if value is None else str(value) for value in row.values()) for row in rows]
        path.write_text("\n".join(["path\tlabel\tcamera", *lines]))
    assert columns_of(path)[:3] == ["path", "label", "camera"]
    assert slice_values(DetailsSpec("camera"), NAMES, path) == ["0", "1", "2", None]
    with raises("slice-column-missing"):
        DetailsSpec("weather", path).check()


def test_columns_of_paths_have_the_names_that_lists_accept(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name,camera\n1.jpg,a\n")
    with raises("list-column-missing"):
        slice_values(DetailsSpec("camera", tmp_path / "a.csv"), ["1.jpg"], None)
    (tmp_path / "b.jsonl").write_text('{"path": "1.jpg", "camera": ["a"]}')
    with raises("list-value-invalid"):
        slice_values(DetailsSpec("camera", tmp_path / "b.jsonl"), ["1.jpg"], None)
    (tmp_path / "c.csv").write_text("path,camera\n1.jpg\n")
    with raises("list-fields-mismatch"):
        slice_values(DetailsSpec("camera", tmp_path / "c.csv"), ["1.jpg"], None)


def test_what_cannot_be_sliced_is_an_error(listed: Path, tmp_path: Path) -> None:
    with raises("slice-not-found"):
        slice_values(DetailsSpec("camera"), NAMES, None)
    with raises("invalid-slice-by"):
        DetailsSpec("(").check()
    with raises("slice-column-missing"):
        DetailsSpec("weather", listed).check()
    with raises("missing-option"):
        DetailsSpec("", listed).check()
    with raises("slice-paths-mismatch"):
        slice_values(DetailsSpec("camera", listed), ["x/1.jpg"], None)
    with raises("slice-without-paths"):
        slice_values(DetailsSpec("day"), [], None)
    with raises("too-many-slices"):
        slice_values(DetailsSpec("[0-9]+"), [f"{number}.jpg" for number in range(2000)], None)
    with raises("list-unreadable"):
        DetailsSpec("camera", tmp_path / "list.txt").check()
    (tmp_path / "two.csv").write_text("path,camera\n1.jpg,a\n1.jpg,b\n")
    with raises("list-image-duplicate"):
        slice_values(DetailsSpec("camera", tmp_path / "two.csv"), ["1.jpg"], None)


def test_options_need_details(here) -> None:
    assert "[missing-option]" in complaint(here("evaluate", "runs/x", "--slice-by", "day"))
    assert "[missing-option]" in complaint(here("evaluate", "runs/x", "--out", "there"))
    answer = complaint(here("evaluate", "runs/x", "--data", "a", "--data.path", "b"))
    assert "[conflicting-options]" in answer
