"""The paired comparison of models as sentences, tables, Markdown and HTML."""

from collections.abc import Callable, Sequence
from html import escape

from paceline.analysis.details.paired import PairedClass, PairedModels
from paceline.analysis.details.text import percent
from paceline.analysis.page_parts import html_line
from paceline.analysis.statistics import LEVEL, equation, probability
from paceline.system.wording import counted

_SHOWN = 10


def head(pair: PairedModels) -> list[str]:
    """Return the columns of the table."""
    first, second = pair.runs
    return ["class", first, second, "difference", f"only {first} right", f"only {second} right", "p (Holm)"]


def sentences(pair: PairedModels) -> list[str]:
    """Return the result in words."""
    first, second = pair.runs
    where = f" on {pair.title}" if pair.title else ""
    if not pair.overall:
        return [f"{first} and {second}{where}: classes not compared: {pair.reason}."]
    whole, tests = pair.overall, counted(len(pair.classes), "class", "classes")
    result = "a significant difference" if whole.is_significant else "no significant difference"
    lines = [
        f"{first} and {second}{where}: top-1 {percent(whole.accuracies[0])} and {percent(whole.accuracies[1])}, "
        f"{result} (McNemar's exact test on {whole.samples:,} paired predictions: only {first} is right on "
        f"{whole.only_first:,}, only {second} on {whole.only_second:,}; {equation(whole.p)})."
    ]
    if pair.settings:
        lines.append(f"They were evaluated differently: {pair.settings}.")
    better, worse = pair.changed(better=True), pair.changed(better=False)
    corrected = f"p < {LEVEL} after Holm's correction for {tests}"
    if not better and not worse:
        return [*lines, f"No class is significantly better or worse in {second} ({corrected})."]
    for word, found in (("better", better), ("worse", worse)):
        if found:
            lines.append(
                f"{_count(found)} {word} in {second} ({corrected}): {', '.join(map(_change, found[:_SHOWN]))}."
            )
    return lines


def _count(found: Sequence[PairedClass]) -> str:
    return f"{len(found)} class{'es are' if len(found) > 1 else ' is'}"


def _change(each: PairedClass) -> str:
    return f"{each.name} ({percent(each.accuracies[0])} to {percent(each.accuracies[1])})"


def table(pair: PairedModels) -> list[list[str]]:
    """Return rows of the significant changes, or, if there are none, of the largest differences."""
    ordered = sorted(pair.classes, key=lambda each: (not each.is_significant, -abs(each.difference), each.corrected))
    shown = [each for each in ordered if each.is_significant or each.difference][:_SHOWN]
    return [
        [
            each.name,
            percent(each.accuracies[0]),
            percent(each.accuracies[1]),
            f"{100 * each.difference:+.2f} points",
            f"{each.only_first:,}",
            f"{each.only_second:,}",
            probability(each.corrected),
        ]
        for each in shown
    ]


def paired_markdown(pairs: Sequence[PairedModels], plain: Callable[[str], str]) -> list[str]:
    """Return lines of Markdown; `plain` escapes text."""
    lines: list[str] = []
    for pair in pairs:
        lines += ["", *(plain(line) for line in sentences(pair))]
        if rows := table(pair):
            cells = [[plain(cell) for cell in row] for row in (head(pair), *rows)]
            cells.insert(1, ["---"] * len(cells[0]))
            lines += ["", *(f"| {' | '.join(row)} |" for row in cells)]
    return lines


def paired_html(pairs: Sequence[PairedModels]) -> str:
    """Return HTML: sentences, and a table of the changed classes."""
    parts = []
    for pair in pairs:
        items = "".join(f"<li>{escape(line)}</li>" for line in sentences(pair))
        parts.append(f'<ul class="paired">{items}</ul>')
        if rows := table(pair):
            heads = "".join(f'<th scope="col">{escape(title)}</th>' for title in head(pair))
            lines = "".join(html_line(escape(name), map(escape, cells)) for name, *cells in rows)
            table_text = f'<table class="figures changed"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'
            parts.append(f'<div class="scroll" tabindex="0">{table_text}</div>')
    return f"<h3>Class by class</h3>{''.join(parts)}" if parts else ""
