"""What the HTML pages of runs and of sweeps are made of."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from paceline.analysis.charts import COLORS, COLORS_ON_DARK


def assets(*names: str) -> str:
    """Return the text of files of the package, one after the other."""
    folder = resources.files("paceline.analysis") / "assets"
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


def script_data(value: Any) -> str:
    """Return JSON for a script element, which "</script>" in a text, such as the name of a run, would end."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def page(title: str, content: str, data: Any, styles: Sequence[str], scripts: Sequence[str], more: str = "") -> str:
    """Return a page that needs no network: HTML with data that its scripts show, which are files of the package.

    `more`: HTML with further scripts.
    """
    return Template(assets("page.html")).substitute(
        title=escape(title),
        style=_palettes() + assets(*styles),
        content=content,
        data=script_data(data),
        script=assets(*scripts),
        more=more,
    )


def _palettes() -> str:
    """Return the style rules of the colors of runs, on light and dark ground."""

    def rule(selector: str, colors: Sequence[str]) -> str:
        return f"{selector} {{ {' '.join(f'--run-{number}: {color};' for number, color in enumerate(colors))} }}\n"

    return rule(":root", COLORS) + rule(':root[data-theme="dark"]', COLORS_ON_DARK)


def html_table(kind: str, heads: Sequence[str], lines: Sequence[str]) -> str:
    """Return a table of a kind that the style knows, from HTML."""
    cells = "".join(f'<th scope="col"{" class=long" if len(head) > 30 else ""}>{head}</th>' for head in ("", *heads))
    return f'<table class="{kind}"><thead><tr>{cells}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def html_line(label: str, cells: Iterable[str]) -> str:
    """Return a row of a table, from HTML."""
    return f'<tr><th scope="row">{label}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts whose rows have no labels."""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="figures"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'
