"""Launch jobs on the simulated hosts of a test, and read what they have written."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from conftest import HANG, command, environment
from machines import Cluster
from networks import until

from paceline.track.records import records_of


def launch_environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a launcher, with PACELINE_HOME in the folder of the test."""
    return environment() | {"PACELINE_HOME": str(tmp_path / "home")}


def paceline_in(tmp_path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in the folder of the test; return its result."""
    env = launch_environment(tmp_path)
    return subprocess.run(command(*words), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG)


class Launcher:
    """A long-running command; its output goes to a file, so that it never blocks on a pipe."""

    def __init__(self, words: Sequence[str], folder: Path, variables: dict[str, str]):
        self._log = folder / f"launcher-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(words, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def wait(self) -> str:
        """Wait for its end; return its output."""
        try:
            self.process.wait(HANG)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the command does not end: {self.output}") from None
        return self.output

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_for(happened: Callable[[], object], job: Launcher | None = None) -> None:
    """Wait until it has happened; fail if the job ends before."""
    deadline = time.monotonic() + HANG
    while not happened():
        assert job is None or job.status is None, job.output
        assert time.monotonic() < deadline, job.output if job else "timeout"
        time.sleep(0.05)


def slow_variables(folder: Path) -> dict[str, str]:
    """Return the variables with which ranks can be slowed down."""
    return {"PYTHONPATH": str(Path(__file__).parent / "slowed"), "SLOW_WHILE": str(folder / "slow")}


@contextmanager
def slowed(folder: Path) -> Iterator[Callable[[], None]]:
    """Slow ranks down after their first steps, until the yielded function is called, so that no run ends too early."""
    file = folder / "slow"
    file.touch()
    try:
        yield file.unlink
    finally:
        file.unlink(missing_ok=True)


def launch_command(cluster: Cluster, hosts: str, *words: object) -> list[str]:
    options = ("--hosts", hosts, "--ssh-config", cluster.config, "--python", sys.executable, "--rank-timeout", 10)
    return command("launch", "ssh", *options, "digits", *words)


@contextmanager
def launch(cluster: Cluster, tmp_path: Path, hosts: str, *words: object, **variables: str) -> Iterator[Launcher]:
    """Yield a launcher that follows its job; afterwards, kill what is left of it."""
    with cleaned_up(cluster, tmp_path):
        job = Launcher(launch_command(cluster, hosts, *words), tmp_path, launch_environment(tmp_path) | variables)
        try:
            yield job
        finally:
            job.kill()


@contextmanager
def cleaned_up(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """Afterwards, kill what is left of a job on its hosts, and its rendezvous store here."""
    try:
        yield
    except BaseException:
        for path in sorted(log for host in cluster.machines.values() for log in host.root.rglob("node.log")):
            print(f"---- {path}\n{path.read_text()}")  # pytest shows it
        raise
    finally:
        for host in cluster.machines.values():
            host.clear()
            if (host.root / ".paceline").exists():
                shutil.rmtree(host.root / ".paceline")
        until(lambda: not rendezvous_stores(tmp_path), "rendezvous store", lambda: _kill(rendezvous_stores(tmp_path)))


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def rendezvous_stores(tmp_path: Path) -> list[psutil.Process]:
    """Return the rendezvous stores of this test on this machine."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "rendezvous" in process.cmdline() and Path(process.cwd()).is_relative_to(tmp_path):
                found.append(process)
    return found


def all_idle(cluster: Cluster) -> bool:
    return not any(host.processes() for host in cluster.machines.values())


def on_disk(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the training records on the disks of the hosts."""
    paths = _files(cluster, "metrics.jsonl")
    records = [record for path in paths for record in records_of(path.read_bytes().splitlines())]
    return [record for record in records if record["kind"] == "train"]


def last_step(cluster: Cluster) -> int:
    return max((record["step"] for record in on_disk(cluster)), default=0)


def ranks_now(cluster: Cluster) -> int:
    """Return the number of ranks in the newest record."""
    newest = max(on_disk(cluster), key=lambda record: record["time"], default={})
    return len(newest.get("memory_per_rank", []))


def starts(cluster: Cluster) -> list[int]:
    """Return the number of ranks of each start of the run."""
    found = [json.loads(path.read_text())["starts"] for path in _files(cluster, "environment.json")]
    return [start["ranks"] for start in max(found, key=len, default=[])]


def _files(cluster: Cluster, name: str) -> list[Path]:
    folders = [host.root for host in cluster.machines.values()]
    return [path for folder in folders for path in folder.glob(f".paceline/jobs/*/*/runs/*/{name}")]


METADATA_SERVICE = """
import http.server, pathlib, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def answer(self):
        notice = b'{"action": "terminate"}' if pathlib.Path(sys.argv[1]).exists() else b""
        content = notice if self.path.endswith("instance-action") else b"token"
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    do_GET = do_PUT = answer
    def log_message(self, *words): pass
http.server.HTTPServer(("169.254.169.254", 80), Answer).serve_forever()
"""


@contextmanager
def metadata_service(cluster: Cluster, name: str, folder: Path) -> Iterator[Path]:
    """Run a metadata service on a host, which sends an interruption notice once the yielded file exists."""
    space, notice = cluster.space(name), folder / "notice"
    address = ["169.254.169.254/32", "dev", "lo"]
    subprocess.run(["ip", "-n", space, "address", "add", *address], check=True)
    service = subprocess.Popen(["ip", "netns", "exec", space, sys.executable, "-c", METADATA_SERVICE, str(notice)])
    try:
        yield notice
    finally:
        service.kill()
        service.wait()
        subprocess.run(["ip", "-n", space, "address", "delete", *address], check=True)
