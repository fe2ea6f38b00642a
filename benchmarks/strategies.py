"""Strategies side by side: one process, DDP and FSDP, with each precision and each gradient synchronization.

    python benchmarks/strategies.py [--model resnet18] [--size 64] [--batch 16] [--steps 2] [--rounds 5]
    sudo python benchmarks/strategies.py --links 1000,200            two ranks with a rate-limited link

Without --links: images/s of all ranks and peak memory per rank, one thread per rank on this machine.
"Ratio" is relative to one process of the same precision, or with --links to stock DDP over the same link.
With --links, as root: each rank runs in its own network namespace, connected by virtual interfaces whose rate (in
Mbit/s) the kernel limits; 0 means no limit.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from networks import missing, network, run
from turns import Group, Step, Turn, make_parser, rounds, stock_ddp, stock_powersgd, work

from paceline.engine.build import Setup


@dataclass(frozen=True)
class Contestant:
    name: str
    ranks: int
    precision: str = "fp32"
    words: tuple[str, ...] = ()
    stock: Callable[[Setup], Step] | None = None
    accumulation: int = 1


FP16, BF16 = ("--grad_sync.dtype", "fp16"), ("--grad_sync.dtype", "bf16")
FSDP = ("--strategy", "fsdp")
POWERSGD = ("--grad_sync.powersgd_rank", "2", "--grad_sync.powersgd_start_step", "2")


def here(precision: str) -> tuple[Contestant, ...]:
    """Return the contestants of a precision; the others are compared with the first, one process."""
    return (
        Contestant(f"{precision}, single", 1, precision),
        Contestant(f"{precision}, DDP x2", 2, precision),
        Contestant(f"{precision}, DDP x2, bf16 all-reduce", 2, precision, BF16),
        Contestant(f"{precision}, FSDP x2", 2, precision, FSDP),
    )


APART = (
    Contestant("stock DDP", 2, stock=stock_ddp),
    Contestant("stock DDP, PowerSGD rank 2", 2, stock=stock_powersgd),
    Contestant("DDP", 2),
    Contestant("DDP, bf16 all-reduce", 2, words=BF16),
    Contestant("DDP, fp16 all-reduce", 2, words=FP16),
    Contestant("DDP, PowerSGD rank 2", 2, words=POWERSGD),
    Contestant("DDP, 4 micro-batches per step", 2, accumulation=4),
    Contestant("FSDP", 2, words=FSDP),
    Contestant("FSDP, fp16 reduce-scatter", 2, words=(*FSDP, *FP16)),
)


def compete(contestant: Contestant, options: argparse.Namespace) -> None:
    words = ["--precision", contestant.precision, *contestant.words]
    words += ["--train.grad_accumulation", str(contestant.accumulation)]
    work(options, options.batch * contestant.accumulation, *words, stock=contestant.stock)


def main() -> None:
    parser = make_parser(__doc__, batch=16, steps=2, rounds=5)
    parser.add_argument("--precisions", type=_words, default=["fp32", "bf16", "fp16"], metavar="NAME,...")
    parser.add_argument("--links", type=_rates, default=[], metavar="MBIT,...", help="link rates")
    options = parser.parse_args()
    contestants = APART if options.links else [each for name in options.precisions for each in here(name)]
    if options.contestant is not None:
        compete(contestants[options.contestant], options)
        return
    title = f"{options.model} at {options.size} px, {options.batch} images per rank, 1 thread per rank"
    print(f"{title}; {options.rounds} rounds of {options.steps} steps; medians, ratios within rounds", flush=True)
    if not options.links:
        groups = [Group(number, each.ranks) for number, each in enumerate(contestants)]
        results = rounds(groups, options.rounds)
        show(contestants, results, options, [number // 4 * 4 for number in range(len(contestants))])
        for group in groups:
            group.close()
    elif reason := missing(tc="iproute2"):
        sys.exit(f"--links {reason}")
    else:
        with namespaces() as (nodes, address):
            groups = [Group(number, each.ranks, nodes=nodes, address=address) for number, each in enumerate(APART)]
            for rate in options.links:
                limit(nodes, rate)
                print(f"link of {rate} Mbit/s" if rate else "unlimited link", flush=True)
                show(APART, rounds(groups, options.rounds), options, [0] * len(APART))
            limit(nodes, 0)
            for group in groups:
                group.close()


def _words(text: str) -> list[str]:
    return text.split(",")


def _rates(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def show(
    contestants: Sequence[Contestant], results: list[list[Turn]], options: argparse.Namespace, bases: list[int]
) -> None:
    def rates(number: int) -> list[float]:
        """Return images per second of each turn."""
        contestant = contestants[number]
        images = options.batch * contestant.accumulation * contestant.ranks * options.steps
        return [images / turn.seconds for turn in results[number]]

    print(f"  {'':32}{'step':>10}{'images/s':>10}{'ratio':>8}{'memory/rank':>15}")
    for number, contestant in enumerate(contestants):
        step = statistics.median(turn.seconds for turn in results[number]) / options.steps
        speed = statistics.median(rates(number))
        ratio = statistics.median(own / base for own, base in zip(rates(number), rates(bases[number]), strict=True))
        peak = max(turn.peak for turn in results[number])
        print(
            f"  {contestant.name:32}{1000 * step:>7.0f} ms{speed:>10.1f}{ratio:>8.2f}{peak / 1e6:>12,.0f} MB",
            flush=True,
        )


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[list[str], str]]:
    """Yield two connected network namespaces and the address of the first."""
    with network() as net:
        nodes = [net.add_space(name) for name in ("n1", "n2")]
        run(f"ip -n {nodes[0]} link add eth0 type veth peer name eth0 netns {nodes[1]}")
        for number, node in enumerate(nodes, start=1):
            run(f"ip -n {node} address add {net.address(number)}/24 dev eth0")
            run(f"ip -n {node} link set eth0 up")
        yield nodes, net.address(1)


def limit(nodes: Sequence[str], rate: int) -> None:
    """Limit both directions with a token bucket filter, which every kernel has."""
    for node in nodes:
        with contextlib.suppress(subprocess.CalledProcessError):  # it may have none yet
            run(f"tc -n {node} qdisc delete dev eth0 root")
        if rate:
            run(f"tc -n {node} qdisc add dev eth0 root tbf rate {rate}mbit burst 512kb latency 100ms")


if __name__ == "__main__":
    main()
