"""Progress bars that fit the terminal: one line per task, whatever its width."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import Progress, Task
from rich.progress_bar import ProgressBar
from rich.text import Text

from paceline.system.files import printable, size_text
from paceline.system.logs import console

_GAP = "  "
_WIDEST, _NARROW, _NARROWEST = 20, 10, 5  # columns of the bar itself
_SPEED_SECONDS = 300.0  # with rich's default of 30 s there is no estimate if a step takes longer


class OneLineProgress(Progress):
    """Each task on one line that never wraps.

    On a narrow terminal it drops the figures first, from the last one, then the elapsed time and the description; then
    the bar shrinks. The count and the remaining time stay.
    """

    def __init__(
        self,
        count: Callable[[Task], tuple[str, str]],
        figures: Callable[[Task], Sequence[str]] = lambda _: (),
        console: Console | None = None,
    ):
        """`count` returns the progress of a task in long and short form; `figures` other values, best first."""
        super().__init__(console=console, speed_estimate_period=_SPEED_SECONDS)
        self._count, self._figures = count, figures

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            if task.visible:
                yield _ProgressLine(task, self._count(task), [figure for figure in self._figures(task) if figure])


class _ProgressLine:
    def __init__(self, task: Task, counts: tuple[str, str], figures: Sequence[str]):
        self._task, self._counts, self._figures = task, counts, figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        before, bar, after = self._fitted(options.max_width)
        if bar:
            yield Text(before, end="")
            yield ProgressBar(self._task.total, self._task.completed, width=bar)
        yield Text(after, no_wrap=True, overflow="crop")

    def _fitted(self, width: int) -> tuple[str, int, str]:
        """Return the longest form that fits: text before the bar, columns of the bar, text behind it."""
        form = ("", 0, "")
        for description, bar, more in self._forms():
            before = description + _GAP if description else ""
            form = before, bar, (_GAP if bar else "") + _GAP.join(more)
            if len(before) + bar + len(form[2]) <= width:
                break
        return form

    def _forms(self) -> Iterator[tuple[str, int, list[str]]]:
        """Yield all forms, from the longest to the shortest."""
        task, (count, short) = self._task, self._counts
        description = printable(task.description)
        elapsed = f"{clock(task.finished_time if task.finished else task.elapsed)} elapsed"
        left = f"{clock(task.time_remaining)} left"
        for number in range(len(self._figures), -1, -1):
            yield description, _WIDEST, [count, *self._figures[:number], elapsed, left]
        for bar in range(_WIDEST, _NARROW - 1, -1):
            yield description, bar, [count, left]
        for bar in range(_WIDEST, _NARROWEST - 1, -1):
            yield "", bar, [count, left]
        yield "", 0, [count, left]
        yield "", 0, [short, left]


def transfer_bar() -> Progress:
    """Return a bar for tasks that are counted in bytes."""

    def count(task: Task) -> tuple[str, str]:
        done = size_text(int(task.completed))
        return f"{done} of {size_text(int(task.total))}" if task.total else done, done

    return OneLineProgress(count, lambda task: [f"{size_text(int(task.speed))}/s"] if task.speed else [], console)


def steps_of(task: Task) -> tuple[str, str]:
    """Return "completed/total" of a task, in long and short form."""
    total = f"{int(task.total or 0):,}"
    return f"{int(task.completed):>{len(total)},}/{total}", f"{compact(task.completed)}/{compact(task.total or 0)}"


def compact(number: float) -> str:
    """Return a count in at most six characters: 950, 1.2k, 35k, 1.2M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{1 if number < 10 * size else 0}f}{unit}"
    return f"{number:.0f}"


def clock(seconds: float | None) -> str:
    """Return a duration as h:mm:ss, or in days from 100 hours on."""
    if seconds is None:
        return "-:--:--"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours < 100 else f"{hours // 24} days"
