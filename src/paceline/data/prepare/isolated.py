"""Decodes untrusted files in subprocesses: a file that crashes the decoder, hangs or needs too much memory is left out.

Pillow and SciPy decode in C and trust the headers of a file. A subprocess has a limit of CPU time per file, which does
not depend on the load of the machine, and a limit of memory. It replies with JSON and bytes, which are safe to parse.
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
from paceline.system.untrusted import Unreadable

CPU_SECONDS = 60
MEMORY = 4 << 30
_MAX_LINE = 1 << 24
_COMMAND = [
    sys.executable,
    "-P",
    "-c",
    f"from {__name__} import main; main()",
]  # -P: do not import from the current folder


class Isolated:
    """Calls function(content, *arguments) in a subprocess. It returns a list of bytes and a JSON value.

    Thread-safe: concurrent calls use different subprocesses, which are reused.
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
        """Return the result of the function. Raises Unreadable if it fails or exceeds its limits."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._start()
        try:
            records, value, refusal = _request(process, content)
        except (OSError, EOFError, ValueError, TypeError):  # it died, or its reply is invalid
            raise self._failure(process) from None
        self._idle.append(process)
        if refusal:
            raise Unreadable(refusal)
        return records, value

    def _start(self) -> "subprocess.Popen[bytes]":
        # same modules as this process, but no thread pools
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        try:
            process = subprocess.Popen(
                [*_COMMAND, self._task],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | variables,
                process_group=0,  # no Ctrl-C: the parent lets current files finish
            )
        except OSError as error:
            message = f"a decoder process could not be started ({error.strerror}). Use fewer --workers."
            raise UserError("decoder-start-failed", message) from None
        if _pipes(process)[1].readline(2) != b"\n":
            _end(process)
            raise UserError(
                "decoder-start-failed", "a decoder process could not be started. Its error is printed above."
            )
        return process

    def _failure(self, process: "subprocess.Popen[bytes]") -> Exception:
        status = _end(process)
        if status == -signal.SIGXCPU:
            return Unreadable(f"decoding takes more than {self._cpu_seconds} s of CPU time")
        if status == -signal.SIGKILL:
            return UserError(
                "decoder-killed",
                "a decoder process was killed, probably because the machine is out of memory. "
                "Run the command again with fewer --workers.",
            )
        reason = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return Unreadable(f"the decoder crashes ({reason})")


def _pipes(process: "subprocess.Popen[bytes]") -> tuple[Any, Any]:
    return process.stdin, process.stdout


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Close the pipes of a subprocess, which makes it exit. Returns its exit status."""
    for pipe in _pipes(process):
        with contextlib.suppress(OSError):  # unread input cannot be flushed
            pipe.close()
    return process.wait()


def _request(process: "subprocess.Popen[bytes]", content: bytes) -> tuple[list[bytes], Any, str]:
    """Return records, value and, if the function failed, the reason."""
    requests, replies = _pipes(process)
    requests.write(len(content).to_bytes(8, "little"))
    requests.write(content)
    requests.flush()
    sizes, value, refusal = json.loads(replies.readline(_MAX_LINE))
    records = [replies.read(size) for size in sizes]
    if [len(record) for record in records] != sizes:
        raise EOFError
    return records, value, refusal


# ---- in the subprocess ----


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
        for stream in (1, 2):  # C libraries print warnings
            os.dup2(silence, stream)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # the OOM killer should choose this process, not its parent
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_DATA, _memory_in_use() + memory)
        replies.write(b"\n")
        replies.flush()
        _serve(function, arguments, cpu_seconds, replies)
