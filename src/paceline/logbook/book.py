"""The logbook: one Markdown page per experiment, an index of all, and DAWNBench's TSV; written from run folders only.

Pages are written anew each time; what stands between the marked lines is the reader's own, and stays.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Required

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from paceline.errors import UserError
from paceline.logbook.charts import svg
from paceline.logbook.compare import compare
from paceline.logbook.curves import charts_of
from paceline.logbook.entry import page_of
from paceline.logbook.read import LOGBOOK_MARK, Run
from paceline.logbook.tables import duration, markdown, plain
from paceline.logbook.verdict import verdict
from paceline.system.files import make_folder, write_text
from paceline.system.untrusted import read_regular
from paceline.track.checks import Count, NotNegative

_MOST_BYTES = 1 << 26
_OPEN, _CLOSE = "<!-- notes: yours; kept when this page is written again -->", "<!-- end of notes -->"
_NOTES = re.compile(re.escape(_OPEN) + r"[ \t\r]*\n(.*)" + re.escape(_CLOSE), re.DOTALL)


def write_logbook(runs: Sequence[Run], out: Path) -> list[Path]:
    """Pages of these runs, and an index of all pages that are there."""
    folders: list[Path] = []
    for run in runs:
        folders.append(_folder_of(run, out, {folder.name for folder in folders}))
    for path in (*(folder / "README.md" for folder in folders), out / "comparison.md", out / "index.md"):
        if path.exists() and LOGBOOK_MARK.encode() not in read_regular(path, _MOST_BYTES):
            raise UserError(f"{path} is not a page of a logbook, and would be overwritten; choose another --out")
    pages = [page for run, folder in zip(runs, folders, strict=True) for page in _write_page(run, folder)]
    if len(runs) > 1:
        write_text(out / "comparison.md", f"# Comparison\n\n{markdown(compare(runs))}\n{LOGBOOK_MARK}\n")
        pages.append(out / "comparison.md")
    entries = sorted(_entries(out), key=_when)
    write_text(out / "index.md", _index(entries, (out / "comparison.md").exists()))
    return [*pages, out / "index.md"]


class _Entry(TypedDict, total=False):
    """What the index reads of a page."""

    run: Required[str]
    origin: str
    model: str | None
    best_top1: NotNegative | None
    best_epoch: NotNegative | None
    started: str | None
    status: str
    ranks: Count | None
    top1: NotNegative | None
    top5: NotNegative | None
    train_seconds: NotNegative | None
    images_per_second: NotNegative | None


_CHECK = TypeAdapter(_Entry)


def _entries(out: Path) -> Iterator[dict[str, Any]]:
    for path in out.glob("*/facts.json"):
        with suppress(OSError, ValueError):  # somebody else's file
            yield dict(_CHECK.validate_json(read_regular(path, _MOST_BYTES, out))) | {"folder": path.parent.name}


def _when(entry: dict[str, Any]) -> str:
    return str(entry.get("started") or "")


def _write_page(run: Run, folder: Path) -> Iterator[Path]:
    page = folder / "README.md"
    make_folder(folder)
    kept = _notes(page) if page.exists() else ""
    if kept is None:  # somebody changed the marked lines: nothing of theirs may be lost
        names = (folder / f"README.old-{number}.md" for number in count(1))
        yield page.rename(next(path for path in names if not path.exists()))
    charts = {name: text for name, chart in charts_of([run]) if (text := svg(chart))}
    for name, text in charts.items():
        write_text(folder / name, text)
    write_text(folder / "dawnbench.tsv", _dawnbench(run))
    write_text(folder / "facts.json", json.dumps(_facts(run), indent=2, default=str) + "\n")
    text = "\n".join(page_of(run, list(charts)))
    write_text(page, f"{text}\n## Notes\n\n{_OPEN}\n{kept or ''}{_CLOSE}\n\n{LOGBOOK_MARK}\n")
    yield page


def _notes(page: Path) -> str | None:
    """What the reader wrote; None if it cannot be told where."""
    try:
        found = _NOTES.search(read_regular(page, _MOST_BYTES).decode())
    except ValueError:
        return None
    return found[1] if found else None


def _folder_of(run: Run, out: Path, others: set[str]) -> Path:
    """Its own from the last time, or one that no other run has."""
    origin, own = str(run.origin.resolve()), _file_name(run.name)
    taken = dict.fromkeys(others, "") | {entry["folder"]: entry.get("origin") for entry in _entries(out)}
    mine = next((folder for folder, owner in taken.items() if owner == origin), None)
    names = [own, *(f"{own}-{number}" for number in range(2, len(taken) + 3))]
    return out / (mine or next(name for name in names if name not in taken))


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def _facts(run: Run) -> dict[str, Any]:
    """What the index and programs read."""
    row = compare([run]).rows[0]
    start = run.starts[0] if run.starts else {}
    return row | {
        "origin": str(run.origin.resolve()),
        "recipe": run.recipe.get("name"),
        "model": run.recipe.get("model", {}).get("name") or run.facts.get("model.name"),
        "best_top1": run.best.get("top1"),
        "best_epoch": run.best.get("epoch"),
        "started": start.get("started"),
        "verdict": [finding.text for finding in verdict(run)],
        "notes": run.notes,
    }


def _dawnbench(run: Run) -> str:
    """Their format: hours since the start of training."""
    lines = ["epoch\thours\ttop1Accuracy\ttop5Accuracy"]
    times = dict(zip(map(id, run.records), run.places("seconds"), strict=True))
    for record in run.evaluated:
        shares = [f"{100 * record[name]:.3f}" if record.get(name) is not None else "" for name in ("top1", "top5")]
        lines.append("\t".join([f"{record.get('epoch') or 0:g}", f"{(times[id(record)] or 0) / 3600:.6f}", *shares]))
    return "\n".join([*lines, ""])


def _best(entry: dict[str, Any]) -> str:
    if entry.get("best_top1") is None:
        return ""
    epoch = f" (epoch {entry['best_epoch']:.4g})" if entry.get("best_epoch") is not None else ""
    return f"{entry['best_top1']:.2%}{epoch}"


def _index(entries: list[dict[str, Any]], compared: bool) -> str:
    lines = [
        "# Logbook",
        "",
        "| run | top-1 | best top-1 | top-5 | training time | images/s | ranks | model | status |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for entry in entries:
        cells = [
            f"[{plain(entry['run'])}]({entry['folder']}/README.md)",
            f"{entry['top1']:.2%}" if entry.get("top1") is not None else "",
            _best(entry),
            f"{entry['top5']:.2%}" if entry.get("top5") is not None else "",
            duration(entry.get("train_seconds")),
            f"{entry['images_per_second']:,.0f}" if entry.get("images_per_second") else "",
            str(entry.get("ranks") or ""),
            plain(entry.get("model") or ""),
            plain(entry.get("status") or ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    last = ["[Comparison](comparison.md) of the runs that were given together last", ""] if compared else []
    return "\n".join([*lines, "", *last, LOGBOOK_MARK, ""])
