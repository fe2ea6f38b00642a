"""What limits a run, provoked in real runs: the verdict has to name it."""

import contextlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from conftest import command, environment
from processes import run_ranks
from strategies import limit, namespaces

from paceline.logbook.read import read
from paceline.logbook.verdict import Finding, verdict

WORDS = ("train", "digits", "--log.every", "5ba", "--log.tensorboard", "false", "--train.duration", "20ba")
SMALL = ("--model.options", "{widths: [16, 32], norm: group}")


def _verdict(folder: Path, procs: int, *words: object, before=None) -> Finding:
    answer = run_ranks(folder, procs, *WORDS, *words, before=before)
    found = verdict(read(folder / "runs" / "digits"))[0]
    assert found.text in answer.stderr  # said at the end of the run
    return found


def _slow_loader(_rank: int) -> None:
    from paceline.data.load import resident

    steps = resident.ResidentLoader.steps

    def slowly(self, first_step: int = 0):
        for batches in steps(self, first_step):
            time.sleep(0.1)
            yield batches

    resident.ResidentLoader.steps = slowly


def _slow_loader_on_rank_1(rank: int) -> None:
    if rank == 1:
        _slow_loader(rank)


def _slow_saves(_rank: int) -> None:
    from paceline.checkpoint import store

    save = store.Writer.save

    def slowly(self, *arguments) -> None:
        time.sleep(0.5)
        save(self, *arguments)

    store.Writer.save = slowly


def test_a_slow_loader(tmp_path: Path) -> None:
    found = _verdict(tmp_path, 1, *SMALL, before=_slow_loader)
    assert found.cause == "data"
    assert "of training is waiting for data; without that it would be" in found.text


def test_a_slow_loader_on_one_rank(tmp_path: Path) -> None:
    found = _verdict(tmp_path, 2, *SMALL, before=_slow_loader_on_rank_1)
    assert found.cause == "data on one rank"
    assert found.text.startswith("rank 1 on ")


def _can_limit_links() -> bool:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    with contextlib.suppress(subprocess.CalledProcessError), namespaces() as (nodes, _):
        limit(nodes, 100)
        return True
    return False


@pytest.mark.skipif(
    not _can_limit_links(), reason="network namespaces need root and Debian's iproute2; run the tests as root there"
)
def test_a_limited_link(tmp_path: Path) -> None:
    """Two machines, as far as the network goes, with 20 Mbit/s between them."""
    words = (*WORDS, "--model.options", "{widths: [64, 128], norm: group}", "--nodes", 2)
    with namespaces() as (nodes, address):
        limit(nodes, 20)
        machines = [
            subprocess.Popen(
                ["ip", "netns", "exec", node, *command(*words, "--rendezvous", f"{address}:29400", "--node-rank", rank)],
                cwd=tmp_path,
                env=environment(),
            )
            for rank, node in enumerate(nodes)
        ]
        assert [machine.wait(timeout=120) for machine in machines] == [0, 0]
    found = verdict(read(tmp_path / "runs" / "digits"))[0]
    assert found.cause == "exchange"
    assert re.search(r"at 0\.0(1[5-9]|2\d*) Gbit/s or less; accumulate", found.text), found.text


def test_a_tiny_batch(tmp_path: Path) -> None:
    words = ("--train.global_batch", 2, "--data.augment.translate", 0, "--model.options", "{widths: [64, 512], norm: group}")
    assert _verdict(tmp_path, 1, *words).cause == "tiny batch"


def test_evaluating_too_often(tmp_path: Path) -> None:
    words = ("--evaluate.every", "1ba", "--checkpoint.every", "100ba")
    assert _verdict(tmp_path, 1, *SMALL, *words, "--train.global_batch", 16).cause == "evaluation"


def test_blocking_saves(tmp_path: Path) -> None:
    words = ("--checkpoint.every", "2ba", "--evaluate.every", "100ba", "--train.global_batch", 16)
    found = _verdict(tmp_path, 1, *SMALL, *words, before=_slow_saves)
    assert found.cause == "checkpoints"
