"""Starting the command line as processes, and meddling with them."""

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

# Ranks fork from a process that has imported everything and done nothing, which saves seconds at every start.
_ready = multiprocessing.get_context("forkserver")
_ready.set_forkserver_preload(["paceline.engine.preload"])


def start(folder: Path, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*words), cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)


def run_ranks(
    folder: Path, procs: int, *words: object, before: Callable[[int], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command line as `procs` ranks, in the environment that torchrun would give them: it must succeed.

    `before`, a function of a test module, is called in each rank first, and may meddle with it.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where torchrun has it: not in a rank
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "GLOO_SOCKET_IFNAME": "lo"}
    meeting |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    processes = []
    for rank in range(procs):
        place = {"RANK": rank, "WORLD_SIZE": procs, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": procs} | meeting
        variables = environment() | {key: str(value) for key, value in place.items() if procs > 1}
        target = (list(map(str, words)), folder, variables, folder / f"rank-{rank}", before)
        processes.append(_ready.Process(target=_rank, args=target))
        processes[-1].start()
    _wait(processes)
    written = [
        "".join(path.read_text() for path in sorted(folder.glob(f"rank-*.{kind}"))) for kind in ("stdout", "stderr")
    ]
    for path in folder.glob("rank-*.std*"):
        path.unlink()
    assert not any(process.exitcode for process in processes), f"{words}: {written[1]}"
    return subprocess.CompletedProcess([*words], 0, *written)


def _wait(ranks: list[multiprocessing.process.BaseProcess]) -> None:
    """For all of them, or a moment longer than for the first that fails: those left may wait for it in vain."""
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
    """Below Linux's default range of ephemeral ports, so that another process is unlikely to get it before its use."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := random.randrange(10000, 32000)))
            except OSError:
                continue
            return port


def _refuse_pickle(*_: object) -> None:
    raise AssertionError("a rank reads a pickle of another one, which could run code")


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + HANG
    while not any(record["step"] >= step for record in RunFolder(run).records()):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """In order of their numbers."""
    named = {child.name(): child for child in psutil.Process(process.pid).children(recursive=True)}
    return [named[name] for name in sorted(named) if name.startswith("paceline-rank-")]
