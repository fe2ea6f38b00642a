"""`doctor --hosts`, with hosts that are processes on this machine."""

import sys
from dataclasses import dataclass

from paceline.launch.doctor import check
from paceline.launch.hosts import Host

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


def test_hosts_and_connections_are_tables(here, monkeypatch) -> None:
    monkeypatch.setattr("paceline.launch.hosts.SshHost", lambda name, *_: FakeHost(name, "$HOME"))
    answer = here("doctor", "--hosts", "a,b", "--python", sys.executable)
    lines = answer.stdout.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["host", "a", "b", "connection", "a", "b"], answer.stdout
