"""Machines that jobs run on: this one, or others through the user's own ssh. Scripts go in, text comes out."""

import atexit
import io
import ipaddress
import os
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
from paceline.launch.answers import TooMuch, communicate, unpack
from paceline.launch.values import in_ssh_option, quoted

# below Linux's default range of ephemeral ports, so that another process is unlikely to get it before it is used
_FREE_PORT = """import random, socket
while True:
    port = random.randrange(10000, 32000)
    try:
        socket.create_server((str(), port)).close()
    except OSError:
        continue
    print(port)
    break"""
_MOST = 16 << 20  # bytes of an answer
_MOST_PADDING = 1 << 20
_LONGEST_SOCKET_FOLDER = 40  # a socket has 107 bytes; ssh adds 41 for its name and 17 while it makes it
_LONGEST_LINE = 500  # of one that is shown

# every folder from ~/.paceline down to the job's own: others could put scripts into one that they may write to
_FOLDERS = """umask 077
fail() {{ echo "$*" >&2; exit 1; }}
for folder in {folders}; do
    mkdir -p "$folder" || exit 1
    [ -O "$folder" ] || fail "$folder belongs to another user; remove it, or run: chown $(id -u) $folder"
    case $(ls -ld "$folder/.") in
        ?????w* | ????????w*) fail "others may write to $folder; run: chmod go-w $folder" ;;
    esac
done"""


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
        pipe = subprocess.PIPE
        with subprocess.Popen(self.argv(command), bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            try:
                out, errors = communicate(process, data, timeout, _MOST)
            except subprocess.TimeoutExpired:
                raise HostError(f"{self.name} did not answer within {timeout:g} s") from None
            except TooMuch:
                raise HostError(f"{self.name} answered with more than {_MOST >> 20} MB; look at what it runs") from None
            finally:
                process.kill()  # nothing, once it has ended
        return Answer(process.returncode, out, errors.decode(errors="replace"))

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Begin a command there, and leave it to the caller."""
        return subprocess.Popen(
            self.argv(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def run(self, script: str, timeout: float = 120) -> Answer:
        """Run a script, which goes in through standard input, in the job's folder; what it writes is its user's."""
        return self.call("sh -s", f"umask 077; cd {quoted(self.folder)} || exit 97\n{script}\n".encode(), timeout)

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
                tar.add(path, f"code/{path.relative_to(tree or path)}", recursive=False, filter=_private)
        folders = " ".join(map(quoted, self._folders))
        answer = self.call("sh -s", _FOLDERS.format(folders=folders).encode())
        if not answer.status:
            words = f"umask 077; tar -C {quoted(self.folder)} -xzf -"
            answer = self.call(words, packed.getvalue(), timeout=600)
        if answer.status:
            raise HostError(f"{self.name}: files could not be copied to {self.folder}: {last_line(answer)}")

    @property
    def _folders(self) -> list[str]:
        """The job's own, after those above it up to ~/.paceline, and that of environments."""
        found = [self.folder]
        while "/.paceline/" in found[0]:
            found.insert(0, found[0].rpartition("/")[0])
        return [found[0], f"{found[0]}/envs", *found[1:]] if len(found) > 1 else found

    def fetch(self, names: Sequence[str], target: Path) -> None:
        """Bring files and folders of the job's folder here."""
        with self.start(f"tar -C {quoted(self.folder)} -cf - -- {shlex.join(names)}") as sending:
            assert sending.stdout
            try:
                unpack(sending.stdout, names, target)
                sending.stdout.read(_MOST_PADDING)  # tar would fail if nobody took it
            except (tarfile.TarError, OSError) as error:
                sending.kill()
                reason = printable(str(error))
                raise HostError(f"{self.name}: {', '.join(names)} could not be fetched: {reason}") from None
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
        control = f'"{in_ssh_option(_sockets())}/%C"'
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
    if len(str(folder)) > _LONGEST_SOCKET_FOLDER:  # TMPDIR may be anywhere
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))
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
    return f"ssh failed: {_shown(errors.strip().splitlines()[-1]) if errors.strip() else 'it says nothing'}"


def _shown(line: str) -> str:
    return printable(line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ...")


def addresses(host: Host) -> tuple[str, str]:
    """Address of this machine as the host sees it, and its own."""
    answer = host.call('echo "$SSH_CONNECTION"').text.split()
    if len(answer) != 4:
        raise HostError(
            f"{host.name}: SSH_CONNECTION is not set there, which tells addresses; look at its sshd's settings"
        )
    return _address(host, answer[0]), _address(host, answer[2])


def _address(host: Host, text: str) -> str:
    """What one machine says becomes part of commands of others."""
    try:
        if "%" not in text:  # an interface of that machine, which means nothing to others
            return str(ipaddress.ip_address(text))
    except ValueError:
        pass
    raise HostError(
        f"{host.name}: SSH_CONNECTION holds {_shown(text)!r} there, where an IP address is expected; "
        "set HostName in ~/.ssh/config to one"
    )


def port_of(host: Host, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise HostError(f"{host.name}: it told {_shown(text)!r} where a port was expected; look at what it runs")
    return int(text)


def free_port(host: Host, python: str) -> int:
    answer = host.call(f"{quoted(python)} -c '{_FREE_PORT}'")
    if answer.status:
        raise HostError(f"{host.name}: looking for a free port failed: {last_line(answer)}")
    return port_of(host, answer.text)


def last_line(answer: Answer) -> str:
    lines = [line for line in (answer.err.strip() or answer.text).splitlines() if not line.startswith("tar: Exiting")]
    telling = [line for line in lines if re.match(r"\s*(error|fatal)\b", line, re.IGNORECASE)]
    return _shown((telling or lines)[-1]) if lines else f"status {answer.status}"


def _private(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The user's own there: root's tar would give files to whoever has the same number on that machine."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o700 if entry.mode & 0o100 else 0o600
    return entry


def tracked_files(folder: Path) -> list[Path]:
    """Files of a project, without those that its .gitignore names; without git, without what is clearly made."""
    asked = [
        "git",
        "-c",
        "core.fsmonitor=false",
        "-C",
        str(folder),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    try:
        found = subprocess.run(asked, capture_output=True, check=True).stdout.split(b"\0")
        return [path for name in found if name and (path := folder / os.fsdecode(name)).is_file()]
    except (OSError, subprocess.CalledProcessError):
        skipped = {".git", ".venv", "venv", "runs", "__pycache__", "node_modules"}
        return [path for path in folder.rglob("*") if path.is_file() and not skipped & set(path.parts)]
