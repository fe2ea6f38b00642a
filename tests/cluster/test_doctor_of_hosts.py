"""`doctor --hosts`, with hosts that are processes on this machine."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.launch import rdma
from paceline.launch.doctor import check, described_all_reduce
from paceline.launch.hosts import CommandResult, Host
from paceline.launch.rdma import rdma_facts, rdma_problems

UNREACHABLE = "255.255.255.255"


@dataclass(frozen=True)
class FakeHost(Host):
    """Reports `address` as its own."""

    address: str = "127.0.0.1"

    def argv(self, command: str) -> list[str]:
        return ["env", f"SSH_CONNECTION=127.0.0.1 1 {self.address} 22", "sh", "-c", command]


def test_connection_blocked_in_one_direction_is_reported() -> None:
    """b can connect to a, but a firewall blocks a from connecting to b."""
    hosts = [FakeHost("a", "$HOME"), FakeHost("b", "$HOME", address=UNREACHABLE)]
    report = check(hosts, sys.executable, "")
    blocked = [problem.message for problem in report.problems if problem.code == "connection-blocked"]
    assert len(blocked) == 1
    assert blocked[0].startswith(f"a cannot connect to b ({UNREACHABLE}:")
    assert "security group" in blocked[0]
    assert [hosts for hosts, *_ in report.connections] == ["b -> a"]  # the all-reduce would hang


def test_every_pair_of_ranks_and_all_of_them_are_measured() -> None:
    """With the names of the hosts that the user gave."""
    report = check([FakeHost("a", "$HOME"), FakeHost("b", "$HOME")], sys.executable, "")
    measured = [row for row in report.connections if row[0].startswith("all-reduce")]
    device = "cuda:0" if report.facts["a"]["gpus"] else "cpu"
    if device == "cpu":
        assert [row[0] for row in measured] == ["all-reduce a cpu - b cpu", "all-reduce over all 2 ranks"], report
    assert all(row[1].endswith("Gbit/s") for row in measured)


def test_all_gpus_of_all_hosts_take_part() -> None:
    """Each host counts its own: a stand-in for `python -m paceline` records how it is called."""
    commands: list[str] = []

    class RecordingHost(FakeHost):
        def call(self, command: str, data: bytes = b"", timeout: float = 120) -> CommandResult:
            if b"test-allreduce" in data:
                commands.append(data.decode())
                figures = {"ranks": ["a cuda:0", "a cuda:1", "b cuda:0"], "bus_bytes_per_second": 1e9, "pairs": []}
                figures["pairs"] = [[0, 1, 4e11], [0, 2, 1e9], [1, 2, 1e9]]
                return CommandResult(0, json.dumps(figures).encode(), "")
            return super().call(command, data, timeout)

    report = check([RecordingHost("a", "$HOME"), RecordingHost("b", "$HOME")], sys.executable, "")
    assert all("--procs auto" in command for command in commands)
    rows = [row[:2] for row in report.connections if row[0].startswith("all-reduce")]
    assert rows == [
        ("all-reduce a cuda:0 - a cuda:1", "3,200 Gbit/s"),
        ("all-reduce a cuda:0 - b cuda:0", "8 Gbit/s"),
        ("all-reduce a cuda:1 - b cuda:0", "8 Gbit/s"),
        ("all-reduce over all 3 ranks", "8 Gbit/s"),
    ]


def test_figures_of_a_rank_that_does_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="rank"):
        described_all_reduce({"ranks": ["a cpu"], "bus_bytes_per_second": 1.0, "pairs": [(0, 1, 1.0)]})


EFA = {
    "efa_interfaces": 4, "efa_provider": True, "nccl_plugin": True, "verbs": True, "locked_memory_bytes": -1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "codes"),
    [
        ({}, []),
        ({"efa_provider": False}, ["efa-provider-missing"]),
        ({"nccl_plugin": False}, ["efa-plugin-missing"]),
        ({"verbs": False}, ["rdma-devices-missing"]),
        ({"locked_memory_bytes": 65536}, ["locked-memory-low"]),
        ({"locked_memory_bytes": 64 << 30}, []),  # a limit, but not a low one
        ({"efa_interfaces": 0, "efa_provider": False, "nccl_plugin": False}, []),  # InfiniBand
        ({"efa_interfaces": 0, "verbs": False, "locked_memory_bytes": 65536}, []),  # only TCP
    ],
)
def test_problems_of_rdma_networks(changed: dict[str, object], codes: list[str]) -> None:
    assert [problem.code for problem in rdma_problems(EFA | changed)] == codes


def test_efa_is_checked_with_libfabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two interfaces of the driver, a stand-in for fi_info, and the plugin in LD_LIBRARY_PATH."""
    for name in ("0000:00:1f.0", "0000:00:20.0", "module"):
        (tmp_path / "efa" / name).mkdir(parents=True)
    monkeypatch.setattr(rdma, "_EFA_DRIVER", tmp_path / "efa")
    monkeypatch.setattr(rdma, "_VERBS", tmp_path)
    monkeypatch.setattr(rdma, "EFA_PATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    fi_info = tmp_path / "fi_info"
    fi_info.write_text('#!/bin/sh\n[ "$*" = "-p efa" ]\n')
    found = rdma_facts()
    assert (found["efa_interfaces"], found["efa_provider"], found["verbs"]) == (2, False, False)
    fi_info.chmod(0o700)
    (tmp_path / "uverbs0").touch()
    (tmp_path / "libnccl-net-ofi.so").touch()
    found = rdma_facts()
    assert (found["efa_provider"], found["nccl_plugin"], found["verbs"]) == (True, True, True)


def test_hosts_and_connections_are_tables(here, monkeypatch) -> None:
    monkeypatch.setattr("paceline.launch.api.SshHost", lambda name, *_: FakeHost(name, "$HOME"))
    answer = here("doctor", "--hosts", "a,b", "--python", sys.executable)
    lines = answer.stdout.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["host", "a", "b", "connection", "a", "b"], answer.stdout
