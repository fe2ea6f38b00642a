"""Line charts as SVG and as a line of text, without a plotting library.

Only the report page has axes of its own, in report.js: they follow the zoom.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar

from paceline.system.files import printable

Point = tuple[float, float]
P = TypeVar("P", bound=Sequence[Any])
COLORS = (
    "#186bec", "#e0660c", "#4f9a12", "#950891", "#7d8ea3", "#8a1c10", "#b565f0", "#123e86", "#f5447a", "#185a03",
)  # fmt: skip
COLORS_ON_DARK = (
    "#4b93ff", "#ff9838", "#62c42c", "#e03ccb", "#cfd6de", "#ef4b43", "#b583ff", "#1a9c9c", "#ffa3c4", "#eae63f",
)  # fmt: skip
_LEGEND_COLUMNS, _LEGEND_LINE = 3, 18
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM = 640, 300, 64, 16, 42
_NOTE_WIDTH = 100  # characters per line of the note
_BLOCKS = " ▁▂▃▄▅▆▇█"
_MIN_POINTS = 4  # shorter curves have no later half to focus on


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]
    run: int = 0
    """Index of the run, which selects color and dash pattern."""
    thin: bool = False
    """Draw it thin and behind the other lines, as training curves are."""


@dataclass(frozen=True)
class Chart:
    title: str
    lines: Sequence[Line]
    x_axis: str = "epoch"
    percent: bool = False
    from_zero: bool = False
    """Start the y axis at zero."""
    note: str = ""
    """Text below the title that explains the lines."""
    run_names: Sequence[str] = ()
    """Legend entries, one per run; empty: one per line."""
    log_x: bool = False
    """Use a logarithmic x axis; all x are then above zero."""


def dashes(run: int) -> str:
    """Return the `stroke-dasharray` of a run: solid for the first ten, then a new pattern per cycle of colors."""
    repeated = run // len(COLORS)
    return " ".join(["8 3", *["2 3"] * (repeated - 1)]) if repeated else ""


def thinned(points: Sequence[P], most: int = 800) -> list[P]:
    """Return about `most` points; the lowest and the highest value of every interval are kept."""
    size = math.ceil(2 * len(points) / most)
    if size <= 2:
        return list(points)
    kept: list[P] = []
    for begin in range(0, len(points), size):
        interval = range(begin, min(begin + size, len(points)))
        ends = {min(interval, key=lambda i: points[i][-1]), max(interval, key=lambda i: points[i][-1])}
        kept += [points[index] for index in sorted(ends)]
    return kept


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers within a range, about `count` of them."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, count: int = 8) -> list[float]:
    """Return powers of ten within a range of positive numbers, about `count` of them; in a short range more numbers."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    factors = (1,) if last - first > 2 else (1, 2, 5)
    every = math.ceil((last - first) / count) or 1
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)] or [low]


def value_range(lines: Sequence[Line], percent: bool = False, from_zero: bool = False) -> tuple[float, float]:
    """Return the limits of the y axis: the values plus a margin; percentages stay between 0 and 100%."""
    values = [y for line in lines for _, y in line.points]
    least, most = min(values), max(values)
    if percent:
        least = max(least, _floor(lines, least, most))
    margin = 0.05 * (most - least) or abs(most) * 0.05 or 1.0
    low, high = (0.0 if least >= 0 and (from_zero or least < 3 * margin) else least - margin), most + margin
    return (min(least, max(0.0, low)), max(most, min(1.0, high))) if percent else (low, high)


def _floor(lines: Sequence[Line], least: float, most: float) -> float:
    """Return where an accuracy axis may start, so that the first epochs do not squeeze the later half.

    With several runs only validation curves count; with one run its training curve counts as well.
    """
    single = len({line.run for line in lines}) == 1
    curves = [line.points for line in lines if single or not line.thin]
    if max(map(len, curves), default=0) < _MIN_POINTS:
        return least
    late = [y for points in curves for x, y in points if x >= (points[0][0] + points[-1][0]) / 2]
    floor = min(late) - max(max(late) - min(late), 0.005)
    return floor if most - least > 3 * (most - floor) else least


