"""The report: one page with everything in it, that opens from disk without a network."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from itertools import cycle, groupby
from string import Template
from typing import Any

from paceline.logbook.charts import COLOURS, thinned
from paceline.logbook.compare import Comparison
from paceline.logbook.read import Run
from paceline.logbook.tables import page_table
from paceline.logbook.verdict import verdict

_AXES = ("epoch", "step", "images", "seconds")


def report(comparison: Comparison, title: str) -> str:
    runs = comparison.runs
    assets = resources.files("paceline.logbook") / "assets"
    axes = [Axes(run) for run in runs]
    data = {
        "runs": [
            {"name": run.name, "colour": colour, "phases": list(_phases(run, own)), "ranks": list(_ranks(run))}
            for run, own, colour in zip(runs, axes, cycle(COLOURS), strict=False)
        ],
        "charts": [chart for chart in _charts(runs, axes) if chart["lines"]],
    }
    # "</script>" in a name would end the element
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template((assets / "report.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        style=(assets / "report.css").read_text(encoding="utf-8"),
        script=(assets / "report.js").read_text(encoding="utf-8"),
        data=text,
        fairness=fairness_html(comparison),
        kind="" if comparison.speedup_counts or len(runs) == 1 else "unfair",
        table=table_html(comparison),
        differences=_differences(comparison),
        verdicts="".join(_verdict(run) for run in runs),
    )


def fairness_html(comparison: Comparison) -> str:
    if len(comparison.runs) == 1:
        return f"<strong>{escape(verdict(comparison.runs[0])[0].text)}</strong>"
    sentence = comparison.sentence
    kind = "" if comparison.speedup_counts else ' class="note"'
    return f"<strong{kind}>{escape(sentence[0].upper() + sentence[1:])}.</strong>"


def table_html(comparison: Comparison) -> str:
    head, *rows = page_table(comparison)
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in own)}</tr>'
        for label, *own in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _differences(comparison: Comparison) -> str:
    found = comparison.fairness.differences
    if not found:
        return ""
    items = "".join(
        f"<li>{escape(str(difference))}{'' if difference.matters else ' (a condition)'}</li>" for difference in found
    )
    return f"<details><summary>What differs ({len(found)})</summary><ul>{items}</ul></details>"


def _verdict(run: Run) -> str:
    notes = "".join(f'<li class="note">{escape(note)}</li>' for note in run.notes)
    findings = "".join(f"<li>{escape(finding.text)}</li>" for finding in verdict(run))
    return f"<h3>{escape(run.name)}</h3><ul>{notes}{findings}</ul>"


class Axes:
    """Epoch, step, images and minutes of every record of a run."""

    def __init__(self, run: Run):
        self._columns = [run.places(axis) for axis in _AXES]

    def at(self, index: int) -> list[float | None]:
        epoch, step, images, seconds = (column[index] for column in self._columns)
        return [epoch, step, images, None if seconds is None else round(seconds / 60, 4)]


def _phases(run: Run, axes: Axes) -> Iterator[dict[str, Any]]:
    numbered = [(record["phase"], index) for index, record in enumerate(run.records) if "phase" in record]
    begin = [0.0] * len(_AXES)
    for _, group in groupby(numbered, key=lambda pair: pair[0]):
        end = [value or 0.0 for value in axes.at([*group][-1][1])]
        yield {"from": begin, "to": end}
        begin = end


def _ranks(run: Run) -> Iterator[dict[str, Any]]:
    split = run.seconds_per_rank or {
        part: [seconds] for part, seconds in run.seconds.items() if part not in ("evaluate", "checkpoint")
    }
    if not split:
        return
    for rank in range(len(next(iter(split.values())))):
        host = f" on {run.host_of_rank[rank]}" if len(run.hosts) > 1 and rank < len(run.host_of_rank) else ""
        yield {"name": f"rank {rank}{host}", "seconds": {part: round(times[rank], 3) for part, times in split.items()}}


def _charts(runs: Sequence[Run], axes: Sequence[Axes]) -> Iterator[dict[str, Any]]:
    curves = [
        ("loss", "loss", False),
        ("top-1", "top1", True),
        ("learning rate", "lr", False),
        ("images/s", "images_per_second", False),
    ]
    for title, metric, percent in curves:
        lines = [
            {
                "run": number,
                "name": f"{run.name}, {word}",
                "dashed": kind == "train" and metric in ("loss", "top1"),
                "points": points,
            }
            for number, run in enumerate(runs)
            for kind, word in (("train", "training"), ("eval", "validation"))
            if (points := _points(run, axes[number], kind, metric))
        ]
        yield {"title": title, "percent": percent, "lines": lines}
    for title, percent, figure in _HOST_FIGURES:
        lines = [
            {"run": number, "name": f"{run.name}, {name}", "dashed": False, "points": points}
            for number, run in enumerate(runs)
            for name, points in _telemetry(run, figure)
        ]
        yield {"title": title, "percent": percent, "minutes": True, "lines": lines}


def _points(run: Run, axes: Axes, kind: str, metric: str) -> list[list[float | None]]:
    found = [
        (index, record[metric])
        for index, record in enumerate(run.records)
        if record["kind"] == kind and record.get(metric) is not None
    ]
    return [[*axes.at(index), value] for index, value in thinned(found)]


def _share(name: str) -> Any:
    return lambda source: source[name] / 100 if source.get(name) is not None else None


def _gigabytes(name: str) -> Any:
    return lambda source: source[name] / 1e9 if source.get(name) is not None else None


# title, in percent, and the figures: of a GPU where there are some, else of the host
_HOST_FIGURES: tuple[tuple[str, bool, dict[str, Any]], ...] = (
    ("use of devices", True, {"gpu": _share("use_percent"), "host": _share("cpu_percent")}),
    ("memory of devices, GB", False, {"gpu": _gigabytes("memory_bytes"), "host": _gigabytes("memory_bytes")}),
    ("power of GPUs, W", False, {"gpu": lambda source: source.get("watts")}),
)


def _telemetry(run: Run, figures: dict[str, Any]) -> Iterator[tuple[str, list[list[Any]]]]:
    begin = min((samples[0]["time"] for samples in run.telemetry.values() if samples), default=0.0)
    for host, samples in run.telemetry.items():
        gpus = max((len(sample.get("gpus", [])) for sample in samples), default=0)
        sources = [(f"{host} GPU {number}", "gpu", number) for number in range(gpus)] or [(host, "host", 0)]
        for name, kind, number in sources:
            if kind not in figures:
                continue
            points = []
            for sample in samples:
                source = sample if kind == "host" else (sample.get("gpus", []) + [{}] * gpus)[number]
                if (value := figures[kind](source)) is not None:
                    points.append([None, None, None, round((sample["time"] - begin) / 60, 4), round(value, 4)])
            if points:
                yield name, thinned(points)
