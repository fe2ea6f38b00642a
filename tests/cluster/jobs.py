"""Launching jobs on the machines of a test, and looking at what they have written."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import command, environment
from machines import Cluster

from paceline.track.records import records_of


def own_environment(tmp_path: Path) -> dict[str, str]:
    return environment() | {"PACELINE_HOME": str(tmp_path / "home")}


def ask(tmp_path: Path, *words: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    own = own_environment(tmp_path)
    return subprocess.run(command(*words), cwd=tmp_path, env=own, capture_output=True, text=True, timeout=timeout)


def launching(cluster: Cluster, hosts: str, *words: object) -> list[str]:
    options = ("--hosts", hosts, "--ssh-config", cluster.config, "--python", sys.executable, "--patience", 10)
    return command("launch", "ssh", *options, "digits", *words)


@contextmanager
def launch(
    cluster: Cluster, tmp_path: Path, hosts: str, *words: object, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """A launcher that follows its job; afterwards nothing of it is left."""
    job = subprocess.Popen(
        launching(cluster, hosts, *words),
        cwd=tmp_path,
        env=own_environment(tmp_path) | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield job
    except BaseException:
        for path in sorted(log for machine in cluster.machines.values() for log in machine.root.rglob("node.log")):
            print(f"---- {path}\n{path.read_text()}")  # pytest shows it
        raise
    finally:
        job.kill()
        job.wait()
        if any((tmp_path / "home").glob("jobs/*/job.json")):
            ask(tmp_path, "stop", "--grace", 1)
        for machine in cluster.machines.values():
            shutil.rmtree(machine.root / ".paceline", ignore_errors=True)


def on_disk(cluster: Cluster) -> list[dict[str, Any]]:
    """Records of training on the machines' own disks."""
    files = [
        path
        for machine in cluster.machines.values()
        for path in machine.root.glob(".paceline/jobs/*/*/runs/*/metrics.jsonl")
    ]
    found = [record for path in files for record in records_of(path.read_bytes().splitlines())]
    return [record for record in found if record["kind"] == "train"]


def wait_for(happened: Callable[[], bool], job: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert job.poll() is None, job.stdout.read() if job.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
