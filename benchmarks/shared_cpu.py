"""How OpenMP's threads should wait for each other, on a quiet machine and beside other processes.

    python benchmarks/shared_cpu.py [--busy 1] [--rounds 5] [--model resnet18] [--size 64] [--batch 32]

One process with a thread per core trains with each GOMP_SPINCOUNT in turn (how often a waiting thread polls before it
sleeps; 0: it sleeps at once), first alone, then beside `--busy` processes that compute all the time. A spinning thread
keeps its core from the very thread it waits for, once there are more threads than cores.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from turns import Group, make_parser, work

from paceline.base.host import cores

SPINS = ("default", "100000", "10000", "1000", "100", "0")


def variables(spins: str) -> dict[str, str]:
    return {} if spins == "default" else {"GOMP_SPINCOUNT": spins}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other work on the machine."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def rates(groups: Sequence[Group], images: int, rounds: int) -> list[list[float]]:
    """Images per second of every group, round by round; the first round warms up."""
    turns = [[images / group.turn()[0] for group in groups] for _ in range(rounds + 1)]
    return [list(column) for column in zip(*turns[1:], strict=True)]


def show(title: str, found: list[list[float]]) -> None:
    print(f"{title}\n  {'GOMP_SPINCOUNT':16}{'images/s':>10}{'ratio':>8}", flush=True)
    for spins, own in zip(SPINS, found, strict=True):
        ratio = statistics.median(mine / first for mine, first in zip(own, found[0], strict=True))
        print(f"  {spins:16}{statistics.median(own):>10.1f}{ratio:>8.3f}", flush=True)


def main() -> None:
    parser = make_parser(__doc__, batch=32, steps=4, rounds=5)
    parser.add_argument("--busy", type=int, default=1, metavar="N", help="other processes that compute")
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    if options.contestant is not None:
        work(options, options.batch, "--precision", options.precision, threads=cores())
    groups = [Group(number, 1, apart=True, variables=variables(spins)) for number, spins in enumerate(SPINS)]
    images = options.batch * options.steps
    print(f"{options.model} at {options.size} px, batch {options.batch}, {cores()} threads, {options.rounds} rounds")
    show("alone", rates(groups, images, options.rounds))
    with busy(options.busy):
        show(f"beside {options.busy} busy process(es)", rates(groups, images, options.rounds))
    for group in groups:
        group.close()


if __name__ == "__main__":
    main()
