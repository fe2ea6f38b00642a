"""The engine against a bare PyTorch loop: same model, same batches, same process, alternating.

    python benchmarks/loop.py [RECIPE] [--steps 20] [--rounds 7]

The bare loop has no metrics, records, signals or checks. A ratio of 1 means that they cost nothing. The third row is
the bare loop in a separate process with the allocator's defaults, where the C library returns the memory of activations
to the kernel at every step.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from paceline.checkpoint.writer import NoWriter
from paceline.config.io import load_recipe
from paceline.config.recipe import Recipe
from paceline.distributed.world import World, threads_per_process
from paceline.engine.build import Setup, build
from paceline.engine.callbacks import Callbacks
from paceline.engine.checkpoints import Checkpoints
from paceline.engine.evaluation.assessment import Assessment
from paceline.engine.replicas import Replicas
from paceline.engine.run import TrainingRun
from paceline.engine.train import train
from paceline.system.host import keep_freed_memory
from paceline.track.json_lines import JsonLines
from paceline.track.progress import Display
from paceline.track.records import RunFolder


class Stopwatch(Display):
    """Records when each step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def step(self, step: int) -> None:
        self.times.append(time.perf_counter())


def recipe_of(name: str, steps: int, batch: int) -> Recipe:
    samples = 4 * batch
    size = load_recipe(name).data.size or 32
    words = [
        "--data.name",
        "synthetic",
        "--data.synthetic",
        f"{{train_samples: {samples}, val_samples: 8, size: {size}}}",
    ]
    words += [
        "--phases",
        "[]",
        "--data.size",
        "0",
        "--train.duration",
        f"{steps}ba",
        "--train.global_batch",
        str(batch),
    ]
    words += ["--evaluate.every", "1000ep", "--checkpoint.every", "1000ep", "--model.weights", "random"]
    words += ["--optim.groups", "[]"]  # the bare loop does not freeze parameters
    return load_recipe(name, [*words, "--optim.schedule", "{name: constant, warmup: 0ep, points: []}", "--ema", "null"])


def engine_seconds(setup: Setup, folder: Path) -> float:
    """Return the wall time of all steps but the first, including records, votes and progress."""
    watch = Stopwatch()
    run_folder = RunFolder(folder)
    folder.mkdir(parents=True)
    callbacks = Callbacks.create(setup.recipe, setup.world, run_folder, setup.total_steps, 0)
    sink, replicas = JsonLines(run_folder.metrics), Replicas(setup.world, run_folder)
    checkpoints = Checkpoints(setup.world, NoWriter(), replicas)
    train(setup, TrainingRun(run_folder, setup, sink, checkpoints, watch, replicas, callbacks, Assessment(setup, None)))
    return watch.times[-1] - watch.times[0]


def bare_seconds(setup: Setup) -> float:
    model, optimizer, smoothing = setup.replica.module, setup.optimizer, setup.recipe.train.label_smoothing
    batches = setup.loader.steps()
    times = []
    for _ in range(setup.total_steps):
        batch = next(batches)[0]
        with setup.autocast():
            logits = model(batch.images)
        loss = F.cross_entropy(logits.float(), batch.labels, label_smoothing=smoothing)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    return times[-1] - times[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="cifar10-fast")
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--as-written", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(threads_per_process(1))
    setup = build(recipe_of(options.recipe, options.steps, options.batch), World())
    if options.as_written:
        for _ in sys.stdin:
            print(bare_seconds(setup), flush=True)
        return
    keep_freed_memory()
    compare(setup, options)


def compare(setup: Setup, options: argparse.Namespace) -> None:
    images = (options.steps - 1) * options.batch
    command = [sys.executable, __file__, options.recipe, "--steps", str(options.steps), "--batch", str(options.batch)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([*command, "--as-written"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
    ):
        assert other.stdin
        assert other.stdout
        rows: dict[str, list[float]] = {"engine": [], "bare loop": [], "bare loop, default allocator": []}
        for number in range(options.rounds + 1):
            first_engine = lambda n=number: engine_seconds(setup, Path(folder) / str(n))  # noqa: E731
            turns: list[tuple[str, Any]] = [("engine", first_engine), ("bare loop", lambda: bare_seconds(setup))]
            for name, turn in turns if number % 2 else reversed(turns):  # the order alternates
                rows[name].append(turn())
            other.stdin.write("go\n")
            other.stdin.flush()
            rows["bare loop, default allocator"].append(float(other.stdout.readline()))
        other.stdin.close()
    print(f"{options.recipe}, batch {options.batch}, {setup.precision}, {torch.get_num_threads()} threads,", end=" ")
    print(f"{options.rounds} rounds of {options.steps - 1} steps; medians")
    bare = rows["bare loop"][1:]  # the first round warms up
    for name, seconds in rows.items():
        ratio = statistics.median(b / s for b, s in zip(bare, seconds[1:], strict=True))
        print(
            f"  {name:33}{images / statistics.median(seconds[1:]):9.1f} images/s   ratio to the bare loop {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
