"""Groups of seeds as sentences, tables, Markdown, CSV, HTML and a chart."""

import csv
import io
from collections.abc import Callable, Iterator
from html import escape

from paceline.analysis.groups import METRICS, GroupDifference, GroupedRuns, GroupMetric, SeedGroup
from paceline.analysis.interval_chart import IntervalRow, interval_svg
from paceline.analysis.page_parts import text_table
from paceline.analysis.statistics import MAX_NEEDED, equation, probability
from paceline.system.wording import counted

_HEAD = ["figure", "group", "seeds", "mean", "standard deviation", "95% confidence interval"]
_ONE_SEED = "so nothing can be said about the noise between seeds. Train several seeds of each (--seeds 5)."


def group_tables(grouped: GroupedRuns) -> list[tuple[list[str], list[list[str]]]]:
    """Return header and rows of the tables to show: that of the groups, and that of their differences, if any."""
    tables = [(_HEAD, _table(grouped))] if grouped.groups else []
    return tables + ([(_difference_head(grouped), _difference_table(grouped))] if grouped.differences else [])


def _table(grouped: GroupedRuns) -> list[list[str]]:
    return [
        [
            metric.title,
            group.name,
            str(spread.n),
            metric.text(spread.mean),
            "" if spread.std is None else metric.text_of_difference(spread.std, ""),
            ""
            if spread.low is None or spread.high is None
            else f"{metric.text(spread.low)} to {metric.text(spread.high)}",
        ]
        for metric in METRICS
        for group in grouped.groups
        if (spread := group.spreads.get(metric.name))
    ]


def _difference_head(grouped: GroupedRuns) -> list[str]:
    p = "p (Welch)" if len(grouped.groups) == 2 else "p (Welch, Holm)"
    first = grouped.groups[0].name
    return ["figure", "group", f"difference to {first}", "95% confidence interval", p, "seeds needed per group"]


def _difference_table(grouped: GroupedRuns) -> list[list[str]]:
    return [
        [
            each.metric.title,
            each.group,
            each.metric.text_of_difference(each.test.difference),
            f"{each.metric.text_of_difference(each.test.low)} to {each.metric.text_of_difference(each.test.high)}",
            "" if each.corrected is None else probability(each.corrected),
            _needed(each),
        ]
        for each in grouped.differences
    ]


def _needed(each: GroupDifference) -> str:
    if each.seeds_needed is not None:
        return f"{each.seeds_needed:,}"
    return f"more than {MAX_NEEDED:,}" if each.test.difference and each.is_significant is not None else ""


def sentences(grouped: GroupedRuns) -> list[str]:
    """Return what the groups show, in words."""
    if grouped.only_one_seed:
        return [f"Every experiment has one seed, {_ONE_SEED}"]
    lines = [line for group in grouped.groups for line in _about(group)]
    if len(grouped.groups) == 1:
        return lines
    return lines + [_sentence(each, len(grouped.groups) - 1) for each in grouped.differences]


def _about(group: SeedGroup) -> Iterator[str]:
    if group.left_out:
        yield f"{group.name}: left out of the statistics: {'; '.join(group.left_out)}."
    if not group.runs:
        yield f"{group.name} has no finished run, so it is not compared."
    elif len(group.runs) == 1:
        yield f"{group.name} has one seed, {_ONE_SEED}"
    if disturbed := [run.name for run in group.runs if run.disturbance]:
        yield f"{group.name}: other processes slowed down {', '.join(disturbed)}, so its training time is unreliable."


