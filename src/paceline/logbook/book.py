"""The logbook: one Markdown page per experiment, an index of all, and DAWNBench's TSV; written from run folders only.

Pages are written anew each time; what stands between the marked lines is the reader's own, and stays.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.base.files import write_text
from paceline.logbook.charts import line_chart
from paceline.logbook.compare import compare, duration, markdown
from paceline.logbook.read import PARTS, Run
from paceline.logbook.verdict import verdict

_OPEN, _CLOSE = "<!-- notes: yours; kept when this page is written again -->", "<!-- end of notes -->"
_NOTES = re.compile(re.escape(_OPEN) + r"[ \t\r]*\n(.*)" + re.escape(_CLOSE), re.DOTALL)
_WORDS = {
    "data": "waiting for data",
    "compute": "forward and backward",
    "sync": "exchanging gradients",
    "optimizer": "optimizer",
    "evaluate": "evaluation",
    "checkpoint": "saves",
}


def write_logbook(runs: Sequence[Run], out: Path) -> list[Path]:
    """Pages of these runs, and an index of all pages that are there."""
    pages = [_write_page(run, out) for run in runs]
    if len(runs) > 1:
        comparison = compare(runs)
        write_text(out / "comparison.md", f"# Comparison\n\n{markdown(comparison)}")
        pages.append(out / "comparison.md")
    entries = sorted(_entries(out), key=_when)
    write_text(out / "index.md", _index(entries, (out / "comparison.md").exists()))
    return [*pages, out / "index.md"]


def _entries(out: Path) -> Iterator[dict[str, Any]]:
    for path in out.glob("*/facts.json"):
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(entry, dict) and {"run", "folder"} <= entry.keys():
                yield entry
        except (OSError, ValueError):
            continue  # somebody else's file


def _when(entry: dict[str, Any]) -> str:
    return str(entry.get("started") or "")


def _write_page(run: Run, out: Path) -> Path:
    folder = _folder_of(run, out)
    page = folder / "README.md"
    folder.mkdir(parents=True, exist_ok=True)
    kept = _NOTES.search(page.read_text(encoding="utf-8", errors="replace")) if page.exists() else None
    charts = list(_charts(run))
    for name, svg in charts:
        write_text(folder / name, svg)
    write_text(folder / "dawnbench.tsv", _dawnbench(run))
    facts = _facts(run) | {"folder": folder.name}
    write_text(folder / "facts.json", json.dumps(facts, indent=2, default=str) + "\n")
    text = "\n".join(_page(run, facts, [name for name, _ in charts]))
    write_text(page, f"{text}\n## Notes\n\n{_OPEN}\n{kept[1] if kept else ''}{_CLOSE}\n")
    return page


def _folder_of(run: Run, out: Path) -> Path:
    """Its own from the last time, or one that no other run has."""
    origin, plain = str(run.origin.resolve()), _file_name(run.name)
    taken = {entry["folder"]: entry.get("origin") for entry in _entries(out)}
    mine = next((folder for folder, owner in taken.items() if owner == origin), None)
    names = [plain, *(f"{plain}-{number}" for number in range(2, len(taken) + 3))]
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
        "started": start.get("started"),
        "verdict": [finding.text for finding in verdict(run)],
        "notes": run.notes,
    }


def _page(run: Run, facts: dict[str, Any], charts: list[str]) -> Iterator[str]:
    yield f"# {_plain(run.name)}\n"
    for note in run.notes:
        yield f"> {note}\n"
    yield from _table("What", _what(run))
    yield from _table("Result", _result(run, facts))
    yield "## Verdict\n"
    yield from (f"- {finding.text}" for finding in verdict(run))
    yield ""
    yield from _times(run)
    if charts:
        yield "## Curves\n"
        yield from (f"![{name.removesuffix('.svg')}]({name})" for name in charts)
        yield ""
    yield from _use(run)
    yield from _again(run)


def _plain(text: str) -> str:
    """Text that Markdown and HTML leave alone."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)


def _table(title: str, rows: list[tuple[str, Any]]) -> Iterator[str]:
    known = [(label, value) for label, value in rows if value not in (None, "", [])]
    if known:
        yield f"## {title}\n\n| | |\n|---|---|"
        yield from (f"| {label} | {str(value).replace('|', '/')} |" for label, value in known)
        yield ""


def _what(run: Run) -> list[tuple[str, Any]]:
    recipe, start = run.recipe, run.starts[-1] if run.starts else {}
    hardware, about = start.get("hardware", {}), recipe.get("about", {})
    device = hardware.get("gpu") or hardware.get("cpu")
    count = f" x {hardware['gpus']}" if hardware.get("gpus") else ""
    packages = start.get("packages", {})
    largest = start.get("largest_batch") or {}
    return [
        ("recipe", recipe.get("name")),
        ("source", about.get("source")),
        ("published", about.get("published")),
        ("model", recipe.get("model", {}).get("name") or run.facts.get("model.name")),
        ("data", f"{recipe['data'].get('name')}, fingerprint {start.get('data')}" if recipe.get("data") else None),
        ("ranks", f"{run.ranks} on {len(run.hosts) or 1} host(s)" if run.ranks else None),
        ("global batch", run.global_batch),
        ("largest batch of a rank", _largest(largest)),
        ("precision", start.get("precision")),
        ("strategy", recipe.get("strategy")),
        ("device", f"{device}{count}" if device else None),
        ("started", start.get("started")),
        (
            "software",
            ", ".join(f"{name} {packages[name]}" for name in ("paceline", "torch", "timm") if name in packages),
        ),
        ("code", start.get("code", {}).get("commit")),
        ("run folder", run.origin if run.kind == "paceline" else None),
        ("checkpoints", run.origin / "checkpoints" if (run.origin / "checkpoints").is_dir() else None),
    ]


