"""Where the recipe of a run comes from: its source, the differences from it, and the results of both."""

from collections.abc import Sequence
from html import escape

from pydantic import TypeAdapter, ValidationError

from paceline.analysis.run import LoggedRun
from paceline.config.tracking import About, github_link

_ADAPTER = TypeAdapter(About)


def about(run: LoggedRun) -> About:
    """Return the recipe's `about`; an empty one if it is missing or invalid."""
    try:
        found = _ADAPTER.validate_python(run.recipe.get("about", {}))
    except ValidationError:
        return About()
    return About() if any(found.measured.problems()) else found


def results(about: About) -> list[tuple[str, str]]:
    """Return source and results by name; missing ones are left out."""
    rows = [("source", about.source), ("published", about.published), ("measured", str(about.measured))]
    return [(name, text) for name, text in rows if text]


def origins_html(runs: Sequence[LoggedRun]) -> str:
    """Return a section with the origin of each recipe; empty if none names one."""
    named: dict[About, list[str]] = {}
    for run in runs:
        named.setdefault(about(run), []).append(run.name)
    named.pop(About(), None)
    heads = [f"<h3>{escape(', '.join(names))}</h3>" if len(named) > 1 else "" for names in named.values()]
    parts = "".join(head + _html(origin) for head, origin in zip(heads, named, strict=True))
    return f'<section id="origin"><h2>Source of the recipe</h2>{parts}</section>' if parts else ""


def _html(origin: About) -> str:
    items = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in results(origin))
    files = "".join(f'<li><a href="{escape(github_link(file))}">{escape(file)}</a></li>' for file in origin.code)
    differences = "".join(f"<li>{escape(text)}</li>" for text in origin.deviations)
    return (
        f"<dl>{items}</dl>"
        f"{f'<p>Code of the source:</p><ul>{files}</ul>' if files else ''}"
        f"{f'<p>Differences from the source:</p><ul>{differences}</ul>' if differences else ''}"
    )
