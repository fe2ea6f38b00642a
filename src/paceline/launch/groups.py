"""Starts the processes of a group of ranks, on this machine or on other hosts, and reads what they print.

A crash or a hang ends these processes, not the command that started them. They end when their standard input is closed.
"""

import re
import shlex
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from uuid import uuid4

from paceline.distributed.channel import new_token
from paceline.launch.hosts import Host, HostError, SshHost, addresses, free_port
from paceline.launch.values import quoted
from paceline.system.files import printable
from paceline.system.lifetime import own_command

CONSEQUENCES = ("rank-lost", "job-ended", "rendezvous-timeout", "rendezvous-unreachable")
"""Codes of errors that the failure of another node causes."""
_END = 30.0  # seconds that processes have to end after their standard input was closed
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
    """Per node."""

    @property
    def ranks(self) -> int:
        """Number of ranks of all nodes together."""
        return self.procs * max(1, len(self.hosts))

    @property
    def one_rank(self) -> "Nodes":
        """The same with one rank, on the first host."""
        return replace(self, hosts=self.hosts[:1], procs=1)

    def commands(self, words: Sequence[object], variables: Mapping[str, str] | None = None) -> list[list[str]]:
        """Return the command line that runs an internal command in the ranks of each node."""
        assigned = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
        words = [*words, "--procs", self.procs]
        if not self.hosts:
            return [[*assigned, *own_command(*words)]]
        if len(self.hosts) > 1:
            first = self.hosts[0]
            endpoint = f"{addresses(first)[1]}:{free_port(first, self.python)}"
            words += ["--nodes", len(self.hosts), "--rendezvous", endpoint, "--node-rank"]
        start = " ".join(["exec", *_quoted(assigned), quoted(self.python), "-m paceline", *_quoted(words)])
        several = len(self.hosts) > 1
        return [
            host.argv(f"cd {quoted(host.folder)} && {start}{f' {number}' if several else ''}")
            for number, host in enumerate(self.hosts)
        ]


def _quoted(words: Sequence[object]) -> list[str]:
    return [shlex.quote(str(word)) for word in words]


def nodes_of(hosts: Sequence[str], ssh_config: Path | None, python: str, procs: int = 1) -> Nodes:
    """Return where to start rank processes: on hosts that ssh reaches, or without any on this machine."""
    options = ("-F", str(ssh_config.resolve())) if ssh_config else ()
    return Nodes(tuple(SshHost(name, "$HOME", options) for name in hosts), python, procs)


@contextmanager
def with_folders(nodes: Nodes, kind: str, files: Mapping[str, bytes]) -> Iterator[Nodes]:
    """Yield nodes with a folder of their own on every host, which has these files. Remove the folders at the end."""
    folder = f"$HOME/.paceline/{kind}/{uuid4().hex[:12]}"
    placed = replace(nodes, hosts=tuple(replace(host, folder=folder) for host in nodes.hosts))
    try:
        for host in placed.hosts:
            host.send(files)
        yield placed
    finally:
        for host in placed.hosts:
            with suppress(HostError):
                host.call(f"rm -rf {quoted(folder)}")


class RankGroup:
    """The processes of all nodes, from the start to the end of a `with` block."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._commands = commands
        self._lines = SimpleQueue[str | None]()
        self.errors = [deque[str](maxlen=_MAX_LINES) for _ in commands]
        """The last lines of standard error of each node."""

    def __enter__(self) -> "RankGroup":
        self._processes = [_start(command) for command in self._commands]
        try:
            token = new_token()
            for process in self._processes:
                _send(process, token)
        except BaseException:
            self._end()
            raise
        pairs = zip(self._processes, self.errors, strict=True)
        self._readers = [Thread(target=_read, args=pair, daemon=True) for pair in pairs]
        self._readers += [Thread(target=self._forward, args=(process,), daemon=True) for process in self._processes]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def lines(self, seconds: float) -> Iterator[str]:
        """Yield the lines that the nodes print, until all have ended. TimeoutError if none comes for so long."""
        for _ in self._processes:
            try:
                while (line := self._lines.get(timeout=seconds)) is not None:
                    yield line
            except Empty:
                last = _last_line(self.errors)
                raise TimeoutError(f"no result within {seconds:.0f} s: {last}") from None
        for reader in self._readers:
            reader.join(_END)

    @property
    def statuses(self) -> list[int]:
        """The exit statuses of the nodes, once they have ended."""
        return [process.wait() for process in self._processes]

    @property
    def reason(self) -> str:
        """The error of a node that explains the others."""
        return reason_of(self.statuses, self.errors)

    def _forward(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout
        for line in process.stdout:
            self._lines.put(line)
        process.wait()
        self._lines.put(None)

    def _end(self) -> None:
        for process in self._processes:
            assert process.stdin
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(command: Sequence[str]) -> "subprocess.Popen[str]":
    # an own process group: Ctrl-C reaches the starting command only, which ends them
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


def reason_of(statuses: Sequence[int], errors: Sequence[Sequence[str]]) -> str:
    """Return the error that explains the others."""
    reported = [match[1] for lines in errors for line in lines if (match := _REPORTED.match(line))]
    endings = tuple(f"[{code}]" for code in CONSEQUENCES)
    causes = [error for error in reported if not error.endswith(endings)] or reported
    if causes and not causes[0].endswith("[rank-failed]"):
        return printable(causes[0])[:_MAX_REASON]
    if -9 in statuses:
        return "the process was killed by SIGKILL [rank-killed]"
    raised = [line for lines in errors for line in lines if _EXCEPTION.match(line)]
    return printable((raised or causes or [_last_line(errors)])[-1])[:_MAX_REASON]


def _last_line(errors: Sequence[Sequence[str]]) -> str:
    lines = [line for lines in errors for line in lines if line.strip()]
    return printable(lines[-1])[:_MAX_REASON] if lines else "nothing was printed"
