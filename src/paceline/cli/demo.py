"""The command demo: train one recipe in one process and in two, then write a comparison, a logbook and a report."""

import shlex
import subprocess
import time
from pathlib import Path

from rich.console import Console

from paceline.cli.options import make_parser
from paceline.errors import UserError
from paceline.system.lifetime import child_env, own_command

_EXPLANATION = (
    "Two processes see the same batches as one and reach the same result. "
    "Both processes share this machine's cores, so no speed-up is expected here."
)


def demo(arguments: list[str]) -> int:
    parser = make_parser("demo", "[--runs DIR]", "Train the built-in digits in one process, then in two, and compare.")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder for run folders (default: runs)"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return _run(parser.parse_args(arguments).runs)


def _run(runs: Path) -> int:
    begin = time.perf_counter()
    folders = [_train(runs, procs) for procs in (1, 2)]
    from paceline.cli.evidence import compare, logbook, report

    names = [str(folder) for folder in folders]
    for command, words in (
        (compare, names),
        (logbook, [*names, "--out", str(runs / "logbook")]),
        (report, [*names, "--out", str(runs / "report.html"), "--title", "digits in one process and in two"]),
    ):
        print(f"$ paceline {command.__name__} {shlex.join(words)}", flush=True)
        command(words)
    screen = Console()
    screen.print(f"\n{_EXPLANATION}", highlight=False)
    for label, place in (
        ("Run folders", ", ".join(names)),
        ("Logbook", runs / "logbook" / "index.md"),
        ("Report (open in a browser)", (runs / "report.html").resolve()),
        ("Curves", f"tensorboard --logdir {runs}"),
    ):
        screen.print(f"{label}: {place}", highlight=False, soft_wrap=True)
    screen.print(f"{time.perf_counter() - begin:.0f} s in total", highlight=False)
    return 0


def _train(runs: Path, procs: int) -> Path:
    """Train from the start with the ordinary command; return the run folder."""
    name = f"demo-{procs}-process{'es' if procs > 1 else ''}-{time.strftime('%Y%m%d-%H%M%S')}"
    words = ["train", "digits", "--procs", str(procs), "--device", "cpu", "--precision", "fp32"]
    words += ["--runs", str(runs), "--name", name]
    print(f"$ paceline {shlex.join(words)}", flush=True)
    status = subprocess.run(own_command(*words), env=child_env(), check=False).returncode
    if status:
        message = f"training ended with exit status {status}. See {runs / name / 'log.txt'}."
        raise UserError("training-failed", message, status=status)
    return runs / name
