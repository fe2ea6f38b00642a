"""Contestants in separate processes that take turns at training steps; used by several benchmarks.

Every contestant consists of one or more ranks with data and models ready; the others sleep during its turn. Noise of
the machine therefore affects all of them equally, and ratios are taken within a round.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.config.io import load_recipe
from paceline.config.recipe import Recipe
from paceline.data.load.batch import Batch
from paceline.distributed.world import World
from paceline.engine.build import Setup, build
from paceline.engine.train import train_step
from paceline.engine.window import StepResult
from paceline.system.host import keep_freed_memory

Step = Callable[[list[Batch]], object]


def generated(model: str, size: int, batch: int, *overrides: str) -> Recipe:
    """Return a recipe with synthetic images, which need no loading, and without evaluation."""
    words = ["--data.name", "synthetic", "--data.synthetic", f"{{train_samples: {4 * batch}, size: {size}}}"]
    words += ["--model", "null", "--model.name", model, "--train.global_batch", str(batch), "--data.size", "0"]
    return load_recipe("cifar10-resnet18", [*words, "--train.duration", "100000ba", *overrides])


def make_parser(description: str | None, batch: int, steps: int, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=batch, help="images per rank and micro-batch")
    parser.add_argument("--steps", type=int, default=steps, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--contestant", type=int, help=argparse.SUPPRESS)
    return parser


def work(
    options: argparse.Namespace,
    images: int,
    *overrides: str,
    threads: int = 1,
    stock: Callable[[Setup], Step] | None = None,
) -> None:
    """Act as one rank: for every line on standard input, run some steps and print their time and the peak memory.

    `images` is the number per rank and step; `stock` returns another step function than the engine's.
    """
    world = World.from_env("cpu")
    with world.connected():
        keep_freed_memory()
        torch.set_num_threads(threads)
        setup = build(generated(options.model, options.size, images * world.size, *overrides), world)
        step = stock(setup) if stock else lambda batches: train_step(setup, batches, 0, 0.01)
        batches = setup.loader.steps()
        for _ in sys.stdin:
            world.barrier()
            begin = time.perf_counter()
            results = [step(next(batches)) for _ in range(options.steps)]
            seconds = time.perf_counter() - begin
            sync = sum(result.sync_seconds() for result in results if isinstance(result, StepResult))
            print(json.dumps({"seconds": seconds, "sync": sync, "peak": peak_bytes()}), flush=True)
    os._exit(0)


def stock_ddp(setup: Setup) -> Step:
    """Return a step of a plain loop around torch's DDP with its defaults."""
    return _bare_loop(setup, DistributedDataParallel(setup.replica.module))


def stock_powersgd(setup: Setup) -> Step:
    """Return the same with torch's PowerSGD hook, in one bucket: with several it crashes under gloo."""
    model = DistributedDataParallel(setup.replica.module, bucket_cap_mb=1 << 20)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _bare_loop(setup, model)


def _bare_loop(setup: Setup, model: DistributedDataParallel) -> Step:
    def step(batches: list[Batch]) -> None:
        with setup.autocast():
            logits = model(batches[0].images)
        F.cross_entropy(logits.float(), batches[0].labels).backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()

    return step


def peak_bytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


class Turn(NamedTuple):
    seconds: float  # of the slowest rank
    sync: float  # seconds between backward and synchronized gradients, of the rank that waited least
    peak: int  # bytes of memory, of the rank that has used most so far


class Group:
    """The processes of one contestant, on this machine or each in its own network namespace."""

    def __init__(
        self,
        number: int,
        ranks: int,
        apart: bool = False,
        nodes: Sequence[str] = (),
        address: str = "127.0.0.1",
        variables: Mapping[str, str] = MappingProxyType({}),
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            master = {"MASTER_ADDR": address, "MASTER_PORT": str(probe.getsockname()[1])}
        master["GLOO_SOCKET_IFNAME"] = "eth0" if nodes else "lo"
        self.processes = []
        for rank in range(ranks):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            if nodes:
                place |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            environment = (
                os.environ | variables | master | ({} if apart else {key: str(value) for key, value in place.items()})
            )
            command = [sys.executable, *sys.argv, "--contestant", str(number)]
            if nodes:
                command = ["ip", "netns", "exec", nodes[rank], *command]
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self.processes.append(process)

    def turn(self) -> Turn:
        for process in self.processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for process in self.processes if process.stdout]
        seconds, sync, peak = ([answer[key] for answer in answers] for key in ("seconds", "sync", "peak"))
        return Turn(max(seconds), min(sync), max(peak))

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
        for process in self.processes:  # ranks exit together
            process.wait()


def rounds(groups: Sequence[Group], number: int) -> list[list[Turn]]:
    """Return the turns of each group, without the first round, which warms up."""
    turns: list[list[Turn]] = [[] for _ in groups]
    for _ in range(number + 1):
        for own, group in zip(turns, groups, strict=True):
            own.append(group.turn())
    return [own[1:] for own in turns]
