"""A run's page in the logbook, as Markdown."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from paceline.analysis.compare import compare
from paceline.analysis.origin import about, results
from paceline.analysis.run import PARTS, LoggedRun
from paceline.analysis.settings import settings
from paceline.analysis.tables import duration, plain, table
from paceline.analysis.verdict import verdict
from paceline.config.tracking import github_link
from paceline.system.files import printable, printable_lines
from paceline.system.untrusted import read_regular
from paceline.track.records import largest_batch

_MAX_DUMP = 1 << 20
_WORDS = {
    "data": "input wait",
    "compute": "forward and backward",
    "sync": "gradient synchronization",
    "optimizer": "optimizer",
    "evaluate": "evaluation",
    "checkpoint": "checkpoints",
}


def page_of(run: LoggedRun, charts: list[str]) -> Iterator[str]:
    """Yield the parts of the page; `charts` are files next to it."""
    yield f"# {plain(run.name)}\n"
    for note in run.notes:
        yield f"> {plain(note)}\n"
    yield from _table("Settings", _overview(run))
    yield from _origin(run)
    yield from _table("Results", [(label, cell) for label, cell in table(compare([run]))[1:]])
    yield "## Bottlenecks\n"
    yield from (f"- {plain(finding.text)}" for finding in verdict(run))
    yield ""
    yield from _times(run)
    if charts:
        yield "## Curves\n"
        yield from (f"![{name.removesuffix('.svg')}]({name})" for name in charts)
        yield ""
    yield from _devices(run)
    yield from _repeat(run)


def _table(title: str, rows: Sequence[tuple[str, Any]]) -> Iterator[str]:
    known = [(label, value) for label, value in rows if value not in (None, "", [])]
    if known:
        yield f"## {title}\n\n| | |\n|---|---|"
        yield from (f"| {plain(label)} | {plain(str(value))} |" for label, value in known)
        yield ""


def _origin(run: LoggedRun) -> Iterator[str]:
    origin = about(run)
    yield from _table("Source of the recipe", results(origin))
    for title, lines in (
        ("Code of the source", [f"[{plain(file)}]({github_link(file)})" for file in origin.code]),
        ("Differences from the source", list(map(plain, origin.deviations))),
    ):
        if lines:
            yield f"{title}:\n"
            yield from (f"- {line}" for line in lines)
            yield ""


def _overview(run: LoggedRun) -> list[tuple[str, Any]]:
    recipe, start = run.recipe, run.starts[-1] if run.starts else {}
    hardware = start.get("hardware", {})
    device = hardware.get("gpu") or hardware.get("cpu")
    count = f" x {hardware['gpus']}" if hardware.get("gpus") else ""
    packages = start.get("packages", {})
    # the run of a launched job was elsewhere than the search when it started
    largest = start.get("largest_batch") or largest_batch(run.origin.parent, start.get("memory_key", {}))
    return [
        *settings(run).items(),
        ("hosts", ", ".join(run.hosts) or run.facts.get("nodes")),
        ("largest batch per rank", _largest(largest)),
        ("strategy", start.get("strategy") or recipe.get("strategy")),
        ("device", f"{device}{count}" if device else None),
        ("host", _host(start)),
        ("started", start.get("started")),
        (
            "software",
            ", ".join(f"{name} {packages[name]}" for name in ("paceline", "torch", "timm") if name in packages),
        ),
        ("code", start.get("code", {}).get("commit")),
        ("full recipe", run.origin / "recipe.yaml" if recipe else None),
        ("run folder", run.origin if run.kind == "paceline" else None),
        ("checkpoints", run.origin / "checkpoints" if (run.origin / "checkpoints").is_dir() else None),
    ]


def _host(start: dict[str, Any]) -> str | None:
    hardware = start.get("hardware", {})
    parts = [
        f"{hardware['cores']} cores" if "cores" in hardware else None,
        f"threads per rank: {hardware['threads_per_process']}" if "threads_per_process" in hardware else None,
        f"{hardware['memory_gb']} GiB" if "memory_gb" in hardware else None,
        start.get("platform"),
        f"Python {start['python']}" if "python" in start else None,
    ]
    return ", ".join(str(part) for part in parts if part) or None


def _largest(search: dict[str, Any] | None) -> str | None:
    """Return the result of `paceline find-batch`."""
    if not search:
        return None
    total = f"{search['largest_global']} over all ranks; fastest {search['fastest']}"
    return f"{search['largest']} ({total}), searched {search['searched']}"


def _times(run: LoggedRun) -> Iterator[str]:
    total = run.total_seconds
    if not total or not run.seconds:
        return
    yield "## Time split\n\n| | time | fraction |\n|---|---|---|"
    for part in PARTS:
        if part in run.seconds:
            yield f"| {_WORDS[part]} | {duration(run.seconds[part])} | {run.seconds[part] / total:.1%} |"
    if "sync" not in run.seconds and run.recipe.get("strategy") == "fsdp":
        yield "\nWith FSDP, gradient synchronization is part of forward and backward and is not measured separately."
    yield ""


def _devices(run: LoggedRun) -> Iterator[str]:
    dumps = []
    for path in sorted((run.origin / "telemetry").glob("[!.]*.txt")):
        with suppress(OSError):
            dumps.append(read_regular(path, _MAX_DUMP, run.origin).decode(errors="replace"))
    if dumps:
        yield "## Devices\n"
        for dump in dumps:
            text = printable_lines(dump.rstrip()).replace("`", "'")
            yield f"```\n{text}\n```\n"


def _repeat(run: LoggedRun) -> Iterator[str]:
    if not run.recipe:
        return
    words = ["train", printable(str(run.origin.resolve() / "recipe.yaml")), "--name", f"{run.name}-again"]
    start = run.starts[-1] if run.starts else {}
    if len(run.hosts) == 1 and (run.ranks or 1) > 1:
        words += ["--procs", str(run.ranks)]
    if start.get("threads_chosen") and (threads := start.get("hardware", {}).get("threads_per_process")):
        words += ["--threads", str(threads)]
    yield f"## Repeat this run\n\n```\npaceline {shlex.join(words)}\n```\n"
    if len(run.hosts) > 1:
        yield f"The run used {len(run.hosts)} hosts. Start it on as many, e.g. with `paceline launch`.\n"
