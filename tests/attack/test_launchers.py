"""Processes end when the one that started them is killed: torchrun, nodes, and commands that start others."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import HANG, TINY, command

from attack.marked import Begin, jobs, kill

ENDLESS = ("train", "digits", *TINY, "--train.duration", "1000000ba", "--evaluate.every", "1000000ba")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with jobs(tmp_path) as started:
        yield started


@pytest.mark.parametrize("step", [0, 5])
def test_kill_of_torchrun(begin: Begin, survived, tmp_path: Path, step: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = begin([*torchrun, "-m", *command(*ENDLESS)[2:]])
    job.wait_for(psutil.Process(job.launcher.pid).children)
    job.wait_for_step(tmp_path / "runs" / "digits", step)
    job.launcher.kill()
    assert job.end()[0] == -9
    survived("kills of torchrun")


@pytest.mark.parametrize(
    "words", [("demo",), ("find-batch", "digits", "--procs", 2), ("find-lr", "digits", "--procs", 2), ("doctor",)]
)
def test_kill_of_commands_that_start_others(begin: Begin, survived, words: tuple[object, ...]) -> None:
    job = begin(command(*words))
    job.wait_for(lambda: len(job.processes()) > 1)
    job.launcher.kill()
    assert job.end()[0] == -9
    survived("kills of commands that start others")


def test_kill_of_a_program_that_uses_the_python_api(begin: Begin, survived) -> None:
    program = "import paceline; paceline.train('digits', {'train.duration': '1000000ba'}, procs=2)"
    job = begin([sys.executable, "-c", program])
    job.wait_for_roles("forkserver")
    job.launcher.kill()
    assert job.end()[0] == -9
    survived("kills of commands that start others")


def test_kill_of_nodes_of_a_local_launch(begin: Begin, survived, tmp_path: Path) -> None:
    """Nodes outlive the command that launched them, but no node outlives its script, and no rank its node."""

    def wait_for(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + HANG
        while not condition():
            assert time.monotonic() < deadline, job.processes()
            time.sleep(0.05)

    home = {"PACELINE_HOME": str(tmp_path / "home")}
    job = begin(command("launch", "local", "--nodes", 2, *ENDLESS[1:], "--detach"), **home)
    assert job.launcher.wait(HANG) == 0
    wait_for(lambda: any((tmp_path / "home").rglob("COMMIT")))
    for node, words in (("node-0", "paceline train"), ("node-1", "node.sh")):
        kill(job.processes(node, words)[0])
        wait_for(lambda node=node: not job.processes(node))
    stop = begin(command("stop"), **home)
    assert stop.end()[0] == 0
    assert job.end()[0] == 0
    survived("kills of nodes of a local launch", 2)
