"""Tables in terminals of different widths, and in pipes."""

from itertools import pairwise

import pytest
from rich.cells import cell_len

from paceline.system import tables
from paceline.system.tables import lines_of, new_table, print_list, print_row, show

HEADS = ("name", "status", "model", "best top-1")
ROWS = [
    ("digits", "finished", "airbench", "98.33% (epoch 18)"),
    ("a-run-with-a-name-of-forty-characters-abc", "running", "resnet50", "-"),
    ("b[red]\x1b[2J 日本\n語\t", "failed", "vit_base_patch32_224", "-"),
]
ESCAPED = r"b[red]\x1b[2J 日本\n語\t"


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.fixture(params=[200, 100, 70, 50, 40, 20])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The width of the terminal that standard output is."""
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    return request.param


@pytest.mark.parametrize("columns", ["20", "80"])
def test_piped_tables_are_plain_and_complete(capsys, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    rows = [*ROWS, ("x" * 500, "y " * 300 + "y", "m", "z")]
    print_list(HEADS, rows, ("model", "status"))
    lines = _lines(capsys)
    show(new_table(HEADS, rows))
    assert _lines(capsys) == lines == lines_of(new_table(HEADS, rows))
    assert len(lines) == 5
    assert lines[3].startswith(ESCAPED)
    begins = [lines[0].index(head) for head in HEADS]
    for number, row in ((1, ROWS[0]), (2, ROWS[1]), (4, rows[3])):
        assert [lines[number][begin:end].strip() for begin, end in pairwise([*begins, None])] == list(row)
    assert not any(line.endswith(" ") for line in lines)
    assert not {*"".join(lines)} & {*"\x1b\t\r"}


def test_a_list_has_one_line_per_row(capsys, width: int) -> None:
    print_list(HEADS, ROWS, ("model", "best top-1"))
    lines = _lines(capsys)
    assert len(lines) == 4
    assert max(map(cell_len, lines)) <= max(width, 40)
    shown = lines[0].split()
    assert ("model" in shown, "best" in shown) == (width >= 100, width >= 70)
    assert [line for line in lines if "…" in line] == ([] if width >= 70 else lines[2:3])
    assert [line.split()[1] for line in lines[:3]] == ["status", "finished", "running"]


def test_other_tables_wrap_and_lose_nothing(capsys, width: int) -> None:
    show(new_table(HEADS, ROWS))
    lines = _lines(capsys)
    assert max(map(cell_len, lines)) <= max(width, 40)
    assert "…" not in "".join(lines)
    letters = "".join([*HEADS, *(cell for row in ROWS[:2] for cell in row), *ROWS[2][1:], ESCAPED])
    assert sorted("".join(lines).replace(" ", "")) == sorted(letters.replace(" ", ""))


def test_rows_that_come_one_by_one_are_aligned(capsys, width: int) -> None:
    print_row(("ok", "paceline", "word " * 20), (7, 14))
    print_row(("problem", "disk", "full"), (7, 14))
    lines = _lines(capsys)
    assert max(map(cell_len, lines)) <= max(width, 40)
    assert lines[0].index("word") == lines[-1].index("full") == 25
    assert " ".join(lines).count("word") == 20
