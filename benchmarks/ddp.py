"""DDP with two ranks on one machine: scaling, and the cost of gradient synchronization.

    python benchmarks/ddp.py [--model resnet18] [--size 64] [--batch 32] [--steps 4] [--rounds 9]

Weak scaling: 2 ranks against 1, one thread each, the same per-rank batch; 2 is ideal.
Strong scaling: 2 processes of one thread against 1 process of two threads, the same global batch; 1 is ideal.
"2 independent processes" do not communicate: the limit that the machine's cores, caches and memory set. The last
column is the ratio to them; "in lockstep" they only wait for each other after every step, without gradients.
"Stock DDP" is torch's DistributedDataParallel over gloo with its defaults in a plain training loop.
"""

import argparse
import statistics
from dataclasses import dataclass, replace

from turns import Group, Step, make_parser, stock_ddp, work

from paceline.data.load.batch import Batch
from paceline.distributed.ddp import Replica
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

    def step(batches: list[Batch]) -> None:
        train_step(alone, batches, 0, 0.01)
        setup.world.barrier()

    return step


def main() -> None:
    parser = make_parser(__doc__, batch=32, steps=4, rounds=9)
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()
    if options.contestant is not None:
        compete(CONTESTANTS[options.contestant], options)
        return
    groups = {each.name: Group(number, each.ranks, each.apart) for number, each in enumerate(CONTESTANTS)}
    times: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(options.rounds + 1):
        for name, group in groups.items():
            times[name].append(group.turn()[0])
    for group in groups.values():
        group.close()
    show({name: seconds[1:] for name, seconds in times.items()}, options)  # the first round warms up


def show(times: dict[str, list[float]], options: argparse.Namespace) -> None:
    print(
        f"{options.model} at {options.size} px, {options.batch} images per rank, precision {options.precision},",
        end=" ",
    )
    print(f"{options.rounds} rounds of {options.steps} steps; medians, ratios within rounds")
    one, two_threads, independent = (contestant.name for contestant in CONTESTANTS[:3])
    for contestant in CONTESTANTS:
        seconds = times[contestant.name]
        images = options.batch * options.steps * (1 if contestant.name == one else 2)
        line = f"  {contestant.name:44}{images / statistics.median(seconds):8.1f} images/s"
        if contestant.ranks == 2:
            weak = statistics.median(2 * a / b for a, b in zip(times[one], seconds, strict=True))
            strong = statistics.median(a / b for a, b in zip(times[two_threads], seconds, strict=True))
            limit = statistics.median(a / b for a, b in zip(times[independent], seconds, strict=True))
            line += f"   weak scaling {weak:.2f}x   strong scaling {strong:.2f}   of the limit {limit:.3f}"
        print(line)


if __name__ == "__main__":
    main()
