"""Hosts that jobs run on: this machine, or others through the user's ssh. Scripts go in, output comes back."""

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

from paceline.errors import UserError
from paceline.launch.host_output import OutputTooLarge, communicate, shown, unpack
from paceline.launch.ssh_errors import ssh_problem
from paceline.launch.values import in_ssh_option, quoted
from paceline.system.files import printable

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
NO_FOLDER = 97
"""Exit status of a script for a host that does not have the job's folder."""
_MAX_OUTPUT = 16 << 20  # bytes
_MAX_PADDING = 1 << 20
_MAX_SOCKET_FOLDER = 40  # characters; a socket path has at most 107, of which ssh adds 58

# every folder from ~/.paceline down to the job's: in one that others may write to, they could replace scripts
_FOLDERS = """umask 077
fail() {{ status=$1; shift; echo "$*" >&2; exit $status; }}
for folder in {folders}; do
    mkdir -p "$folder" || exit 1
    [ -O "$folder" ] || fail 91 "$folder belongs to another user. Remove it, or run: chown $(id -u) $folder"
    case $(ls -ld "$folder/.") in
        ?????w* | ????????w*) fail 92 "other users may write to $folder. Run: chmod go-w $folder" ;;
    esac
done"""
_FOLDER_CODES = {91: "folder-not-owned", 92: "folder-writable-by-others"}


@dataclass(frozen=True)
class CommandResult:
    status: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode(errors="replace").strip()


class HostError(UserError):
    """A host is unreachable, or a command on it failed."""


