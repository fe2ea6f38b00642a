"""Jobs on two machines behind a real sshd each."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import machines
import psutil
import pytest
from conftest import command, environment
from machines import Cluster, cluster_of

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
SMALL = ("--train.duration", "60ba", "--checkpoint.every", "10ba", "--log.every", "1ba", "--log.tensorboard", "false")
LONG = (*SMALL, "--train.duration", "3000ba", "--evaluate.every", "3000ba")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster"), "n1", "n2") as made:
        yield made


def _environment(tmp_path: Path) -> dict[str, str]:
    return environment() | {"PACELINE_HOME": str(tmp_path / "home")}


def _launch(cluster: Cluster, tmp_path: Path, hosts: str, *words: object) -> list[str]:
    options = ("--hosts", hosts, "--ssh-config", cluster.config, "--python", sys.executable, "--patience", 10)
    return command("launch", "ssh", *options, "digits", *words)


def _ask(tmp_path: Path, *words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), cwd=tmp_path, env=_environment(tmp_path), capture_output=True, text=True, timeout=timeout
    )


def _step(cluster: Cluster) -> int:
    """How far training has got, as the machines' own disks show it."""
    steps = [0]
    for machine in cluster.machines.values():
        for path in machine.root.glob(".paceline/jobs/*/*/runs/*/metrics.jsonl"):
            steps += [int(found) for found in re.findall(rb'"step": (\d+)', path.read_bytes())]
    return max(steps)


def _wait_for_step(cluster: Cluster, step: int, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while _step(cluster) < step:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _clean(cluster: Cluster) -> None:
    import shutil

    for machine in cluster.machines.values():
        shutil.rmtree(machine.root / ".paceline", ignore_errors=True)


def test_two_machines_train_together_and_are_compared_with_one(cluster: Cluster, tmp_path: Path) -> None:
    for hosts, name in (("n1", "one"), ("n1,n2", "two")):
        words = _launch(cluster, tmp_path, hosts, "--name", name, *SMALL)
        done = subprocess.run(
            words, cwd=tmp_path, env=_environment(tmp_path), capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^n1 +\| ", done.stdout, re.MULTILINE)
    assert re.search(r"^n2 +\| ", done.stdout, re.MULTILINE)
    assert "finished: top-1" in done.stdout
    start = json.loads((tmp_path / "runs" / "two" / "environment.json").read_text())["starts"][-1]
    assert sorted(start["host_of_rank"]) == ["n1", "n2"]
    assert {path.stem for path in (tmp_path / "runs" / "two" / "telemetry").glob("*.jsonl")} == {"n1", "n2"}
    compared = _ask(tmp_path, "compare", "runs/one", "runs/two")
    assert compared.returncode == 0, compared.stderr
    assert "the same experiment" in compared.stdout
    assert "2 (2)" in compared.stdout
    assert not [process.cmdline() for machine in cluster.machines.values() for process in machine.processes()]
    _clean(cluster)


def test_a_job_goes_on_without_its_launcher_and_stop_ends_all_of_it(cluster: Cluster, tmp_path: Path) -> None:
    canary = {"SECRET_TOKEN": "canary-5e1f"}
    words = _launch(cluster, tmp_path, "n1,n2", "--pass", "SECRET_TOKEN", *LONG)
    launcher = subprocess.Popen(
        words, cwd=tmp_path, env=_environment(tmp_path) | canary, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _wait_for_step(cluster, 5)
    launcher.kill()
    launcher.wait()
    _wait_for_step(cluster, _step(cluster) + 20)
    ranks = [rank for machine in cluster.machines.values() for rank in machine.ranks()]
    assert len(ranks) == 2
    logs = _ask(tmp_path, "logs")
    assert "n1 | " in logs.stdout
    assert "2 cpu ranks on 2 machines" in logs.stdout
    assert "n1: running" in _ask(tmp_path, "status").stdout
    _no_trace_of("canary-5e1f", cluster, tmp_path, logs.stdout)
    stopped = _ask(tmp_path, "stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert not [process.cmdline() for machine in cluster.machines.values() for process in machine.processes()]
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if "meet" in (p.info["cmdline"] or []) and _ours(p, tmp_path)
    ]
    fetched = _ask(tmp_path, "fetch")
    assert fetched.returncode == 0, fetched.stderr
    assert json.loads((Path(fetched.stdout.strip()) / "summary.json").read_text())["status"] == "interrupted"
    _clean(cluster)


def _ours(process: psutil.Process, tmp_path: Path) -> bool:
    return str(tmp_path) in process.cwd()


def _no_trace_of(secret: str, cluster: Cluster, tmp_path: Path, *texts: str) -> None:
    folders = [tmp_path, *(machine.root / ".paceline" for machine in cluster.machines.values())]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert not any(secret in text for text in texts)
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert secret not in shown
    assert os.environ.get("SECRET_TOKEN") is None
