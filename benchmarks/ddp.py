"""DDP with two ranks on one machine: scaling, and the cost of gradient synchronization.

    python benchmarks/ddp.py [--model resnet18] [--size 64] [--batch 32] [--steps 4] [--rounds 9]

Weak scaling: 2 ranks against 1, one thread each, the same per-rank batch; 2 is ideal.
Strong scaling: 2 processes of one thread against 1 process of two threads, the same global batch; 1 is ideal.
"2 independent processes" do not communicate: the limit that the machine's cores, caches and memory set. The last
column is the ratio to them; "in lockstep" they only wait for each other after every step, without gradients.
"Sync" is the time between backward and averaged gradients on the rank that waited least; copying gradients to shared
memory is a part of backward.
"Stock DDP" is torch's DistributedDataParallel over gloo with its defaults in a plain training loop.
"""

import argparse
import statistics
from dataclasses import dataclass, replace

from turns import Group, Step, Turn, make_parser, rounds, stock_ddp, work

from paceline.data.load.batch import Batch
from paceline.distributed.ddp import Replica
from paceline.distributed.local_barrier import LocalBarrier
from paceline.distributed.world import World
from paceline.engine.build import Setup
from paceline.engine.train import train_step


@dataclass(frozen=True)
class Contestant:
    name: str
    ranks: int
    threads: int
    stock: bool = False
    exchange: str = "fp32"
    apart: bool = False
    lockstep: bool = False


CONTESTANTS = (
    Contestant("1 rank x 1 thread", 1, 1),
    Contestant("1 rank x 2 threads", 1, 2),
    Contestant("2 independent processes", 2, 1, apart=True),
    Contestant("2 independent processes in lockstep", 2, 1, lockstep=True),
    Contestant("2 ranks x 1 thread", 2, 1),
    Contestant("2 ranks x 1 thread, bf16 all-reduce", 2, 1, exchange="bf16"),
    Contestant("2 ranks x 1 thread, stock DDP", 2, 1, stock=True),
)


def compete(contestant: Contestant, options: argparse.Namespace) -> None:
    words = ["--precision", options.precision, "--grad_sync.dtype", contestant.exchange]
    stock = stock_ddp if contestant.stock else lockstep if contestant.lockstep else None
    work(options, options.batch * contestant.threads, *words, threads=contestant.threads, stock=stock)


def lockstep(setup: Setup) -> Step:
    """Return a step of the engine that waits for the other rank, but synchronizes no gradients."""
    alone = replace(setup, replica=Replica(setup.replica.module, World(), setup.recipe))
    barrier = LocalBarrier(setup.world, "/tmp")

    def step(batches: list[Batch]) -> None:
        train_step(alone, batches, 0, 0.01)
        barrier.wait()

    return step


def main() -> None:
    parser = make_parser(__doc__, batch=32, steps=4, rounds=9)
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    if options.contestant is not None:
        compete(CONTESTANTS[options.contestant], options)
        return
    groups = [Group(number, each.ranks, each.apart) for number, each in enumerate(CONTESTANTS)]
    turns = rounds(groups, options.rounds)
    for group in groups:
        group.close()
    show(turns, options)


def show(turns: list[list[Turn]], options: argparse.Namespace) -> None:
    print(
        f"{options.model} at {options.size} px, {options.batch} images per rank, precision {options.precision},",
        end=" ",
    )
    print(f"{options.rounds} rounds of {options.steps} steps; medians, ratios within rounds")
    print(f"  {'':40}{'images/s':>9}{'step':>10}{'sync':>10}{'weak':>7}{'strong':>8}{'of the limit':>14}")
    one, two_threads, independent = turns[:3]
    for contestant, own in zip(CONTESTANTS, turns, strict=True):
        step = statistics.median(turn.seconds for turn in own) / options.steps
        sync = statistics.median(turn.sync for turn in own) / options.steps
        images = options.batch * max(contestant.ranks, contestant.threads)
        line = f"  {contestant.name:40}{images / step:9.1f}{1000 * step:7.1f} ms"
        if contestant.ranks == 2:
            weak, strong, limit = (_ratio(base, own) for base in (one, two_threads, independent))
            line += f"{1000 * sync:7.1f} ms{2 * weak:6.2f}x{strong:8.2f}{limit:14.3f}"
        print(line)


def _ratio(base: list[Turn], own: list[Turn]) -> float:
    return statistics.median(a.seconds / b.seconds for a, b in zip(base, own, strict=True))


if __name__ == "__main__":
    main()