@dataclass(frozen=True)
class Host:
    """A host and the job's folder on it, in which $HOME is the host's."""

    name: str
    folder: str

    def argv(self, command: str) -> list[str]:
        """Return the local command line that runs a shell command there; it must not contain secrets."""
        return ["sh", "-c", command]

    def call(self, command: str, data: bytes = b"", timeout: float = 120) -> CommandResult:
        """Run a shell command there with `data` on standard input; return its status and output."""
        pipe = subprocess.PIPE
        with subprocess.Popen(self.argv(command), bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            try:
                out, errors = communicate(process, data, timeout, _MAX_OUTPUT)
            except subprocess.TimeoutExpired:
                raise self.error("host-timeout", f"no answer within {timeout:g} s") from None
            except OutputTooLarge:
                message = f"the host sent more than {_MAX_OUTPUT >> 20} MB. Check what runs on it."
                raise self.error("host-output-too-large", message) from None
            finally:
                process.kill()  # no effect once it has ended
        return CommandResult(process.returncode, out, errors.decode(errors="replace"))

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Start a command there; the caller has to end it."""
        return subprocess.Popen(
            self.argv(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def run(self, script: str, timeout: float = 120) -> CommandResult:
        """Run a script in the job's folder through standard input; files it writes are readable by the user only."""
        enter = f"umask 077; cd {quoted(self.folder)} || exit {NO_FOLDER}"
        return self.call("sh -s", f"{enter}\n{script}\n".encode(), timeout)

    def run_checked(self, script: str, what: str, timeout: float = 120) -> str:
        """Run a script in the job's folder and return its output; raise HostError if it fails."""
        result = self.run(script, timeout)
        if result.status:
            raise self.error("host-command-failed", f"step {what!r} failed: {last_line(result)}")
        return result.text

    def send(self, files: Mapping[str, bytes], tree: Path | None = None) -> None:
        """Copy files, and those of a source tree under code/, to the job's folder, readable by the user only."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o600
                tar.addfile(entry, io.BytesIO(content))
            for path in tracked_files(tree) if tree else ():
                tar.add(path, f"code/{path.relative_to(tree or path)}", recursive=False, filter=_private)
        folders = " ".join(map(quoted, self._folders))
        result = self.call("sh -s", _FOLDERS.format(folders=folders).encode())
        if result.status:
            code = _FOLDER_CODES.get(result.status, "host-copy-failed")
            raise self.error(code, f"cannot copy files to {self.folder}: {last_line(result)}")
        command = f"umask 077; tar -C {quoted(self.folder)} -xzf -"
        result = self.call(command, packed.getvalue(), timeout=600)
        if result.status:
            raise self.error("host-copy-failed", f"cannot copy files to {self.folder}: {last_line(result)}")

    @property
    def _folders(self) -> list[str]:
        """All folders from ~/.paceline down to the job's, and the one of environments."""
        folders = [self.folder]
        while "/.paceline/" in folders[0]:
            folders.insert(0, folders[0].rpartition("/")[0])
        return [folders[0], f"{folders[0]}/envs", *folders[1:]] if len(folders) > 1 else folders

    def fetch(self, names: Sequence[str], target: Path) -> None:
        """Copy files and folders of the job's folder to `target` on this machine."""
        with self.start(f"tar -C {quoted(self.folder)} -cf - -- {shlex.join(names)}") as sender:
            assert sender.stdout
            try:
                unpack(sender.stdout, names, target)
                sender.stdout.read(_MAX_PADDING)  # otherwise tar fails with a broken pipe
            except (tarfile.TarError, OSError) as error:
                sender.kill()
                raise self._fetch_error(names, printable(str(error))) from None
        if sender.returncode not in (0, 1):  # 1: a file changed while tar read it
            raise self._fetch_error(names, f"tar ended with status {sender.returncode}")

    def _fetch_error(self, names: Sequence[str], reason: str) -> HostError:
        return self.error("host-fetch-failed", f"cannot fetch {', '.join(names)}: {reason}")

    def error(self, code: str, message: str) -> HostError:
        """Return an error about this host."""
        return HostError(code, f"{self.name}: {message}", host=self.name)


@dataclass(frozen=True)
class SshHost(Host):
    """A host reached with OpenSSH's client, so that the user's config, agent, jump hosts and known hosts apply."""

    options: tuple[str, ...] = field(default=())
    """Arguments of ssh before the host name."""

    def argv(self, command: str) -> list[str]:
        # one connection for all calls of this process, and no prompts: nobody may be there to answer them
        control = f'"{in_ssh_option(_control_folder())}/%C"'
        settings = ["BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=10", "ServerAliveCountMax=3"]
        settings += ["ControlMaster=auto", f"ControlPath={control}", "ControlPersist=15"]
        options = (word for setting in settings for word in ("-o", setting))
        return ["ssh", *self.options, *options, self.name, "--", command]

    def call(self, command: str, data: bytes = b"", timeout: float = 120) -> CommandResult:
        result = super().call(command, data, timeout)
        if result.status == 255:
            raise self.error(*ssh_problem(self.name, result.err))
        return result


@cache
def _control_folder() -> Path:
    """Return a private folder for ssh control sockets, removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-"))
    if len(str(folder)) > _MAX_SOCKET_FOLDER:  # TMPDIR may be long
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def addresses(host: Host) -> tuple[str, str]:
    """Return the IP address of this machine as the host sees it, and the host's own."""
    words = host.call('echo "$SSH_CONNECTION"').text.split()
    if len(words) != 4:
        message = "SSH_CONNECTION is not set on the host, so its IP address is unknown. Check the sshd configuration."
        raise host.error("host-address-unknown", message)
    return _address(host, words[0]), _address(host, words[2])


def _address(host: Host, text: str) -> str:
    """Return a valid address only: it becomes part of commands on other hosts."""
    try:
        if "%" not in text:  # a scope names an interface of that host, which means nothing to others
            return str(ipaddress.ip_address(text))
    except ValueError:
        pass
    message = (
        f"SSH_CONNECTION on the host contains {shown(text)!r} instead of an IP address. "
        "Set HostName in ~/.ssh/config to an address."
    )
    raise host.error("host-address-invalid", message)


def port_of(host: Host, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        message = f"the host sent {shown(text)!r} instead of a port number. Check what runs on it."
        raise host.error("host-port-invalid", message)
    return int(text)


def free_port(host: Host, python: str) -> int:
    result = host.call(f"{quoted(python)} -c '{_FREE_PORT}'")
    if result.status:
        raise host.error("host-command-failed", f"cannot find a free port: {last_line(result)}")
    return port_of(host, result.text)


def free_memory(host: Host, python: str) -> int:
    """Return the bytes of memory that programs on the host can still use."""
    result = host.call(f"{quoted(python)} -c 'import psutil; print(psutil.virtual_memory().available)'")
    if result.status or not re.fullmatch(r"[0-9]{1,18}", result.text):
        raise host.error("host-command-failed", f"cannot read its free memory: {last_line(result)}")
    return int(result.text)


def last_line(result: CommandResult) -> str:
    """Return the line of a command's output that best explains its failure."""
    lines = [line for line in (result.err.strip() or result.text).splitlines() if not line.startswith("tar: Exiting")]
    errors = [line for line in lines if re.match(r"\s*(error|fatal)\b", line, re.IGNORECASE)]
    return shown((errors or lines)[-1]) if lines else f"status {result.status}"


def _private(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Drop the owner: run by root, tar would give files to the user with the same id on that host."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o700 if entry.mode & 0o100 else 0o600
    return entry


def tracked_files(folder: Path) -> list[Path]:
    """Return the files of a project that .gitignore does not exclude; without git, all but common build folders."""
    # core.fsmonitor would run a program that the repository names
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, check=True).stdout.split(b"\0")
        return [path for name in names if name and (path := folder / os.fsdecode(name)).is_file()]
    except (OSError, subprocess.CalledProcessError):
        skipped = {".git", ".venv", "venv", "runs", "__pycache__", "node_modules"}
        return [path for path in folder.rglob("*") if path.is_file() and not skipped & set(path.parts)]
