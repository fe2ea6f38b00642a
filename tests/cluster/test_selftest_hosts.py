"""`paceline selftest --hosts` on two hosts with a real sshd each."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machines
import pytest
from jobs import all_idle, paceline_in, wait_for
from machines import Cluster, cluster_of

from paceline.selftest.checks import CHECKS

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
TIMED = {"hosts", "time-split", "step-time", "rank-speed", "loader", "bandwidth"}
"""Checks that may be slow here: the hosts share two cores, a disk and the memory of this machine."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("selftest"), "n1", "n2") as made:
        yield made


def _selftest(cluster: Cluster, tmp_path: Path, *words: object) -> tuple[subprocess.CompletedProcess[str], Any]:
    hosts = ("--hosts", "n1,n2", "--ssh-config", cluster.config, "--python", sys.executable)
    answer = paceline_in(tmp_path, "selftest", "--device", "cpu", "--quick", "--out", "out", *hosts, *words)
    content = json.loads((tmp_path / "out" / "selftest.json").read_text())
    return answer, {row["name"]: row for row in content["checks"]}


def test_two_hosts_pass(cluster: Cluster, tmp_path: Path) -> None:
    answer, rows = _selftest(cluster, tmp_path)
    assert set(rows) == {"hosts", *CHECKS}
    for name, row in rows.items():
        assert row["status"] in ({"pass", "slow"} if name in TIMED else {"pass"}), row
    assert answer.returncode == 0, answer.stdout + answer.stderr
    addresses = [host.address for host in cluster.machines.values()]
    for name in ("selftest.json", "selftest.html"):
        text = (tmp_path / "out" / name).read_text()
        assert not [found for found in (*addresses, str(cluster.folder)) if found in text]
        assert not re.search(r"\b(n1|n2)\b", text)
    wait_for(lambda: all_idle(cluster))
    assert not [*cluster.folder.glob("*.root/.paceline/selftest/*")]


def test_a_blocked_port_is_named(cluster: Cluster, tmp_path: Path) -> None:
    # a firewall that allows only ssh, made of routing rules, since not every kernel has netfilter
    rule = f"to {cluster.machines['n2'].address} ipproto tcp dport 1024-65534 blackhole"
    subprocess.run(["ip", "-n", cluster.space("n1"), "rule", "add", *rule.split()], check=True)
    try:
        answer, rows = _selftest(cluster, tmp_path)
    finally:
        subprocess.run(["ip", "-n", cluster.space("n1"), "rule", "delete", *rule.split()], check=True)
    assert answer.returncode == 1
    assert re.search(r"^fail +hosts +n1 cannot connect to n2 .*\[connection-blocked\]", answer.stdout, re.MULTILINE)
    assert "node 0 cannot connect to node 1" in rows["hosts"]["reason"]
    assert {row["status"] for name, row in rows.items() if name != "hosts"} == {"skipped"}
