"""`paceline selftest`: its options, which checks run, and problems of hosts."""

from collections.abc import Callable
from typing import Any

from conftest import environment, raises

from paceline.selftest.checks import CHECKS
from paceline.selftest.probes import PROBES
from paceline.selftest.settings import check_overrides


def test_fields_that_the_selftest_sets_are_refused(here: Callable[..., Any]) -> None:
    check_overrides(["--model.name", "resnet18", "--import", "nets"])
    with raises("option-not-applicable"):
        check_overrides(["--precision", "bf16"])
    assert "[option-not-applicable]" in here("selftest", "--optim.lr", "1").stderr
    assert here("selftest", "--compile", "maybe").returncode == 1


def test_the_list_names_all_checks(here: Callable[..., Any]) -> None:
    listed = here("selftest", "--list").stdout
    assert all(name in listed for name in CHECKS)
    assert {probe for check in CHECKS.values() for probe in check.probes} == set(PROBES)


def test_a_launcher_must_not_start_it(paceline: Callable[..., Any]) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1"}
    assert "[selftest-under-launcher]" in paceline("selftest", env=environment() | ranks).stderr
