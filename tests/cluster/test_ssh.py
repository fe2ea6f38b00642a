"""Jobs on two hosts with a real sshd each."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import machines
import pytest
from extension_recipe import IMPORTS, USED
from jobs import all_idle, last_step, launch, paceline_in, rendezvous_stores, slow_variables, slowed, wait_for
from machines import Cluster, cluster_of

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
SMALL = ("--train.duration", "60ba", "--checkpoint.every", "10ba", "--log.every", "1ba", "--log.tensorboard", "false")
LONG = (*SMALL, "--train.duration", "3000ba", "--evaluate.every", "3000ba")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with cluster_of(folder, "n1", "n2", variables=slow_variables(folder)) as made:
        yield made


def test_two_nodes_train_together_and_are_compared_with_one(cluster: Cluster, tmp_path: Path) -> None:
    for hosts, name in (("n1", "one"), ("n1,n2", "two")):
        with launch(cluster, tmp_path, hosts, "--name", name, *SMALL) as job:
            output = job.wait()
            wait_for(lambda: all_idle(cluster))
        assert job.status == 0, output
    assert re.search(r"^n1 +\| ", output, re.MULTILINE)
    assert re.search(r"^n2 +\| ", output, re.MULTILINE)
    assert "finished: top-1" in output
    start = json.loads((tmp_path / "runs" / "two" / "environment.json").read_text())["starts"][-1]
    assert sorted(start["host_of_rank"]) == ["n1", "n2"]
    assert {path.stem for path in (tmp_path / "runs" / "two" / "telemetry").glob("*.jsonl")} == {"n1", "n2"}
    compared = paceline_in(tmp_path, "compare", "runs/one", "runs/two")
    assert compared.returncode == 0, compared.stderr
    assert "the same experiment" in compared.stdout
    assert "2 (2)" in compared.stdout


def test_packages_of_the_user_are_copied_to_the_nodes(cluster: Cluster, tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[1] / "extension" / "shapes", tmp_path / "shapes")
    with launch(cluster, tmp_path, "n1,n2", "--name", "shapes", *USED, *IMPORTS) as job:
        output = job.wait()
        wait_for(lambda: all_idle(cluster))
    assert job.status == 0, output
    start = json.loads((tmp_path / "runs" / "shapes" / "environment.json").read_text())["starts"][-1]
    assert sorted(start["host_of_rank"]) == ["n1", "n2"]
    assert set(start["imports"]) == {"shapes.data", "shapes.training"}
    assert (tmp_path / "runs" / "shapes" / "seen.txt").read_text().endswith("finished")


def test_job_continues_without_its_launcher_and_stop_ends_all_of_it(cluster: Cluster, tmp_path: Path) -> None:
    secret = f"canary-{uuid4().hex}"
    words = ("--pass", "SECRET_TOKEN", *LONG)
    with slowed(cluster.folder), launch(cluster, tmp_path, "n1,n2", *words, SECRET_TOKEN=secret) as launcher:
        wait_for(lambda: last_step(cluster) >= 25, launcher)
        launcher.kill()
        before = last_step(cluster)
        wait_for(lambda: last_step(cluster) >= before + 1)
        _check_and_stop(cluster, tmp_path, secret)


def _doctor(cluster: Cluster, tmp_path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    options = ("--hosts", "n1,n2", "--ssh-config", cluster.config, "--python", sys.executable)
    return paceline_in(tmp_path, "doctor", *options, *words)


def test_doctor_checks_hosts(cluster: Cluster, tmp_path: Path) -> None:
    healthy = _doctor(cluster, tmp_path)
    if low := re.search(r"^! n1: .*\[disk-space-low\]", healthy.stdout, re.MULTILINE):
        pytest.skip(f"needs more space for temporary files: {low[0]}")
    assert re.search(r"^n1 +\d+ +\d+ GB", healthy.stdout, re.MULTILINE), healthy.stdout + healthy.stderr
    assert re.search(r"^n1 -> n2 +[\d.,e+-]+ Gbit/s", healthy.stdout, re.MULTILINE)
    assert re.search(r"^n2 -> n1 ", healthy.stdout, re.MULTILINE)
    assert re.search(r"^all-reduce n1 cpu - n2 cpu +[\d.,e+-]+ Gbit/s", healthy.stdout, re.MULTILINE)
    assert re.search(r"^all-reduce over all 2 ranks +[\d.,e+-]+ Gbit/s", healthy.stdout, re.MULTILINE)
    assert healthy.returncode == 0
    assert "[data-not-found]" in _doctor(cluster, tmp_path, "--data", "/nowhere").stdout
    # a firewall that allows only ssh, made of routing rules, since not every kernel has netfilter
    rule = f"to {cluster.machines['n2'].address} ipproto tcp dport 1024-65534 blackhole"
    subprocess.run(["ip", "-n", cluster.space("n1"), "rule", "add", *rule.split()], check=True)
    try:
        blocked = _doctor(cluster, tmp_path)
    finally:
        subprocess.run(["ip", "-n", cluster.space("n1"), "rule", "delete", *rule.split()], check=True)
    assert blocked.returncode == 1
    assert re.search(r"^! n1 cannot connect to n2 .*\[connection-blocked\]", blocked.stdout, re.MULTILINE)


def _check_and_stop(cluster: Cluster, tmp_path: Path, secret: str) -> None:
    ranks = [rank for host in cluster.machines.values() for rank in host.ranks()]
    assert len(ranks) == 2
    logs = paceline_in(tmp_path, "logs")
    assert "n1 | " in logs.stdout
    assert "2 cpu ranks on 2 nodes" in logs.stdout
    assert re.search("^n1 +running$", paceline_in(tmp_path, "status").stdout, re.MULTILINE)
    _no_trace_of(secret, cluster, tmp_path, logs.stdout)
    stopped = paceline_in(tmp_path, "stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    wait_for(lambda: all_idle(cluster))
    assert not rendezvous_stores(tmp_path)
    fetched = paceline_in(tmp_path, "fetch")
    assert (
        paceline_in(tmp_path, "fetch").stdout == fetched.stdout
    )  # the run folder of the same job may be fetched again
    assert fetched.returncode == 0, fetched.stderr
    assert json.loads((Path(fetched.stdout.strip()) / "summary.json").read_text())["status"] == "interrupted"


def _no_trace_of(secret: str, cluster: Cluster, tmp_path: Path, *texts: str) -> None:
    folders = [tmp_path, *(host.root / ".paceline" for host in cluster.machines.values())]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert not any(secret in text for text in texts)
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert secret not in shown
    assert os.environ.get("SECRET_TOKEN") is None
