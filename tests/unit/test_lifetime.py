"""Processes that end with their parent, and signals that are answered whatever the main thread does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import HANG

from paceline.system import lifetime
from paceline.system.files import FolderLock

_CHILD = """
import time, types
from paceline.system import lifetime
lifetime.sys = types.SimpleNamespace(platform={platform!r})
lifetime.end_with_parent()
print("begun", flush=True)
time.sleep({seconds})
print("outlived", flush=True)
"""
_PARENT = """
import subprocess, sys
from paceline.system.lifetime import tied
subprocess.run({words!r}, env=tied())
"""


def _child(platform: str = sys.platform) -> list[str]:
    return [sys.executable, "-c", _CHILD.format(platform=platform, seconds=HANG)]


@pytest.mark.parametrize("platform", ["linux", "another"])
@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; true', "sh"]])
def test_a_process_ends_with_the_one_that_started_it(platform: str, wrapper: list[str]) -> None:
    """Also through a script that stands for the interpreter, once that script has ended."""
    if platform == "linux" and sys.platform != "linux":
        pytest.skip("needs prctl")
    program = _PARENT.format(words=[*wrapper, *_child(platform)])
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == "begun\n"
        for process in [*psutil.Process(parent.pid).children(), psutil.Process(parent.pid)]:
            if process.name() == "sh" or process.pid == parent.pid:
                process.kill()
        assert parent.stdout.read() == ""  # nobody holds the pipe


def test_a_process_whose_parent_has_ended_before_it_began() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    own = os.environ | {lifetime.PARENT: str(ended.pid)}
    answer = subprocess.run(_child(), env=own, capture_output=True, timeout=HANG, check=False)
    assert (answer.returncode, answer.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.parametrize(("init", "is_orphan"), [("/sbin/init", True), (sys.executable, False)])
def test_torchrun_may_be_the_first_process_of_a_container(monkeypatch, init: str, is_orphan: bool) -> None:
    """A rank that init has adopted is an orphan; one that was started by process 1 is not."""
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(os, "readlink", {"/proc/1/exe": init, "/proc/self/exe": sys.executable}.__getitem__)
    assert lifetime._is_orphan(0) == is_orphan


def test_processes_that_nobody_tied_outlive_their_parent(monkeypatch) -> None:
    monkeypatch.delenv(lifetime.PARENT, raising=False)
    monkeypatch.setattr(lifetime, "_die", lambda: pytest.fail("it must not end"))
    lifetime.end_with_parent()


_DEAF = """
import ctypes, os, threading
from paceline.system.signals import answering
def overdue():
    print("overdue", flush=True)
    os._exit(3)
answers = {"exit": lambda signum: os._exit(128 + signum), "wait": lambda signum: None}
with answering(answers[os.environ["ANSWER"]], overdue, seconds=0.01):
    print("begun", flush=True)
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):  # the second time it waits for itself, and no signal ends that
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(("answer", "status"), [("exit", 128 + signal.SIGTERM), ("wait", 3)])
def test_a_signal_is_answered_while_the_main_thread_is_inside_a_c_call(answer: str, status: int) -> None:
    own = os.environ | {"ANSWER": answer}
    with subprocess.Popen([sys.executable, "-c", _DEAF], env=own, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        assert process.wait(timeout=HANG) == status


def test_a_lock_is_waited_for_while_its_holder_ends(tmp_path: Path) -> None:
    hold = f"""
import sys, time
from pathlib import Path
from paceline.system.files import FolderLock
lock = FolderLock(Path({str(tmp_path)!r}))
print("held", flush=True)
sys.stdin.readline()
time.sleep(0.3)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", hold], **pipes) as holder:
        assert holder.stdout
        assert holder.stdin
        assert holder.stdout.readline() == "held\n"
        holder.stdin.write("end\n")
        holder.stdin.flush()
        FolderLock(tmp_path, grace=HANG).release()
