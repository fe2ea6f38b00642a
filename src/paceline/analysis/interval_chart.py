"""A chart of groups of measurements: a dot per value, and the mean with its confidence interval."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from paceline.analysis.charts import COLORS, shortened, text_element, tick_label, ticks
from paceline.system.files import printable

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BOTTOM = 640, 150, 24, 44, 44, 30
_NOTE = "Dots: seeds. Bar: mean and 95% confidence interval."
_NAME_LENGTH = 20


@dataclass(frozen=True)
class IntervalRow:
    """A row of the chart."""

    name: str
    values: Sequence[float]
    mean: float
    low: float | None
    """Ends of the confidence interval; None: unknown."""
    high: float | None


def interval_svg(title: str, rows: Sequence[IntervalRow], percent: bool) -> str:
    """Return the chart as an SVG document."""
    height = _TOP + _ROW * len(rows) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(printable(title))}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        text_element(16, 18, title, "start", "#212529", 600),
        text_element(16, 34, _NOTE, "start", size=11),
        *_plot(rows, percent, height),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _plot(rows: Sequence[IntervalRow], percent: bool, height: int) -> Iterator[str]:
    ends = [end for row in rows for end in (*row.values, row.low, row.high) if end is not None]
    margin = 0.05 * (max(ends) - min(ends)) or abs(max(ends)) * 0.05 or 1.0
    low, high = min(ends) - margin, max(ends) + margin

    def x_of(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low)

    bottom = height - _BOTTOM
    for tick in ticks(low, high):
        yield f'<line x1="{x_of(tick):.1f}" x2="{x_of(tick):.1f}" y1="{_TOP}" y2="{bottom}" stroke="#e9ecef"/>'
        yield text_element(x_of(tick), bottom + 18, f"{100 * tick:g}%" if percent else tick_label(tick))
    for number, row in enumerate(rows):
        y, color = _TOP + _ROW * (number + 0.5), COLORS[number % len(COLORS)]
        yield text_element(_LEFT - 10, y + 4, shortened(row.name, _NAME_LENGTH), "end")
        for value in row.values:
            yield f'<circle cx="{x_of(value):.1f}" cy="{y - 8:.1f}" r="3.5" fill="{color}" fill-opacity="0.6"/>'
        yield _line(x_of(row.mean), x_of(row.mean), y, y + 14, color)
        if row.low is not None and row.high is not None:
            yield _line(x_of(row.low), x_of(row.high), y + 7, y + 7, color)


def _line(x1: float, x2: float, y1: float, y2: float, color: str) -> str:
    place = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{color}" stroke-width="2.5"/>'
