"""Untrusted files are decoded in processes of their own: a file that crashes, fills or stalls one is left out.

Pillow and SciPy decode in C, by what a file says of itself. A process has a limit of processor time for each file,
which other work on the machine does not use up, and a limit of memory. Its answers are read as JSON and bytes.
"""

import contextlib
import importlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from paceline.errors import UserError

CPU_SECONDS = 60
MEMORY = 4 << 30
_LONGEST_LINE = 1 << 24
_COMMAND = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]  # -P: the current folder is not trusted


class Unreadable(Exception):
    """Nothing can be made of a file; the message says why."""


class Isolated:
    """Calls function(content, *arguments), which gives bytes and a JSON value, or raises Unreadable.

    Any number of threads may call at once; each call has a process to itself, and processes are used again.
    """

    def __init__(
        self,
        function: Callable[..., tuple[list[bytes], Any]],
        *arguments: Any,
        cpu_seconds: int = CPU_SECONDS,
        memory: int = MEMORY,
    ):
        self._task = json.dumps([function.__module__, function.__name__, arguments, cpu_seconds, memory])
        self._cpu_seconds = cpu_seconds
        self._idle: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Isolated":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._idle:
            _end(process)

    def __call__(self, content: bytes) -> tuple[list[bytes], Any]:
        """What the function makes of a file."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._start()
        try:
            records, value, refusal = _exchange(process, content)
        except (OSError, EOFError, ValueError, TypeError):  # it died, or answers nonsense
            raise self._failure(process) from None
        self._idle.append(process)
        if refusal:
            raise Unreadable(refusal)
        return records, value

    def _start(self) -> "subprocess.Popen[bytes]":
        # the modules that this process has found, and threads for none of them
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        try:
            process = subprocess.Popen(
                [*_COMMAND, self._task],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | own,
                process_group=0,  # Ctrl-C is for the preparation, which lets files under way be finished
            )
        except OSError as error:
            raise UserError(
                f"a process to decode images in could not be started ({error.strerror}); give fewer --workers"
            ) from None
        if _pipes(process)[1].readline(2) != b"\n":
            _end(process)
            raise UserError("a process to decode images in could not be started; its message is above")
        return process

    def _failure(self, process: "subprocess.Popen[bytes]") -> Exception:
        status = _end(process)
        if status == -signal.SIGXCPU:
            return Unreadable(f"takes more than {self._cpu_seconds} s of processor time to decode")
        if status == -signal.SIGKILL:
            return UserError(
                "a process that decodes images was killed, probably because memory ran out; "
                "repeat the command with fewer --workers"
            )
        reason = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return Unreadable(f"crashes the decoder ({reason})")


def _pipes(process: "subprocess.Popen[bytes]") -> tuple[Any, Any]:
    return process.stdin, process.stdout


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Close its pipes, upon which it exits if it has not; its status."""
    for pipe in _pipes(process):
        with contextlib.suppress(OSError):  # what it has not read cannot be flushed
            pipe.close()
    return process.wait()


def _exchange(process: "subprocess.Popen[bytes]", content: bytes) -> tuple[list[bytes], Any, str]:
    """Records, value and, if there are none, why."""
    requests, replies = _pipes(process)
    requests.write(len(content).to_bytes(8, "little"))
    requests.write(content)
    requests.flush()
    sizes, value, refusal = json.loads(replies.readline(_LONGEST_LINE))
    records = [replies.read(size) for size in sizes]
    if [len(record) for record in records] != sizes:
        raise EOFError
    return records, value, refusal


# ---- within the process ----


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _memory_in_use() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def _serve(function: Callable[..., tuple[list[bytes], Any]], arguments: list[Any], cpu: int, replies: BinaryIO) -> None:
    requests = sys.stdin.buffer
    while head := requests.read(8):
        content = requests.read(int.from_bytes(head, "little"))
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu)
        records: list[bytes] = []
        value, refusal = None, ""
        try:
            records, value = function(content, *arguments)
        except Unreadable as error:
            refusal = str(error)
        except Exception as error:  # decoders raise nearly anything
            refusal = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        replies.write(json.dumps([[len(record) for record in records], value, refusal]).encode() + b"\n")
        replies.writelines(records)
        replies.flush()


def main() -> None:
    module, name, arguments, cpu_seconds, memory = json.loads(sys.argv[1])
    function = getattr(importlib.import_module(module), name)
    with os.fdopen(os.dup(1), "wb") as replies:
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # libraries in C print what they think of a file
            os.dup2(silence, stream)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # where memory runs out, end this process rather than the one that can tell
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_DATA, _memory_in_use() + memory)
        replies.write(b"\n")
        replies.flush()
        _serve(function, arguments, cpu_seconds, replies)
