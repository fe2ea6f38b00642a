"""Line charts as SVG, for logbooks and notebooks: text that any browser draws, without a plotting library."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, TypeVar

from paceline.base.files import printable

Point = tuple[float, float]
P = TypeVar("P", bound=Sequence[Any])
COLOURS = ("#2563eb", "#d9480f", "#2b8a3e", "#7048e8", "#c2255c", "#0b7285", "#946200", "#495057")
_LEGEND_COLUMNS, _LEGEND_LINE = 3, 18
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 300, 64, 16, 34, 42


def thinned(points: Sequence[P], most: int = 800) -> list[P]:
    """At most about that many: of every stretch the lowest and the highest value (the last of a point) stay."""
    size = math.ceil(2 * len(points) / most)
    if size <= 2:
        return list(points)
    kept: list[P] = []
    for begin in range(0, len(points), size):
        stretch = range(begin, min(begin + size, len(points)))
        ends = {min(stretch, key=lambda i: points[i][-1]), max(stretch, key=lambda i: points[i][-1])}
        kept += [points[index] for index in sorted(ends)]
    return kept


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within a range."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(title: str, across: str, lines: Mapping[str, Sequence[Point]], percent: bool = False) -> str:
    """Lines by name on one scale; nothing where no line has a point."""
    drawn = {name: thinned([p for p in line if math.isfinite(p[1])]) for name, line in lines.items()}
    drawn = {name: line for name, line in drawn.items() if line}
    if not drawn:
        return ""
    xs = [x for line in drawn.values() for x, _ in line]
    ys = [y for line in drawn.values() for _, y in line]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    margin = 0.05 * (high_y - low_y) or abs(high_y) * 0.05 or 1.0
    low_y, high_y = (0.0 if 0 <= low_y < 3 * margin else low_y - margin), high_y + margin
    whole_height = _HEIGHT + _LEGEND_LINE * -(-len(drawn) // _LEGEND_COLUMNS)
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x_of(x: float) -> float:
        return _LEFT + (inner_width * (x - low_x) / (high_x - low_x) if high_x > low_x else inner_width / 2)

    def y_of(y: float) -> float:
        return _TOP + inner_height * (1 - (y - low_y) / (high_y - low_y))

    def label(value: float) -> str:
        return f"{100 * value:g} %" if percent else f"{value:,g}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {whole_height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{whole_height}" fill="#ffffff"/>',
        _text(_LEFT, 18, title, "start", "#212529", 600),
        _text(_LEFT + inner_width / 2, _HEIGHT - 6, across),
    ]
    for y in ticks(low_y, high_y):
        level = f'y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"'
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" {level} stroke="#e9ecef"/>')
        parts.append(_text(_LEFT - 6, y_of(y) + 4, label(y), "end"))
    parts += [_text(x_of(x), _HEIGHT - 24, f"{x:,g}") for x in ticks(low_x, high_x)]
    for number, line in enumerate(drawn.values()):
        colour, stroke = _stroke(number)
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" {stroke} stroke-width="2"/>')
        if len(line) <= 30:
            parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{colour}"/>' for x, y in line]
    return "\n".join([*parts, *_legend(list(drawn), inner_width), "</svg>", ""])


def _legend(names: Sequence[str], width: float) -> Iterator[str]:
    """Below the chart, where it covers nothing, however many lines there are."""
    columns = min(len(names), _LEGEND_COLUMNS)
    most = int((width / columns - 32) / 6.5)  # letters of about this width
    for number, name in enumerate(names):
        row, column = divmod(number, columns)
        x, y = _LEFT + column * width / columns, _HEIGHT + 8 + _LEGEND_LINE * row
        yield f'<line x1="{x:.1f}" x2="{x + 18:.1f}" y1="{y}" y2="{y}" {_stroke(number)[1]} stroke-width="3"/>'
        yield _text(x + 24, y + 4, name if len(name) <= most else f"{name[: most - 1]}…", "start")


def _stroke(number: int) -> tuple[str, str]:
    """Colour of a line, and how it is drawn: dashed when the colours begin again."""
    rounds, place = divmod(number, len(COLOURS))
    dashes = f' stroke-dasharray="{6 - rounds % 4} {2 * (rounds % 4)}"' if rounds % 4 else ""
    return COLOURS[place], f'stroke="{COLOURS[place]}"{dashes}'


def _text(x: float, y: float, words: str, anchor: str = "middle", fill: str = "#495057", weight: int = 400) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f"<text {place}>{escape(printable(words))}</text>"
