"""Trains several seeds of a recipe on this machine: a process per seed, one after the other or side by side.

A seed that fails or is killed does not affect the others. On several nodes, and under a launcher such as torchrun,
engine/seeds.py trains them instead.
"""

import argparse
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from paceline.cli.options import count
from paceline.config.seeds import failed_seeds, parse_seeds, run_name, seed_conflict
from paceline.errors import UserError
from paceline.system.files import say
from paceline.system.gpus import Gpu, gpus_side_by_side, visible_gpus
from paceline.system.host import cores
from paceline.system.lifetime import child_env, own_command
from paceline.system.logs import announce_stop
from paceline.system.outcome import FILE, read_outcome, report_outcome
from paceline.system.signals import STOPPED, handling_signals

if TYPE_CHECKING:
    from paceline.config.recipe import Recipe

_POLL_INTERVAL = 0.1  # seconds


def add_seed_options(parser: argparse.ArgumentParser) -> None:
    """Add --seeds and --parallel."""
    parser.add_argument(
        "--seeds",
        metavar="N|0,3,7",
        help="train N seeds (0 to N-1), or the listed ones, as runs NAME-seed0, ...",
    )
    parser.add_argument(
        "--parallel",
        type=count,
        metavar="N",
        help="seeds to train side by side (default: as many as fit on the GPUs; 1 on CPUs)",
    )


def seeds_of(options: argparse.Namespace, overridden: Sequence[str]) -> tuple[int, ...]:
    """Return the seeds to train, none without --seeds; UserError if they contradict other options."""
    if options.seeds is None:
        if options.parallel:
            raise UserError("missing-option", "--parallel needs --seeds, e.g. --seeds 5.", option="--seeds")
        return ()
    if options.resume:
        message = "--resume continues one run. Omit --seeds, or run the first command again to resume all seeds."
        raise UserError("conflicting-options", message, option="--seeds")
    if "seed" in overridden:
        raise seed_conflict()
    return parse_seeds(options.seeds)


def refuse_parallel(options: argparse.Namespace, seeds: Sequence[int]) -> None:
    """Refuse --parallel where all ranks train one seed after the other."""
    if (options.parallel or 1) > 1 and len(seeds) > 1:
        message = (
            "--parallel needs a single node without a launcher. On several nodes, and under torchrun or srun, ranks "
            "train one seed after the other. Omit --parallel."
        )
        raise UserError("conflicting-options", message, option="--parallel")


