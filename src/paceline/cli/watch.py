"""The command watch: follow a run in the terminal."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import make_parser, positive
from paceline.errors import UserError
from paceline.system.files import LOCK_NAME, is_locked, say

if TYPE_CHECKING:
    from rich.console import Group

    from paceline.analysis.live import Snapshot

_WATCH = """Watch a run: progress, loss, accuracy, images/s, utilization and memory per GPU and host, time per rank.

The run may be in another process or in a mounted folder. Without a terminal, the output is plain text every 30 seconds.
The command ends with the run; Ctrl-C does not stop the run."""

_START_SECONDS = 10  # importing torch before a run has a folder


def watch(arguments: list[str]) -> int:
    parser = make_parser("watch", "RUN [--every SECONDS] [--once]", _WATCH)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "--every", type=positive, metavar="SECONDS", help="interval (default: 1; without a terminal: 30)"
    )
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    _wait_for_start(options.run)
    _follow(options)
    return 0


def _wait_for_start(run: Path) -> None:
    """Wait for the recipe.yaml of a run that has just been started, or may just have been."""
    begin = time.monotonic()
    while not (run / "recipe.yaml").is_file():
        names = {path.name for path in run.iterdir()} if run.is_dir() else set()
        is_new = names <= {LOCK_NAME, "log.txt"} and time.monotonic() < begin + _START_SECONDS
        if not is_new and not is_locked(run):
            message = f"{run} is not a run folder: it has no recipe.yaml."
            raise UserError("not-a-run", message, path=run)
        time.sleep(0.2)


def _follow(options: argparse.Namespace) -> None:
    from rich.live import Live

    from paceline.analysis.live import snapshot
    from paceline.system.logs import Screen

    screen = Screen()
    now = snapshot(options.run)
    if options.once or not screen.is_terminal:
        while True:
            say(_plain(now))
            if options.once or now.status not in ("running", "starting"):
                return
            time.sleep(options.every or 30)
            now = snapshot(options.run)
    try:
        with Live(_screen(now), console=screen, auto_refresh=False) as live:
            while now.status in ("running", "starting"):
                time.sleep(options.every or 1)
                now = snapshot(options.run)
                live.update(_screen(now), refresh=True)
    except KeyboardInterrupt:
        print("the run continues", file=sys.stderr)


def figures(now: "Snapshot") -> list[tuple[str, str]]:
    """Return labels and values of a run's state, the status first."""
    from paceline.analysis.tables import duration

    train, evaluated = now.train, now.evaluated
    rows = [("status", f"{now.status}, {now.ranks} rank{'s' * (now.ranks != 1)}")]
    if now.total_steps:
        rows.append(("step", f"{now.step:,} of {now.total_steps:,} ({now.step / now.total_steps:.0%})"))
    if train:
        rows += [
            ("epoch", _known(train.get("epoch"), "{:.2f}")),
            ("loss", _known(train.get("loss"), "{:.4f}") or "not finite"),
            ("training top-1", _known(train.get("top1"), "{:.2%}")),
            ("images/s", _known(train.get("images_per_second"), "{:,.0f}")),
        ]
    if evaluated:
        place = _known(evaluated.get("epoch"), " (epoch {:.2f})")
        rows.append(("validation top-1", _known(evaluated.get("top1"), "{:.2%}") + place))
    if now.seconds_left is not None and now.status == "running":
        rows.append(("time left", f"about {duration(now.seconds_left)}"))
    return rows


def _hosts(now: "Snapshot") -> list[list[str]]:
    rows = []
    for host, sample in now.hosts.items():
        rows.append([host, f"{sample['cpu_percent']:.0f}%", f"{sample['memory_bytes'] / 1e9:.1f} GB", "", ""])
        for number, gpu in enumerate(sample.get("gpus", [])):
            cells = [
                _known(gpu.get("use_percent"), "{:.0f}%"),
                _known((gpu.get("memory_bytes") or 0) / 1e9, "{:.1f} GB"),
                _known(gpu.get("watts"), "{:.0f} W"),
                _known(gpu.get("celsius"), "{:.0f} C"),
            ]
            rows.append([f"{host} GPU {number}", *cells])
    return rows


def _known(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _ranks(now: "Snapshot") -> list[list[str]]:
    """Return the time per step of each rank, from the newest record."""
    split, steps = now.train.get("seconds_per_rank"), now.train.get("steps", 1)
    if not split:
        return []
    ranks = range(len(split["data"]))
    return [[str(rank), *(f"{1000 * split[part][rank] / steps:,.1f} ms" for part in split)] for rank in ranks]


def _plain(now: "Snapshot") -> str:
    lines = [f"{now.name}: " + ", ".join(f"{label} {value}" for label, value in figures(now))]
    lines += ["  " + "  ".join(cell for cell in row if cell) for row in _hosts(now)]
    parts = list(now.train.get("seconds_per_rank", {}))
    lines += [
        f"  rank {row[0]}: " + ", ".join(f"{part} {cell}" for part, cell in zip(parts, row[1:], strict=True))
        for row in _ranks(now)
    ]
    return "\n".join(lines)


def _screen(now: "Snapshot") -> "Group":
    from rich.console import Group, RenderableType
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    from paceline.system.tables import new_table

    known = new_table(("", ""), figures(now))
    known.show_header = False
    hosts = new_table(("host", "utilization", "memory", "power", "temperature"), _hosts(now))
    parts: list[RenderableType] = [known, Text(""), hosts]
    if rows := _ranks(now):
        parts += [Text("\ntime per step"), new_table(("rank", *now.train["seconds_per_rank"]), rows)]
    bar = ProgressBar(total=now.total_steps or 1, completed=now.step, width=60)
    return Group(Text(now.name), bar, Text(""), *parts)  # the bar does not end its line
