"""Measures the peak memory of FSDP ranks while they train, save and load a ViT-L (304 M parameters), on CPUs.

    python benchmarks/checkpoint_memory.py [--model vit_large_patch16_224] [--ranks 2] [--batch 2]

Prints the peak resident memory of the ranks in each phase, in GB. Memory that a phase freed stays with the process, so
that later phases reuse it, as in a training run. Two ranks need 14 GB of memory, four 23, and some minutes.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.checkpoint.verified import open_checkpoint, verify
from paceline.checkpoint.writer import ShardedWriter
from paceline.config.data import Data, Synthetic
from paceline.config.model import Model
from paceline.config.optim import Optim
from paceline.config.recipe import Recipe, Train
from paceline.distributed.world import World
from paceline.engine.build import Setup, build
from paceline.engine.checkpoints import Checkpoints
from paceline.engine.replicas import Replicas
from paceline.engine.train import train_step
from paceline.system.device import peak_memory
from paceline.track.records import RunFolder

_STEPS = 4  # the first ones allocate the state of the optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_large_patch16_224")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="images per rank")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        for phase in ([], ["--resume"]):
            run_ranks(options.ranks, [*sys.argv, "--folder", folder, *phase])


def run_ranks(count: int, words: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    master |= {"LOCAL_WORLD_SIZE": str(count), "PACELINE_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environments = [os.environ | master | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    ranks = [subprocess.Popen([sys.executable, *words], env=environment) for environment in environments]
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        sys.exit("a rank failed")


def measure(options: argparse.Namespace) -> None:
    world = World.from_env("cpu")
    with world.connected(), world.long_timeout():
        with phase(world, "build"):
            setup = build(recipe_of(options), world)
        folder = RunFolder(options.folder)
        if options.resume:
            path = folder.checkpoints / f"step-{_STEPS:08d}"
            if world.is_rank_zero:
                verify(path)
            with phase(world, "load"):
                setup.load(open_checkpoint(path)[1], str(path))
            return
        with phase(world, "train"):
            train(setup)
        writer = ShardedWriter(folder.checkpoints, 2, "top1", setup.replica.shard, copies_cpu=False)
        checkpoints = Checkpoints(world, writer, Replicas(world, folder))
        with phase(world, "save"):
            checkpoints.save(_STEPS, lambda: setup.state(_STEPS), {}, lambda: None, lambda: None)
            checkpoints.complete()


def recipe_of(options: argparse.Namespace) -> Recipe:
    images = options.batch * options.ranks
    synthetic = Synthetic(train_samples=4 * images, val_samples=2, channels=3, size=224, classes=1000)
    return Recipe(
        "memory",
        data=Data(name="synthetic", synthetic=synthetic, mean=(0.5,) * 3, std=(0.25,) * 3),
        model=Model(options.model),
        train=Train(global_batch=images, duration=f"{_STEPS}ba"),
        optim=Optim(name="adamw", lr=1e-4),
        strategy="fsdp",
        device="cpu",
        precision="fp32",
    )


def train(setup: Setup) -> None:
    batches = setup.loader.steps()
    for step in range(_STEPS):
        train_step(setup, next(batches), step, 1e-4)


@contextmanager
def phase(world: World, name: str) -> Iterator[None]:
    """Print the highest resident memory of all ranks during a phase."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark of this process
    yield
    peaks = world.all_gather_object(peak_memory(world.device))
    if world.is_rank_zero:
        print(f"{name:<22} {' '.join(f'{peak / 1e9:6.2f}' for peak in peaks)}", flush=True)


if __name__ == "__main__":
    main()
