"""The verb demo: one recipe, on one process and on two, side by side."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli.options import make_parser
from paceline.errors import UserError
from paceline.track.records import RunFolder

_HONEST = (
    "What this shows: two processes see the same batches and reach the same result. What it cannot show: the speed of "
    "two machines; here both processes share one machine's cores, which one process could use alone."
)


def demo(arguments: list[str]) -> int:
    parser = make_parser("demo", "[--runs DIR]", "Train the embedded digits on one process, then on two, and compare.")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders go (default: runs)"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return _run(parser.parse_args(arguments).runs)


def _run(runs: Path) -> int:
    begin = time.perf_counter()
    results = [_train(runs, procs) for procs in (1, 2)]
    table = Table(box=box.SIMPLE, title="digits, the same recipe twice", title_justify="left")
    for column in ("", "1 process", "2 processes"):
        table.add_column(column, justify="left" if not column else "right")
    for label, cells in _rows([summary for _, summary in results]):
        table.add_row(label, *cells)
    screen = Console()
    screen.print(table)
    screen.print(_HONEST, highlight=False)
    screen.print("Run folders: " + ", ".join(str(folder) for folder, _ in results), highlight=False)
    screen.print(
        f"Curves: tensorboard --logdir {runs}    ({time.perf_counter() - begin:.0f} s in all)", highlight=False
    )
    return 0


def _train(runs: Path, procs: int) -> tuple[Path, dict[str, Any]]:
    """Run the ordinary command, as a user would, always from the start."""
    name = f"demo-{procs}-process{'es' if procs > 1 else ''}-{time.strftime('%Y%m%d-%H%M%S')}"
    words = ["train", "digits", "--procs", str(procs), "--runs", str(runs), "--name", name]
    print(f"$ paceline {' '.join(words)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "paceline", *words], check=False).returncode
    if status:
        raise UserError(f"the demo's training ended with status {status}; see {runs / name / 'log.txt'}")
    folder = RunFolder(runs / name)
    return folder.path, json.loads(folder.summary.read_text())


def _rows(summaries: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    return [
        ("training time", [f"{s['train_seconds']:.1f} s" for s in summaries]),
        (
            "test accuracy",
            [f"{s['final']['top1']:.2%} ({s['final']['correct']} of {s['final']['samples']})" for s in summaries],
        ),
        ("test loss", [f"{s['final']['loss']:.6f}" for s in summaries]),
        ("images/s", [f"{s['images_per_second']:,.0f}" for s in summaries]),
        ("global batch", [f"{s['per_rank_batch']} x {s['ranks']} = {s['global_batch']}" for s in summaries]),
        ("waiting for the other", [f"{s['seconds']['sync'] / s['train_seconds']:.0%}" for s in summaries]),
    ]