def slots(gpus: Sequence[Gpu], procs: int, parallel: int | None, num_seeds: int) -> list[dict[str, str]]:
    """Return the environment variables of each process that trains seeds: its own GPUs, or none on CPUs.

    By default as many seeds as fit on the GPUs are trained side by side, and one at a time on CPUs.
    """
    if not gpus:
        return [{}] * min(parallel or 1, num_seeds)
    wanted = min(parallel or max(1, len(gpus) // procs), num_seeds)
    return [{}] if wanted == 1 else gpus_side_by_side(gpus, procs, wanted)


def train_seeds(recipe: "Recipe", seeds: Sequence[int], options: argparse.Namespace, name: str) -> int:
    """Train the seeds in processes of their own; return the exit status. UserError names the seeds that failed."""
    from paceline.config.imports import trusted
    from paceline.config.io import dump_recipe

    places = slots(
        visible_gpus() if recipe.device in ("auto", "cuda") else [], options.procs, options.parallel, len(seeds)
    )
    threads = options.threads or (max(1, cores() // (len(places) * options.procs)) if len(places) > 1 else 0)
    given = {
        "--name": name,
        "--runs": options.runs,
        "--results": options.results,
        "--profile": options.profile,
        "--procs": options.procs,
        "--threads": threads,
    }
    words = [f"{option}={value}" for option, value in given.items() if value]
    words += [f"--import={module}" for module in recipe.imports if module.partition(".")[0] in trusted()]
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        path = Path(scratch) / "recipe.yaml"  # all seeds train this one, also if the user edits their file
        path.write_text(dump_recipe(recipe), encoding="utf-8")
        training = _Children(["train", str(path), *words], seeds, places, Path(scratch), options.runs / name)
        status = training.run()
    if training.failures and not status:
        raise failed_seeds(training.failures, len(seeds))
    if not status:
        report_outcome(runs=[str((options.runs / run_name(name, seed)).absolute()) for seed in seeds])
    return status


class _Children:
    """The processes that train seeds, at most one per place at a time."""

    def __init__(
        self, command: list[str], seeds: Sequence[int], places: list[dict[str, str]], scratch: Path, base: Path
    ):
        self._command, self._seeds, self._scratch, self._base = command, list(seeds), scratch, base
        self._free = list(places)
        self._side_by_side = len(places) > 1
        self._running: dict[int, tuple[subprocess.Popen[str], dict[str, str]]] = {}
        self._readers: list[Thread] = []
        self._received: list[int] = []
        self.failures: dict[int, str] = {}
        """Why seeds failed."""

    def run(self) -> int:
        """Train all seeds; return 0, or the status of the signal that ended this."""
        waiting = list(self._seeds)
        try:
            with handling_signals(self._stop):
                while self._running or (waiting and not self._received):
                    while waiting and self._free and not self._received:
                        self._start(waiting.pop(0))
                    self._collect()
                    time.sleep(_POLL_INTERVAL)
        finally:
            for child, _ in self._running.values():
                child.kill()
            for reader in self._readers:
                reader.join()
        return 128 + self._received[0] if self._received else 0

    def _start(self, seed: int) -> None:
        number, place = self._seeds.index(seed) + 1, self._free.pop(0)
        path = self._base.with_name(run_name(self._base.name, seed))
        say(f"paceline: seed {seed} ({number} of {len(self._seeds)}): {path}", error=True)
        report_outcome(run=str(path.absolute()))
        child = subprocess.Popen(
            own_command(*self._command, f"--seeds={seed},"),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if self._side_by_side else None,
            text=True,
            errors="replace",
            env=child_env({**os.environ, **place, FILE: str(self._outcome(seed))}),
            process_group=0,  # Ctrl-C reaches this process only, which forwards it once: a second one ends it at once
        )
        self._running[seed] = child, place
        if self._side_by_side:
            self._readers.append(Thread(target=_print_lines, args=(seed, child), daemon=True))
            self._readers[-1].start()
        if self._received:  # while it started
            child.send_signal(self._received[0])

    def _collect(self) -> None:
        """Note how processes ended, and free their places."""
        for seed, (child, place) in list(self._running.items()):
            if (status := child.poll()) is None:
                continue
            del self._running[seed]
            self._free.append(place)
            if status and not (self._received and status in STOPPED):
                self.failures[seed] = self._reason(seed, status)
                say(f"paceline: seed {seed} failed: {self.failures[seed]}", error=True)

    def _reason(self, seed: int, status: int) -> str:
        if error := read_outcome(self._outcome(seed)).get("error"):
            return UserError.from_json(error).report
        if status == -signal.SIGKILL:
            return "its process was killed, perhaps because the machine ran out of memory"
        return f"its process ended with exit status {status}; the lines above say why"

    def _outcome(self, seed: int) -> Path:
        return self._scratch / f"outcome-{seed}.json"

    def _stop(self, signum: int) -> None:
        """Let the processes checkpoint and exit; a second signal kills them."""
        self._received.append(signum)
        first = len(self._received) == 1
        if first:
            announce_stop(signum)
        for child, _ in list(self._running.values()):
            with suppress(ProcessLookupError):
                child.send_signal(signum if first else signal.SIGKILL)


def _print_lines(seed: int, child: "subprocess.Popen[str]") -> None:
    assert child.stderr
    for line in child.stderr:
        say(f"seed {seed} | {line.rstrip()}", error=True)
