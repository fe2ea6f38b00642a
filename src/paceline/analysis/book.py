"""Write the logbook: a Markdown page per run, an index, and DAWNBench's TSV; all figures come from run folders.

Every call rewrites the pages. The text between the two note markers belongs to the reader and is kept.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Required

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from paceline.analysis.charts import svg
from paceline.analysis.compare import compare
from paceline.analysis.curves import charts_of
from paceline.analysis.entry import page_of
from paceline.analysis.read import LOGBOOK_MARK
from paceline.analysis.run import LoggedRun
from paceline.analysis.tables import duration, markdown, plain
from paceline.analysis.verdict import verdict
from paceline.errors import UserError
from paceline.system.files import make_folder, write_text
from paceline.system.untrusted import read_regular
from paceline.track.checks import NonNegativeFloat, NonNegativeInt

_MAX_BYTES = 1 << 26
_OPEN, _CLOSE = "<!-- your notes: kept when paceline rewrites this page -->", "<!-- end of notes -->"
_NOTES = re.compile(re.escape(_OPEN) + r"[ \t\r]*\n(.*)" + re.escape(_CLOSE), re.DOTALL)


def write_logbook(runs: Sequence[LoggedRun], out: Path) -> list[Path]:
    """Write a page per run and an index of every page in `out`; return the paths written."""
    folders: list[Path] = []
    for run in runs:
        folders.append(_folder_of(run, out, {folder.name for folder in folders}))
    for path in (*(folder / "README.md" for folder in folders), out / "comparison.md", out / "index.md"):
        if path.exists() and LOGBOOK_MARK.encode() not in read_regular(path, _MAX_BYTES):
            raise UserError(
                "not-a-logbook-page", f"{path} is not a logbook page. Choose another --out to keep it.", path=path
            )
    pages = [page for run, folder in zip(runs, folders, strict=True) for page in _write_page(run, folder)]
    if len(runs) > 1:
        write_text(out / "comparison.md", f"# Comparison\n\n{markdown(compare(runs))}\n{LOGBOOK_MARK}\n")
        pages.append(out / "comparison.md")
    entries = sorted(_entries(out), key=_when)
    write_text(out / "index.md", _index(entries, (out / "comparison.md").exists()))
    return [*pages, out / "index.md"]


class _IndexEntry(TypedDict, total=False):
    """The fields of a page's facts.json that the index shows."""

    run: Required[str]
    origin: str
    model: str | None
    best_top1: NonNegativeFloat | None
    best_epoch: NonNegativeFloat | None
    started: str | None
    status: str
    ranks: NonNegativeInt | None
    top1: NonNegativeFloat | None
    top5: NonNegativeFloat | None
    train_seconds: NonNegativeFloat | None
    images_per_second: NonNegativeFloat | None


_CHECK = TypeAdapter(_IndexEntry)


def _entries(out: Path) -> Iterator[dict[str, Any]]:
    for path in out.glob("*/facts.json"):
        with suppress(OSError, ValueError):  # not written by the logbook
            yield dict(_CHECK.validate_json(read_regular(path, _MAX_BYTES, out))) | {"folder": path.parent.name}


def _when(entry: dict[str, Any]) -> str:
    return str(entry.get("started") or "")


def _write_page(run: LoggedRun, folder: Path) -> Iterator[Path]:
    page = folder / "README.md"
    make_folder(folder)
    notes = _notes(page) if page.exists() else ""
    if notes is None:  # the markers are gone, so the whole page may hold notes
        backups = (folder / f"README.old-{number}.md" for number in count(1))
        yield page.rename(next(path for path in backups if not path.exists()))
    charts = {name: text for name, chart in charts_of([run]) if (text := svg(chart))}
    for name, text in charts.items():
        write_text(folder / name, text)
    write_text(folder / "dawnbench.tsv", _dawnbench(run))
    write_text(folder / "facts.json", json.dumps(_facts(run), indent=2, default=str) + "\n")
    text = "\n".join(page_of(run, list(charts)))
    write_text(page, f"{text}\n## Notes\n\n{_OPEN}\n{notes or ''}{_CLOSE}\n\n{LOGBOOK_MARK}\n")
    yield page


def _notes(page: Path) -> str | None:
    """Return the reader's notes, or None if the markers are missing."""
    try:
        match = _NOTES.search(read_regular(page, _MAX_BYTES).decode())
    except ValueError:
        return None
    return match[1] if match else None


def _folder_of(run: LoggedRun, out: Path, others: set[str]) -> Path:
    """Return the folder of an earlier page of this run, or an unused one."""
    origin, base = str(run.origin.resolve()), _file_name(run.name)
    used = dict.fromkeys(others, "") | {entry["folder"]: entry.get("origin") for entry in _entries(out)}
    previous = next((folder for folder, owner in used.items() if owner == origin), None)
    names = [base, *(f"{base}-{number}" for number in range(2, len(used) + 3))]
    return out / (previous or next(name for name in names if name not in used))


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def _facts(run: LoggedRun) -> dict[str, Any]:
    """Return the content of facts.json, which the index and other programs read."""
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


def _dawnbench(run: LoggedRun) -> str:
    """Return the run in DAWNBench's format, with hours since the start of training."""
    lines = ["epoch\thours\ttop1Accuracy\ttop5Accuracy"]
    times = dict(zip(map(id, run.records), run.positions("seconds"), strict=True))
    for record in run.evaluated:
        percents = [f"{100 * record[name]:.3f}" if record.get(name) is not None else "" for name in ("top1", "top5")]
        lines.append("\t".join([f"{record.get('epoch') or 0:g}", f"{(times[id(record)] or 0) / 3600:.6f}", *percents]))
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
    last = ["[Comparison](comparison.md) of the runs in the last call of `paceline logbook`", ""] if compared else []
    return "\n".join([*lines, "", *last, LOGBOOK_MARK, ""])
