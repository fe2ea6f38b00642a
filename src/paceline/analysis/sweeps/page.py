"""The page of a sweep: history, parallel coordinates, importance of fields, and a table of trials."""

from dataclasses import asdict
from html import escape
from string import Template

from paceline.analysis.page_parts import assets, html_table, page
from paceline.analysis.sweeps.record import SweepRecord, SweepTrial
from paceline.analysis.sweeps.text import ranked, short, summary_line, trial_table
from paceline.config.space import Choice, parse_space
from paceline.errors import UserError


def sweep_page(record: SweepRecord) -> str:
    """Return the HTML page, which needs no network."""
    content = Template(assets("sweep.html")).substitute(
        kind="" if record.best else "unfair",
        summary=escape(summary_line(record)),
        importance=_importance(record),
        table=_table(record),
        settings=_settings(record),
    )
    styles, scripts = ("report.css", "sweep.css"), ("common.js", "sweep.js")
    return page(record.name, content, _page_data(record), styles, scripts)


def _page_data(record: SweepRecord) -> dict[str, object]:
    kept = ("number", "state", "value")
    trials = [
        {name: asdict(trial)[name] for name in kept}
        | {"values": {field: short(word) for field, word in trial.values.items()}}
        for trial in record.trials
        if trial.values.keys() == record.space.keys()  # a worker may just be choosing values
    ]
    return {
        "metric": record.metric,
        "label": record.label,
        "space": record.space,
        "choices": {field: _choices(field, text) for field, text in record.space.items()},
        "trials": trials,
    }


def _choices(field: str, text: str) -> list[str]:
    """Return the values of a choice as the page shows them; an empty list for a range."""
    try:
        dimension = parse_space([f"{field}={text}"])[0]
    except UserError:  # the file was edited
        return []
    return [short(word) for word in dimension.values] if isinstance(dimension, Choice) else []


def _importance(record: SweepRecord) -> str:
    if not record.importance:
        return "<p>This needs five complete trials with different results.</p>"
    note = "<p>Fraction of the variance of the result that each field explains (fANOVA), over the trials above.</p>"
    bars = "".join(
        f'<div class="bar"><span>{escape(field)}</span><div><b style="width:{100 * part:.1f}%"></b></div>'
        f"<small>{part:.0%}</small></div>"
        for field, part in record.importance.items()
    )
    return note + bars


def _table(record: SweepRecord) -> str:
    head, *rows = trial_table(record)
    with_reasons = any(trial.reason for trial in record.trials)
    lines = [_row(trial, cells, with_reasons) for trial, cells in zip(ranked(record), rows, strict=True)]
    heads = [*head[1:], *(["reason"] if with_reasons else [])]
    return html_table("runs", list(map(escape, heads)), lines)


def _row(trial: SweepTrial, cells: list[str], with_reason: bool) -> str:
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
    reason = f'<td class="reason">{escape(trial.reason)}</td>' if with_reason else ""
    return f'<tr data-trial="{trial.number}"><th scope="row">{escape(trial.run)}</th>{rest}{reason}</tr>'


def _settings(record: SweepRecord) -> str:
    items = {
        "recipe": record.recipe,
        "metric": record.metric,
        "sampler": record.sampler,
        "pruner": record.pruner,
        "trials": str(record.planned),
        **record.space,
    }
    return "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in items.items()) + "</dl>"