def _largest(found: dict[str, Any]) -> str | None:
    if not found:
        return None
    whole = f"{found['largest_global']} of all ranks; fastest {found['fastest']}"
    return f"{found['largest']} ({whole}), searched {found['searched']}"


def _result(run: Run, facts: dict[str, Any]) -> list[tuple[str, Any]]:
    best = run.best
    samples = f" of {facts['samples']:,}" if facts["samples"] else ""
    memory, use, energy = facts["peak_memory"], facts["device_use"], facts["energy_joules"]
    return [
        ("status", run.status),
        ("top-1", f"{facts['top1']:.2%}{samples}" if facts["top1"] is not None else None),
        ("top-5", f"{facts['top5']:.2%}" if facts["top5"] is not None else None),
        ("validation loss", f"{facts['loss']:.4f}" if facts["loss"] is not None else None),
        ("best top-1", f"{best['top1']:.2%} after epoch {best['epoch']:g}" if best.get("epoch") is not None else None),
        ("training time", duration(facts["train_seconds"])),
        ("with evaluation and saves", duration(facts["total_seconds"])),
        ("images/s", f"{facts['images_per_second']:,.0f}" if facts["images_per_second"] else None),
        ("most memory of a rank", f"{memory / 1e9:.2f} GB" if memory else None),
        ("use of devices", f"{use:.0%} (mean)" if use is not None else None),
        ("energy of GPUs", f"{energy / 3600:,.1f} Wh" if energy else None),
        ("cost", f"{facts['cost']:,.2f} $" if facts["cost"] is not None else None),
    ]


def _times(run: Run) -> Iterator[str]:
    total = run.total_seconds
    if not total or not run.seconds:
        return
    yield "## Where the time went\n\n| | time | share |\n|---|---|---|"
    for part in PARTS:
        if part in run.seconds:
            yield f"| {_WORDS[part]} | {duration(run.seconds[part])} | {run.seconds[part] / total:.1%} |"
    if "sync" not in run.seconds and run.recipe.get("strategy") == "fsdp":
        yield "\nUnder FSDP, exchanging is part of forward and backward, and was not measured by itself."
    yield ""


def charts_of(runs: Sequence[Run]) -> Iterator[tuple[str, str, str, dict[str, Any], bool]]:
    """File name, title, axis, lines by name, whether in percent: of one run or of several side by side."""
    several = len(runs) > 1

    def lines(metric: str, **kinds: str) -> dict[str, Any]:
        return {
            f"{run.name} {label}".strip() if several else label or run.name: run.curve(metric, kind)
            for run in runs
            for label, kind in kinds.items()
        }

    yield "loss", "loss", "epoch", lines("loss", training="train", validation="eval"), False
    yield "accuracy", "top-1", "epoch", lines("top1", training="train", validation="eval"), True
    yield "learning-rate", "learning rate", "epoch", lines("lr", training="train"), False
    yield "speed", "images/s", "epoch", lines("images_per_second", training="train"), False


def _charts(run: Run) -> Iterator[tuple[str, str]]:
    for name, title, across, lines, percent in charts_of([run]):
        if svg := line_chart(title, across, lines, percent):
            yield f"{name}.svg", svg


def _use(run: Run) -> Iterator[str]:
    dumps = sorted((run.origin / "telemetry").glob("*.txt")) if run.kind == "paceline" else []
    if dumps:
        yield "## Devices\n"
        for path in dumps:
            yield f"```\n{path.read_text(encoding='utf-8', errors='replace').rstrip()}\n```\n"


def _again(run: Run) -> Iterator[str]:
    if not run.recipe:
        return
    several = ["--procs", str(run.ranks)] if len(run.hosts) == 1 and (run.ranks or 1) > 1 else []
    words = ["train", str(run.origin / "recipe.yaml"), *several, "--name", f"{run.name}-again"]
    yield f"## Again\n\n```\npaceline {shlex.join(words)}\n```\n"
    commands = [start["command"] for start in run.starts if start.get("command")]
    if commands:
        yield "It was started with\n\n```"
        yield from ("paceline " + shlex.join(map(str, command[1:])) for command in commands)
        yield "```\n"


def _dawnbench(run: Run) -> str:
    """Their format: hours since the start of training."""
    lines = ["epoch\thours\ttop1Accuracy\ttop5Accuracy"]
    times = dict(zip(map(id, run.records), run.places("seconds"), strict=True))
    for record in run.evaluated:
        shares = [f"{100 * record[name]:.3f}" if record.get(name) is not None else "" for name in ("top1", "top5")]
        lines.append("\t".join([f"{record.get('epoch') or 0:g}", f"{(times[id(record)] or 0) / 3600:.6f}", *shares]))
    return "\n".join([*lines, ""])


def _index(entries: list[dict[str, Any]], compared: bool) -> str:
    lines = ["# Logbook", "", "| run | model | ranks | top-1 | top-5 | training time | images/s | status |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for entry in entries:
        cells = [
            f"[{_plain(entry['run'])}]({entry['folder']}/README.md)",
            entry.get("model") or "",
            str(entry.get("ranks") or ""),
            f"{entry['top1']:.2%}" if entry.get("top1") is not None else "",
            f"{entry['top5']:.2%}" if entry.get("top5") is not None else "",
            duration(entry.get("train_seconds")),
            f"{entry['images_per_second']:,.0f}" if entry.get("images_per_second") else "",
            entry.get("status") or "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(["[Comparison](comparison.md)", ""] if compared else [])])
