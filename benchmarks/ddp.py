"""Two ranks on this machine: what the second one adds, and what the exchange of gradients costs.

    python benchmarks/ddp.py [--model resnet18] [--size 64] [--batch 32] [--steps 5] [--rounds 9]

Weak scaling: 2 ranks against 1, one thread each, the same per-rank batch; 2 would be perfect.
Strong scaling: 2 processes of one thread against 1 process of two threads, the same global batch; 1 would be perfect.
"2 processes that do not know of each other" exchange nothing: what the machine's cores, caches and memory allow.
"Stock DDP" is torch's DistributedDataParallel over gloo with its defaults, around a bare loop.
All contestants are started once, with their data and models, and then take turns at a few steps each; whoever does not
have its turn sleeps.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.base.world import World, keep_freed_memory
from paceline.config.io import load_recipe
from paceline.engine.build import Setup, build
from paceline.engine.train import train_step


@dataclass(frozen=True)
class Contestant:
    name: str
    ranks: int
    threads: int
    stock: bool = False
    exchange: str = "fp32"
    apart: bool = False


CONTESTANTS = (
    Contestant("1 rank x 1 thread", 1, 1),
    Contestant("1 rank x 2 threads", 1, 2),
    Contestant("2 processes that do not know of each other", 2, 1, apart=True),
    Contestant("2 ranks x 1 thread", 2, 1),
    Contestant("2 ranks x 1 thread, bf16 exchange", 2, 1, exchange="bf16"),
    Contestant("2 ranks x 1 thread, stock DDP", 2, 1, stock=True),
)


def work(contestant: Contestant, options: argparse.Namespace) -> None:
    """One rank: for every line on standard input, run some steps and answer with the seconds they took."""
    world = World.from_env("cpu")
    batch = options.batch * contestant.threads * world.size
    words = ["--data.name", "synthetic", "--data.synthetic", f"{{train_samples: {4 * batch}, size: {options.size}}}"]
    words += ["--model", f"{{name: {options.model}}}", "--train.global_batch", str(batch), "--data.size", "0"]
    words += ["--precision", options.precision, "--exchange.dtype", contestant.exchange, "--train.duration", "1000ba"]
    recipe = load_recipe("cifar10-resnet18", words)
    with world.connected():
        keep_freed_memory()
        torch.set_num_threads(contestant.threads)
        setup = build(recipe, world)
        step = stock_step(setup) if contestant.stock else lambda batches: train_step(setup, batches, 0.01)
        batches = setup.loader.steps()
        for _ in sys.stdin:
            world.barrier()
            begin = time.perf_counter()
            for _ in range(options.steps):
                step(next(batches))
            print(time.perf_counter() - begin, flush=True)
    os._exit(0)


def stock_step(setup: Setup):  # type: ignore[no-untyped-def]
    """A bare loop around torch's DDP as it comes."""
    model = DistributedDataParallel(setup.replica.module)

    def step(batches):  # type: ignore[no-untyped-def]
        with setup.autocast():
            logits = model(batches[0].images)
        F.cross_entropy(logits.float(), batches[0].labels).backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()

    return step


class Group:
    """The processes of one contestant."""

    def __init__(self, number: int, contestant: Contestant):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = []
        for rank in range(contestant.ranks):
            place: dict[str, object] = {}
            if not contestant.apart:
                place = {
                    "RANK": rank,
                    "WORLD_SIZE": contestant.ranks,
                    "LOCAL_RANK": rank,
                    "LOCAL_WORLD_SIZE": contestant.ranks,
                }
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            environment = os.environ | {key: str(value) for key, value in (place | meeting).items()}
            command = [sys.executable, __file__, *sys.argv[1:], "--contestant", str(number)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.processes.append(subprocess.Popen(command, env=environment, **pipes))

    def turn(self) -> float:
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return max(float(process.stdout.readline()) for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:  # ranks leave together
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="images a rank")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--steps", type=int, default=4, help="steps a turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contestant", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant is not None:
        work(CONTESTANTS[options.contestant], options)
        return
    groups = {contestant.name: Group(number, contestant) for number, contestant in enumerate(CONTESTANTS)}
    times: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(options.rounds + 1):
        for name, group in groups.items():
            times[name].append(group.turn())
    for group in groups.values():
        group.close()
    show({name: seconds[1:] for name, seconds in times.items()}, options)  # the first round warms up


def show(times: dict[str, list[float]], options: argparse.Namespace) -> None:
    print(
        f"{options.model} at {options.size} px, {options.batch} images a rank, precision {options.precision},", end=" "
    )
    print(f"{options.rounds} rounds of {options.steps} steps; medians, ratios within rounds")
    one, two_threads = CONTESTANTS[0].name, CONTESTANTS[1].name
    for contestant in CONTESTANTS:
        seconds = times[contestant.name]
        images = options.batch * options.steps * (1 if contestant.name == one else 2)
        line = f"  {contestant.name:44}{images / statistics.median(seconds):8.1f} images/s"
        if contestant.ranks == 2:
            weak = statistics.median(2 * a / b for a, b in zip(times[one], seconds, strict=True))
            strong = statistics.median(a / b for a, b in zip(times[two_threads], seconds, strict=True))
            line += f"   weak scaling {weak:.2f}x   strong scaling {strong:.2f}"
        print(line)


if __name__ == "__main__":
    main()
