"""Processes that end with their parent, and signals that are handled whatever the main thread does."""

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
print("started", flush=True)
time.sleep({seconds})
print("outlived", flush=True)
"""
_PARENT = """
import subprocess, sys
from paceline.system.lifetime import child_env
subprocess.run({command!r}, env=child_env())
"""


def _child(platform: str = sys.platform) -> list[str]:
    return [sys.executable, "-c", _CHILD.format(platform=platform, seconds=HANG)]


@pytest.mark.parametrize("platform", ["linux", "another"])
@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; true', "sh"]])
def test_a_process_ends_with_its_parent(platform: str, wrapper: list[str]) -> None:
    """Also if a wrapper script starts the interpreter and ends."""
    if platform == "linux" and sys.platform != "linux":
        pytest.skip("needs prctl")
    program = _PARENT.format(command=[*wrapper, *_child(platform)])
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == "started\n"
        for process in [*psutil.Process(parent.pid).children(), psutil.Process(parent.pid)]:
            if process.name() == "sh" or process.pid == parent.pid:
                process.kill()
        assert parent.stdout.read() == ""  # no process holds the pipe


def test_a_process_ends_if_its_parent_ended_before_it_started() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    variables = os.environ | {lifetime.PARENT: str(ended.pid)}
    answer = subprocess.run(_child(), env=variables, capture_output=True, timeout=HANG, check=False)
    assert (answer.returncode, answer.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.parametrize(("init", "is_orphan"), [("/sbin/init", True), (sys.executable, False)])
def test_torchrun_may_be_process_1_of_a_container(monkeypatch, init: str, is_orphan: bool) -> None:
    """A rank that init adopted is an orphan; one that process 1 started is not."""
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(os, "readlink", {"/proc/1/exe": init, "/proc/self/exe": sys.executable}.__getitem__)
    assert lifetime._is_orphan(0) == is_orphan


def test_other_processes_outlive_their_parent(monkeypatch) -> None:
    monkeypatch.delenv(lifetime.PARENT, raising=False)
    monkeypatch.setattr(lifetime, "_die", lambda: pytest.fail("it must not end"))
    lifetime.end_with_parent()


_DEADLOCKED = """
import ctypes, os, threading
from paceline.system.signals import handling_signals
def overdue():
    print("overdue", flush=True)
    os._exit(3)
handlers = {"exit": lambda signum: os._exit(128 + signum), "wait": lambda signum: None}
with handling_signals(handlers[os.environ["HANDLER"]], overdue, seconds=0.01):
    print("started", flush=True)
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):  # the second time it deadlocks, which no signal interrupts
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(("handler", "status"), [("exit", 128 + signal.SIGTERM), ("wait", 3)])
def test_a_signal_is_handled_while_the_main_thread_is_inside_a_c_call(handler: str, status: int) -> None:
    variables = os.environ | {"HANDLER": handler}
    with subprocess.Popen(
        [sys.executable, "-c", _DEADLOCKED], env=variables, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "started\n"
        process.terminate()
        assert process.wait(timeout=HANG) == status


def test_a_lock_is_acquired_within_the_grace_period(tmp_path: Path) -> None:
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
