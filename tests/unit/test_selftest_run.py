"""`paceline selftest`: its options, which checks run, and problems of hosts."""

from collections.abc import Callable
from typing import Any

import pytest
from conftest import environment, raises

from paceline.errors import Problem
from paceline.launch import doctor
from paceline.launch.doctor import HostReport
from paceline.launch.groups import Nodes
from paceline.launch.hosts import Host
from paceline.launch.rdma import rdma_problems
from paceline.selftest import run
from paceline.selftest.checks import CHECKS, Row
from paceline.selftest.probes import PROBES
from paceline.selftest.run import Selftest
from paceline.selftest.settings import Settings, check_overrides

NODES = Nodes((Host("a", "$HOME"), Host("b", "$HOME")))
RDMA = {"efa_interfaces": 4, "efa_provider": False, "nccl_plugin": False, "verbs": False, "locked_memory_bytes": 65536}
FACTS = {"device": "cpu", "procs": 1, "gpus": [], "cpu": "any", "cores": 2, "packages": {"torch": "2"}}
FACTS |= dict.fromkeys(("cuda", "hip", "driver", "nccl"))


def test_fields_that_the_selftest_sets_are_refused(here: Callable[..., Any]) -> None:
    check_overrides(["--model.name", "resnet18", "--import", "nets"])
    with raises("option-not-applicable"):
        check_overrides(["--precision", "bf16"])
    assert "[option-not-applicable]" in here("selftest", "--optim.lr", "1").stderr
    assert here("selftest", "--compile", "maybe").returncode == 1


def test_the_list_names_all_checks(here: Callable[..., Any]) -> None:
    listed = [line.split()[0] for line in here("selftest", "--list").stdout.splitlines() if line.strip()]
    assert set(listed) >= {"hosts", *CHECKS}
    assert {probe for check in CHECKS.values() for probe in check.probes} == set(PROBES)


def test_a_check_of_hosts_alone_needs_hosts(here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = here("selftest", "--only", "hosts")
    assert answer.returncode == 1
    assert "[missing-option]" in answer.stderr
    monkeypatch.setattr(doctor, "check", lambda *_: HostReport())
    monkeypatch.setattr(run, "measure", _measured_as(FACTS))
    for name in ("send", "call"):
        monkeypatch.setattr(Host, name, lambda *_: None)
    rows = list(Selftest(Settings(hosts=2), NODES, ["hosts"]).rows())
    assert [(row.name, row.status) for row in rows] == [("hosts", "pass"), ("environment", "pass")]


def test_the_number_of_processes_may_be_auto(here: Callable[..., Any]) -> None:
    assert "'none' is not a positive integer or auto" in here("selftest", "--procs", "none").stderr
    assert "--only hosts" in here("selftest", "--procs", "auto", "--only", "hosts").stderr  # not an error of --procs


def test_a_launcher_must_not_start_it(paceline: Callable[..., Any]) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1"}
    assert "[selftest-under-launcher]" in paceline("selftest", env=environment() | ranks).stderr


def test_problems_that_hosts_can_train_with_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RDMA, NCCL uses TCP: slow, but every other check can run."""
    slow = [*rdma_problems(RDMA), *rdma_problems(RDMA | {"verbs": True}), Problem("driver-differs", "1 on a, 2 on b")]
    assert {problem.code for problem in slow} > {"efa-provider-missing", "rdma-devices-missing", "locked-memory-low"}
    for problem in slow:
        assert _row_of_hosts(monkeypatch, problem).status == "slow", problem
    row = _row_of_hosts(monkeypatch, slow[0], Problem("connection-blocked", "a cannot connect to b"))
    assert row.status == "fail"
    assert row.reason.startswith("a cannot connect to b")


def _row_of_hosts(monkeypatch: pytest.MonkeyPatch, *problems: Problem) -> Row:
    monkeypatch.setattr(doctor, "check", lambda *_: HostReport(problems=list(problems)))
    return next(Selftest(Settings(hosts=2), NODES).rows())


@pytest.mark.parametrize(
    ("facts", "fix"),
    [
        ({"device": "cpu"}, "--procs 2 or --hosts A,B"),
        ({"device": "cuda", "gpus": ["A", "A"]}, "--procs 2 or --hosts A,B"),
        ({"device": "cuda", "gpus": ["A"]}, "a machine with several GPUs, --hosts A,B or --device cpu"),
        ({"device": "mps"}, "--device cpu"),
    ],
)
def test_a_check_that_needs_two_ranks_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], fix: str
) -> None:
    monkeypatch.setattr(run, "measure", _measured_as(FACTS | facts))
    rows = {row.name: row for row in Selftest(Settings(procs=1), Nodes(), ["rank-speed"]).rows()}
    assert rows["rank-speed"].status == "skipped"
    assert rows["rank-speed"].reason == f"needs two ranks. Use {fix}"


def _measured_as(facts: dict[str, object]) -> Callable[..., Any]:
    """Return a function that measures nothing but the given facts."""

    def measure(_nodes: object, probes: list[str], _settings: object) -> list[tuple[str, dict[str, object]]]:
        assert probes == ["facts"]
        return [("facts", facts)]

    return measure
