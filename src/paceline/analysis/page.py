"""The report: one self-contained HTML page that opens without a network."""

from collections.abc import Sequence
from html import escape
from string import Template

from paceline.analysis.compare import ComparedRuns
from paceline.analysis.details.paired_text import paired_html
from paceline.analysis.details.section import details_html
from paceline.analysis.groups_text import html_section
from paceline.analysis.origin import origins_html
from paceline.analysis.page_data import page_data
from paceline.analysis.page_parts import assets, html_line, html_table, page
from paceline.analysis.run import LoggedRun
from paceline.analysis.settings import shared_and_differing
from paceline.analysis.tables import listing, page_table, runs_are_rows
from paceline.analysis.verdict import verdict
from paceline.system.files import printable


def report(comparison: ComparedRuns, title: str) -> str:
    """Return the HTML page."""
    runs = comparison.runs
    found = [(run.name, details) for run in runs for details in run.details[0]]
    details, details_script = details_html(found, paired_html(comparison.paired))
    content = Template(assets("report.html")).substitute(
        fairness=fairness_html(comparison),
        kind="" if comparison.is_reliable or len(runs) == 1 else "unfair",
        table=table_html(comparison),
        differences=_differences(comparison),
        groups=html_section(comparison.grouped),
        settings=settings_html(runs),
        origins=origins_html(runs),
        verdicts="".join(_verdict(run) for run in runs),
        details=details,
    )
    styles, scripts = ("report.css", "details.css"), ("common.js", "report.js")
    return page(title, content, page_data(runs), styles, scripts, details_script)


def fairness_html(comparison: ComparedRuns) -> str:
    """Return the heading: what limits a single run, or whether several runs are the same experiment."""
    if len(comparison.runs) == 1:
        return f"<strong>{escape(verdict(comparison.runs[0])[0].text)}</strong>"
    summary = comparison.summary
    kind = "" if comparison.is_reliable else ' class="note"'
    return f"<strong{kind}>{escape(summary[0].upper() + summary[1:])}.</strong>"


def table_html(comparison: ComparedRuns) -> str:
    """Return the table of results."""
    head, *rows = page_table(comparison)
    marked = [f"{_mark(number)}{escape(run.name)}" for number, run in enumerate(comparison.runs)]
    if runs_are_rows(comparison):
        heads, labels = [escape(cell) for cell in head[1:]], marked
    else:
        heads, labels = marked, [escape(label) for label, *_ in rows]
    lines = [html_line(label, map(escape, cells)) for label, (_, *cells) in zip(labels, rows, strict=True)]
    return html_table("runs" if runs_are_rows(comparison) else "figures", heads, lines)


def _mark(run: int) -> str:
    """Return the element that the page's script replaces by the run's color and dash pattern."""
    return f'<i data-run="{run}"></i>'


def settings_html(runs: Sequence[LoggedRun]) -> str:
    """Return model, data and hyperparameters: a table of those that differ, and a list of the others."""
    shared, differing = shared_and_differing(runs)
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shared.items())
    if len(runs) == 1:
        return f"<dl>{items}</dl>"
    same = f"<h3>Shared by all runs</h3><dl>{items}</dl>" if items else ""
    if not differing:
        return same
    lines = [
        html_line(
            f"{_mark(number)}{escape(run.name)}",
            (_setting(values[number], values[0]) for values in differing.values()),
        )
        for number, run in enumerate(runs)
    ]
    table = html_table("runs", [escape(name) for name in differing], lines)
    return (
        f"<h3>Different between runs</h3><p>Highlighted: differs from the first run.</p>"
        f'<div class="scroll">{table}</div>{same}'
    )


def _setting(value: str, first: str) -> str:
    shown = escape(value) or "unknown"
    return shown if value == first else f"<mark>{shown}</mark>"


def _differences(comparison: ComparedRuns) -> str:
    lines = listing(comparison.fairness)
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line.removeprefix('- '))}</li>" for line in lines)
    return f"<details><summary>Differences ({len(lines)})</summary><ul>{items}</ul></details>"


def _verdict(run: LoggedRun) -> str:
    notes = "".join(f'<li class="note">{escape(note)}</li>' for note in run.notes)
    findings = "".join(f"<li>{escape(finding.text)}</li>" for finding in verdict(run))
    return f"<h3>{escape(run.name)}</h3><ul>{notes}{findings}</ul>{_profile(run)}"


def _profile(run: LoggedRun) -> str:
    """Return a table of the operators or kernels with the most time in the last profile."""
    profiles = [record for record in run.records if record["kind"] == "profile"]
    if not profiles:
        return ""
    last = profiles[-1]
    lines = [
        html_line(
            escape(printable(top["name"])),
            (f"{top['fraction']:.1%}", f"{top['seconds'] / last['steps'] * 1e3:.3f}", f"{top['calls']:,}"),
        )
        for top in last["operators"]
    ]
    head = f"Profile of {last['steps']} steps up to step {last['step']}"
    table = html_table("figures", ["time", "ms per step", "calls"], lines)
    return f'<h4>{head}</h4><div class="scroll">{table}</div>'
