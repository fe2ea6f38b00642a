"""Writes the result of a selftest: JSON for programs, and one HTML page to attach to a bug report."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from paceline.selftest.checks import Row
from paceline.system.files import write_json, write_text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #8884; padding: .4rem .6rem; text-align: left; vertical-align: top; }
pre { overflow-x: auto; background: #8881; padding: .6rem; }
.pass { color: #187a3c; } .fail { color: #b3261e; font-weight: 600; } .slow { color: #8a5a00; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; }
.pass { color: #5fd38d; } .fail { color: #ff8a80; } .slow { color: #ffc266; } }
"""


def report(
    rows: Sequence[Row], facts: dict[str, Any], options: dict[str, Any], scrub: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return everything that is written, as JSON has it. `scrub` removes what others must not see."""
    return {
        "format": "paceline selftest 1",
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": scrub(options),
        "environment": scrub(facts),
        "checks": [row._replace(reason=scrub(row.reason), figures=scrub(row.figures))._asdict() for row in rows],
    }


def write(folder: Path, content: dict[str, Any]) -> tuple[Path, Path]:
    """Write selftest.json and selftest.html; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "selftest.json", folder / "selftest.html"
    write_json(data, content)
    write_text(page, html(content))
    return data, page


def html(content: dict[str, Any]) -> str:
    """Return a page that needs no other file."""
    rows = "".join(
        f"<tr><td>{escape(row['name'])}</td><td>{escape(row['title'])}</td>"
        f'<td class="{escape(row["status"])}">{escape(row["status"])}</td><td>{escape(row["reason"])}</td></tr>'
        for row in content["checks"]
    )
    facts = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(_shown(value))}</td></tr>"
        for part in ("options", "environment")
        for name, value in content[part].items()
    )
    figures = escape(json.dumps({row["name"]: row["figures"] for row in content["checks"]}, indent=1))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>paceline selftest</title><style>{_STYLE}</style></head><body><h1>paceline selftest</h1>"
        f"<p>{escape(content['finished'])}</p>"
        f"<table><tr><th>check</th><th></th><th>result</th><th>reason</th></tr>{rows}</table>"
        f"<h2>Environment</h2><table>{facts}</table>"
        f"<details><summary>Figures</summary><pre>{figures}</pre></details></body></html>\n"
    )


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
