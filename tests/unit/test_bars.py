"""Progress bars on terminals of different widths."""

import io
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Task, TaskID
from rich.table import Table
from rich.text import Text

from paceline.data.prepare import pack
from paceline.system import logs
from paceline.system.files import say
from paceline.system.progress_bar import _ProgressLine
from paceline.track import progress
from paceline.track.progress import Bar

WIDTHS = (200, 120, 80, 60, 40, 24)


@dataclass
class Screen:
    """A terminal with a fake clock."""

    now: float = 0.0
    file: io.StringIO = field(default_factory=io.StringIO)

    def console(self, width: int) -> Console:
        return Console(file=self.file, width=width, force_terminal=True, color_system=None, get_time=lambda: self.now)

    def lines(self, shown: Any, width: int) -> list[str]:
        other = self.console(width)
        with other.capture() as captured:
            other.print(shown.get_renderable())
        return [line for line in captured.get().splitlines() if line.strip()]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen()
    monkeypatch.setattr(progress, "console", made.console(80))
    monkeypatch.setattr(pack, "console", made.console(80))
    return made


def _trained(screen: Screen, total: int, step: int, seconds: float, **figures: float) -> Any:
    """Return the bar of a training after `step` steps, of which the last took `seconds`."""
    bar = Bar(total, step - 1)
    shown = bar._progress
    shown.stop()  # stops the refresh thread
    screen.now += seconds
    shown.update(shown.tasks[0].id, completed=step - 0.5)
    screen.now += seconds
    bar.step(step)
    bar.train({"step": step, "epoch": 3.14, "seconds": {}, **figures})
    return bar


def _realistic(screen: Screen) -> Any:
    return _trained(screen, 5000, 1234, 1.0, loss=1.2345, top1=0.456, images_per_second=3308.0)


def _extreme(screen: Screen) -> Any:
    return _trained(screen, 5_000_000, 1_234_567, 0.0475, loss=1234.5678, top1=0.456, images_per_second=123_456.0)


def test_line_never_wraps_and_shows_count_and_time_left(screen: Screen) -> None:
    for made in (_realistic, _extreme):
        shown = made(screen)._progress
        for width in WIDTHS:
            lines = screen.lines(shown, width)
            assert len(lines) == 1, (width, lines)
            assert cell_len(lines[0]) <= width, (width, lines)
            assert lines[0].endswith(" left"), (width, lines)
            assert "gone" not in lines[0]
            if width >= 60:
                assert "━" in lines[0], (width, lines)


def test_least_important_parts_are_dropped_on_a_narrow_terminal(screen: Screen) -> None:
    shown = _realistic(screen)._progress
    (widest,) = screen.lines(shown, 200)
    parts = ["images/s", "train top-1", "loss", "epoch", "elapsed", "training", "━", "1,234/5,000", "left"]
    assert all(part in widest for part in parts)
    before = parts
    for width in range(199, 30, -1):
        (line,) = screen.lines(shown, width)
        present = [part for part in parts if part in line]
        assert present == parts[len(parts) - len(present) :], (width, line)  # the most important parts remain
        assert len(present) <= len(before), (width, line)
        before = present
    (narrow,) = screen.lines(shown, 80)
    assert narrow.startswith("training  ━")
    assert "1,234/5,000  0:00:02 elapsed  2:05:32 left" in narrow


def test_count_too_long_for_the_terminal_is_shortened(screen: Screen) -> None:
    shown = _extreme(screen)._progress
    assert "1,234,567/5,000,000  99:" in screen.lines(shown, 40)[0]
    assert screen.lines(shown, 24)[0].startswith("1.2M/5.0M  99:")


def test_evaluation_has_its_own_line(screen: Screen) -> None:
    bar = _realistic(screen)

    class Work:
        num_samples, rank_samples = 50_000, 25_000

    with bar.evaluating(Work()) as advance:
        advance(500)
        screen.now += 1
        advance(500)
        for width in WIDTHS:
            training, evaluating = screen.lines(bar._progress, width)
            assert max(cell_len(training), cell_len(evaluating)) <= width
            assert "left" in training
            assert "left" in evaluating
        assert "evaluating" in screen.lines(bar._progress, 60)[1]
        assert " 2,000/50,000" in screen.lines(bar._progress, 60)[1]
    assert len(screen.lines(bar._progress, 80)) == 1


def test_unknown_time_left(screen: Screen) -> None:
    bar = Bar(100)
    bar._progress.stop()
    assert screen.lines(bar._progress, 80)[0].endswith("-:--:-- left")


def test_bar_of_prepare_fits(screen: Screen) -> None:
    shown = pack._bar()
    task = shown.add_task("train", total=10**11, images=0, rate="")
    shown.update(task, completed=10**9)
    screen.now += 1
    shown.update(task, completed=2 * 10**9, images=1_281_167, rate="12,345 images/s")
    for width in WIDTHS:
        (line,) = screen.lines(shown, width)
        assert cell_len(line) <= width
        assert line.endswith("left")
    assert "12,345 images/s" in screen.lines(shown, 120)[0]
    assert screen.lines(shown, 24)[0].startswith("1.3M  ")


def test_control_characters_in_untrusted_text_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """In tables, log lines, messages and bars: none of them reaches the terminal."""
    hostile = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\rb\bc"
    file = io.StringIO()
    shown = logs.Screen(file=file, width=200, color_system=None)
    table = Table("name")
    table.add_row(Text(hostile))
    shown.print(table)
    shown.print(hostile, markup=False)
    logs.set_up()
    logs.log.info("%s", hostile)
    say(hostile)
    printed = capsys.readouterr()
    task = Task(TaskID(0), hostile, 10, 1, _get_time=lambda: 0.0)
    line = next(_ProgressLine(task, ("1/10", "1/10"), [])._forms())[0]
    for text in (file.getvalue(), printed.err, printed.out, line):
        assert r"\x1b[2J\x9b31m\u202egnp.exe" in text
        assert not {*text} & {*"\x1b\x07\x9b\u202e\r\b"}
