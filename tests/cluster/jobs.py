"""Launching jobs on the machines of a test, and looking at what they have written."""

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


def own_environment(tmp_path: Path) -> dict[str, str]:
    return environment() | {"PACELINE_HOME": str(tmp_path / "home")}


def ask(tmp_path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    own = own_environment(tmp_path)
    return subprocess.run(command(*words), cwd=tmp_path, env=own, capture_output=True, text=True, timeout=HANG)


class Launcher:
    """A command that runs for a while; what it prints goes to a file, so that it never waits for a reader."""

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
        """Until its end; what it printed."""
        try:
            self.process.wait(HANG)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.output}") from None
        return self.output

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_for(happened: Callable[[], object], job: Launcher | None = None) -> None:
    """Until it has happened, as long as the job goes on."""
    deadline = time.monotonic() + HANG
    while not happened():
        assert job is None or job.status is None, job.output
        assert time.monotonic() < deadline, job.output if job else "it does not happen"
        time.sleep(0.05)


def slow_variables(folder: Path) -> dict[str, str]:
    """For those who start ranks that can be slowed down."""
    return {"PYTHONPATH": str(Path(__file__).parent / "slowed"), "SLOW_WHILE": str(folder / "slow")}


@contextmanager
def slowed(folder: Path) -> Iterator[Callable[[], None]]:
    """Ranks train slowly after their first steps, until what this gives is called: no run ends before its time."""
    file = folder / "slow"
    file.touch()
    try:
        yield file.unlink
    finally:
        file.unlink(missing_ok=True)


def launching(cluster: Cluster, hosts: str, *words: object) -> list[str]:
    options = ("--hosts", hosts, "--ssh-config", cluster.config, "--python", sys.executable, "--rank-timeout", 10)
    return command("launch", "ssh", *options, "digits", *words)


@contextmanager
def launch(cluster: Cluster, tmp_path: Path, hosts: str, *words: object, **variables: str) -> Iterator[Launcher]:
    """A launcher that follows its job; afterwards nothing of it is left."""
    with cleared(cluster, tmp_path):
        job = Launcher(launching(cluster, hosts, *words), tmp_path, own_environment(tmp_path) | variables)
        try:
            yield job
        finally:
            job.kill()


@contextmanager
def cleared(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """Afterwards nothing of a job is left on the machines, nor of its meeting place here."""
    try:
        yield
    except BaseException:
        for path in sorted(log for machine in cluster.machines.values() for log in machine.root.rglob("node.log")):
            print(f"---- {path}\n{path.read_text()}")  # pytest shows it
        raise
    finally:
        for machine in cluster.machines.values():
            machine.clear()
            if (machine.root / ".paceline").exists():
                shutil.rmtree(machine.root / ".paceline")
        until(
            lambda: not rendezvous_endpoints(tmp_path), "a meeting place", lambda: _kill(rendezvous_endpoints(tmp_path))
        )


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def rendezvous_endpoints(tmp_path: Path) -> list[psutil.Process]:
    """Those that jobs of this test keep here."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "rendezvous" in process.cmdline() and Path(process.cwd()).is_relative_to(tmp_path):
                found.append(process)
    return found


def all_idle(cluster: Cluster) -> bool:
    return not any(machine.processes() for machine in cluster.machines.values())


def on_disk(cluster: Cluster) -> list[dict[str, Any]]:
    """Records of training on the machines' own disks."""
    found = [
        record for path in _files(cluster, "metrics.jsonl") for record in records_of(path.read_bytes().splitlines())
    ]
    return [record for record in found if record["kind"] == "train"]


def last_step(cluster: Cluster) -> int:
    return max((record["step"] for record in on_disk(cluster)), default=0)


def ranks_now(cluster: Cluster) -> int:
    """How many ranks wrote the newest record."""
    newest = max(on_disk(cluster), key=lambda record: record["time"], default={})
    return len(newest.get("memory_per_rank", []))


def starts(cluster: Cluster) -> list[int]:
    """With how many ranks the run was started, one time after the other."""
    told = [json.loads(path.read_text())["starts"] for path in _files(cluster, "environment.json")]
    return [start["ranks"] for start in max(told, key=len, default=[])]


def _files(cluster: Cluster, name: str) -> list[Path]:
    folders = [machine.root for machine in cluster.machines.values()]
    return [path for folder in folders for path in folder.glob(f".paceline/jobs/*/*/runs/*/{name}")]


STUB = """
import http.server, pathlib, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def answer(self):
        asked = self.path.endswith("instance-action")
        told = b'{"action": "terminate"}' if pathlib.Path(sys.argv[1]).exists() else b""
        content = told if asked else b"token"
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    do_GET = do_PUT = answer
    def log_message(self, *words): pass
http.server.HTTPServer(("169.254.169.254", 80), Answer).serve_forever()
"""


@contextmanager
def noticed(cluster: Cluster, name: str, folder: Path) -> Iterator[Path]:
    """A metadata service on the machine, which tells it to leave as soon as a file is there."""
    space, note = cluster.space(name), folder / "notice"
    address = ["169.254.169.254/32", "dev", "lo"]
    subprocess.run(["ip", "-n", space, "address", "add", *address], check=True)
    service = subprocess.Popen(["ip", "netns", "exec", space, sys.executable, "-c", STUB, str(note)])
    try:
        yield note
    finally:
        service.kill()
        service.wait()
        subprocess.run(["ip", "-n", space, "address", "delete", *address], check=True)
