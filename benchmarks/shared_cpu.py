"""OpenMP wait policy and CPU affinity, on an idle machine and next to other processes.

    python benchmarks/shared_cpu.py [--busy 1] [--rounds 5] [--model resnet18] [--size 64] [--batch 32]

One process with a thread per core trains with each setting in turn, first alone, then next to `--busy` busy processes.
GOMP_SPINCOUNT is how often a waiting thread polls before it sleeps; OMP_PROC_BIND binds each thread to a core.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from turns import Group, make_parser, work

BOUND = {"OMP_PROC_BIND": "true"}
CONTESTANTS = {
    "torch's defaults": {},
    "short spinning": {"GOMP_SPINCOUNT": "10000"},
    "no spinning": {"GOMP_SPINCOUNT": "0"},
    "bound": BOUND,
    "bound, short spinning (paceline)": BOUND | {"GOMP_SPINCOUNT": "10000"},
    "bound, no spinning": BOUND | {"GOMP_SPINCOUNT": "0"},
}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run busy processes on the machine."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def rates(groups: Sequence[Group], images: int, rounds: int) -> list[list[float]]:
    """Return images per second of every group and round, without the first round, which warms up."""
    turns = [[images / group.turn().seconds for group in groups] for _ in range(rounds + 1)]
    return [list(column) for column in zip(*turns[1:], strict=True)]


def show(title: str, found: list[list[float]]) -> None:
    print(f"{title}\n  {'':34}{'images/s':>10}{'ratio':>8}", flush=True)
    for name, own in zip(CONTESTANTS, found, strict=True):
        ratio = statistics.median(mine / first for mine, first in zip(own, found[0], strict=True))
        print(f"  {name:34}{statistics.median(own):>10.1f}{ratio:>8.3f}", flush=True)


def main() -> None:
    parser = make_parser(__doc__, batch=32, steps=4, rounds=5)
    parser.add_argument("--busy", type=int, default=1, metavar="N", help="number of busy processes")
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    threads = os.cpu_count() or 1  # not the affinity mask: a bound main thread has one core
    if options.contestant is not None:
        work(options, options.batch, "--precision", options.precision, threads=threads)
    variables = CONTESTANTS.values()
    groups = [Group(number, 1, apart=True, variables=own) for number, own in enumerate(variables)]
    images = options.batch * options.steps
    print(f"{options.model} at {options.size} px, batch {options.batch}, {threads} threads, {options.rounds} rounds")
    show("alone", rates(groups, images, options.rounds))
    with busy(options.busy):
        show(f"next to {options.busy} busy process{'es' * (options.busy > 1)}", rates(groups, images, options.rounds))
    for group in groups:
        group.close()


if __name__ == "__main__":
    main()
