"""Starts rank processes that run probes, on this machine or on other hosts, and reads their figures.

A crash or a hang ends these processes, not the selftest. They end when their standard input is closed.
"""

import json
import re
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from paceline.distributed.channel import new_token
from paceline.launch.hosts import Host, addresses, free_port
from paceline.launch.values import quoted
from paceline.selftest.settings import Settings
from paceline.system.files import printable

HANG = 900.0
"""Seconds without a result after which processes are ended."""
_END = 30.0  # seconds that processes have to end after their standard input was closed
_CONSEQUENCES = ("[rank-lost]", "[job-ended]", "[rendezvous-timeout]", "[rendezvous-unreachable]")
"""Endings of errors that the failure of another node causes."""
_REPORTED = re.compile(r"paceline: error: (.*)")
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*")
_MAX_REASON, _MAX_LINES = 500, 400


@dataclass(frozen=True)
class Nodes:
    """Where rank processes are started."""

    hosts: tuple[Host, ...] = ()
    """Empty: this machine."""
    python: str = "python3"
    """On the hosts."""
    procs: int = 1
    """Per host."""

    @property
    def one_rank(self) -> "Nodes":
        """The same with one rank, on the first host."""
        return replace(self, hosts=self.hosts[:1], procs=1)

    def commands(self, probes: Sequence[str], settings: Settings) -> list[list[str]]:
        """Return the command line of each node."""
        words = ["selftest-probe", "--probes", ",".join(probes), "--settings", settings.to_text()]
        words += ["--procs", str(self.procs)]
        if not self.hosts:
            return [[sys.executable, "-P", "-m", "paceline", *words]]
        if len(self.hosts) > 1:
            first = self.hosts[0]
            endpoint = f"{addresses(first)[1]}:{free_port(first, self.python)}"
            words += ["--nodes", str(len(self.hosts)), "--rendezvous", endpoint, "--node-rank"]
        start = f"exec {quoted(self.python)} -m paceline {shlex.join(words)}"
        several = len(self.hosts) > 1
        return [
            host.argv(f"cd {quoted(host.folder)} && {start}{f' {number}' if several else ''}")
            for number, host in enumerate(self.hosts)
        ]


def measure(nodes: Nodes, probes: Sequence[str], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each probe with its figures, or with {"error": reason}; after a failure the others run in new processes."""
    left = list(probes)
    while left:
        reason = ""
        for found in _run(nodes.commands(left, settings)):
            if "probe" in found:
                left.remove(found["probe"])
                yield found["probe"], found["figures"] | {"probe_seconds": found["seconds"]}
            else:
                reason = found["error"]
        if left:
            yield left.pop(0), {"error": reason or "the processes ended without a result"}


def _run(commands: list[list[str]]) -> Iterator[dict[str, Any]]:
    """Start the processes of all nodes; yield the figures that the first one prints, at the end the error if any."""
    token, lines = new_token(), SimpleQueue[str | None]()
    errors = [deque[str](maxlen=_MAX_LINES) for _ in commands]
    processes = [_start(command) for command in commands]
    try:
        for process in processes:
            _send(process, token)
        readers = [Thread(target=_read, args=pair, daemon=True) for pair in zip(processes, errors, strict=True)]
        readers.append(Thread(target=_forward, args=(processes, lines), daemon=True))
        for reader in readers:
            reader.start()
        while (line := lines.get(timeout=HANG)) is not None:
            if line.startswith('{"probe"'):
                yield json.loads(line)
        for reader in readers:
            reader.join(_END)
        if any(process.returncode for process in processes):
            yield {"error": _reason([process.returncode for process in processes], errors)}
    except Empty:
        yield {"error": f"no result within {HANG:.0f} s: {_last_line(errors)}"}
    finally:
        _end(processes)


def _start(command: list[str]) -> "subprocess.Popen[str]":
    # an own process group: Ctrl-C reaches the selftest only, which ends them
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", process_group=0)


def _send(process: "subprocess.Popen[str]", token: str) -> None:
    assert process.stdin
    with suppress(BrokenPipeError):  # it has failed already, and standard error says why
        process.stdin.write(f"{token}\n")
        process.stdin.flush()


def _read(process: "subprocess.Popen[str]", into: deque[str]) -> None:
    assert process.stderr
    into.extend(line.rstrip() for line in process.stderr)


def _forward(processes: "list[subprocess.Popen[str]]", lines: "SimpleQueue[str | None]") -> None:
    first = processes[0]
    assert first.stdout
    for line in first.stdout:
        lines.put(line)
    for process in processes:
        process.wait()
    lines.put(None)


def _end(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        assert process.stdin
        with suppress(BrokenPipeError):
            process.stdin.close()
    for process in processes:
        try:
            process.wait(_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _reason(statuses: Sequence[int], errors: Sequence[Sequence[str]]) -> str:
    """Return the error that explains the others."""
    reported = [match[1] for lines in errors for line in lines if (match := _REPORTED.match(line))]
    causes = [error for error in reported if not error.endswith(_CONSEQUENCES)] or reported
    if causes and not causes[0].endswith("[rank-failed]"):
        return printable(causes[0])[:_MAX_REASON]
    if -9 in statuses:
        return "the process was killed by SIGKILL [rank-killed]"
    raised = [line for lines in errors for line in lines if _EXCEPTION.match(line)]
    return printable((raised or causes or [_last_line(errors)])[-1])[:_MAX_REASON]


def _last_line(errors: Sequence[Sequence[str]]) -> str:
    lines = [line for lines in errors for line in lines if line.strip()]
    return printable(lines[-1])[:_MAX_REASON] if lines else "nothing was printed"