def _sentence(each: GroupDifference, comparisons: int) -> str:
    metric, test = each.metric, each.test
    who = f"{metric.title} of {each.group} and {each.first}"
    if each.corrected is None:
        return (
            f"{who}: the seeds of each group have the same value, so their noise is unknown and the difference of "
            f"{metric.text_of_difference(test.difference)} cannot be tested."
        )
    if test.low == test.high == 0:
        return f"{who}: no difference. All runs have the same value."
    found = "the difference is significant" if each.is_significant else "the difference is not significant"
    holm = f" after Holm's correction for {comparisons} comparisons" if comparisons > 1 else ""
    low, high = map(metric.text_of_difference, (test.low, test.high))
    text = (
        f"{who}: {found}. It is {metric.text_of_difference(test.difference)} (95% confidence interval {low} to {high}; "
        f"Welch's t-test, {equation(each.corrected)}{holm})."
    )
    if needed := _needed(each):
        seeds = f"{needed} seed{'s' * (each.seeds_needed != 1)} per group"
        text += f" Detecting a difference of this size with 80% power takes {seeds}."
    return text


def markdown_lines(grouped: GroupedRuns, plain: Callable[[str], str]) -> list[str]:
    """Return sentences and tables as Markdown; `plain` escapes text."""
    lines = [f"\n{plain(sentence)}" for sentence in sentences(grouped)]
    if not grouped.groups:
        return lines
    blocks = []
    for head, rows in group_tables(grouped):
        cells = [list(map(plain, head)), ["---"] * len(head), *(list(map(plain, row)) for row in rows)]
        blocks += ["", *(f"| {' | '.join(row)} |" for row in cells)]
    return ["", f"## {title(grouped)}", *blocks, *lines]


def title(grouped: GroupedRuns) -> str:
    """Return the title of the section, e.g. "Groups of seeds (2 groups, 10 runs)"."""
    runs = sum(len(group.runs) for group in grouped.groups)
    return f"Groups of seeds ({counted(len(grouped.groups), 'group')}, {counted(runs, 'run')})"


def _csv(grouped: GroupedRuns) -> str:
    """Return a line per figure and group, with the difference to the first group."""
    text = io.StringIO()
    writer = csv.writer(text)
    spread_names, test_names = ("n", "mean", "std", "low", "high"), ("difference", "low", "high", "p", "degrees")
    writer.writerow(
        ["figure", "group", *spread_names, "difference", "difference_low", "difference_high", *test_names[3:]]
    )
    tests = {(each.metric.name, each.group): each.test for each in grouped.differences}
    for metric in METRICS:
        for group in grouped.groups:
            if spread := group.spreads.get(metric.name):
                test = tests.get((metric.name, group.name))
                cells = [getattr(test, name) if test else None for name in test_names]
                writer.writerow([metric.name, group.name, *(getattr(spread, name) for name in spread_names), *cells])
    return text.getvalue()


def files(grouped: GroupedRuns) -> dict[str, str]:
    """Return the content of the files of a written comparison by name: the figures, and a chart of each."""
    if not grouped.groups:
        return {}
    charts = {f"seeds-{metric.name}.svg": svg for metric in METRICS if (svg := _chart(grouped, metric))}
    return {"seeds.csv": _csv(grouped)} | charts


def _chart(grouped: GroupedRuns, metric: GroupMetric) -> str:
    """Return an SVG document with the values, mean and confidence interval of each group; empty without values."""
    rows = [
        IntervalRow(group.name, group.values[metric.name], spread.mean, spread.low, spread.high)
        for group in grouped.groups
        if (spread := group.spreads.get(metric.name))
    ]
    unit = ", s" if metric.name == "train_seconds" else ""
    return interval_svg(f"{metric.title}{unit}, by seed", rows, metric.name == "top1") if rows else ""


def html_section(grouped: GroupedRuns) -> str:
    """Return the section of the report about groups; empty if there are none."""
    if not grouped.groups:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(grouped))
    tables = "".join(f'<div class="scroll">{text_table(*table)}</div>' for table in group_tables(grouped))
    charts = "".join(f"<div>{svg}</div>" for metric in METRICS if (svg := _chart(grouped, metric)))
    return (
        f'<section id="groups"><h2>{escape(title(grouped))}</h2><ul>{items}</ul>{tables}'
        f'<div class="intervals">{charts}</div></section>'
    )
