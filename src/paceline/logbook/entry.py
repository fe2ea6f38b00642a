"""One run's page of the logbook, in Markdown."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.config.io import leaves
from paceline.logbook.charts import line_chart
from paceline.logbook.read import PARTS, Run
from paceline.logbook.tables import duration, plain
from paceline.logbook.verdict import verdict

_WORDS = {
    "data": "waiting for data",
    "compute": "forward and backward",
    "sync": "exchanging gradients",
    "optimizer": "optimizer",
    "evaluate": "evaluation",
    "checkpoint": "saves",
}


def page_of(run: Run, facts: dict[str, Any], charts: list[str]) -> Iterator[str]:
    yield f"# {plain(run.name)}\n"
    for note in run.notes:
        yield f"> {plain(note)}\n"
    yield from _table("What", _what(run))
    yield from _table("Result", _result(run, facts))
    yield "## Verdict\n"
    yield from (f"- {plain(finding.text)}" for finding in verdict(run))
    yield ""
    yield from _times(run)
    if charts:
        yield "## Curves\n"
        yield from (f"![{name.removesuffix('.svg')}]({name})" for name in charts)
        yield ""
    yield from _use(run)
    yield from _again(run)


def _table(title: str, rows: list[tuple[str, Any]]) -> Iterator[str]:
    known = [(label, value) for label, value in rows if value not in (None, "", [])]
    if known:
        yield f"## {title}\n\n| | |\n|---|---|"
        yield from (f"| {label} | {plain(str(value))} |" for label, value in known)
        yield ""


def _what(run: Run) -> list[tuple[str, Any]]:
    recipe, start = run.recipe, run.starts[-1] if run.starts else {}
    hardware, about = start.get("hardware", {}), recipe.get("about", {})
    device = hardware.get("gpu") or hardware.get("cpu")
    number = f" x {hardware['gpus']}" if hardware.get("gpus") else ""
    packages = start.get("packages", {})
    largest = start.get("largest_batch") or {}
    return [
        ("recipe", recipe.get("name")),
        ("source", about.get("source")),
        ("published", about.get("published")),
        ("model", recipe.get("model", {}).get("name") or run.facts.get("model.name")),
        ("data", f"{recipe['data'].get('name')}, fingerprint {start.get('data')}" if recipe.get("data") else None),
        ("training", _settings(recipe)),
        ("ranks", run.ranks),
        ("hosts", ", ".join(run.hosts) or run.facts.get("nodes")),
        ("global batch", run.global_batch),
        ("largest batch of a rank", _largest(largest)),
        ("precision", start.get("precision")),
        ("strategy", start.get("strategy") or recipe.get("strategy")),
        ("device", f"{device}{number}" if device else None),
        ("host", _host(start)),
        ("started", start.get("started")),
        (
            "software",
            ", ".join(f"{name} {packages[name]}" for name in ("paceline", "torch", "timm") if name in packages),
        ),
        ("code", start.get("code", {}).get("commit")),
        ("whole recipe", run.origin / "recipe.yaml" if recipe else None),
        ("run folder", run.origin if run.kind == "paceline" else None),
        ("checkpoints", run.origin / "checkpoints" if (run.origin / "checkpoints").is_dir() else None),
    ]


def _settings(recipe: dict[str, Any]) -> str:
    fields = dict(leaves(recipe))
    told = [
        ("train.duration", "{}"),
        ("optim.name", "{}"),
        ("optim.lr", "learning rate {}"),
        ("optim.schedule.name", "schedule {}"),
        ("optim.weight_decay", "weight decay {}"),
    ]
    known = [form.format(fields[key]) for key, form in told if fields.get(key) is not None]
    return ", ".join([*known, *([f"{len(recipe['phases'])} phases"] if recipe.get("phases") else [])])


def _host(start: dict[str, Any]) -> str | None:
    hardware = start.get("hardware", {})
    told = [
        f"{hardware['cores']} cores" if "cores" in hardware else None,
        f"{hardware['threads_per_process']} threads a rank" if "threads_per_process" in hardware else None,
        f"{hardware['memory_gb']} GiB" if "memory_gb" in hardware else None,
        start.get("platform"),
        f"Python {start['python']}" if "python" in start else None,
    ]
    return ", ".join(str(part) for part in told if part) or None


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


def charts_for(run: Run) -> Iterator[tuple[str, str]]:
    for name, title, across, lines, percent in charts_of([run]):
        if svg := line_chart(title, across, lines, percent):
            yield f"{name}.svg", svg


def _use(run: Run) -> Iterator[str]:
    dumps = sorted(path for path in (run.origin / "telemetry").glob("*.txt") if path.is_file())
    if dumps:
        yield "## Devices\n"
        for path in dumps:
            text = path.read_text(encoding="utf-8", errors="replace").rstrip().replace("`", "'")
            yield f"```\n{text}\n```\n"


def _again(run: Run) -> Iterator[str]:
    if not run.recipe:
        return
    words = ["train", str(run.origin.resolve() / "recipe.yaml"), "--name", f"{run.name}-again"]
    start = run.starts[-1] if run.starts else {}
    if len(run.hosts) == 1 and (run.ranks or 1) > 1:
        words += ["--procs", str(run.ranks)]
    if start.get("threads_chosen"):
        words += ["--threads", str(start["hardware"]["threads_per_process"])]
    yield f"## Again\n\n```\npaceline {shlex.join(words)}\n```\n"
    if len(run.hosts) > 1:
        yield f"It ran on {len(run.hosts)} hosts: give it the same places, or launch it on as many.\n"
