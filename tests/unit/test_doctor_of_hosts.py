"""The doctor of machines, with machines that are processes of this one."""

import sys
from dataclasses import dataclass

from paceline.launch.doctor import check
from paceline.launch.hosts import Host

NOWHERE = "255.255.255.255"


@dataclass(frozen=True)
class Pretended(Host):
    """Others are told to reach it at `address`."""

    address: str = "127.0.0.1"

    def argv(self, command: str) -> list[str]:
        return ["env", f"SSH_CONNECTION=127.0.0.1 1 {self.address} 22", "sh", "-c", command]


def test_a_way_that_is_blocked_in_one_direction_is_told() -> None:
    """Nobody can connect to b, which can connect to a: as a firewall would have it."""
    hosts = [Pretended("a", "$HOME"), Pretended("b", "$HOME", address=NOWHERE)]
    found = check(hosts, sys.executable, "")
    blocked = [finding for finding in found.findings if "cannot connect" in finding]
    assert len(blocked) == 1
    assert blocked[0].startswith(f"a cannot connect to b ({NOWHERE}:")
    assert "open the firewall or security group" in blocked[0]
    assert any(line.startswith("b -> a: ") for line in found.lines)
    assert not any("exchange gradients" in line for line in found.lines)  # which could only hang