def svg(chart: Chart) -> str:
    """Return the chart as an SVG document, or an empty string if no line has a point."""
    lines = [Line(line.name, _finite(line.points), line.run, line.thin) for line in chart.lines]
    lines = sorted((line for line in lines if line.points), key=lambda line: not line.thin)
    if not lines:
        return ""
    low, high = value_range(lines, chart.percent, chart.from_zero)
    cut = any(y < low for line in lines for _, y in line.points)
    notes = textwrap.wrap(f"{chart.note} {f'The axis starts at {100 * low:.3g}%.' if cut else ''}", _NOTE_WIDTH)
    top, height = 34 + 15 * len(notes), _HEIGHT + 15 * len(notes)
    legend = _legend_entries(chart, lines)
    whole_height = height + _LEGEND_LINE * -(-len(legend) // _LEGEND_COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {whole_height}" role="img" '
        f'aria-label="{escape(printable(chart.title))}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{whole_height}" fill="#ffffff"/>',
        text_element(_LEFT, 18, chart.title, "start", "#212529", 600),
        *(text_element(_LEFT, 34 + 15 * number, note, "start", size=11) for number, note in enumerate(notes)),
        text_element((_LEFT + _WIDTH - _RIGHT) / 2, height - 6, chart.x_axis),
        *_plot(chart, lines, (low, high), top, height),
        *_legend(legend, height),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def sparkline(values: Sequence[float], width: int = 72) -> str:
    """Return a curve from zero to its maximum as one line of text."""
    top = max(values) or 1.0
    columns = min(width, len(values))
    chosen = [values[column * len(values) // columns] for column in range(columns)]
    return "".join(_BLOCKS[round(value / top * (len(_BLOCKS) - 1))] for value in chosen)


def _finite(points: Sequence[Point]) -> list[Point]:
    return thinned([point for point in points if math.isfinite(point[1])])


def _plot(chart: Chart, lines: Sequence[Line], bounds: tuple[float, float], top: int, height: int) -> Iterator[str]:
    xs = [x for line in lines for x, _ in line.points]
    x_scale = math.log10 if chart.log_x else float
    (low_x, high_x), (low_y, high_y) = (x_scale(min(xs)), x_scale(max(xs))), bounds
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, height - top - _BOTTOM

    def x_of(x: float) -> float:
        fraction = (x_scale(x) - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        return _LEFT + inner_width * fraction

    def y_of(y: float) -> float:
        return top + inner_height * (1 - (y - low_y) / (high_y - low_y))

    for y in ticks(low_y, high_y):
        level = f'y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"'
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" {level} stroke="#e9ecef"/>'
        yield text_element(_LEFT - 6, y_of(y) + 4, f"{100 * y:g}%" if chart.percent else tick_label(y), "end")
    x_ticks = log_ticks(min(xs), max(xs)) if chart.log_x else ticks(low_x, high_x)
    yield from (text_element(x_of(x), height - 24, tick_label(x)) for x in x_ticks)
    # the nested document clips curves below the axis; its margin leaves room for dots at the edges
    area = (_LEFT - 4, top - 4, inner_width + 8, inner_height + 8)
    box = " ".join(map(str, area))
    yield '<svg x="{}" y="{}" width="{}" height="{}" viewBox="{}">'.format(*area, box)
    for line in lines:
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        yield f'<polyline points="{path}" fill="none" {_stroke(line)}/>'
        if len(line.points) <= 30 and not line.thin:
            color = COLORS[line.run % len(COLORS)]
            yield from (f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{color}"/>' for x, y in line.points)
    yield "</svg>"


def tick_label(value: float) -> str:
    """Return a number as an axis shows it."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _legend_entries(chart: Chart, lines: Sequence[Line]) -> list[Line]:
    """Return one entry per run if the chart names runs, otherwise one per line."""
    if not chart.run_names:
        return [line for line in chart.lines if line.name in {drawn.name for drawn in lines}]
    return [Line(chart.run_names[run], (), run) for run in sorted({line.run for line in lines})]


def _legend(entries: Sequence[Line], below: int) -> Iterator[str]:
    """Yield the legend below the chart, where it covers no curve."""
    columns, width = min(len(entries), _LEGEND_COLUMNS), _WIDTH - _LEFT - _RIGHT
    most = int((width / columns - 44) / 7)  # a character is about 7 pixels wide
    for number, entry in enumerate(entries):
        row, column = divmod(number, columns)
        x, y = _LEFT + column * width / columns, below + 8 + _LEGEND_LINE * row
        yield f'<line x1="{x:.1f}" x2="{x + 26:.1f}" y1="{y}" y2="{y}" {_stroke(entry)}/>'
        yield text_element(x + 32, y + 4, shortened(entry.name, most), "start")


def shortened(name: str, most: int) -> str:
    """Return a name of at most `most` characters, cut in the middle: names of runs often differ at the end."""
    if len(name) <= most:
        return name
    kept = most - 1
    return f"{name[: kept - kept // 2]}…{name[len(name) - kept // 2 :]}"


def _stroke(line: Line) -> str:
    pattern = f' stroke-dasharray="{dashes(line.run)}"' if dashes(line.run) else ""
    weight = 'stroke-width="1.2" stroke-opacity="0.55"' if line.thin else 'stroke-width="2"'
    return f'stroke="{COLORS[line.run % len(COLORS)]}" {weight}{pattern}'


def text_element(
    x: float, y: float, words: str, anchor: str = "middle", fill: str = "#495057", weight: int = 400, size: int = 12
) -> str:
    """Return a text element of an SVG document."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}" font-size="{size}"'
    return f"<text {place}>{escape(printable(words))}</text>"
