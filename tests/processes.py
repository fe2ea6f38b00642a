"""Runs the command line in subprocesses and ranks."""

import faulthandler
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import psutil
from conftest import HANG, command, environment
from torch.distributed import TCPStore, distributed_c10d

from paceline.cli.main import main
from paceline.track.records import RunFolder

# ranks fork from a process that has imported everything, which saves seconds per start
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["paceline.engine.preload"])


def start(folder: Path, *words: object) -> subprocess.Popen[str]:
    """Start the command line in a folder; returns the process."""
    return subprocess.Popen(command(*words), cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)


def run_ranks(
    folder: Path, procs: int, *words: object, before: Callable[[int], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line as `procs` ranks with the variables that torchrun would set. All of them must succeed.

    `before`, a function of a test module, is called first in each rank, e.g. to patch something.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outside the ranks, as with torchrun
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "GLOO_SOCKET_IFNAME": "lo"}
    master |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    processes = []
    for rank in range(procs):
        ranks = {"RANK": rank, "WORLD_SIZE": procs, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": procs} | master
        variables = environment() | {key: str(value) for key, value in ranks.items() if procs > 1}
        target = (list(map(str, words)), folder, variables, folder / f"rank-{rank}", before)
        processes.append(_context.Process(target=_rank, args=target))
        processes[-1].start()
    _wait(processes)
    output = [
        "".join(path.read_text() for path in sorted(folder.glob(f"rank-*.{kind}"))) for kind in ("stdout", "stderr")
    ]
    for path in folder.glob("rank-*.std*"):
        path.unlink()
    assert not any(process.exitcode for process in processes), f"{words}: {output[1]}"
    return subprocess.CompletedProcess([*words], 0, *output)


def _wait(ranks: list[multiprocessing.process.BaseProcess]) -> None:
    """Wait for all ranks, or a minute after the first failure: the others may wait for the failed rank."""
    deadline = time.monotonic() + HANG
    while running := [rank for rank in ranks if rank.exitcode is None]:
        if not wait([rank.sentinel for rank in running], max(0.0, deadline - time.monotonic())):
            for rank in running:
                rank.kill()
        elif any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + 60)


def _rank(
    words: list[str], folder: Path, variables: dict[str, str], output: Path, before: Callable[[int], None] | None
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for number, kind in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output.with_suffix(f".{kind}"), os.O_WRONLY | os.O_CREAT), number)
    faulthandler.dump_traceback_later(HANG - 60)  # shows where a rank hangs
    distributed_c10d._tensor_to_object = _refuse_pickle
    if before:
        before(int(variables.get("RANK", 0)))
    sys.exit(main(words))


def free_port() -> int:
    """Return a free port below Linux's ephemeral ones, so that another process is unlikely to get it before its use."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := random.randrange(10000, 32000)))
            except OSError:
                continue
            return port


def _refuse_pickle(*_: object) -> None:
    raise AssertionError("a rank loads a pickle from another rank, which could execute code")


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Wait until a run has recorded this step."""
    deadline = time.monotonic() + HANG
    while not any(record["step"] >= step for record in RunFolder(run).records()):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the rank processes of a launcher, in rank order."""
    named = {child.name(): child for child in psutil.Process(process.pid).children(recursive=True)}
    return [named[name] for name in sorted(named) if name.startswith("paceline-rank-")]
