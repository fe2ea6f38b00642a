"""Machines that jobs run on: this one, or others through the user's own ssh. Scripts go in, text comes out."""

import atexit
import io
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from paceline.base.files import printable
from paceline.errors import UserError

_FREE_PORT = "import socket; s = socket.socket(); s.bind((str(), 0)); print(s.getsockname()[1])"


@dataclass(frozen=True)
class Answer:
    status: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode(errors="replace").strip()


class HostError(UserError):
    """A machine that cannot be reached, or did not do what it was asked to."""


@dataclass(frozen=True)
class Host:
    """A machine, and the job's folder there ($HOME is that machine's)."""

    name: str
    folder: str

    def argv(self, command: str) -> list[str]:
        """What runs a shell command there; nothing secret may be in it."""
        return ["sh", "-c", command]

    def call(self, command: str, data: bytes = b"", timeout: float = 120) -> Answer:
        try:
            done = subprocess.run(self.argv(command), input=data, capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise HostError(f"{self.name} did not answer within {timeout:g} s") from None
        return Answer(done.returncode, done.stdout, done.stderr.decode(errors="replace"))

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Begin a command there, and leave it to the caller."""
        return subprocess.Popen(
            self.argv(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def run(self, script: str, timeout: float = 120) -> Answer:
        """Run a script, which goes in through standard input, in the job's folder."""
        return self.call("sh -s", f"cd {quoted(self.folder)} || exit 97\n{script}\n".encode(), timeout)

    def must(self, script: str, what: str, timeout: float = 120) -> str:
        answer = self.run(script, timeout)
        if answer.status:
            raise HostError(f"{self.name}: {what} failed: {last_line(answer)}")
        return answer.text

    def send(self, files: Mapping[str, bytes], tree: Path | None = None) -> None:
        """Put files, and a tree's files under code/, into the job's folder; only the user may read them."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o600
                tar.addfile(entry, io.BytesIO(content))
            for path in tracked_files(tree) if tree else ():
                tar.add(path, f"code/{path.relative_to(tree or path)}", recursive=False)
        folder = quoted(self.folder)
        answer = self.call(f"umask 077; mkdir -p {folder} && tar -C {folder} -xzf -", packed.getvalue(), timeout=600)
        if answer.status:
            raise HostError(f"{self.name}: files could not be copied to {self.folder}: {last_line(answer)}")

    def fetch(self, names: Sequence[str], target: Path) -> None:
        """Bring files and folders of the job's folder here."""
        with self.start(f"tar -C {quoted(self.folder)} -cf - {shlex.join(names)}") as sending:
            assert sending.stdout
            try:
                with tarfile.open(fileobj=sending.stdout, mode="r|") as tar:
                    tar.extractall(target, filter="data")
                sending.stdout.read()  # the padding: tar would fail if nobody took it
            except tarfile.TarError as error:
                raise HostError(f"{self.name}: {', '.join(names)} could not be fetched: {error}") from None
        if sending.returncode not in (0, 1):  # 1: a file changed while it was read
            raise HostError(
                f"{self.name}: {', '.join(names)} could not be fetched: tar ended with {sending.returncode}"
            )


@dataclass(frozen=True)
class SshHost(Host):
    """Through OpenSSH's client, so that the user's config, agent, jump hosts and known hosts count."""

    options: tuple[str, ...] = field(default=())
    """More words for ssh, before the host's name."""

    def argv(self, command: str) -> list[str]:
        # one connection for all calls of this process; never a question, since nobody may be there to answer
        control = _sockets() / "%C"
        settings = ["BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=10", "ServerAliveCountMax=3"]
        settings += ["ControlMaster=auto", f"ControlPath={control}", "ControlPersist=15"]
        given = (word for setting in settings for word in ("-o", setting))
        return ["ssh", *self.options, *given, self.name, "--", command]

    def call(self, command: str, data: bytes = b"", timeout: float = 120) -> Answer:
        answer = super().call(command, data, timeout)
        if answer.status == 255:
            raise HostError(f"{self.name}: {_ssh_trouble(self.name, answer.err)}")
        return answer


@cache
def _sockets() -> Path:
    """A folder that nobody else can look into, for as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_TROUBLES = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key has changed: somebody else may answer in its place; if the "
    "machine was set up anew, `ssh-keygen -R {host}` forgets the old key",
    "Host key verification failed|No .* host key is known": "its host key is not known; `ssh {host}` once, and compare "
    "the fingerprint that it shows",
    "Permission denied": "it refuses your key; check `ssh {host}`, the key in ssh-agent, and authorized_keys there",
    "Could not resolve hostname": "there is no machine of that name; check the spelling, or ~/.ssh/config",
    "Connection refused": "nothing listens at its ssh port; is sshd running, and is the port right in ~/.ssh/config?",
    "timed out|No route to host|Network is unreachable": "it cannot be reached; is it running, and does a firewall "
    "let you in?",
}


def _ssh_trouble(host: str, errors: str) -> str:
    for pattern, cure in _TROUBLES.items():
        if re.search(pattern, errors):
            return cure.format(host=host)
    return f"ssh failed: {printable(errors.strip().splitlines()[-1]) if errors.strip() else 'it says nothing'}"


def addresses(host: Host) -> tuple[str, str]:
    """Address of this machine as the host sees it, and its own."""
    answer = host.call('echo "$SSH_CONNECTION"').text.split()
    if len(answer) != 4:
        raise HostError(
            f"{host.name}: SSH_CONNECTION is not set there, which tells addresses; look at its sshd's settings"
        )
    return answer[0], answer[2]


def free_port(host: Host, python: str) -> int:
    answer = host.call(f"{quoted(python)} -c '{_FREE_PORT}'")
    if answer.status:
        raise HostError(f"{host.name}: looking for a free port failed: {last_line(answer)}")
    return int(answer.text)


def last_line(answer: Answer) -> str:
    lines = [line for line in (answer.err.strip() or answer.text).splitlines() if not line.startswith("tar: Exiting")]
    telling = [line for line in lines if re.match(r"\s*(error|fatal)\b", line, re.IGNORECASE)]
    return printable((telling or lines)[-1]) if lines else f"status {answer.status}"


def quoted(path: str) -> str:
    """For a shell; $HOME is that of the machine."""
    return '"$HOME"' + shlex.quote(path.removeprefix("$HOME")) if path.startswith("$HOME") else shlex.quote(path)


def tracked_files(folder: Path) -> list[Path]:
    """Files of a project, without those that its .gitignore names; without git, without what is clearly made."""
    asked = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(asked, capture_output=True, check=True).stdout.decode().split("\0")
        return [path for name in found if name and (path := folder / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        skipped = {".git", ".venv", "venv", "runs", "__pycache__", "node_modules"}
        return [path for path in folder.rglob("*") if path.is_file() and not skipped & set(path.parts)]
