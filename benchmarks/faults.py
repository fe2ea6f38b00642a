"""Recovery time of elastic training after faults: an ssh job on two hosts made of namespaces. Needs root.

    python benchmarks/faults.py --rounds 3

Measures the seconds from the fault to the first training step after it. The model is small, so that this is the time to
detect the fault, rendezvous again and restart, not to load a model. At the end the object store for results hangs for a
minute; training must not wait for it. Ranks that do not respond for --rank-timeout seconds are considered failed.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

import psutil
from machines import Cluster, cluster_of, missing
from object_store import ObjectStore, object_store

from paceline.track.records import records_of

WORDS = ("digits", "--train.duration", "100000ba", "--evaluate.every", "100000ba", "--checkpoint.every", "10ba")
_PAUSE = 15.0  # five failures of a node within a minute end a job
QUIET = ("--log.every", "1ba", "--log.tensorboard", "false")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank-timeout", type=int, default=15, help="seconds")
    parser.add_argument("--away", type=int, default=60, help="seconds without the object store")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(cluster_of(scratch, "n1", "n2"))
        store = stack.enter_context(object_store(scratch / "store", cluster.gateway))
        job = Job(cluster, scratch, options.rank_timeout, store)
        stack.callback(job.stop)
        times: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for name, fault in FAULTS.items():
                job.wait(ranks=2, more_steps=15)
                time.sleep(_PAUSE)
                times.setdefault(name, []).append(fault(job))
        print(f"{options.rounds} rounds, --rank-timeout {options.rank_timeout}: seconds until training continues")
        for name, own in times.items():
            print(f"  {name:<44} {statistics.median(own):6.1f}   ({min(own):.1f} to {max(own):.1f})", flush=True)
        usual, away = store_away(job, options.away)
        print(f"object store unavailable for {options.away} s: longest step {away:.2f} s, {usual:.2f} s before that")


class Job:
    def __init__(self, cluster: Cluster, folder: Path, rank_timeout: int, store: ObjectStore):
        self.cluster, self.store, self._folder = cluster, store, folder
        self._environment = os.environ | {"PACELINE_HOME": str(folder / "home")} | store.variables
        options = ["--hosts", "n1,n2", "--ssh-config", str(cluster.config), "--python", sys.executable]
        options += ["--results", "s3://results/here", "--pass", ",".join(store.variables)]
        words = [*options, "--rank-timeout", str(rank_timeout), *WORDS, *QUIET]
        self._log = (folder / "launcher.log").open("w")
        self._launcher = self._paceline("launch", "ssh", *words)

    def _paceline(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "paceline", *words]
        return subprocess.Popen(
            command, cwd=self._folder, env=self._environment, stdout=self._log, stderr=subprocess.STDOUT
        )

    def longest(self, begin: float, end: float) -> float:
        """Return the longest time between two consecutive training steps."""
        times = {begin, end}
        for machine in self.cluster.machines.values():
            for path in machine.root.glob(".paceline/jobs/*/*/runs/*/metrics.jsonl"):
                own = records_of(path.read_bytes().splitlines())
                times |= {one["time"] for one in own if one["kind"] == "train" and begin <= one["time"] <= end}
        return max(later - sooner for sooner, later in pairwise(sorted(times)))

    def newest(self) -> tuple[float, int, int]:
        """Return time, number and ranks of the last recorded step."""
        found = (0.0, 0, 0)
        for machine in self.cluster.machines.values():
            for path in machine.root.glob(".paceline/jobs/*/*/runs/*/metrics.jsonl"):
                lines = path.read_bytes().splitlines()[-50:]
                own = [record for record in records_of(lines) if record["kind"] == "train"]
                found = max([found, *((one["time"], one["step"], len(one["memory_per_rank"])) for one in own)])
        return found

    def wait(self, ranks: int, more_steps: int = 0, since: float = 0.0) -> float:
        """Wait until that many ranks have trained; returns the time of their first step."""
        begun, first = self.newest()[1], 0.0
        deadline = time.monotonic() + 180
        while True:
            when, step, count = self.newest()
            if count == ranks and when > since and not first:
                first, begun = when, step
            if first and step >= begun + more_steps:
                return first
            if time.monotonic() > deadline or self._launcher.poll() is not None:
                sys.exit((self._folder / "launcher.log").read_text()[-3000:])
            time.sleep(0.02)

    def machine_of_rank(self, number: int) -> str:
        for name, machine in self.cluster.machines.items():
            if any(rank.name() == f"paceline-rank-{number}" for rank in machine.ranks()):
                return name
        raise LookupError(f"rank {number} does not run")

    def stop(self) -> None:
        self._launcher.kill()
        self._launcher.wait()
        self._paceline("stop", "--grace", "2").wait()


def _timed(job: Job, fault: Callable[[], object], ranks: int, wait: float = 0.3) -> float:
    now = time.time()
    fault()
    return job.wait(ranks, since=now + wait) - now


def worker_killed(job: Job) -> float:
    victim = job.cluster.machines[job.machine_of_rank(1)].ranks()[0]
    return _timed(job, victim.kill, ranks=2)


def worker_stopped(job: Job) -> float:
    victim = job.cluster.machines[job.machine_of_rank(1)].ranks()[0]
    return _timed(job, victim.suspend, ranks=2)


def machine_killed(job: Job, rank: int = 1) -> float:
    name = job.machine_of_rank(rank)
    with suppress(psutil.NoSuchProcess):
        taken = _timed(job, job.cluster.machines[name].lose, ranks=1)
    job.cluster.start(name)
    return taken


def first_machine_killed(job: Job) -> float:
    return machine_killed(job, rank=0)


def cable_pulled(job: Job) -> float:
    name = job.machine_of_rank(1)
    taken = _timed(job, lambda: job.cluster.cut(name), ranks=1)
    job.cluster.plug_in(name)
    return taken


def store_away(job: Job, seconds: float) -> tuple[float, float]:
    """Return the longest step with the object store, and while it hangs, which is worse than refusing connections."""
    job.wait(ranks=2, more_steps=50)
    begin = time.time()
    time.sleep(20)
    middle = time.time()
    job.store.process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    job.store.process.send_signal(signal.SIGCONT)
    job.wait(ranks=2, more_steps=15)
    return job.longest(begin, middle), job.longest(middle, middle + seconds)


FAULTS: dict[str, Callable[[Job], float]] = {
    "rank killed": worker_killed,
    "rank suspended (SIGSTOP)": worker_stopped,
    "node lost": machine_killed,
    "node of rank 0 lost": first_machine_killed,
    "network cable pulled (no reset)": cable_pulled,
}

if __name__ == "__main__":
    main()
